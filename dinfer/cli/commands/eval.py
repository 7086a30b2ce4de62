"""evaluates a recipe on tasks of lm-eval, and measures its speed

usage: dinfer eval [tasks=NAME] [overrides ...]

Prints the score of each task, forwards per request (NFE), tokens per forward (TPF), tokens per second (TPS),
computed positions per decoded one, and latency. Writes one JSON file for each run to the folder `out`, and runs.csv
with a line for each task of each run there. If a run is killed or interrupted, call the command again to continue; a
finished run is shown. The table goes to stdout, progress to stderr. Needs lm-eval: pip install 'dinfer[eval]'.

On several cards: torchrun --nproc-per-node 8 -m dinfer eval ... puts a model on each card, and
runtime.tensor_parallel=2 divides one model among two. On a Ray cluster: dinfer eval ray=auto replicas=8 ...
  dinfer eval tasks=mini_gsm limit=50 decoder=threshold decoder.threshold=0.8
  dinfer eval -m tasks=mini_gsm limit=200 cache=none,dual decoder.threshold=0.7,0.8,0.9
"""

import json
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import RenderableType

from dinfer.cli.application import launch
from dinfer.cli.conf import GROUPS, check_ahead, counted, group, held_of, need, pipeline, ranks_of, setting
from dinfer.cli.terminal import Interrupted, Report, say, several, show, table
from dinfer.core.registry import typed
from dinfer.lab.outputs import check_folder

# The column of each figure: its name in the results, and how many decimals are shown.
FIGURES = {
    "NFE": ("nfe", 1), "TPF": ("tpf", 2), "positions": ("positions_per_committed", 1), "TPS": ("tps", 0),
    "p50": ("latency_p50", 2), "p95": ("latency_p95", 2), "seconds": ("seconds", 1),
}  # fmt: skip


def run(args: Namespace) -> None:
    """Evaluates each point of a sweep."""
    launch(args, partial(evaluate, line=args.line))


def evaluate(config: dict[str, Any], *, line: list[str]) -> None:
    """Evaluates one recipe, unless its report is there. `line`: the command line."""
    need("lm_eval", "eval", "dinfer eval needs lm-eval")
    check(config)
    address, count = setting(config, "ray", str | None), setting(config, "replicas", int | None)
    if address is None and count is not None:
        raise ValueError(
            f"replicas={count} needs a Ray cluster: give ray=auto too, or start the replicas with torchrun"
        )
    if address is None:
        found = measured(config, line)
    else:
        need("ray", "ray", "ray= needs Ray")
        if count is not None:
            counted(config, "replicas")
        from evaluations.replicas import on_ray
        from evaluations.run import load_tasks

        load_tasks(settings_of(config))  # raises for what is wrong with them before a process starts
        device = setting(config, "device", str | None)
        found = on_ray(partial(measured, config, line), address, count, cards=ranks_of(config), device=device)
    if found is not None:
        show(figures(found))


def check(config: dict[str, Any]) -> None:
    """Raises for what is wrong before lm-eval is imported, which takes seconds, and before the model is loaded."""
    from evaluations.settings import FORMS, check_kwargs

    settings = settings_of(config)
    setting(config, "overwrite", bool)
    if (folder := setting(config, "out", str | None)) is not None:
        check_folder(Path(folder))
    from dinfer.structure.form import form_of

    if (form := form_of({name: settings.gen_kwargs.get(name) for name in FORMS})) is not None:
        form.check()
    check_kwargs(settings.gen_kwargs, check_ahead(config).request_options)


