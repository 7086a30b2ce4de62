"""Statistics, draws and cuts of ranks that each have a part of the logits: those of the whole, in torch and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kernels import DEVICE

pytest.importorskip("triton")

from dinfer.core.kernels import token_stats as module
from dinfer.core.kernels.token_stats import token_stats
from dinfer.core.ranks.split import Rank, Section
from dinfer.core.sampling.gumbel import nucleus
from dinfer.core.terms.stats import Draw, VocabularySlice
from dinfer.kernels.triton import token_stats as triton_stats

ALL: dict[str, Any] = {"needs": ("entropy", "margin", "best")}
Result = TypeVar("Result")


def divided(vocab: int, ranks: int, work: Callable[[VocabularySlice], Result]) -> tuple[list[Result], list[torch.Size]]:
    """What each rank finds once all have told the others what they know, and the shapes of what one has told."""

    def columns(rank: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> VocabularySlice:
        first, end = Section("vocab", vocab).share(Rank(rank, ranks))
        return VocabularySlice(first, end - first, -(-vocab // ranks), gather, rank)

    told: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for rank, own in enumerate(told):  # what a rank says does not depend on what it hears
        work(columns(rank, lambda x, own=own: own.append(x) or torch.stack([x] * ranks)))  # type: ignore[func-returns-value]
    found = []
    for rank in range(ranks):
        heard = iter([torch.stack(each) for each in zip(*told, strict=True)])
        found.append(work(columns(rank, lambda x, heard=heard: next(heard))))
    return found, [x.shape for x in told[0]]


def random_logits(seed: int, vocab: int, digits: int) -> torch.Tensor:
    """Few digits make ties, within a rank and between ranks. [2, 3, V]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, vocab, generator=generator).mul(3).round(decimals=digits).to(DEVICE)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["torch", "triton"])
@examples(20)
@given(
    seed=st.integers(0, 9999), vocab=st.integers(3, 40), mask=st.sampled_from([None, 0, 1, 2]),
    digits=st.sampled_from([0, 9]), ranks=st.integers(2, 3), odd=st.sampled_from(["nan", "inf", "-inf", "1"]),
    drawn=st.booleans(),
)  # fmt: skip
def test_ranks_find_the_statistics_of_the_whole(
    kernel: bool, seed: int, vocab: int, mask: int | None, digits: int, ranks: int, odd: str, drawn: bool
) -> None:
    """One logit is odd, and one position is not asked for. A row is drawn without noise."""
    logits_RLV = random_logits(seed, vocab, digits)
    logits_RLV[0, 1, seed % (vocab - 1)] = float(odd)  # not the last, which beliefs below leave out: no NaN hides there
    logits_RLV[1, 2, : vocab // 2] = float("-inf")
    wanted_RL = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    wanted_RL[1, 0] = False
    belief_RLV = logits_RLV.clone()
    belief_RLV[..., vocab - 1] = float("-inf")  # which the draw may take all the same
    draw = Draw(
        belief_RLV, logits_RLV, torch.tensor([[1.0], [0.0]], dtype=torch.float64, device=DEVICE),
        torch.tensor([[True], [seed % 2 > 0]], device=DEVICE), torch.tensor([seed, 7], device=DEVICE),
        torch.arange(6, device=DEVICE).view(2, 3), torch.tensor([seed % 5, 3], device=DEVICE),
    )  # fmt: skip
    drawn_RL = torch.arange(6, device=DEVICE).view(2, 3) % 4 > 0 if seed % 3 else None
    if not drawn:
        draw = None

    def stats_of(columns: VocabularySlice) -> Any:
        part = draw
        if draw is not None:
            beliefs, logits = columns.part(draw.belief_RLV), columns.part(draw.logits_RLV)
            part = replace(draw, belief_RLV=beliefs, logits_RLV=logits)
        given = {"columns": columns, "draw": part, "drawn_RL": drawn_RL, "wanted_RL": wanted_RL, **ALL}
        return token_stats(columns.part(logits_RLV), mask, torch.float32, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_triton", lambda *given: False)
        want = token_stats(logits_RLV, mask, torch.float32, draw=draw, wanted_RL=wanted_RL, drawn_RL=drawn_RL, **ALL)
        patch.setattr(module, "use_triton", lambda *given: kernel)
        patch.setattr(triton_stats, "PIECE", 8)
        patch.setattr(triton_stats, "DRAW_PIECE", 8)
        found, shapes = divided(vocab, ranks, stats_of)
    assert {shape[-1] for shape in shapes} == ({4, 8} if drawn else {8})
    fine_RL = want.finite_RL
    for stats in found:
        assert torch.equal(stats.finite_RL, fine_RL)
        assert torch.equal(stats.token_RL[fine_RL], want.token_RL[fine_RL])
        assert torch.equal(stats.stat("best")[fine_RL], want.stat("best")[fine_RL])
        if drawn:
            assert torch.equal(stats.mask_drawn_RL[fine_RL], want.mask_drawn_RL[fine_RL])
        for name in ("confidence_RL", "mask_confidence_RL", "entropy_RL", "margin_RL"):
            got, expected = getattr(stats, name)[fine_RL], getattr(want, name)[fine_RL]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@examples(60)
@given(
    seed=st.integers(0, 9999), vocab=st.integers(12, 40), mask=st.sampled_from([None, 1]), ranks=st.integers(2, 3),
    digits=st.sampled_from([0, 9]), top_k=st.integers(1, 3), top_p=st.sampled_from([0.05, 0.31, 0.72, 1.0]),
    min_p=st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_ranks_cut_where_one_does(
    seed: int, vocab: int, mask: int | None, ranks: int, digits: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Of equals the first are kept, whoever has them. One row has no cut."""
    logits_RLV, top = random_logits(seed, vocab, digits).double(), 3
    given = {"top_k": [top_k, 0], "top_p": [top_p, 1.0], "min_p": [min_p, 0]}
    options = {name: torch.tensor(values, dtype=torch.float64)[:, None] for name, values in given.items()}
    whole = nucleus(logits_RLV, options, mask, top, VocabularySlice(0, vocab, vocab))
    found, shapes = divided(
        vocab, ranks, lambda columns: nucleus(columns.part(logits_RLV), options, mask, top, columns)
    )
    assert torch.equal(torch.cat(found, -1), whole) and shapes == [(2, 3, top + 1)]
