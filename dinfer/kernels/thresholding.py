"""Rules that several decoders share: which positions are confident enough."""

from torch import Tensor

from dinfer.core.stats import TokenStats
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.rank import descending_rank

LONGEST = 128  # rows that the kernel compares all pairs of positions of


def confident(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, *, least: Tensor | int = 1, above: bool = False
) -> Tensor:
    """Masked positions with c >= bar, and the `least` most confident; not those that the mask token wins. bool [R, L]

    `above`: c > bar instead.
    """
    if masked_RL.shape[1] <= LONGEST and use_triton(masked_RL, "commit"):
        from dinfer.kernels.triton.commit import confident as kernel

        return kernel(
            stats.confidence_RL, stats.mask_confidence_RL, stats.mask_drawn_RL, masked_RL, bar_R1, least, above=above,
        )  # fmt: skip
    bar_R1 = bar_R1.to(stats.confidence_RL.dtype)
    score_RL = stats.top_RL.masked_fill(~masked_RL, -1.0)
    sure_RL = score_RL > bar_R1 if above else score_RL >= bar_R1
    return (sure_RL | (descending_rank(score_RL) < least)) & masked_RL & ~stats.declined_RL
