"""Whether a model in the box repairs drafts with a missing or an extra token, with moves and without.

    python -m benchmarks.repair --adapter tiny-llada2-insert-delete --out benchmarks/results/repair-tiny-llada2

Drafts are right answers of the model (`joint_threshold`, one block, threshold 0.9). Half of their blocks are spoilt at
one random place: a token is left out or put in. The first step of a block writes its draft. `--beside` names an adapter
that was trained only to edit, for `joint_threshold` on the same drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

import dinfer
from benchmarks.multi_block import load
from benchmarks.provenance import provenance, save
from benchmarks.quality import samples_of, with_problems
from dinfer.analysis.metrics import measure
from dinfer.decoders.insert_delete import InsertDelete
from dinfer.decoders.joint_threshold import JointThreshold
from dinfer.demo.problems import generate, is_correct
from dinfer.recipe.registry import DECODERS
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats

SETTINGS = [
    *({"threshold": 0.9, "edit_threshold": edit} for edit in (0.0, 0.5, 0.7, 0.9)),
    *({"threshold": 0.9, "edit_threshold": 0.5, "post_edits": edits} for edits in (1, 2, 3, 4)),
]


class Drafted(Decoder):
    """Writes a row's draft in the first step of a block, then decodes. A row's seed is the number of its draft."""

    drafts_NS: ClassVar[Tensor]

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        first_R1 = (view.masked_RL | view.given_RL | (view.pos_RL < 0)).all(-1, keepdim=True)
        asked = super().select(stats, view, state)
        place_L = torch.arange(view.pos_RL.shape[1], device=view.pos_RL.device)
        draft_RL = self.drafts_NS[view.seed_R[:, None], view.pos_RL.clamp_min(0)]
        token_RL = stats.token_RL if asked.token_RL is None else asked.token_RL
        source_RL = place_L.expand_as(view.pos_RL) if asked.source_RL is None else asked.source_RL
        none_RL = torch.zeros_like(view.masked_RL)
        return Proposal(
            torch.where(first_R1, view.masked_RL, asked.commit_RL),
            torch.where(first_R1, draft_RL, token_RL),
            busy_R=first_R1[:, 0] | (none_RL[:, 0] if asked.busy_R is None else asked.busy_R),
            remask_RL=none_RL if asked.remask_RL is None else asked.remask_RL & ~first_R1,
            source_RL=torch.where(first_R1, place_L, source_RL),
            retry_R=asked.retry_R,
        )


@DECODERS.register("drafted_joint_threshold")
@dataclass(frozen=True, kw_only=True)
class DraftedJointThreshold(Drafted, JointThreshold):
    """`joint_threshold` on a draft."""

    moves: ClassVar[bool] = False


@DECODERS.register("drafted_insert_delete")
@dataclass(frozen=True, kw_only=True)
class DraftedInsertDelete(Drafted, InsertDelete):
    """`insert_delete` on a draft."""


def spoilt(tokens: Sequence[int], first: int, end: int, block: int, random: Random) -> list[int]:
    """Leaves out or puts in a token in half of the blocks, between the first and the last token of the answer."""
    found = list(tokens)
    for begin in range(first // block * block, end, block):
        low, high = max(begin, first), min(begin + block, end)
        kind, at = random.random(), random.randrange(low, high)
        if kind < 0.25:
            found[at : begin + block] = tokens[at + 1 : begin + block + 1]
        elif kind < 0.5:
            found[at + 1 : begin + block] = tokens[at : begin + block - 1]
            found[at] = tokens[random.randrange(first, end)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or name of the adapter that was trained to move")
    parser.add_argument("--beside", help="folder or name of an adapter that was trained to edit alone")
    given = with_problems(parser).parse_args()
    base = load("tiny-llada2", given.adapter, 0, given.device, given.rows)
    iteration, block = {"name": "block_diffusion"}, base.model.spec.causal_block
    problems = generate("heldout", given.count, given.seed)

    def pipeline(decoder: dict[str, Any], model: Any = base.model) -> dinfer.Pipeline:
        recipe = dinfer.compose(model, iteration=iteration, decoder=decoder, cache="block")
        return dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime)

    careful = {"name": "joint_threshold", "threshold": 0.9, "edit_threshold": 0.5}
    answers = pipeline(careful).generate([one.question for one in problems], max_new_tokens=given.new)
    right = [at for at, (one, got) in enumerate(zip(problems, answers, strict=True)) if is_correct(one, got.text)]
    problems, answers, random = [problems[at] for at in right], [answers[at] for at in right], Random(given.seed)
    firsts = [len(base.encode(one.question)) for one in problems]
    drafts = [
        spoilt(got.canvas, first, first + len(got.ids) + 1, block, random)
        for got, first in zip(answers, firsts, strict=True)
    ]
    length = max(map(len, drafts))
    padded = [[*draft, *[base.model.spec.eos_id] * (length - len(draft))] for draft in drafts]
    Drafted.drafts_NS = torch.tensor(padded, device=base.model.device)
    texts = [base.decode(ended(draft[first:], base)) for draft, first in zip(drafts, firsts, strict=True)]
    before = sum(is_correct(one, text) for one, text in zip(problems, texts, strict=True)) / len(problems)
    print(f"{len(problems)} right answers, {100 * before:.1f}% of them right as drafts", flush=True)
    rows = []
    runs = [(given.adapter, base.model, name) for name in ("drafted_joint_threshold", "drafted_insert_delete")]
    if given.beside:
        other = load("tiny-llada2", given.beside, 0, given.device, given.rows)
        runs.append((given.beside, other.model, "drafted_joint_threshold"))
    for adapter, model, name in runs:
        for setting in SETTINGS:
            pipe = pipeline({"name": name, **setting}, model)
            options = [{"seed": at} for at in range(len(problems))]
            results = pipe.generate([one.question for one in problems], max_new_tokens=given.new, options=options)
            row = measure(samples_of(problems, results), 1.0).row()
            rows.append({"adapter": adapter, "decoder": name.removeprefix("drafted_"), **setting, **row})
            print(
                f"{adapter} {name} {setting} {row['accuracy']:.1f}% NFE {row['nfe']:.2f} TPF {row['tpf']:.2f}",
                flush=True,
            )
    report = {"setting": vars(given) | {"out": str(given.out)}, "drafts": len(problems), "right": 100 * before}
    report |= provenance(torch.device(given.device)) | {"rows": rows}
    save(report, given.out.with_suffix(".json"))


def ended(ids: list[int], base: dinfer.Pipeline) -> list[int]:
    """A draft up to its first stop token."""
    end = next((at for at, token in enumerate(ids) if token in base.model.spec.stop_ids), len(ids))
    return ids[:end]


if __name__ == "__main__":
    main()
