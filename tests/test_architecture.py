"""Who may import whom, how long a file may be, and what importing dinfer costs: read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 400

CORE = {"canvas", "protocols", "kernels", "spec"}
COMPONENT = CORE | {"registry"}
# What each module or package of dinfer may import of dinfer, beside itself. Arrows point down only.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "canvas": {"kernels"},
    "registry": set(),
    "problems": set(),
    "spec": set(),
    "protocols": {"canvas", "kernels", "spec"},
    "layers": {"protocols", "kernels", "spec"},
    "families": {"layers", "protocols", "registry", "spec"},
    "sweeps": COMPONENT | {"protocols"},
    "windows": CORE,
    "kv": {"kernels", "spec"},
    "decoders": COMPONENT,
    "sampling": COMPONENT,
    "caches": COMPONENT | {"windows"},
    "iterations": COMPONENT | {"sweeps"},
    "models": COMPONENT | {"families", "layers"},
    "compose": {"protocols", "registry"},
    "shards": set(),
    "catalog": set(),
    "adapters": {"shards", "spec"},
    "quantized": {"shards", "spec"},
    "checkpoint": {"adapters", "kernels", "layers", "protocols", "quantized", "registry", "shards", "spec"},
    "state": {"canvas", "protocols", "compose", "kernels", "kv"},
    "guidance": CORE | {"compose", "kv", "state"},
    "commits": CORE,
    "step": CORE | {"commits", "compose", "guidance", "state"},
    "engine": {"canvas", "protocols", "compose", "kernels", "kv", "state", "step"},
    "infilling": {"engine"},
    "metrics": {"engine"},
    "surroundings": set(),
    "likelihood": CORE | {"layers"},
    "pipeline": {"checkpoint", "compose", "engine", "infilling", "layers", "registry"},
    "audit": CORE | {"compose", "engine", "layers", "pipeline", "registry", "step"},
    "fronts": set(),
    "plots": {"fronts"},
    "tuning": {"compose", "metrics", "registry"},
    "trace": {"compose", "engine", "pipeline", "protocols", "registry"},
    "__init__": {"compose", "engine", "infilling", "pipeline", "registry"},
    # It hands hand-made canvases to the real components, so it may reach below the pipeline, but not into the cli.
    "parity": {
        "canvas", "checkpoint", "compose", "decoders", "engine", "iterations", "likelihood", "pipeline", "protocols",
        "registry", "sampling", "state", "step",
    },
    "cli": {
        "audit", "catalog", "checkpoint", "compose", "engine", "fronts", "metrics", "pipeline", "plots", "problems",
        "protocols", "registry", "trace", "tuning",
    },
}  # fmt: skip
# Packages beyond torch and the standard library, and who may import them at all.
OUTSIDE: dict[str, set[str]] = {
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"audit", "plots"},
    "optuna": {"tuning"},
    "triton": {"kernels"},
    "transformers": {"pipeline"},
    "safetensors": {"checkpoint", "shards", "parity", "cli"},
    "huggingface_hub": {"checkpoint"},
    "numpy": {"metrics"},
    "jinja2": set(),
    "vllm": set(),
    "sglang": set(),
    "lm_eval": set(),
    "evaluations": {"cli"},
}
FILES = sorted((ROOT / "dinfer").rglob("*.py"))
ALL = [
    path
    for folder in ("dinfer", "evaluations", "benchmarks", "examples", "hydra_plugins", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(source: str) -> Iterator[str]:
    """Full names; a relative import begins with a dot; `from dinfer import x` gives dinfer.x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ([f"{module}.{alias.name}" for alias in node.names] if module == "dinfer" else [module])


def offences(unit: str, source: str) -> list[str]:
    found = []
    for name in imports(source):
        top, *rest = name.split(".")
        if not top:
            found.append(f"relative import {name}")
        elif top == "dinfer" and rest and rest[0] not in {unit, "__version__"} | MAY_IMPORT[unit]:
            found.append(f"{unit} may not import {name}")
        elif top in OUTSIDE and unit not in OUTSIDE[top]:
            found.append(f"{unit} may not import {top}")
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    unit = path.relative_to(ROOT / "dinfer").parts[0].removesuffix(".py")
    assert unit in MAY_IMPORT, f"say in MAY_IMPORT what {unit} may import"
    assert offences(unit, path.read_text()) == []


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("decoders", "from dinfer.caches.window import DualCache"),
        ("caches", "import dinfer.iterations.blockwise"),
        ("step", "from dinfer.decoders.threshold import Threshold"),
        ("step", "from dinfer import decoders"),
        ("kernels", "def f():\n    from dinfer.protocols import ModelSpec"),
        ("engine", "from dinfer.pipeline import load"),
        ("models", "from .llada import Llada"),
        ("models", "from . import llada"),
        ("pipeline", "if True:\n    import hydra"),
        ("layers", "import triton.language as tl"),
        ("engine", "from dinfer.cli.main import main"),
    ],
)
def test_the_rule_notices(unit: str, source: str) -> None:
    assert len(offences(unit, source)) == 1


def test_the_rule_has_no_cycle_and_nothing_idle() -> None:
    """Each unit of the table exists, and every arrow of it leads down."""
    units = {path.relative_to(ROOT / "dinfer").parts[0].removesuffix(".py") for path in FILES}
    assert set(MAY_IMPORT) == units
    depth: dict[str, int] = {}
    while len(depth) < len(MAY_IMPORT):
        ready = [u for u, below in MAY_IMPORT.items() if u not in depth and below <= depth.keys()]
        assert ready, f"a cycle among {sorted(MAY_IMPORT.keys() - depth.keys())}"
        depth |= {u: 1 + max((depth[below] for below in MAY_IMPORT[u]), default=0) for u in ready}
    siblings = {"decoders", "caches", "iterations", "models", "sampling"}
    assert not any(siblings & MAY_IMPORT[unit] for unit in MAY_IMPORT.keys() - {"parity"})


@pytest.mark.parametrize("path", ALL, ids=relative)
def test_no_file_is_too_long(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= LONGEST, f"{lines} lines: split this file"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_error_is_swallowed(path: Path) -> None:
    """No bare except, none that catches everything, and none that does nothing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"all"}
            assert not caught & {"all", "Exception", "BaseException"}, f"line {node.lineno}"
            assert not all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body), node.lineno


def test_importing_dinfer_is_light() -> None:
    heavy = ["triton", "transformers", "hydra", "omegaconf", "huggingface_hub", "rich", "tokenizers", "jinja2"]
    code = (
        "import sys, torch; before = set(sys.modules); import dinfer; "
        f"print(*[m for m in {heavy} if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_components_load_on_first_use() -> None:
    code = (
        "import sys, dinfer; loaded = [m for m in sys.modules if m.startswith('dinfer.decoders.')]; "
        "assert not loaded, loaded; assert 'threshold' in dinfer.DECODERS.names()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
