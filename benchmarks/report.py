"""Writes the tables of README.md and docs from the files in benchmarks/results, so that nobody types a figure by hand.

    python -m benchmarks.report

A function a section: `SECTIONS` has their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.goals import ROWS, RUNS, Row, figure, level, number, report_of, wanted
from dinfer.core.recipe.presets import catalog
from dinfer.core.registry import MODELS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- ([\w-]+): begin[^\n]*-->\n).*?(<!-- \2: end -->)", re.DOTALL)
Report = dict[str, Any]
Cell = str | Callable[[Any], Any]  # a format of the row's entries, or what makes the cell of the row


def load(name: str, folder: Path = RESULTS) -> Report:
    """A file of results by its name without suffix."""
    return dict(json.loads((folder / f"{name}.json").read_text()))


def table(columns: Mapping[str, Cell], rows: Iterable[Any]) -> str:
    """A table with these columns, title to cell, and a line for each row."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " --- |" * (len(columns) - 1)]
    for row in rows:
        cells = (cell.format_map(row) if isinstance(cell, str) else str(cell(row)) for cell in columns.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def made(*reports: Report) -> str:
    """The hardware, the version of torch and the commits of reports."""
    some, commits = reports[0], dict.fromkeys(report["commit"] for report in reports)
    return f"{some['hardware']}, torch {some['torch']}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


# Accuracy of the models in the box


ACCURACY = "{accuracy:.1f}%, {tpf:.2f}"
SHOWN = ("steps=32", "steps=8", "threshold=0.99", "threshold=0.9", "threshold=0.7", "threshold=0.5")


def box() -> str:
    """`tiny`: accuracy and tokens per forward by decoder and cache."""
    rows = {(row["options"], row["cache"]): row for row in load("tiny-quality-h200")["rows"]}
    columns: dict[str, Cell] = {"decoder": lambda options: f"`{rows[options, 'none']['decoder']}` {options}"}
    for cache in ("none", "prefix", "dual"):
        columns[f"cache `{cache}`"] = lambda options, cache=cache: ACCURACY.format_map(rows[options, cache])
    return table(columns, SHOWN)


def second_box() -> str:
    """`tiny-llada2`: accuracy, forwards and tokens per forward by decoder."""
    figures = {"accuracy": "{accuracy:.1f}%", "NFE": "{nfe:.1f}", "TPF": "{tpf:.2f}"}
    return table({"decoder": "`{decoder}` {options}", **figures}, load("tiny-llada2-quality")["rows"])


def families() -> str:
    """What the families of published checkpoints are, a line each."""
    rows = []
    for family in MODELS.names():
        if not (entries := [entry for entry in catalog() if entry.family == family]):
            continue  # such as the family of the tutorial
        attention = " and ".join(dict.fromkeys(entry.attention for entry in entries if not entry.prompt_block))
        rows.append((family, entries, attention))
    return table(
        {
            "family": lambda row: f"`{row[0]}`",
            "published": lambda row: f"`{row[1][0].checkpoint}`{f' and {len(row[1]) - 1} more' if row[1][1:] else ''}",
            "attention": lambda row: row[2] + (", experts" if any("-A" in entry.size for entry in row[1]) else ""),
        },
        rows,
    )


# Speed


STEPS = {  # the title of a row, and its file
    "LLaDA-8B": "step-llada-8b-h200",
    "LLaDA-8B, batch 8": "step-llada-8b-batch8-h200",
    "LLaDA-8B, fp8": "step-llada-8b-fp8-h200",
    "LLaDA-8B, int4": "step-llada-8b-int4-h200",
    "LLaDA2-mini, masks alike": "step-llada2-mini-h200",
    "LLaDA2-mini": "step-llada2-mini-spread-h200",
    "LLaDA2-mini, fp8, masks alike": "step-llada2-mini-fp8-h200",
    "LLaDA2-mini, fp8": "step-llada2-mini-fp8-spread-h200",
    "LLaDA2-mini, int4": "step-llada2-mini-int4-spread-h200",
}


def timed() -> dict[str, Report]:
    """The steps of full-size shapes, by title."""
    return {title: load(name) | {"title": title} for title, name in STEPS.items()}


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def steps() -> str:
    """The time of a step of full-size shapes, and its limits by bytes and by multiply-adds."""
    found = timed()
    columns: dict[str, Cell] = {
        "shape": "{title}",
        "experts read": lambda row: "-" if row["experts_read"] is None else f"{row['experts_read']:.0f}",
        "step": "{graph[step_ms]:.2f} ms",
        "with the host": lambda row: milliseconds(row["graph"]["step_ms"] + row["graph"]["host_ms"]),
        "limit: bytes": "{limit[bytes_ms]:.2f} ms",
        "limit: multiply-adds": "{limit[flops_ms]:.2f} ms",
        "of the limit": lambda row: f"{100 * row['limit']['reached']:.0f}%",
    }
    return f"{made(*found.values())}.\n\n{table(columns, found.values())}"


def step_runs() -> str:
    """The same steps without CUDA graphs, the time to the first measured step, and one shape on other cards."""
    found = timed()
    columns: dict[str, Cell] = {
        "shape": "{title}",
        "eager step": "{eager[step_ms]:.2f} ms",
        "CUDA graph": "{graph[step_ms]:.2f} ms",
        "decoding and host": lambda row: f"{100 * row['without_network']['share']:.1f}%",
        "warm-up": lambda row: f"{row['eager']['warm_up_s'] + row['graph']['warm_up_s']:.1f} s",
        "same tokens": lambda row: "yes" if row["graph_equals_eager"] else "NO",
    }
    return table(columns, found.values())


def step_parts() -> str:
    """The time of these steps by part."""
    found = timed()
    first = next(iter(found.values()))  # of one card: none adds up over ranks
    names = [name for name in first["profile"]["parts"] if name != "collectives"]
    columns: dict[str, Cell] = {"shape": "{title}"}
    columns |= {name: f"{{profile[parts][{name}][own_us]:.0f}}" for name in names}
    columns |= {
        "host": lambda row: f"{1e3 * row['graph']['host_ms']:.0f}",
        "no network": lambda row: f"{1e3 * row['without_network']['step_ms']:.0f}",
    }
    return table(columns, found.values())


CURVES = {"bf16": "mini", "fp8": "mini-fp8"}


def measured(results: Path) -> dict[str, Report]:
    """The files of `benchmarks.goals` that are there, by run."""
    return {name: report for name in RUNS if (report := report_of(results, name)) is not None}


def levels(results: Path) -> dict[str, list[Report]]:
    """Of each format of LLaDA2-mini, what was measured, by the number in flight."""
    found = {title: report_of(results, name) for title, name in CURVES.items()}
    return {title: sorted(one["runs"], key=lambda run: run["in_flight"]) for title, one in found.items() if one}


def goals(results: Path = RESULTS) -> str:
    """Every figure that is to be reached beside its goal and its limit."""
    reports = measured(results)
    if not reports:
        return "Not measured yet: `python -m benchmarks.goals --out benchmarks/results` does it."

    def values(row: Row, limit: str = "limit") -> tuple[float | None, float | None]:
        run = level(reports[row.run], row.in_flight) if row.run in reports else None
        return (None, None) if run is None or limit not in run else figure(row.figure, run, limit)

    def share(row: Row, value: float | None, limit: float | None) -> str:
        """What part of its limit a figure is. Of a time, the limit is the least."""
        return "-" if not value or not limit else f"{limit / value if 'ms' in row.figure else value / limit:.0%}"

    columns: dict[str, Cell] = {
        "work": lambda row: row.work,
        "in flight": lambda row: row.in_flight,
        "figure": lambda row: row.figure,
        "measured": lambda row: number(values(row)[0]),
        "goal": wanted,
        "limit": lambda row: number(values(row)[1]),
        "of the limit": lambda row: share(row, *values(row)),
        "warm": lambda row: number(values(row, "limit_warm")[1]),
        "of that": lambda row: share(row, *values(row, "limit_warm")),
    }
    return f"{made(*reports.values())}.\n\n{table(columns, ROWS)}"


def curve(results: Path = RESULTS) -> str:
    """Tokens a second and latency of LLaDA2-mini over the requests in flight."""
    rows = [run | {"title": title} for title, runs in levels(results).items() for run in runs]
    return table(
        {
            "LLaDA2-mini, in flight": "{title}, {in_flight}",
            "tokens/s, steady": lambda run: number(run["steady_tokens_per_s"]),
            "limit": lambda run: number(run["limit"]["tokens_per_s"]),
            "a request, median": "{latency_s[median]:.2f} s",
            "worst": "{latency_s[max]:.2f} s",
            "GPU busy": lambda run: f"{100 * run['device_share']:.0f}%",
        },
        rows,
    )


# Beside other programs


PEERS = {  # a row's title, and its run
    "dInfer, eager, dual cache": "peer-eager",
    "dInfer, torch.compile, dual cache": "peer-dual",
    "ours, dual cache": "ours-dual",
    "ours, dual cache, fp8": "ours-fp8",
    "ours, dual cache, int4": "ours-int4",
    "dInfer, torch.compile, vicinity 16/16": "peer-vicinity",
    "dInfer, torch.compile, no cache": "peer-none",
    "dInfer, torch.compile, dual cache, batch 8": "peer-batch8",
    "ours, dual cache, batch 8": "ours-batch8",
}


def beside() -> Report:
    """All runs of the published dInfer and ours, and what they ran on."""
    return load("peers-h200-09863cab")


def peers() -> str:
    """The published dInfer and ours on the same work: generations beside generations, steps beside steps."""
    report = beside()
    runs, some = report["runs"], report["runs"]["ours-dual"]
    _, _, beside_each_other = report["command"].partition("--together ")
    together = [name for name in PEERS.values() if name in beside_each_other.split()]
    rows = []
    for title, name in PEERS.items():
        widths = {int(key.split()[-1]): found["median_ms"] for key, found in runs[name]["by_width"].items()}
        full = widths.pop(some["prompt"] + some["new"])
        window = " to ".join(f"{ms:.2f}" for ms in sorted(set(widths.values()))) or "-"
        star = " *" if name in together else ""
        rows.append(runs[name] | {"title": title, "window": window, "full": full, "star": star})
    columns: dict[str, Cell] = {
        "run": "{title}", "ms a forward, generation": "{ms_per_forward:.2f}", "window step": "{window}",
        "full pass": "{full:.2f}", "tokens/s": "{tokens_per_s:,.0f}", "first call": "{warm_up_s:.0f} s{star}",
    }  # fmt: skip
    return f"dInfer at {report['peer_commit']}; {made(report)}, transformers {report['transformers']}.\n\n" + table(
        columns, rows
    )


SHOWN_COMMITS = {"8": (1, 2, 4, 8), "16": (4,), "32": (4, 8)}  # of the lengths of blocks


def rival() -> str:
    """An autoregressive model of the same shape beside block diffusion: tokens a second by requests in flight."""
    report = load("rival-sdar-8b-h200")
    causal, blocks = report["causal"], report["blocks"]
    lines = {"one token a step, autoregressive": {at: (run["tokens_per_s"], 1) for at, run in causal.items()}}
    for block, runs in blocks.items():
        for commits in SHOWN_COMMITS[block]:
            lines[f"blocks of {block}, {commits} token{'s' * (commits > 1)} a step"] = {
                at: (run[f"commits_{commits}"]["tokens_per_s"], run[f"commits_{commits}"]["positions_per_token"])
                for at, run in runs.items()
            }
    columns: dict[str, Cell] = {"model": lambda name: name}
    columns["positions a token"] = lambda name: f"{next(iter(lines[name].values()))[1]:g}"
    for at in causal:
        columns[f"{at} in flight"] = lambda name, at=at: f"{lines[name][at][0]:,.0f}" if at in lines[name] else "-"
    steps = ", ".join(f"{run['ms']:.2f} ({run['limit']['limit_ms']:.2f})" for run in causal.values())
    return (
        f"{made(report)}. A step of the autoregressive model takes {steps} ms with {', '.join(causal)} in flight; in "
        f"brackets the least that its bytes or multiply-adds allow.\n\n{table(columns, lines)}"
    )


BLOCKS = {"llada": "LLaDA-8B, blocks of 32", "sdar-4b": "SDAR-4B, blocks of 4", "sdar-8b": "SDAR-8B, blocks of 4"}


def diffulex(folder: Path = RESULTS) -> str:
    """Diffulex and ours on the same work, as far as it was measured. Cards of one session have a file each."""
    reports = {file.name: load(file.stem, folder) for file in sorted(folder.glob("diffulex*-h200.json"))}
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
    rows = [
        run | {"title": f"{who}, {title}", "batch": batch, "usual": usual["median_ms"]}
        for batch in (1, 16)
        for name, title in BLOCKS.items()
        for side, who in (("diffulex", "Diffulex"), ("ours", "ours"))
        if (run := runs.get(f"{side}-{name}-batch{batch}")) is not None
        and (usual := max(run["by_width"].values(), key=lambda found: found["forwards"]))
    ]
    columns: dict[str, Cell] = {
        "run": "{title}", "batch": "{batch}", "ms a forward, generation": "{ms_per_forward:.2f}",
        "step": "{usual:.2f} ms", "forwards": "{forwards}", "tokens/s": "{tokens_per_s:,.0f}",
    }  # fmt: skip
    about = (
        f"Diffulex at {report['diffulex_commit']}; {made(*reports.values())}, transformers {report['transformers']}."
    )
    return f"{about}\n\n{table(columns, rows)}"


def llama_cpp() -> str:
    """llama.cpp and ours on the same files on a CPU: CPU time of one thread."""
    report = load("llama-cpp-memory-cpu")
    rows = [(name.removesuffix(".gguf"), found) for name, found in sorted(report["after"]["files"].items())]
    columns: dict[str, Cell] = {
        "file": lambda row: row[0],
        "full pass, llama.cpp": lambda row: f"{row[1]['llama.cpp']['whole pass']:.2f} s",
        "ours": lambda row: f"{row[1]['ours']['whole pass']:.2f} s",
        "our window step": lambda row: f"{row[1]['ours']['window step']:.2f} s",
        "tokens/s, ours / theirs": lambda row: f"{row[1]['tokens/s, ours / theirs']:.1f}",
        "peak memory, ours / theirs": lambda row: (
            f"{row[1]['ours']['peak MB']:.0f} / {row[1]['llama.cpp']['peak MB']:.0f} MB: "
            f"{row[1]['peak memory, ours / theirs']:.2f}"
        ),
    }
    return (
        f"llama.cpp {report['llama.cpp'].removeprefix('vendored ')}; {report['machine']}; ours at "
        f"{report['after']['commit']}. CPU time of one thread, medians of two rounds in turns "
        f"(`llama-cpp-memory-cpu.json`).\n\n{table(columns, rows)}"
    )


def summary() -> str:
    """One figure of speed, and one of accuracy against tokens per forward."""
    report = beside()
    ours, peer, ours8, peer8 = (
        report["runs"][f"{who}-{run}"] for run in ("dual", "batch8") for who in ("ours", "peer")
    )
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
            f"**Accuracy.** The model in the box on {load('tiny-quality-h200')['rows'][0]['problems']} held-out "
            "problems, each point a setting of a decoder. [docs/results.md](docs/results.md) has more.",
            "",
            '<img src="docs/images/accuracy.svg" width="600" alt="Accuracy against tokens per forward">',
        ]
    )


