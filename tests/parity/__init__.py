"""Checks the real components, step and engine against recorded runs of the reference implementations.

`python -m tests.parity DIR` checks everything found in a folder laid out as `tests/goldens`. Each kind of file has a
module in `kinds`, which says how its JSON translates to a recipe. To add a decoder or an algorithm, add an entry to the
table of its kind: `kinds.decoders.TRANSLATIONS`, `plans.ALGORITHMS`, `multi_block.PLANS`.
"""

from tests.parity.check import Report, Result, UsageError, check

__all__ = ["Report", "Result", "UsageError", "check"]
