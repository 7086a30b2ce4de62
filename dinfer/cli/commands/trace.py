"""writes a page that plays the denoising of an answer

usage: dinfer trace "question" [compare.decoder=NAME ...] [overrides ...]

One HTML file that needs nothing else: the canvas forward by forward, what was committed when and how surely, which
positions each forward computed, the forwards of each block. With `compare.*`, two recipes side by side: the second is
the first with what is named so.

  prompt="question"       the same as a setting, in Hydra's grammar
  out=trace.html          .html: the page; .json: the data behind it (docs/trace.md); out=[a.html,a.json]: both
  max_new_tokens=128      length of the generation
  chat=null               use the checkpoint's chat template; null: if it has one

Examples:
  dinfer trace "question" decoder.threshold=0.7
  dinfer trace "question" cache=dual compare.cache=none
  dinfer trace "question" compare.decoder=fixed compare.decoder.steps=8 out=[trace.html,trace.json]
In a sweep (-m), every point writes files of its own: trace-0.html, trace-1.html, ...
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from dinfer.analysis.outputs import check_file, write
from dinfer.analysis.trace.page import page
from dinfer.analysis.trace.record import Trace, document, record
from dinfer.cli.application import launch, numbered, schema_of
from dinfer.cli.compare_overrides import changed, taken_out
from dinfer.cli.conf import GROUPS, Schema
from dinfer.cli.recipe import pipeline, setting, text_of
from dinfer.cli.terminal import say
from dinfer.core.recipe import compose
from dinfer.pipeline import Pipeline


def run(args: list[str]) -> None:
    """Writes the traces of each point of a sweep."""
    rest, changes = taken_out(args)
    task = partial(trace, changes=changes, schema=schema_of("trace", rest))
    launch("trace", rest, task, takes_text=True)


def trace(config: dict[str, Any], question: str | None, *, changes: list[str], schema: Schema) -> None:
    """Records the answer with one recipe, or two, and writes what is asked for."""
    prompt = text_of(config, "prompt", question)
    if prompt is None:
        raise ValueError('a question is needed: dinfer trace "question"')
    paths = [numbered(path) for path in outputs(setting(config, "out", str | tuple[str, ...]))]
    for path in paths:
        check_file(path)
    configs = [config] + ([changed(schema, changes)] if changes else [])
    pipe = pipeline(config)
    traces = [recorded(beside(pipe, config, other), other, prompt) for other in configs]
    found = document(prompt, traces)
    for one in traces:
        counts = one.counts
        say(f"{one.name}: {counts['tokens']} tokens, {counts['forwards']} forwards, {counts['tpf']:.2f} TPF")
    for path in paths:
        write(path, page(found) if path.suffix == ".html" else json.dumps(found) + "\n")
        say(f"wrote {path}")


def outputs(out: str | list[str]) -> list[Path]:
    """The files to write. Raises ValueError for a kind that there is none of."""
    paths = [Path(name) for name in ([out] if isinstance(out, str) else out)]
    for path in paths:
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"out={path} must end in .html (the page) or .json (its data)")
    if not paths:
        raise ValueError("out=[] names no file: write out=trace.html")
    return paths


def beside(pipe: Pipeline, config: dict[str, Any], other: dict[str, Any]) -> Pipeline:
    """The pipeline of another configuration, with the network that is loaded if it is the same one."""
    if other["model"] != config["model"]:
        return pipeline(other)
    parts = {kind: other[kind] for kind in GROUPS if kind != "model"}
    return Pipeline(compose(pipe.model, **parts), pipe.tokenizer, pipe.engine.runtime)


def recorded(pipe: Pipeline, config: dict[str, Any], prompt: str) -> Trace:
    model, chat = config["model"], setting(config, "chat", bool | None)
    new_tokens = setting(config, "max_new_tokens", int)
    return record(pipe, prompt, max_new_tokens=new_tokens, chat=chat, model=model.get("checkpoint") or model["name"])
