"""How many examples Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

TIMES = 10 if settings.get_current_profile_name() == "explore" else 1


def examples(count: int) -> settings:
    """`count` examples in `make test`, ten times as many in `make test-all`."""
    return settings(max_examples=count * TIMES)
