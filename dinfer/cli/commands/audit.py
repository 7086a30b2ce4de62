"""measures how far cached logits drift from those of a pass without a cache

usage: dinfer audit ["question"] [overrides ...]

Runs the recipe. Beside each forward it computes the whole canvas once more, and compares the logits of all masked
positions: KL divergence, most likely tokens and committed tokens, by block and by step of a block.

Without a question it audits held-out problems. In a sweep (-m), every point writes files of its own: audit-0.json,
audit-1.json, ...
  dinfer audit cache=prefix decoder.threshold=0.7
  dinfer audit -m cache=dual,vicinity,delayed,adaptive out=null
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from dinfer.cli.application import launch, numbered
from dinfer.cli.conf import counted, pipeline, problems_of, ranks_of, setting
from dinfer.cli.terminal import Report, say, several, show, table
from dinfer.lab.outputs import check_file, replacing

if TYPE_CHECKING:
    from dinfer.lab.audit import Audit


def measure(config: dict[str, Any]) -> None:
    """Audits one recipe, prints what it found and writes it."""
    question, count = config["prompt"], counted(config, "count")
    new_tokens, out = counted(config, "max_new_tokens"), setting(config, "out", str | None)
    questions = [question] if question else [problem.question for problem in problems_of(config, count)]
    from dinfer.lab.audit import Audit, audit, check_ranks, plot

    check_ranks(ranks_of(config))
    writers = {"json": Audit.write} | ({"png": plot} if find_spec("matplotlib") else {})
    paths = [numbered(Path(f"{out}.{kind}")) for kind in writers] if out is not None else []
    for path in paths:
        check_file(path)
    with Report() as progress:
        progress.at("loading the model")
        pipe = pipeline(config)
        progress.at(f"auditing {several(len(questions), 'answer')}")
        found = audit(pipe, [pipe.encode(text) for text in questions], max_new_tokens=new_tokens)
    for path in paths:
        with replacing(path) as part:
            writers[path.suffix[1:]](found, part)
        say(f"wrote {path}")
    show(report(found))


def report(found: Audit) -> RenderableType:
    """The means of each block, and of all."""
    means = {str(block): means for block, means in found.by(lambda s: s.block).items()} | {"all": found.overall}
    rows = [
        {
            "block": name,
            "steps": f"{m['steps']:.0f}",
            "KL": f"{m['kl']:.2e}",
            "worst KL": f"{m['kl_worst']:.2e}",
            "same top-1": f"{100 * m['top1']:.2f}%",
            "same commits": f"{100 * m['committed_agreement']:.2f}%",
        }
        for name, m in means.items()
    ]
    says = "exact" if found.exact else "an approximation"
    return table(
        rows,
        f"{found.recipe['cache']} is {says} for this model. KL in nats, over masked positions.\n"
        f"{100 * found.same_tokens:.2f}% of the tokens are those of cache=none.",
    )


run = partial(launch, task=measure, text="prompt")
