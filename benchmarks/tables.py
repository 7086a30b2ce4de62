"""The tables of README.md and docs: a function a section, each from files of benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.goals import ROWS, RUNS, Row, figure, level, number, report_of, wanted
from dinfer.core.recipe.presets import catalog
from dinfer.core.registry import MODELS

RESULTS = Path(__file__).parent / "results"
Report = dict[str, Any]
Cell = str | Callable[[Any], Any]  # a format of the row's entries, or what makes the cell of the row


def load(name: str, folder: Path = RESULTS) -> Report:
    """A file of results by its name without suffix."""
    return dict(json.loads((folder / f"{name}.json").read_text()))


def there(names: Iterable[str], folder: Path) -> list[Report]:
    """Those of the files that are there."""
    return [load(name, folder) for name in names if (folder / f"{name}.json").is_file()]


def table(columns: Mapping[str, Cell], rows: Iterable[Any]) -> str:
    """A table with these columns, title to cell, and a line for each row."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " --- |" * (len(columns) - 1)]
    for row in rows:
        cells = (cell.format_map(row) if isinstance(cell, str) else str(cell(row)) for cell in columns.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def at(index: Any) -> Callable[[Any], Any]:
    """The cell that is the row's entry at an index, or nothing."""
    return lambda row: row.get(index, "") if isinstance(row, dict) else row[index]


def command(report: Report) -> str:
    """The command of a report, without its output."""
    return re.sub(r" --out \S+", "", report["command"])


def made(*reports: Report) -> str:
    """The hardware, the version of torch and the commits of reports."""
    some, commits = reports[0], dict.fromkeys(report["commit"] for report in reports)
    return f"{some['hardware']}, torch {some['torch']}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


# Accuracy of the models in the box


ACCURACY = "{accuracy:.1f}%, {tpf:.2f}"
SHOWN = ("steps=32", "steps=8", "threshold=0.99", "threshold=0.9", "threshold=0.7", "threshold=0.5")


def matrix(title: str, heads: Mapping[str, Any], names: Mapping[str, Any], cell: Callable[[Any, Any], str]) -> str:
    """A table of two keys: a line for each of `names`, a column for each of `heads`, title to key."""
    columns: dict[str, Cell] = {title: lambda name: name}
    columns |= {head: lambda name, key=key: cell(names[name], key) for head, key in heads.items()}
    return table(columns, names)


def box() -> str:
    """`tiny`: accuracy and tokens per forward by decoder and cache."""
    rows = {(row["options"], row["cache"]): row for row in load("tiny-quality-h200")["rows"]}
    return matrix(
        "decoder",
        {f"cache `{cache}`": cache for cache in ("none", "prefix", "dual")},
        {f"`{rows[options, 'none']['decoder']}` {options}": options for options in SHOWN},
        lambda options, cache: ACCURACY.format_map(rows[options, cache]),
    )


def second_box() -> str:
    """`tiny-llada2`: accuracy, forwards and tokens per forward by decoder."""
    figures = {"accuracy": "{accuracy:.1f}%", "NFE": "{nfe:.1f}", "TPF": "{tpf:.2f}"}
    return table({"decoder": "`{decoder}` {options}", **figures}, load("tiny-llada2-quality")["rows"])


def everything() -> str:
    """Accuracy, tokens per forward and wall time of every decoder and cache, a table for each iteration."""
    report = load("tiny-everything-h200")
    rows = {(row["iteration"], row["decoder"], row["options"], row["cache"]): row for row in report["rows"]}
    caches = {f"`{name}`": name for name in ("none", "vicinity", "prefix", "dual", "delayed", "adaptive")}
    parts = [f"{len(rows)} recipes, {made(report)}."]

    def cell(recipe: Any, cache: str) -> str:
        row = rows.get((*recipe, cache))
        return "-" if row is None else (ACCURACY + ", {seconds:.2f} s").format_map(row)

    for iteration in ("blockwise", "smooth", "full"):
        names = {f"`{key[1]}` {key[2]}".rstrip(): key[:3] for key in rows if key[0] == iteration}
        parts.append(f"### `{iteration}`\n\n{matrix('decoder', caches, names, cell)}")
    return "\n\n".join(parts)


FURTHER = {
    "tiny": ("tiny-further-cpu", "tiny-further-more-cpu", "tiny-further-prior-cpu"),
    "tiny-llada2": ("tiny-llada2-further-cpu",),
}


def further() -> str:
    """Decoders, caches and options that are not in the table of everything."""
    reports = {model: [load(file) for file in files] for model, files in FURTHER.items()}
    every = [report for runs in reports.values() for report in runs]

    def named(name: str, options: str) -> str:
        return " ".join([f"`{name}`", *([options] if options else [])])

    rows = [row | {"model": model} for model, runs in reports.items() for report in runs for row in report["rows"]]
    columns: dict[str, Cell] = {
        "model": "`{model}`",
        "iteration": "`{iteration}`",
        "decoder": lambda row: named(row["decoder"], row["options"]),
        "cache": lambda row: named(*row["cache"].partition(" ")[::2]),
        "accuracy": "{accuracy:.1f}%",
        "NFE": "{nfe:.1f}",
        "TPF": "{tpf:.2f}",
    }
    return f"{made(*every)}.\n\n{table(columns, rows)}"


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


ABLATIONS = [f"ablation-{name}h200" for name in ("", "experts-", "more-", "decoders-", "host-")]


def ablation() -> str:
    """What a step loses without each kernel group or optimisation of the host: a line each, a column for each case."""
    reports, cases = there(ABLATIONS, RESULTS), dict[str, Report]()
    for report in reports:
        for case, rows in report["cases"].items():
            cases.setdefault(case, {}).update({name: row for name, row in rows.items() if "error" not in row})
    names = dict.fromkeys(name for rows in cases.values() for name in rows if not name.startswith("all on"))
    spreads = {case: rows["all on"] for case, rows in cases.items()}
    heads = {case: case for case in cases}
    spread = {"spread of all on": "all on"}
    return (
        f"{made(*reports)}.\n\n"
        + matrix(
            "without", heads, spread | {f"`{name}`": name for name in names},
            lambda name, case: (
                "{step_spread:.1%} / {wall_spread:.1%}".format_map(spreads[case]) if name == "all on"
                else lost(cases[case].get(name), spreads[case])
            ),
        )
    )  # fmt: skip


def lost(row: Report | None, base: Report) -> str:
    """What step and run lose without something; a dot: no more than repeated runs differ."""
    parts = []
    for key in ("step", "wall") if row else ():
        change = row[f"{key}_ratio"] - 1
        within = abs(change) <= max(base[f"{key}_spread"], row.get(f"{key}_spread", 0))
        parts.append("·" if within else f"{change:+.1%}")
    return " / ".join(parts)


def throughput() -> str:
    """Tokens per second over the number of requests in flight, and the time of the largest batch by step."""
    parts = []
    runs: dict[str, Cell] = {
        "in flight": "{in_flight}",
        "tokens/s": "{tokens_per_s:.0f}",
        "steady": lambda run: "-" if run["steady_tokens_per_s"] is None else f"{run['steady_tokens_per_s']:.0f}",
        "TPF": "{tpf:.2f}",
        "first block, median": lambda run: f"{1e3 * run['first_block_s']['median']:.0f} ms",
        "worst": lambda run: f"{1e3 * run['first_block_s']['max']:.0f} ms",
        "a request": "{latency_s[median]:.2f} s",
        "GPU busy": lambda run: f"{100 * run['device_share']:.0f}%",
        "beyond": "{memory[beyond_weights_and_kv_gb]:.2f} GB",
    }
    for name in ("llada2-mini-spread", "llada2-mini", "llada-8b", "llada-8b-compile", "tiny"):
        report = load(f"throughput-{name}-h200")
        last = report["runs"][-1]
        launched: dict[str, Cell] = {
            "step, at the largest number in flight": lambda row: (
                "{phase}, {lanes} rows of {width} positions".format_map(row)
                + (", some of which settle" if row["settles"] else "")
            ),
            "launches": "{launches}",
            "median": "{median_ms:.2f} ms",
            "of the time": lambda row, whole=1e3 * last["seconds"]: f"{100 * row['total_ms'] / whole:.0f}%",
        }
        parts += [
            f"### {name}",
            f"`{command(report)}`, {report['setting']['dtype']}, {made(report)}. The "
            f"first block of the first request: {report['cold']['first_block_s']:.1f} s after the weights were on the "
            "card.",
            table(runs, report["runs"]),
            table(launched, last["steps"][:4]),
        ]
    return "\n\n".join(parts)


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


def long_prompts(results: Path = RESULTS) -> str:
    """Prefills and steps of long prompts."""
    reports = measured(results)
    rows = [
        run | {"length": length}
        for length in ("16k", "32k")
        for run in reports.get(f"mini-{length}", {"runs": []})["runs"]
    ]
    return table(
        {
            "LLaDA2-mini, prompts of": "{length}",
            "in flight": "{in_flight}",
            "prefill, positions/s": lambda run: f"{run['limit']['prefill'].get('positions_per_s', 0):,.0f}",
            "usual step": "{limit[usual][median_ms]:.2f} ms",
            "by bytes": "{limit[usual][bytes_ms]:.2f} ms",
            "keys and values read": "{limit[usual][keys_gb]:.2f} GB",
        },
        rows,
    )


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


STARTS = {  # when kernels are compiled, and the file
    "at its first launch": "startup-llada2-mini-h200",
    "ahead, beside each other": "startup-llada2-mini-ahead-h200",
}


def startup(results: Path = RESULTS) -> str:
    """From weights on the card to the first block: nothing compiled before, and once more on the same machine."""
    found = {title: report for title, name in STARTS.items() for report in there([name], results)}
    if not found:
        return "Not measured yet: `python -m benchmarks.startup` does it."
    rows = [
        {"title": title, "commit": report["commit"], "start": words}
        | {phase["phase"]: phase for phase in report[name]["phases"]}
        for title, report in found.items()
        for name, words in (("cold", "first"), ("warm", "second"))
        if name in report
    ]
    columns: dict[str, Cell] = {
        "a kernel is compiled": "{title}",
        "commit": "{commit}",
        "start": "{start}",
        "first block": "{one request[first_block_s]:.1f} s",
        "kernels": "{one request[kernels]}",
        "several requests": "{all in flight[seconds]:.1f} s",
    }
    return f"{made(*found.values())}.\n\n{table(columns, rows)}"


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
        "run": "{title}",
        "ms a forward, generation": "{ms_per_forward:.2f}",
        "window step": "{window}",
        "full pass": "{full:.2f}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "first call": "{warm_up_s:.0f} s{star}",
    }
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