def short() -> str:
    """The figures that a reader asks for first."""
    found, runs, here = timed(), beside()["runs"], load("llama-cpp-memory-cpu")["after"]["files"]["Q4_K_M.gguf"]
    dense, experts = found["LLaDA-8B"], found["LLaDA2-mini"]
    most = {
        name: next(run for run in own if run["in_flight"] == 256)["steady_tokens_per_s"]
        for name, own in levels(RESULTS).items()
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
            f"* **On a CPU** one thread decodes {here['tokens/s, ours / theirs']:.1f} times as many tokens a second as "
            "llama.cpp's, from the same Q4_K_M file.",
        ]
    )


def experts() -> str:
    """Steps on two cards, with experts divided and dealt out whole, by the number of requests."""
    names = ["tensor-parallel-fused-h200", *sorted(path.stem for path in RESULTS.glob("tensor-parallel-rows*"))]
    took: dict[int, dict[str, float]] = {}
    for found in (found for name in names for found in load(name).values() if isinstance(found, dict)):
        case = found.get("case")
        if case and (case["shape"], case["cards"], case["quantize"], case["sums"]) == ("llada2-mini", 2, None, "fused"):
            took.setdefault(case["rows"], {})[case["experts"]] = found["with_host_ms"]
    columns: dict[str, Cell] = {
        "requests": lambda row: row[0],
        "divided experts": lambda row: milliseconds(row[1].get("divided")),
        "whole experts": lambda row: milliseconds(row[1].get("dealt out")),
    }
    return table(columns, sorted(took.items()))


