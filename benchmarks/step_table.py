"""Tables of a step of full-size shapes, from the files of `benchmarks.step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

STEPS = {  # the title of a row, its file, and its goal in ms
    "LLaDA-8B": ("step-llada-8b-h200", 4.9),
    "LLaDA-8B, batch 8": ("step-llada-8b-batch8-h200", 8.5),
    "LLaDA-8B, fp8": ("step-llada-8b-fp8-h200", 3.1),
    "LLaDA-8B, int4": ("step-llada-8b-int4-h200", 2.1),
    "LLaDA2-mini, masks alike": ("step-llada2-mini-h200", None),
    "LLaDA2-mini": ("step-llada2-mini-spread-h200", 1e3 / 190),
    "LLaDA2-mini, fp8, masks alike": ("step-llada2-mini-fp8-h200", None),
    "LLaDA2-mini, fp8": ("step-llada2-mini-fp8-spread-h200", 1e3 / 300),
    "LLaDA2-mini, int4": ("step-llada2-mini-int4-spread-h200", 2.4),
}


def reports() -> dict[str, dict[str, Any]]:
    """The file of each row, by its title."""
    return {title: json.loads((RESULTS / f"{name}.json").read_text()) for title, (name, _) in STEPS.items()}


def steps() -> str:
    """The time of a step of full-size shapes, and its limits by bytes and by multiply-adds."""
    found = reports()
    some = next(iter(found.values()))
    commits = ", ".join(dict.fromkeys(report["commit"] for report in found.values()))
    lines = [
        f"One {some['hardware']}, torch {some['torch']}, commits {commits}: one window step as a CUDA graph, random "
        "weights in bfloat16 unless said, one request unless said, blocks of 32, with LM head and commits. LLaDA-8B "
        "has the dual cache and a canvas of 128 + 256 tokens. LLaDA2-mini has block diffusion and 384 + 256 tokens.",
        "",
        "| shape | experts read | step | with the host | goal | limit: bytes | limit: multiply-adds | of the limit |",
        "| --- |" + " --- |" * 7,
    ]
    for title, (_, wanted) in STEPS.items():
        report = found[title]
        graph, limit, read = report["graph"], report["limit"], report["experts_read"]
        lines.append(
            f"| {title} | {'-' if read is None else f'{read:.0f}'} | {graph['step_ms']:.2f} ms "
            f"| {graph['step_ms'] + graph['host_ms']:.2f} ms | {'-' if wanted is None else f'{wanted:.2f} ms'} "
            f"| {limit['bytes_ms']:.2f} ms | {limit['flops_ms']:.2f} ms | {100 * limit['reached']:.0f}% |"
        )
    return "\n".join(lines)


def runs() -> str:
    """The same steps without CUDA graphs, the time to the first measured step, and one shape on other cards."""
    found = reports()
    lines = [
        "| shape | eager step | CUDA graph | decoding and host | warm-up | same tokens |",
        "| --- |" + " --- |" * 5,
    ]
    for title, report in found.items():
        graph, eager = report["graph"], report["eager"]
        lines.append(
            f"| {title} | {eager['step_ms']:.2f} ms | {graph['step_ms']:.2f} ms "
            f"| {100 * report['without_network']['share']:.1f}% | {eager['warm_up_s'] + graph['warm_up_s']:.1f} s "
            f"| {'yes' if report['graph_equals_eager'] else 'NO'} |"
        )
    return "\n".join([*lines, "", _cards(found["LLaDA2-mini"])])


def _cards(report: dict[str, Any]) -> str:
    """The same step on other cards, which differ in the time to read experts."""
    others = [json.loads(path.read_text()) for path in sorted((RESULTS / "cards").glob("*.json"))]
    rates = [1e3 / (one["graph"]["step_ms"] + one["graph"]["host_ms"]) for one in (report, *others)]
    experts = [one["profile"]["parts"]["experts"]["own_us"] / 1e3 for one in (report, *others)]
    return (
        f"LLaDA2-mini's step runs {rates[0]:.2f} times a second on this card, with the host. Its experts take "
        f"{experts[0]:.2f} ms of it. On the {len(others)} cards of another machine (commit {others[0]['commit']}, "
        f"`results/cards`) experts take {min(experts[1:]):.2f} to {max(experts[1:]):.2f} ms, and the step runs "
        f"{', '.join(f'{rate:.2f}' for rate in sorted(rates[1:]))} times a second."
    )


def parts() -> str:
    """The time of these steps by part."""
    found = reports()
    first, *_ = found.values()  # of one card: none adds up over ranks
    names = [name for name in first["profile"]["parts"] if name != "collectives"]
    lines = [
        "| shape | " + " | ".join(names) + " | host | no network |",
        "| --- |" + " --- |" * (len(names) + 2),
    ]
    for title, report in found.items():
        own = [report["profile"]["parts"][name]["own_us"] for name in names]
        own += [1e3 * report["graph"]["host_ms"], 1e3 * report["without_network"]["step_ms"]]
        lines.append(f"| {title} | " + " | ".join(f"{us:.0f}" for us in own) + " |")
    return "\n".join(lines)
