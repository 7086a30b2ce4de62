"""The card of a checkpoint: the README.md that the hub shows, with metadata in front."""

from contextlib import suppress
from pathlib import Path


def datasets_of(folder: Path) -> list[str]:
    """What the model was trained on, as the field `datasets` of its card says. Empty without a readable card."""
    from huggingface_hub import ModelCard  # slow to import, and rarely needed

    found: object = None
    if (card := folder / "README.md").is_file():
        with suppress(Exception):  # cards are written by hand, and their YAML fails in many ways
            found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("datasets")
    names = [found] if isinstance(found, str) else found
    return [str(name) for name in names] if isinstance(names, list) else []