NARROW = {  # by file
    "throughput-llada2-mini-block-beside-6-2-h100": "all (`block`), bf16",
    "throughput-llada2-mini-narrow-8-4-h100": "twelve, bf16",
    "throughput-llada2-mini-narrow-6-2-h100": "eight, bf16",
    "throughput-llada2-mini-fp8-narrow-6-2-h100": "eight, fp8",
}


def narrow() -> str:
    """Throughput with whole blocks and with the narrow window."""
    reports = {name: load(name) for name in NARROW}
    rows = [
        {"title": NARROW[name], **run, "least": run["limit"]["tokens_per_s"]}
        for name, report in reports.items() for run in report["runs"]
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["title"], row["in_flight"]))
    columns: dict[str, Cell] = {
        "positions": "{title}", "in flight": "{in_flight}", "tokens/s, steady": "{steady_tokens_per_s:,.0f}",
        "limit of its steps": "{least:,.0f}",
    }  # fmt: skip
    return f"{made(*reports.values())}.\n\n{table(columns, rows)}"


def constrained() -> str:
    """What a step costs whose rows are in a language."""
    report = load("constrained-llada-8b-h100")
    rows = [
        {"batch": batch, "step": step, "plain": found["none"]["ms"]}
        | {name: f"{own['ms']:.2f} ms, {own['more']:+.1%}" for name, own in found.items()}
        for batch, steps in report["batches"].items() for step, found in steps.items()
    ]  # fmt: skip
    columns: dict[str, Cell] = {"step, rows x positions": "{step}", "without": "{plain:.2f} ms"}
    for name, size in report["languages"].items():
        columns[f"{size['states']:,} states"] = lambda row, name=name: row.get(name, "-")
    return f"{made(report)}.\n\n{table(columns, rows)}"


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
        "run": "{title}",
        "batch": "{batch}",
        "ms a forward, generation": "{ms_per_forward:.2f}",
        "step": "{usual:.2f} ms",
        "forwards": "{forwards}",
        "tokens/s": "{tokens_per_s:,.0f}",
    }
    about = (
        f"Diffulex at {report['diffulex_commit']}; {made(*reports.values())}, transformers {report['transformers']}."
    )
    return f"{about}\n\n{table(columns, rows)}"


def llama_cpp() -> str:
    """llama.cpp and ours on the same files on a CPU: CPU time of one thread."""
    report = load("llama-cpp-memory-cpu")
    rows = [(name.removesuffix(".gguf"), found) for name, found in sorted(report["after"]["files"].items())]
    columns: dict[str, Cell] = {
        "file": at(0),
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
        "requests": at(0),
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


def recipes(folder: Path = RESULTS) -> str:
    """This model on this card: the line that serves it, and what to expect of it."""
    rows = []
    for report in there(RECIPES, folder):
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
    "recipes": recipes,
    "families": families, "summary": summary, "box": box, "second_box": second_box, "further": further,
    "everything": everything, "short": short, "steps": steps, "step-runs": step_runs, "parts": step_parts,
    "peers": peers, "rival": rival, "narrow-card": narrow, "constrained": constrained,
    "diffulex": diffulex, "llama-cpp": llama_cpp, "goals": goals,
    "long-prompts": long_prompts, "curve": curve, "startup": startup, "throughput": throughput, "ablation": ablation,
    "experts": experts,
}  # fmt: skip
