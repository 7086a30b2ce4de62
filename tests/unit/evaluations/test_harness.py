"""dinfer as a model of lm-eval, for whoever calls lm-eval."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
ROOT = Path(__file__).parents[3]


@pytest.mark.rest
def test_the_page_s_example_runs_in_a_fresh_process() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "exact_match" in done.stdout, done.stderr[-2000:]
