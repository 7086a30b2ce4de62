"""Images in prompts: files, the vision tower, and conversations with image parts."""

from typing import Any


class Seeing:
    """A network that may see pictures."""

    eyes: Any = ""  # `dinfer.families.images.eyes.Eyes`, or why there are none
    placeholder: int | None = None  # the token that stands where an embedding is given
