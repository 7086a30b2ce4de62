"""Abilities register themselves: those of dinfer, and those of other distributions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dinfer.core.abilities.registry import ABILITIES, Abilities
from dinfer.core.step.ability import Ability

ROOT = Path(__file__).parents[4]
RUN = """
import dinfer, even_numbers
from dinfer.core.abilities.registry import ABILITIES

pipe = dinfer.load("tiny", device="cpu", dtype="float32")
assert even_numbers.EvenNumbers in pipe.recipe.abilities and "even_numbers" in ABILITIES.names()
ids = pipe.generate("What is 7 plus 8?", max_new_tokens=8).ids
print(sum(token % 2 for token in ids), len(ids))
"""


def test_every_name_that_an_ability_is_ordered_by_is_registered() -> None:
    names = ABILITIES.names()
    written = "".join(path.read_text() for path in (ROOT / "dinfer").rglob("abilities/*.py"))
    ordered = {
        name for found in re.findall(r"(?:before|after)=\(([^)]+)\)", written) for name in re.findall(r"\w+", found)
    }
    assert ordered and ordered <= {*names}


def test_order_follows_before_and_after() -> None:
    table = Abilities()
    for name, before, after in (("a", (), ("c",)), ("b", ("a", "gone"), ()), ("c", (), ())):
        table.register(name, before=before, after=after)(type(name, (Ability,), {}))
    names = [name for name in table.names() if name in "abc"]
    assert names == ["b", "c", "a"]
    with pytest.raises(ValueError, match="take another name"):
        table.register("a")(type("Other", (Ability,), {}))
    table.register("d", before=("b",), after=("a",))(type("d", (Ability,), {}))
    with pytest.raises(ValueError, match=r"abilities a, b, d are to come before each other: change before= or after="):
        table.names()


def test_an_ability_of_another_distribution_takes_part(tmp_path: Path) -> None:
    """The example of the docs, installed as a distribution of one module."""
    page = (ROOT / "docs" / "add_an_ability.md").read_text()
    (tmp_path / "even_numbers.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
    info = tmp_path / "even_numbers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: even-numbers\nVersion: 1\n")
    entry = re.findall(r"```toml\n(.*?)```", page, re.S)[0]
    lines = (line.replace('"', "") for line in entry.splitlines())
    (info / "entry_points.txt").write_text("\n".join(lines).replace("[project.entry-points.", "["))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    odd, count = map(int, done.stdout.split())
    assert odd == 0 and count > 0
