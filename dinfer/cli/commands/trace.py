"""writes a page that plays the denoising of an answer

usage: dinfer trace "question" [compare.decoder=NAME ...] [overrides ...]

Writes one HTML file that needs no other. It shows the canvas forward by forward, what each forward committed and how
surely, which positions it computed, and the forwards of each block. With `compare.*` it shows two recipes side by side:
the second is the first with these changes.

Examples:
  dinfer trace "question" decoder.threshold=0.7
  dinfer trace "question" cache=dual compare.cache=none
  dinfer trace "question" compare.decoder=fixed compare.decoder.steps=8 out=[trace.html,trace.json]
In a sweep (-m), every point writes files of its own: trace-0.html, trace-1.html, ...
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from dinfer.cli import conf
from dinfer.cli.application import launch, numbered
from dinfer.cli.conf import beside, parse, pipeline, setting
from dinfer.cli.terminal import say
from dinfer.core.registry import unknown
from dinfer.lab.outputs import check_file, write

_CHANGE = re.compile(r"compare(?:\.(?P<change>[^=]+=.*)|=.*)", re.DOTALL)
MAY_DIFFER = (*conf.GROUPS, conf.RECIPE, "max_new_tokens")
SUFFIXES = (".html", ".json")


def run(args: Namespace) -> None:
    """Writes the traces of each point of a sweep. What begins with `compare.` is an override of the second recipe."""
    found = {word: match for word in args.words if (match := _CHANGE.fullmatch(word))}
    for word, match in found.items():
        if not match["change"]:
            raise ValueError(f"{word!r} does not say what to change: write compare.decoder=NAME or compare.cache=NAME")
    args.words, changes = [word for word in args.words if word not in found], [m["change"] for m in found.values()]
    needed = 'a question is needed: dinfer trace "question"'
    launch(args, partial(trace, changes=changes), text="prompt", needed=needed)


def changed(changes: list[str]) -> dict[str, Any]:
    """The running command's configuration with the changes.

    Where they choose a component, the first recipe's options of that component do not hold. Raises ValueError.
    """
    parsed = [parse(change) for change in changes]
    conf.check_once((leaf, f"compare.{one.input_line}") for one in parsed for leaf in conf.leaves_of(one))
    keys = [one.key_or_group for one in parsed]
    for key in keys:
        if (root := key.partition(".")[0]) not in MAY_DIFFER:
            raise unknown("setting to compare:", root, list(MAY_DIFFER))
    chosen = {*keys} & {*conf.GROUPS, conf.RECIPE}
    # A preset chooses all components but the model.
    without = chosen | ({*conf.GROUPS} - {"model"} if conf.RECIPE in chosen else set())
    return conf.recomposed("trace", changes, without=without)


def trace(config: dict[str, Any], *, changes: list[str]) -> None:
    """Records the answer with one recipe, or two, and writes what is asked for."""
    if (candidates := config["runtime"]["speculate"]) != 0:
        raise ValueError(f"runtime.speculate={candidates}: a trace shows each step by itself: leave it at 0")
    out = setting(config, "out", str | tuple[str, ...])
    paths = [numbered(Path(name)) for name in ([out] if isinstance(out, str) else out)]
    if not paths:
        raise ValueError("out=[] names no file: write out=trace.html")
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"out={path} must end in .html (the page) or .json (its data)")
        check_file(path)
    configs = [config] + ([changed(changes)] if changes else [])
    pipe = pipeline(config)
    from dinfer.lab.trace.record import document, page, record

    traces = []
    for each in configs:
        model, chat = each["model"], setting(each, "chat", bool | None)
        new_tokens = setting(each, "max_new_tokens", int)
        own = beside(pipe, each) if model == config["model"] else pipeline(each)  # the same network is loaded already
        name = model.get("checkpoint") or model["name"]
        traces.append(record(own, config["prompt"], max_new_tokens=new_tokens, chat=chat, model=name))
    found = document(config["prompt"], traces)
    for one in traces:
        counts = one.counts
        say(
            f"{one.name}: {counts['tokens']} tokens, {counts['forwards']} forwards, {counts['tpf']:.2f} TPF, "
            f"{counts['positions_per_committed']:.1f} positions per token"
        )
    for path in paths:
        write(path, page(found) if path.suffix == ".html" else json.dumps(found) + "\n")
        say(f"wrote {path}")
