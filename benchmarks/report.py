"""Writes the tables of README.md and docs from the files in benchmarks/results, so that nobody types a figure by hand.

python -m benchmarks.report
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import goals_table
from benchmarks.ablation_table import ablation
from benchmarks.capacity import table as scaling
from benchmarks.further_table import further
from benchmarks.open_blocks_table import open_blocks
from benchmarks.peers import table
from benchmarks.several_table import repair, several
from dinfer.cli.catalog import catalog
from dinfer.core.registry import MODELS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = ("steps=32", "steps=8", "threshold=0.99", "threshold=0.9", "threshold=0.7", "threshold=0.5")


def quality() -> str:
    """Accuracy and tokens per forward of the model in the box, by decoder and cache."""
    report = json.loads((RESULTS / "tiny-quality-h200.json").read_text())
    rows = {(row["options"], row["cache"]): row for row in report["rows"]}
    caches = ("none", "prefix", "dual")
    lines = [
        f"The model in the box on {report['rows'][0]['problems']} held-out problems, blocks of 32, "
        f"`max_new_tokens={report['setting']['new']}`, float32: accuracy, and tokens per forward (TPF).",
        "",
        "| decoder | " + " | ".join(f"cache `{cache}`" for cache in caches) + " |",
        "| --- |" + " --- |" * len(caches),
    ]
    for options in SHOWN:
        cells = [f"{rows[options, cache]['accuracy']:.1f}%, {rows[options, cache]['tpf']:.2f}" for cache in caches]
        lines.append(f"| `{rows[options, 'none']['decoder']}` {options} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def second() -> str:
    """Accuracy, forwards and tokens per forward of the second model in the box, by decoder."""
    report = json.loads((RESULTS / "tiny-llada2-quality.json").read_text())
    lines = [
        "The second model in the box, `tiny-llada2` (LLaDA2's architecture, 7.1 million parameters, 4 of 16 experts a "
        "token, trained to edit), on the same problems with `iteration=block_diffusion cache=block`. It is not as good "
        "as the first at one token a forward or with a threshold; with a decoder that edits it comes near.",
        "",
        "| decoder | accuracy | NFE | TPF |",
        "| --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        lines.append(
            f"| `{row['decoder']}` {row['options']} | {row['accuracy']:.1f}% | {row['nfe']:.1f} | {row['tpf']:.2f} |"
        )
    return "\n".join(lines)


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


def _step_reports() -> dict[str, dict[str, Any]]:
    return {title: json.loads((RESULTS / f"{name}.json").read_text()) for title, (name, _) in STEPS.items()}


def steps() -> str:
    """The time of a step of full-size shapes, and its limits by bytes and by multiply-adds."""
    reports = _step_reports()
    some = next(iter(reports.values()))
    commits = ", ".join(dict.fromkeys(report["commit"] for report in reports.values()))
    lines = [
        f"One window step with random weights in bfloat16, one request unless said, blocks of 32, LM head, commits and "
        f"cursors included, on one {some['hardware']}, torch {some['torch']}, commit {commits}: LLaDA-8B with the dual "
        "cache, prompt 128 + 256 new; LLaDA2-mini with block diffusion, prompt 384 + 256 new, tokens choosing their "
        "experts independently of each other unless masks are alike. *bytes*: the time to read the weights that the "
        "step needs, and the keys and values of its rows, once, at the copy bandwidth measured in the same run. "
        "*multiply-adds*: their time at the rate of a large product, measured likewise. The limit is the larger. "
        "*with the host*: the step and for how long the card then waits for the host, on average of the run. "
        "*decode, host*: what a step takes without a network and that wait, of the whole. Warm-up is "
        "compiling the kernels, a generation of 256 tokens eagerly, and one more with graphs.",
        "",
        "| shape | experts read | eager | CUDA graph | with the host | to be reached | bytes | multiply-adds "
        "| of the limit | decode, host | warm-up | same tokens |",
        "| --- |" + " --- |" * 11,
    ]
    for title, (_, wanted) in STEPS.items():
        report = reports[title]
        graph, eager, limit, read = report["graph"], report["eager"], report["limit"], report["experts_read"]
        lines.append(
            f"| {title} | {'-' if read is None else f'{read:.0f}'} | {eager['step_ms']:.2f} ms "
            f"| {graph['step_ms']:.2f} ms | {graph['step_ms'] + graph['host_ms']:.2f} ms "
            f"| {'-' if wanted is None else f'{wanted:.2f} ms'} "
            f"| {limit['bytes_ms']:.2f} ms | {limit['flops_ms']:.2f} ms | {100 * limit['reached']:.0f}% "
            f"| {100 * report['without_network']['share']:.1f}% | {eager['warm_up_s'] + graph['warm_up_s']:.1f} s "
            f"| {'yes' if report['graph_equals_eager'] else 'NO'} |"
        )
    lines += [
        "",
        _cards(reports["LLaDA2-mini"]),
    ]
    return "\n".join(lines)


def _cards(report: dict[str, Any]) -> str:
    """The same step on other cards, which differ in the time to read experts."""
    others = [json.loads(path.read_text()) for path in sorted((RESULTS / "cards").glob("*.json"))]
    rates = [1e3 / (one["graph"]["step_ms"] + one["graph"]["host_ms"]) for one in (report, *others)]
    experts = [one["profile"]["parts"]["experts"]["own_us"] / 1e3 for one in (report, *others)]
    return (
        f"LLaDA2-mini's step, of which its experts take {experts[0]:.2f} ms here: {rates[0]:.2f} a second with the "
        f"host. On the {len(others)} cards of another machine (commit {others[0]['commit']}) experts took "
        f"{min(experts[1:]):.2f} to {max(experts[1:]):.2f} ms, and it was "
        f"{', '.join(f'{rate:.2f}' for rate in sorted(rates[1:]))} a second."
    )


def parts() -> str:
    """The time of these steps by part."""
    reports = _step_reports()
    names = list(next(iter(reports.values()))["profile"]["parts"])
    lines = [
        "Microseconds per step, from a profile of window steps with CUDA graphs. A kernel launched early begins "
        "while the one before still runs; counted is the time from where the kernels before have ended, so that no "
        "moment counts twice. *rest*: window, embedding, commits, cursors. *between kernels*: what is left of the step "
        "as it is timed without the profiler, which slows kernels a little, so it may be below 0. *host*: for how long "
        "the card waits for it between two steps. *no network*: the whole step, if the network is left out.",
        "",
        "| shape | " + " | ".join(names) + " | host | no network |",
        "| --- |" + " --- |" * (len(names) + 2),
    ]
    for title, report in reports.items():
        own = [report["profile"]["parts"][name]["own_us"] for name in names]
        own += [1e3 * report["graph"]["host_ms"], 1e3 * report["without_network"]["step_ms"]]
        lines.append(f"| {title} | " + " | ".join(f"{us:.0f}" for us in own) + " |")
    return "\n".join(lines)


def quantized() -> str:
    """Accuracy, tokens per forward and answers that stay the same, by what is rounded; a table for each model."""
    report = json.loads((RESULTS / "quantized-h200.json").read_text())
    rows = {(row["model"], row["cache"], row["quantize"], row["kv"]): row for row in report["rows"]}
    parts = [
        f"{report['rows'][0]['problems']} held-out problems, `threshold` 0.9, "
        f"`max_new_tokens={report['setting']['new']}`, "
        "float32 but for what is rounded: accuracy with its 95% interval, tokens per forward, and the share of the "
        f"problems with the answer of the model as it is, word for word. `{_command(report)}`, "
        f"{report['hardware']}, torch {report['torch']}, commit {report['commit']}."
    ]
    for model in dict.fromkeys(key[0] for key in rows):
        caches = list(dict.fromkeys(key[1] for key in rows if key[0] == model))
        lines = [
            f"| `{model}` | " + " | ".join(f"cache `{cache}`" for cache in caches) + " |",
            "| --- |" + " --- |" * len(caches),
        ]
        for quantize, kv in dict.fromkeys(key[2:] for key in rows):
            title = "as it is" if (quantize, kv) == (None, "model") else f"`runtime.kv={kv}`"
            cells = [_rounded_cell(rows[model, cache, quantize, kv]) for cache in caches]
            lines.append(f"| {title if quantize is None else f'`quantize={quantize}`'} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _rounded_cell(row: dict[str, Any]) -> str:
    interval = f"{row['accuracy_low']:.1f} to {row['accuracy_high']:.1f}"
    return f"{row['accuracy']:.1f}% ({interval}), {row['tpf']:.2f}, {row['same']:.0f}%"


def everything() -> str:
    """Accuracy, tokens per forward and wall time of every decoder and cache, a table for each iteration."""
    report = json.loads((RESULTS / "tiny-everything-h200.json").read_text())
    rows = {(row["iteration"], row["decoder"], row["options"], row["cache"]): row for row in report["rows"]}
    caches = ("none", "vicinity", "prefix", "dual", "delayed", "adaptive")
    parts = [
        f"{len(rows)} recipes, {report['rows'][0]['problems']} problems in one batch, "
        f"`max_new_tokens={report['setting']['new']}`, float32, {report['hardware']}, torch {report['torch']}, commit "
        f"{report['commit']}. Each cell: accuracy, tokens per forward, seconds for the batch (eager steps). "
        "-: refused, or not measured at this setting."
    ]
    for iteration in ("blockwise", "smooth", "full"):
        lines = [
            f"### `{iteration}`",
            "",
            "| decoder | " + " | ".join(f"`{cache}`" for cache in caches) + " |",
            "| --- |" + " --- |" * len(caches),
        ]
        for decoder, options in dict.fromkeys((row[1], row[2]) for row in rows if row[0] == iteration):
            cells = [_cell(rows.get((iteration, decoder, options, cache))) for cache in caches]
            lines.append(f"| `{decoder}` {options}".rstrip() + " | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['accuracy']:.1f}%, {row['tpf']:.2f}, {row['seconds']:.2f} s"


def families() -> str:
    """What the families of published checkpoints are, a line each."""
    lines = [
        "| family | published | attention | experts | gaps anywhere | exact cache |",
        "| --- |" + " --- |" * 5,
    ]
    for family in MODELS.names():
        entries = [entry for entry in catalog() if entry.family == family]
        attention = " and ".join(dict.fromkeys(entry.attention for entry in entries if not entry.prompt_block))
        both_ways = attention == "bidirectional"
        cells = [
            f"`{entries[0].checkpoint}`{f' and {len(entries) - 1} more' if entries[1:] else ''}",
            attention,
            "yes" if any("-A" in entry.size for entry in entries) else "no",
            "yes" if both_ways else "no",
            "no" if both_ways else "`block`",
        ]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary() -> str:
    """One figure of speed, and one of accuracy against tokens per forward."""
    report = table.measured()
    ours, peer, ours8, peer8 = (
        report["runs"][f"{who}-{run}"] for run in ("dual", "batch8") for who in ("ours", "peer")
    )
    box = json.loads((RESULTS / "tiny-quality-h200.json").read_text())
    return "\n".join(
        [
            f"**Speed.** LLaDA-8B's shape on one {report['hardware']}: a forward takes {ours['ms_per_forward']:.2f} ms "
            f"over whole generations, with the published dInfer (torch.compile) {peer['ms_per_forward']:.2f} ms. The "
            f"first call takes {ours['warm_up_s']:.0f} s against {peer['warm_up_s']:.0f} s; a batch of 8 yields "
            f"{ours8['tokens_per_s']:,.0f} against {peer8['tokens_per_s']:,.0f} tokens a second. Both did the same "
            f"work, dInfer at commit {report['peer_commit']} and ours at {report['commit']}; "
            "[docs/performance.md](docs/performance.md#beside-the-published-dinfer) has all figures.",
            "",
            '<img src="docs/images/speed.svg" width="600" alt="Tokens a second, ours and the published dInfer">',
            "",
            f"**Accuracy.** The model in the box on {box['rows'][0]['problems']} held-out problems, each point a "
            "setting of a decoder. [docs/results.md](docs/results.md) has every decoder with every cache.",
            "",
            '<img src="docs/images/accuracy.svg" width="600" alt="Accuracy against tokens per forward">',
        ]
    )


def rendered(readme: str) -> str:
    """The README with its generated sections written anew."""
    readme = _with_section(readme, families() + "\n", "families")
    return _with_section(readme, summary() + "\n")


def rendered_results(page: str) -> str:
    """docs/results.md with its tables written anew."""
    page = _with_section(page, f"{quality()}\n\n{second()}\n", "box")
    page = _with_section(page, further(RESULTS) + "\n", "further")
    page = _with_section(page, several(RESULTS) + "\n", "several")
    page = _with_section(page, repair(RESULTS) + "\n", "repair")
    return _with_section(page, everything() + "\n")


def throughput() -> str:
    """Tokens per second over the number of requests in flight, and the time of steps."""
    parts = [_targets()]
    for name in ("llada2-mini-spread", "llada2-mini", "llada-8b", "llada-8b-compile", "tiny"):
        report = _throughput(name)
        setting, runs = report["setting"], report["runs"]
        lines = [
            f"### {name}",
            "",
            f"`{_command(report)}`, {setting['dtype']}, {report['hardware']}, torch "
            f"{report['torch']}, commit {report['commit']}. The first block of the first request: "
            f"{report['cold']['first_block_s']:.1f} s after the weights were on the card.",
            "",
            "| in flight | tokens/s | steady | TPF | first block, median | worst | a request | GPU busy | beyond |",
            "| --- |" + " --- |" * 8,
        ]
        for run in runs:
            first, steady = run["first_block_s"], run["steady_tokens_per_s"]
            lines.append(
                f"| {run['in_flight']} | {run['tokens_per_s']:.0f} | {'-' if steady is None else f'{steady:.0f}'} "
                f"| {run['tpf']:.2f} | {1e3 * first['median']:.0f} ms | {1e3 * first['max']:.0f} ms "
                f"| {run['latency_s']['median']:.2f} s | {100 * run['device_share']:.0f}% "
                f"| {run['memory']['beyond_weights_and_kv_gb']:.2f} GB |"
            )
        parts.append("\n".join([*lines, "", *_steps(runs)]))
    return "\n\n".join(parts)


def _command(report: dict[str, Any]) -> str:
    """The command of a report, without its output."""
    return re.sub(r" --out \S+", "", report["command"])


def _throughput(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"throughput-{name}-h200.json").read_text())


def _targets() -> str:
    """Goals and what was reached."""
    mini, spread, dense = _throughput("llada2-mini"), _throughput("llada2-mini-spread"), _step_reports()["LLaDA-8B"]
    most, apart = mini["runs"][-1], spread["runs"][-1]
    cold = max(_throughput(name)["cold"]["first_block_s"] for name in ("llada2-mini", "llada2-mini-spread", "llada-8b"))
    beyond = dense["graph"]["beyond_weights_gb"]
    lines = [
        "| work | to be reached | measured |",
        "| --- | --- | --- |",
        f"| LLaDA2-mini, {apart['in_flight']} in flight, 512 in, 512 out, 2.6 tokens a step, tokens choosing their "
        "experts independently of each other | 8000 tokens/s "
        f"| {apart['steady_tokens_per_s']:.0f} steady, {apart['tokens_per_s']:.0f} in all |",
        "| the same, masks alike | 8000 tokens/s "
        f"| {most['steady_tokens_per_s']:.0f} steady, {most['tokens_per_s']:.0f} in all |",
        f"| from weights on the card to the first block | 20 s | {cold:.1f} s, the longest of the first three tables: "
        "compiling all kernels, and a block |",
        f"| LLaDA-8B, 1 row: memory beyond weights, keys and values | 1.5 GB | {beyond:.2f} GB with keys and values |",
    ]
    return "\n".join(lines)


def _steps(runs: list[dict[str, Any]]) -> list[str]:
    """The time of the largest batch by step."""
    run = runs[-1]
    whole = 1e3 * run["seconds"]
    lines = ["| step, at the largest number in flight | launches | median | of the time |", "| --- |" + " --- |" * 3]
    for row in run["steps"][:4]:
        settle = ", some of which settle" if row["settles"] else ""
        lines.append(
            f"| {row['phase']}, {row['lanes']} rows of {row['width']} positions{settle} | {row['launches']} "
            f"| {row['median_ms']:.2f} ms | {100 * row['total_ms'] / whole:.0f}% |"
        )
    return lines


def rendered_performance(page: str) -> str:
    """docs/performance.md with its sections written anew."""
    for name, body in {
        "steps": steps(),
        "peers": table.peers(),
        "diffulex": table.diffulex(),
        "parts": parts(),
        "quantized": quantized(),
        "goals": goals_table.goals(RESULTS),
        "throughput": throughput(),
        "startup": goals_table.startup(RESULTS),
        "ablation": ablation(RESULTS),
        "open-blocks": open_blocks(RESULTS),
    }.items():
        page = _with_section(page, body + "\n", name)
    return page


def _with_section(text: str, body: str, name: str = "results") -> str:
    section = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    return section.sub(lambda found: found[1] + body + found[2], text)


def rendered_scaling(page: str) -> str:
    """docs/scaling.md with its sections written anew."""
    for name, body in scaling.sections(RESULTS).items():
        page = _with_section(page, body + "\n", name)
    return page


PAGES = {
    ROOT / "README.md": rendered,
    ROOT / "docs" / "results.md": rendered_results,
    ROOT / "docs" / "performance.md": rendered_performance,
    ROOT / "docs" / "scaling.md": rendered_scaling,
}


def main() -> None:
    for path, render in PAGES.items():
        path.write_text(render(path.read_text()))
    goals_table.draw_curve(RESULTS, ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
