"""How many examples Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

TIMES = 10 if settings.get_current_profile_name() == "explore" else 1


def examples(count: int) -> settings:
    """`count` examples, the same ones at each run; ten times as many with `--hypothesis-profile=explore`."""
    return settings(max_examples=count * TIMES)
