"""Answers a data set: JSON or JSONL of prompts in, predictions and statistics out.

    python -m benchmarks.dataset DATA.jsonl OUT --batch 8 --limit 100 model=llada_8b_instruct decoder.threshold=0.9

It writes OUT.jsonl after each batch, with a prediction a line in the order of the data set, and OUT.json, with
statistics (`dinfer.analysis.metrics`), settings, commit and hardware. Other arguments are overrides of
`dinfer generate`. The same command, or one with a higher limit, continues a stopped run; other settings are refused.
`dinfer eval` judges answers, this does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.configured import check_least, configured
from benchmarks.prompts import Prompt, read_prompts
from benchmarks.provenance import provenance
from dinfer.analysis.metrics import Sample, measure
from dinfer.analysis.outputs import JsonLines
from dinfer.cli.recipe import pipeline
from dinfer.pipeline import Pipeline


def answer(pipe: Pipeline, prompts: list[Prompt], new_tokens: int) -> list[dict[str, Any]]:
    """The predictions of a batch. `wall`: a prompt's share of the batch's wall time; they sum to the run's."""
    began = time.perf_counter()
    results = pipe.generate([prompt.prompt for prompt in prompts], max_new_tokens=new_tokens)
    wall = (time.perf_counter() - began) / len(prompts)
    return [
        {
            "id": prompt.id, "prompt": prompt.prompt, "answer": prompt.answer, "prediction": result.text,
            "tokens": result.counts.tokens, "forwards": result.counts.forwards, "refreshes": result.counts.refreshes,
            "seconds": result.counts.seconds, "stopped": result.stopped, "wall": wall,
        }
        for prompt, result in zip(prompts, results, strict=True)
    ]  # fmt: skip


def statistics(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all predictions, including those of earlier runs."""
    samples = [
        Sample(line["forwards"], line["refreshes"], line["tokens"], line["seconds"], line["stopped"]) for line in lines
    ]
    return measure(samples, sum(line["wall"] for line in lines)).row()


def files(out: Path) -> tuple[Path, Path]:
    """The paths of the statistics and the predictions."""
    return out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.jsonl")


def resumed(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The predictions of earlier runs. Raises ValueError if these had other settings."""
    report, predictions = files(out)
    if not report.is_file():
        if predictions.exists():
            raise ValueError(f"{predictions} is there, but {report}, which says how it was made, is not: remove it")
        return []
    before = json.loads(report.read_text())["settings"]
    changed = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
    if changed:
        raise ValueError(f"{report} was made with another {', '.join(changed)}: choose another OUT or remove its files")
    if not predictions.is_file():
        return []
    whole = predictions.read_text().split("\n")[:-1]  # without a line that a kill cut short
    return [json.loads(line) for line in whole]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="OUT.jsonl and OUT.json are written")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--batch", type=int, default=32, help="prompts answered together, and requests in flight")
    parser.add_argument("--warmup", type=int, default=0, help="batches answered before the clock runs, and thrown away")
    given = parser.parse_intermixed_args(args)
    try:
        run(given)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.dataset: {error}")


def run(given: argparse.Namespace) -> None:
    """Raises ValueError or OSError for what cannot be run."""
    check_least(given, batch=1, warmup=0)
    prompts = read_prompts(given.data, given.limit)
    config = configured([f"runtime.rows={given.batch}", *given.overrides])
    digest = hashlib.sha256(given.data.read_bytes()).hexdigest()
    settings = {**config, "data": str(given.data), "sha256": digest, "batch": given.batch}
    lines = resumed(given.out, settings)
    report, predictions = files(given.out)
    if len(lines) > len(prompts):
        raise ValueError(f"{predictions} has {len(lines)} predictions already, more than --limit={given.limit}")
    todo = prompts[len(lines) :]
    report.parent.mkdir(parents=True, exist_ok=True)
    about = json.loads(report.read_text()) if report.is_file() else {}
    if todo:
        pipe, new_tokens = pipeline(config), config["max_new_tokens"]
        about = {**provenance(pipe.recipe.model.device), "settings": settings}
        report.write_text(json.dumps(about | {"prompts": len(prompts), "answered": len(lines)}, indent=1) + "\n")
        for _ in range(given.warmup):
            answer(pipe, todo[: given.batch], new_tokens)
        with JsonLines(predictions) as file:
            file.mend()
            for first in range(0, len(todo), given.batch):
                batch = answer(pipe, todo[first : first + given.batch], new_tokens)
                for line in batch:
                    file.write(line)
                lines += batch
                print(f"{len(lines)}/{len(prompts)}", flush=True)
    figures = statistics(lines)
    about |= {"prompts": len(prompts), "answered": len(lines), "statistics": figures}
    report.write_text(json.dumps(about, indent=1) + "\n")
    print(
        f"{len(lines)} prompts, NFE {figures['nfe']}, TPF {figures['tpf']}, {figures['tps']} tokens/s, "
        f"latency {figures['latency']} s; wrote {predictions} and {report}"
    )


if __name__ == "__main__":
    main()