def measured(config: dict[str, Any], line: list[str]) -> dict[str, Any] | None:
    """The report of a recipe on the first rank, None on others. Writes it, unless it is there."""
    from evaluations.replicas import replicas

    among = replicas(setting(config, "device", str | None), ranks_of(config))
    with Report() as progress:
        progress.at("importing lm-eval")
        from evaluations import run as runs
        from evaluations.report import kept

        settings = settings_of(config)
        recipe = {kind: config[kind] for kind in GROUPS}
        runtime = {name: config[name] for name in ("dtype", "runtime")} | {"device": among.device.type}
        folder, overwrite = setting(config, "out", str | None), setting(config, "overwrite", bool)
        stem = None if folder is None else runs.stem_of(Path(folder), recipe, settings, runtime)
        done = stem is not None and not overwrite and runs.report_of(stem).is_file()
        if stem is not None and not (done or overwrite or among.rank) and (count := kept(stem)):
            say(f"{folder} keeps {several(count, 'answer')} of an earlier session, so only the others are computed")
        try:
            found = None if done else runs.evaluate(
                lambda: pipeline(config | {"device": str(among.device)}), settings, among=among, recipe=recipe,
                runtime=runtime, stem=stem, overwrite=overwrite, command=shlex.join(line),
                progress=progress.at,
            )  # fmt: skip
        except KeyboardInterrupt:
            if among.rank > 0:
                raise
            told = (
                "nothing is kept, since out=null" if stem is None else f"{folder} keeps {several(kept(stem), 'answer')}"
            )
            again = shlex.join(arg for arg in line if not arg.startswith("overwrite="))
            raise Interrupted(f"interrupted; {told}. To go on: {again}") from None
    if stem is None or among.rank > 0:
        return found
    report = runs.report_of(stem)
    found = json.loads(report.read_text(encoding="utf-8"))
    say(f"done on {found['date']}: {report}. overwrite=true does it again." if done else f"wrote {report}")
    return found


def tasks_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The names of the tasks. Raises ValueError for one that does not exist, before lm-eval is imported."""
    from evaluations.names import check_names

    tasks = config["tasks"]
    if tasks is None:
        raise ValueError("no tasks are given: name some, such as tasks=mini_gsm")
    given = {"tasks": [tasks] if isinstance(tasks, str) else tasks, "include": config.get("include", [])}
    names: tuple[str, ...] = setting(given, "tasks", tuple[str, ...])
    check_names(names, setting(given, "include", tuple[str, ...]))
    return names


def settings_of(config: dict[str, Any], documents: tuple[int, int] | None = None) -> Any:
    """The settings of `evaluations`, from the configuration."""
    from evaluations.settings import Likelihood, Limits, Settings

    gen_kwargs = config["gen_kwargs"] or {}
    if not isinstance(gen_kwargs, dict):
        raise ValueError(f"gen_kwargs={gen_kwargs!r} must be names and values, such as {{threshold: 0.8}}")
    hints = get_type_hints(Settings)
    values = {name: config[name] for name in hints if name in config} | {
        "tasks": tasks_of(config),
        "gen_kwargs": gen_kwargs | held_of(config),
        "documents": documents,
        "code": group(config, "code", Limits),
        "likelihood": group(config, "likelihood", Likelihood),
    }
    return Settings(**typed(hints, values))


def figures(document: dict[str, Any]) -> RenderableType:
    """A line for each task."""
    rows = []
    for task, line in document["tasks"].items():
        score = line["score"] if line["score"] is not None else line["scores"].get(line["metric"])
        shown = f"{score:.4f}" if isinstance(score, float) else str(score)
        row = {"task": task, "score": shown, "documents": str(line["documents"])} | dict.fromkeys(FIGURES, "")
        if line["metrics"] is not None:
            known = {name: (line["metrics"].get(key), digits) for name, (key, digits) in FIGURES.items()}
            row |= {name: "-" if figure is None else f"{figure:.{digits}f}" for name, (figure, digits) in known.items()}
        elif line["likelihood"] is not None:
            row["seconds"] = f"{line['likelihood']['seconds']:.1f}"
        rows.append(row)
    metrics = sorted({line["metric"].removesuffix(",none") for line in document["tasks"].values()})
    caption = (
        f"Scores: {', '.join(metrics)}. NFE: forwards a request.\n"
        "TPF, TPS: tokens per forward, per second. positions: computed for each decoded one.\n"
        "p50, p95: latency in seconds."
    )
    if (sessions := document.get("sessions", 1)) > 1:
        caption += f"\nThe run was resumed: its seconds, and so TPS, are those of {sessions} sessions together."
    if any(line["likelihood"] for line in document["tasks"].values()):
        how = document["likelihood"]
        caption += f"\nLikelihoods: Monte-Carlo bounds, {how['estimator']}, {how['samples']} samples."
    return table(rows, caption)
