"""Checks the real components, step and engine against recorded runs of the reference implementations.

`python -m tests.parity DIR` checks everything found in a folder laid out as `tests/goldens`. One module for each kind
of case says how its JSON translates to a recipe; to add a decoder or an algorithm, add an entry to its table:

| cases         | module       | table                   |
| models/       | `models`     | `ATTENTION`             |
| decoders/     | `decoders`   | `TRANSLATIONS`          |
| generation/   | `generation` | `ALGORITHMS`            |
"""

from tests.parity.check import Report, Result, UsageError, check

__all__ = ["Report", "Result", "UsageError", "check"]
