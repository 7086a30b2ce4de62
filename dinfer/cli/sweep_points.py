"""The points of a sweep: which there are, and what became of them.

The product of all values, but an option goes only to those of the chosen components that have it: in
`decoder=threshold,factor decoder.threshold=0.7,0.9 decoder.factor=0.5,1` each decoder is swept over its own option,
four points in all. A point that does not compose, or fails, does not end the sweep; all are named at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn

from dinfer.cli.conf import GROUPS, RECIPE, Schema
from dinfer.cli.errors import FAILED


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a point has no result."""

    reason: str
    failed: bool  # else its components cannot work together, which is a finding and no failure


def points(product: Sequence[Sequence[str]], schema: Schema) -> list[list[str]]:
    """The different points of a product of overrides, each without the options that its components do not have.

    `dinfer.cli.names.check` has seen to it that every option belongs to some component of the sweep. Says on stderr
    what was dropped.
    """
    found: dict[tuple[str, ...], None] = {}
    dropped: set[str] = set()
    for point in product:
        kept, chosen = [], _chosen(schema, point)
        for text in point:
            kind, _, option = text.partition("=")[0].lstrip("+").partition(".")
            known = schema.options(kind, chosen[kind]) if option and kind in GROUPS else None
            if known is None or option.split(".")[0] in ("name", *known):
                kept.append(text)
            else:
                dropped.add(f"{kind}.{option} of {kind}={chosen[kind]}")
        found[tuple(kept)] = None
    if dropped:
        print(f"# no such option, so not swept: {', '.join(sorted(dropped))}", file=sys.stderr)
    return [list(point) for point in found]


def _chosen(schema: Schema, point: Sequence[str]) -> dict[str, str]:
    """The components at a point."""
    pairs = dict(text.split("=", 1) for text in point)
    return schema.chosen({kind: pairs[kind] for kind in (*GROUPS, RECIPE) if kind in pairs})


def report(jobs: Sequence[JobReturn]) -> None:
    """Names the points without a result; ends the program with a failure if some failed."""
    missed = [(job, job.return_value) for job in jobs if isinstance(job.return_value, Missed)]
    for failed, title in ((False, "left out, since the components cannot work together"), (True, "failed")):
        listed = [(job, miss) for job, miss in missed if miss.failed == failed]
        if listed:
            print(f"\n# {title}: {len(listed)} of {len(jobs)}", file=sys.stderr)
        for job, miss in listed:
            print(f"{' '.join(job.overrides or [])}: {miss.reason}", file=sys.stderr)
    if any(miss.failed for _, miss in missed):
        raise SystemExit(FAILED)
