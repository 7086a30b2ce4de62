"""Statistics of logits of which each rank has a part: those of the whole, in torch and by the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kernels import DEVICE

pytest.importorskip("triton")

from dinfer.core.spec import Rank, Section
from dinfer.core.stats import Columns, TokenStats
from dinfer.kernels import token_stats as module
from dinfer.kernels.token_stats import token_stats
from dinfer.kernels.triton import token_stats as triton_stats

ALL: dict[str, Any] = {"entropy": True, "margin": True, "best": True}


def divided(logits_RLV: torch.Tensor, mask: int | None, ranks: int, **given: Any) -> list[TokenStats]:
    """The statistics that each rank finds, once all have told the others what they know."""
    vocab, told = logits_RLV.shape[-1], list[torch.Tensor]()
    shares = [Section("vocab", vocab).share(Rank(rank, ranks)) for rank in range(ranks)]

    def stats_of(first: int, end: int, gather: Any) -> TokenStats:
        columns = Columns(first, end - first, -(-vocab // ranks), gather)
        return token_stats(logits_RLV[..., first:end], mask, torch.float32, columns=columns, **ALL, **given)

    def tell(own: torch.Tensor) -> torch.Tensor:
        told.append(own)
        return torch.stack([own] * ranks)

    for share in shares:
        stats_of(*share, tell)
    return [stats_of(*share, lambda own: torch.stack(told)) for share in shares]


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["torch", "triton"])
@examples(20)
@given(
    seed=st.integers(0, 9999), vocab=st.integers(3, 40), mask=st.sampled_from([None, 0, 1, 2]),
    digits=st.sampled_from([0, 9]), ranks=st.integers(2, 3), odd=st.sampled_from(["nan", "inf", "-inf", "1"]),
)  # fmt: skip
def test_ranks_find_the_statistics_of_the_whole(
    kernel: bool, seed: int, vocab: int, mask: int | None, digits: int, ranks: int, odd: str
) -> None:
    """Few digits make ties, within a rank and between ranks. One logit is odd, and one position is not asked for."""
    generator = torch.Generator().manual_seed(seed)
    logits_RLV = torch.randn(2, 3, vocab, generator=generator).mul(3).round(decimals=digits).to(DEVICE)
    logits_RLV[0, 1, seed % vocab] = float(odd)
    logits_RLV[1, 2, : vocab // 2] = float("-inf")
    wanted_RL = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    wanted_RL[1, 0] = False
    want = token_stats(logits_RLV.cpu(), mask, torch.float32, wanted_RL=wanted_RL.cpu(), **ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_triton", lambda *given: kernel)
        patch.setattr(triton_stats, "PIECE", 8)
        found = divided(logits_RLV, mask, ranks, wanted_RL=wanted_RL)
    fine_RL = want.finite_RL
    for stats in found:
        assert torch.equal(stats.finite_RL.cpu(), fine_RL)
        assert torch.equal(stats.token_RL.cpu()[fine_RL], want.token_RL[fine_RL])
        assert torch.equal(stats.of("best").cpu()[fine_RL], want.of("best")[fine_RL])
        for name in ("confidence_RL", "mask_confidence_RL", "entropy_RL", "margin_RL"):
            got, expected = getattr(stats, name).cpu()[fine_RL], getattr(want, name)[fine_RL]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
