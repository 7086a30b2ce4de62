"""Rules that several decoders share: which positions are confident enough, and which decoded tokens to change."""

from typing import NamedTuple

from torch import Tensor

from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.positions import descending_rank
from dinfer.kernels.timesteps import Quota
from dinfer.step.stats import TokenStats

LONGEST = 128  # the longest block whose pairs of positions the kernel compares


class Decoded(NamedTuple):
    """What a rule that edits reads beside the masks."""

    tokens_RL: Tensor
    given_RL: Tensor  # bool
    bar_R1: Tensor  # above this probability, another token may replace a decoded one
    steps_R: Tensor  # int64, steps that began without a mask; the rule counts them in place
    budget_R1: Tensor  # int64, how many of these steps may change tokens


class Changes(NamedTuple):
    """Positions to commit and to mask again, rows that want another step, and rows without masks. bool"""

    commit_RL: Tensor
    remask_RL: Tensor
    busy_R: Tensor
    full_R: Tensor


def confident(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, *, least: Tensor | Quota | int = 1, above: bool = False
) -> Tensor:
    """Masked positions whose confidence is at least the bar, and the `least` most confident ones. bool [R, L]

    Positions where the mask token wins are left out. `above`: the confidence must exceed the bar.
    """
    if masked_RL.shape[1] <= LONGEST and use_triton(masked_RL, "commit"):
        from dinfer.kernels.triton.commit import confident as kernel

        return kernel(stats, masked_RL, bar_R1, least, above=above)[0]
    bar_R1 = bar_R1.to(stats.confidence_RL.dtype)
    least = least.tokens() if isinstance(least, Quota) else least
    score_RL = stats.top_RL.masked_fill(~masked_RL, -1.0)
    sure_RL = score_RL > bar_R1 if above else score_RL >= bar_R1
    return (sure_RL | (descending_rank(score_RL) < least)) & masked_RL & ~stats.declined_RL


def fill_and_edit(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, decoded: Decoded, *, least: Tensor | int
) -> Changes:
    """Commits masks that are `confident` above the bar. Rewrites doubtful decoded tokens, or masks them again.

    A row without masks changes tokens in at most `budget_R1` steps. A row that changed tokens is busy if its budget
    allows another step.
    """
    if masked_RL.shape[1] <= LONGEST and use_triton(masked_RL, "commit"):
        from dinfer.kernels.triton.commit import confident as kernel

        return Changes(*kernel(stats, masked_RL, bar_R1, least, above=True, decoded=decoded))
    full_R, budget_R = ~masked_RL.any(-1), decoded.budget_R1[:, 0]
    decoded.steps_R.add_(full_R)
    spent_R = full_R & (decoded.steps_R > budget_R)  # an iteration may keep a row in a finished block
    fill_RL = confident(stats, masked_RL, bar_R1, least=least, above=True)
    above_RL = stats.top_RL > decoded.bar_R1.to(stats.confidence_RL.dtype)
    doubt_RL = ~masked_RL & ~decoded.given_RL & above_RL & ~spent_R[:, None]
    edit_RL = doubt_RL & (stats.token_RL != decoded.tokens_RL) & ~stats.declined_RL
    remask_RL = doubt_RL & stats.declined_RL
    busy_R = (fill_RL | edit_RL | remask_RL).any(-1) & (decoded.steps_R < budget_R)
    return Changes(fill_RL | edit_RL, remask_RL, busy_R, full_R)
