"""What the card of a checkpoint says of its training."""

from pathlib import Path

import pytest

from dinfer.families.hub import datasets_of


@pytest.mark.parametrize(
    ("card", "datasets"),
    [
        ("---\ndatasets:\n- allenai/c4\n- riddles\n---\n# A model\n", ["allenai/c4", "riddles"]),
        ("---\ndatasets: riddles\n---\n", ["riddles"]),
        ("---\nlicense: mit\n---\n", []),
        ("# A model\n", []),
        ("---\ndatasets: [riddles\n---\n", []),
        ("---\ndatasets: 7\n---\n", []),
        (None, []),
    ],
)
def test_the_datasets_of_a_card(tmp_path: Path, card: str | None, datasets: list[str]) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert datasets_of(tmp_path) == datasets
