"""The tables of `benchmarks.peers` in docs/performance.md, from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
FILE = RESULTS / "peers-h200-5453251.json"
TITLES = {  # a row's title, and its run
    "dInfer, eager, dual cache": "peer-eager",
    "dInfer, torch.compile, dual cache": "peer-dual",
    "ours, dual cache": "ours-dual",
    "ours, dual cache, fp8": "ours-fp8",
    "dInfer, torch.compile, vicinity 16/16": "peer-vicinity",
    "ours, vicinity 16/16": "ours-vicinity",
    "dInfer, torch.compile, no cache": "peer-none",
    "ours, no cache": "ours-none",
    "dInfer, torch.compile, dual cache, batch 8": "peer-batch8",
    "ours, dual cache, batch 8": "ours-batch8",
}

SHOWN = {  # in the figure of the README
    "dInfer, torch.compile": "peer-dual",
    "ours": "ours-dual",
    "ours, fp8": "ours-fp8",
    "dInfer, torch.compile, batch 8": "peer-batch8",
    "ours, batch 8": "ours-batch8",
}


def measured() -> dict[str, Any]:
    """All runs, and what they ran on."""
    return dict(json.loads(FILE.read_text()))


def peers() -> str:
    """The published dInfer and ours on the same work: generations beside generations, steps beside steps."""
    report = measured()
    runs, some = report["runs"], report["runs"]["ours-dual"]
    together = [title for title, name in TITLES.items() if runs[name].get("together_with")]
    lines = [
        f"LLaDA-8B's shape with random bfloat16 weights, prompt {some['prompt']}, {some['new']} new tokens, blocks of "
        f"{some['block']}, {some['tokens_per_forward']:.0f} tokens a step on both sides: each computes its threshold "
        "rule and commits the leftmost masks. dInfer at commit "
        f"{report['peer_commit']}, ours at {report['commit']}, one {report['hardware']}, torch {report['torch']}, "
        f"transformers {report['transformers']}. A generation is the median of {len(some['all_s'])}, over its "
        "forwards. A window step is one forward of a block, a full pass one of the whole canvas. The first call "
        f"compiles. {len(together)} runs of dInfer compiled beside each other (marked *), so their first calls "
        "are longer than alone; they were timed one at a time.",
        "",
        "| run | ms a forward, generation | window step | full pass | tokens/s | forwards | first call |",
        "| --- |" + " --- |" * 6,
    ]
    for title, name in TITLES.items():
        run = runs[name]
        widths = {int(key.split()[-1]): found["median_ms"] for key, found in run["by_width"].items()}
        full = widths.pop(run["prompt"] + run["new"])
        window = " to ".join(f"{ms:.2f}" for ms in sorted(set(widths.values()))) or "-"
        lines.append(
            f"| {title} | {run['ms_per_forward']:.2f} | {window} | {full:.2f} | {run['tokens_per_s']:,.0f} "
            f"| {run['forwards']} | {run['warm_up_s']:.0f} s{' *' if title in together else ''} |"
        )
    return "\n".join(lines)


BLOCKS = {"llada": "LLaDA-8B, blocks of 32", "sdar-4b": "SDAR-4B, blocks of 4", "sdar-8b": "SDAR-8B, blocks of 4"}
SIDES = {"diffulex": "Diffulex", "ours": "ours"}


def diffulex(folder: Path = RESULTS) -> str:
    """Diffulex and ours on the same work, as far as it was measured. Cards of one session have a file each."""
    reports = {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("diffulex*-h200.json"))}
    if not reports:
        return "Not measured yet: `python -m benchmarks.peers.compare --diffulex FOLDER` does it."
    first, report = next(iter(reports.items()))
    same, runs = ("diffulex_commit", "hardware", "torch", "transformers"), dict[str, Any]()
    for name, other in reports.items():
        if differ := [key for key in same if other[key] != report[key]]:
            raise ValueError(f"{name} has another {' and '.join(differ)} than {first}: measure all anew")
        if twice := runs.keys() & other["runs"].keys():
            raise ValueError(f"{name} has {', '.join(sorted(twice))} again: delete the older file")
        runs |= other["runs"]
    commits = " and ".join(dict.fromkeys(other["commit"] for other in reports.values()))
    some = next(iter(runs.values()))
    lines = [
        f"Random bfloat16 weights, {some['new']} new tokens, prompts of 128 tokens (LLaDA) and 512 (SDAR). Each step "
        "commits the 4 or 2 leftmost masks on both sides, and keys of finished blocks are final. Diffulex at commit "
        f"{report['diffulex_commit']}, ours at {commits}, one {report['hardware']}, torch {report['torch']}, "
        f"transformers {report['transformers']}. A generation is the median of {len(some['all_s'])}, over its "
        "forwards. Ours caches a block in the next one's first step, Diffulex in a step of its own.",
        "",
        "| run | batch | ms a forward, generation | step | forwards | tokens/s |",
        "| --- |" + " --- |" * 5,
    ]
    for batch in (1, 16):
        for name, title in BLOCKS.items():
            for side, who in SIDES.items():
                if (run := runs.get(f"{side}-{name}-batch{batch}")) is not None:
                    step = max(run["by_width"].values(), key=lambda found: found["forwards"])["median_ms"]
                    lines.append(
                        f"| {who}, {title} | {batch} | {run['ms_per_forward']:.2f} | {step:.2f} ms "
                        f"| {run['forwards']} | {run['tokens_per_s']:,.0f} |"
                    )
    return "\n".join(lines)


def on_cpu() -> dict[str, Any]:
    """llama.cpp and ours, with what both ran on."""
    return dict(json.loads((RESULTS / "llama-cpp-memory-cpu.json").read_text()))


def llama_cpp() -> str:
    """llama.cpp and ours on the same files on a CPU: CPU time of one thread."""
    report = on_cpu()
    lines = [
        f"llama.cpp {report['llama.cpp'].removeprefix('vendored ')}; {report['machine']}; ours at "
        f"{report['after']['commit']}. CPU time of one thread, medians of two rounds in turns "
        "(`llama-cpp-memory-cpu.json`).",
        "",
        "| file | full pass, llama.cpp | ours | our window step | tokens/s, ours / theirs "
        "| peak memory, ours / theirs |",
        "| --- |" + " --- |" * 5,
    ]
    for name, found in sorted(report["after"]["files"].items()):
        theirs, ours = found["llama.cpp"], found["ours"]
        lines.append(
            f"| {name.removesuffix('.gguf')} | {theirs['whole pass']:.2f} s | {ours['whole pass']:.2f} s "
            f"| {ours['window step']:.2f} s | {found['tokens/s, ours / theirs']:.1f} "
            f"| {ours['peak MB']:.0f} / {theirs['peak MB']:.0f} MB: {found['peak memory, ours / theirs']:.2f} |"
        )
    return "\n".join(lines)
