"""Writes the tables of README.md and docs from the files in benchmarks/results, so that nobody types a figure by hand.

python -m benchmarks.report
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import goals_table, step_table
from benchmarks.ablation_table import ablation
from benchmarks.capacity import table as scaling
from benchmarks.further_table import further
from benchmarks.open_blocks_table import open_blocks
from benchmarks.peers import table
from benchmarks.several_table import repair, several
from dinfer.cli.catalog import catalog
from dinfer.recipe.registry import MODELS

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


def quantized() -> str:
    """Accuracy, tokens per forward and answers that stay the same, by what is rounded; a table for each model."""
    report = json.loads((RESULTS / "quantized-h200.json").read_text())
    rows = {(row["model"], row["cache"], row["quantize"], row["kv"]): row for row in report["rows"]}
    parts = [
        f"{report['rows'][0]['problems']} held-out problems, `threshold` 0.9, "
        f"`max_new_tokens={report['setting']['new']}`, "
        "float32 but for what is rounded: accuracy with its 95% interval, tokens per forward, and the share of "
        f"problems whose answer equals, word for word, that of the model as it is. `{_command(report)}`, "
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
        "| family | published | attention | experts |",
        "| --- |" + " --- |" * 3,
    ]
    for family in MODELS.names():
        entries = [entry for entry in catalog() if entry.family == family]
        attention = " and ".join(dict.fromkeys(entry.attention for entry in entries if not entry.prompt_block))
        cells = [
            f"`{entries[0].checkpoint}`{f' and {len(entries) - 1} more' if entries[1:] else ''}",
            attention,
            "yes" if any("-A" in entry.size for entry in entries) else "no",
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
            "setting of a decoder. [docs/results.md](docs/results.md) has more.",
            "",
            '<img src="docs/images/accuracy.svg" width="600" alt="Accuracy against tokens per forward">',
        ]
    )


def throughput() -> str:
    """Tokens per second over the number of requests in flight, and the time of steps."""
    parts = []
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


def short() -> str:
    """The figures that a reader asks for first."""
    found, runs, box = step_table.reports(), table.measured()["runs"], table.on_cpu()["after"]["files"]["Q4_K_M.gguf"]
    dense, experts = found["LLaDA-8B"], found["LLaDA2-mini"]
    most = {
        name: next(run for run in levels if run["in_flight"] == 256)["steady_tokens_per_s"]
        for name, levels in goals_table.levels(goals_table.measured(RESULTS)).items()
    }
    return "\n".join(
        [
            f"* **A step** of one request takes {dense['graph']['step_ms']:.2f} ms with LLaDA-8B and "
            f"{experts['graph']['step_ms']:.2f} ms with LLaDA2-mini. The card could read the weights in "
            f"{dense['limit']['reached']:.0%} and {experts['limit']['reached']:.0%} of that time.",
            f"* **Beside the published dInfer**: a forward of LLaDA-8B takes "
            f"{runs['ours-dual']['ms_per_forward']:.2f} ms over whole generations, and "
            f"{runs['peer-dual']['ms_per_forward']:.2f} ms there.",
            f"* **Throughput**: LLaDA2-mini gives {most['bf16']:,.0f} tokens a second with 256 requests in flight, and "
            f"{most['fp8']:,.0f} with `quantize=fp8`.",
            f"* **On a CPU** one thread decodes {box['tokens/s, ours / theirs']:.1f} times as many tokens a second as "
            "llama.cpp's, from the same Q4_K_M file.",
        ]
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "families": families,
    "summary": summary,
    "box": lambda: f"{quality()}\n\n{second()}",
    "further": lambda: further(RESULTS),
    "several": lambda: several(RESULTS),
    "repair": lambda: repair(RESULTS),
    "everything": everything,
    "short": short,
    "steps": step_table.steps,
    "step-runs": step_table.runs,
    "parts": step_table.parts,
    "peers": table.peers,
    "diffulex": table.diffulex,
    "llama-cpp": table.llama_cpp,
    "quantized": quantized,
    "goals": lambda: goals_table.goals(RESULTS),
    "long-prompts": lambda: goals_table.long_prompts(RESULTS),
    "curve": lambda: goals_table.curve(RESULTS),
    "startup": lambda: goals_table.startup(RESULTS),
    "throughput": throughput,
    "ablation": lambda: ablation(RESULTS),
    "open-blocks": lambda: open_blocks(RESULTS),
}
SECTION = re.compile(r"(<!-- ([\w-]+): begin[^\n]*-->\n).*?(<!-- \2: end -->)", re.DOTALL)


def documents() -> list[Path]:
    """README.md, the pages of docs, and the reports beside the results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]


def pages() -> dict[Path, str]:
    """The pages that have generated sections, with these written anew.

    A pair of markers in a document names its section, so a section moves with its markers.
    """
    tables = {name: write() for name, write in SECTIONS.items()} | scaling.sections(RESULTS)
    found = {path: path.read_text() for path in documents()}
    return {
        path: SECTION.sub(lambda section: f"{section[1]}{tables[section[2]]}\n{section[3]}", text)
        for path, text in found.items()
        if SECTION.search(text)
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
    goals_table.draw_curve(RESULTS, ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