PRESETS = {
    "llada2-mini": "llada2_mini", "llada-8b": "llada_8b_instruct",
    "sdar-4b": "sdar model.checkpoint=JetLM/SDAR-4B-Chat", "sdar-8b": "sdar_8b_chat",
}  # fmt: skip
RECIPES = (
    "goals-mini-h200", "goals-mini-fp8-h200", "goals-8b-64-h200", "goals-8b-fp8-batch8-h200", "goals-sdar-4b-128-h200",
    "goals-sdar-8b-128-h200",
)  # fmt: skip


def recipes() -> str:
    """This model on this card: the line that serves it, and what to expect of it."""
    rows = []
    for report in map(load, RECIPES):
        setting = report["setting"]
        best = max(report["runs"], key=lambda run: run["tokens_per_s"])
        own = f" quantize={setting['quantize']}" if setting["quantize"] else ""
        favour = " runtime.favour=throughput" if setting["gather"] else ""
        line = (
            f"dinfer serve model={PRESETS[setting['shape']]} device=cuda runtime.rows={best['in_flight']}{own}{favour}"
        )
        line += f" runtime.max_length={setting['prompt'] + setting['new']}"
        rows.append(best | {
            "model": setting["shape"], "card": report["hardware"].removeprefix("NVIDIA "), "line": f"`{line}`",
            "rate": setting["rate"], "first": f"{best['first_block_s']['median']:.2f} s",
            "lengths": f"{setting['prompt']} and {setting['new']}", "commit": report["commit"],
        })  # fmt: skip
    columns: dict[str, Cell] = {
        "model": "{model}", "card": "{card}", "line": "{line}", "tokens in and out": "{lengths}",
        "tokens a step": "{rate}", "expect, tokens/s": "{tokens_per_s:,.0f}", "first block": "{first}",
        "at": "{commit}",
    }  # fmt: skip
    return table(columns, rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "recipes": recipes, "families": families, "summary": summary, "box": box, "second_box": second_box, "short": short,
    "steps": steps, "step-runs": step_runs, "parts": step_parts, "peers": peers, "rival": rival, "diffulex": diffulex,
    "llama-cpp": llama_cpp, "goals": goals, "curve": curve, "experts": experts,
}  # fmt: skip


def documents() -> list[Path]:
    """README.md, the pages of docs, and the reports beside the results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]


def pages() -> dict[Path, str]:
    """The pages that have generated sections, with these written anew.

    A pair of markers in a document names its section, so a section moves with its markers.
    """
    found = {path: path.read_text() for path in documents()}
    return {
        path: SECTION.sub(lambda section: f"{section[1]}{SECTIONS[section[2]]()}\n{section[3]}", text)
        for path, text in found.items()
        if SECTION.search(text)
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
