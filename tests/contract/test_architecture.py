"""Who may import whom, how long a function may be, and what importing dinfer costs: read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dinfer.recipe.registry import REGISTRIES

ROOT = Path(__file__).parents[2]
LINES, PARAMETERS = 60, 10  # of a function; kernels spell out their arguments
LARGER = {  # functions above these limits, which are to be divided; nothing is added here
    "dinfer/step/plan.py:window_bounds",  # Triton compiles it too
}
REFLECTIONS = 20  # calls of getattr and hasattr in all: each hides from the type checker what it reads

# A unit is a package of dinfer, or a module of one of these packages, whose modules stand on different levels.
LEVELLED = {
    "analysis", "engine", "loading", "parallel", "pipeline", "recipe", "startup", "step",
}  # fmt: skip

# What the components of a choice may import, whether one of them does or not.
COMPONENT = {
    "kernels", "recipe.refusals", "recipe.registry", "step.contracts", "step.mixins", "step.model", "step.stats",
}  # fmt: skip
# What each unit may import of dinfer, beside itself: units, or all of a package with levels. Arrows point down only.
MAY_IMPORT: dict[str, set[str]] = {
    "structure": set(),
    "step.plan": set(),
    "step.stats": set(),
    "parallel.split": set(),
    "parallel.symmetric": set(),
    "kernels": {"step.plan", "step.stats", "parallel.ranks", "parallel.symmetric"},
    "step.canvas": {"kernels"},
    "recipe.registry": set(),
    "recipe.refusals": {"recipe.registry"},
    "recipe.presets": {"recipe.registry"},
    "demo": set(),
    "step.spec": set(),
    "parallel.ranks": {"parallel.split", "parallel.symmetric", "step.stats"},
    "step.contracts": {"recipe.registry", "step.canvas", "step.plan", "step.spec", "step.stats"},
    "step.model": {
        "parallel.ranks", "parallel.split", "recipe.registry", "step.canvas", "step.contracts", "step.spec",
        "step.stats",
    },
    "step.mixins": {"step.canvas", "step.contracts", "step.model"},
    "step.shape": {"step.canvas"},
    "step.commits": {"kernels", "step.canvas", "step.contracts", "step.model", "step.stats"},
    "step.window": {"kernels", "step.canvas", "step.contracts", "step.mixins", "step.model", "step.plan", "step.shape"},
    "step.state": {"kernels", "memory", "step.canvas", "step.contracts", "step.model", "step.shape", "step.window"},
    "step.ability": {
        "memory", "step.canvas", "step.commits", "step.contracts", "step.mixins", "step.model", "step.shape",
        "step.state", "step.stats", "step.window",
    },
    "step.scores": {
        "kernels", "step.ability", "step.canvas", "step.contracts", "step.model", "step.shape", "step.stats",
    },
    "step.step": {
        "kernels", "memory", "step.ability", "step.canvas", "step.commits", "step.contracts", "step.model",
        "step.scores", "step.shape", "step.state", "step.window",
    },
    "abilities": {"kernels", "memory", "recipe.refusals", "recipe.registry", "step", "structure"},
    "layers": {"step.model", "parallel.ranks", "recipe.registry", "kernels", "step.spec"},
    "memory": {"kernels", "parallel.ranks", "step.spec"},
    "decoders": COMPONENT,
    "sampling": COMPONENT,
    "caches": COMPONENT | {"step.plan", "step.window"},
    "iterations": COMPONENT,
    "models": {"layers", "loading.files", "parallel.split", "recipe.registry", "step.model", "step.spec"},
    "recipe.recipe": {
        "abilities", "recipe.refusals", "recipe.registry", "step.canvas", "step.contracts", "step.mixins", "step.model",
        "step.shape",
    },
    "loading.files": {"recipe.registry"},
    "loading.safetensors_io": {"loading.files"},
    "loading.gguf_file": {"kernels", "layers", "loading.files", "loading.safetensors_io", "parallel.split"},
    "loading.lora": {"loading.files", "loading.safetensors_io", "parallel.split"},
    "loading.quantized": {"loading.files", "loading.safetensors_io", "parallel.split"},
    "loading.checkpoint": {
        "kernels", "layers", "loading.files", "loading.gguf_file", "loading.lora", "loading.quantized",
        "loading.safetensors_io", "parallel.split", "recipe.registry", "startup.prepare",
        "step.model", "step.spec",
    },
    "loading.inspect": {
        "layers", "loading.checkpoint", "loading.files", "loading.quantized", "loading.safetensors_io",
        "parallel.split", "recipe.registry", "step.model", "step.spec",
    },
    "startup.prepare": {"kernels", "startup.patches"},
    "startup.parallel_compiling": {"kernels", "startup.patches"},
    "startup.kernel_compiler": {
        "recipe.recipe", "startup.parallel_compiling", "startup.prepare",
        "step.canvas", "step.shape", "step.state", "step.step", "step.window",
    },
    "startup.patches": set(),
    "engine.request": {"abilities", "step.canvas", "step.spec"},
    "engine.row": {
        "abilities", "engine.request", "memory", "recipe.recipe", "step.canvas", "step.mixins", "step.shape",
    },
    "engine.runner": {
        "kernels", "recipe.recipe", "startup.kernel_compiler", "startup.patches", "step.shape", "step.state",
        "step.step",
    },
    "engine.worker": {
        "abilities", "engine.runtime", "engine.runner", "memory", "recipe.recipe",
        "startup.kernel_compiler", "step.canvas", "step.shape", "step.state",
    },
    "engine.batch": {
        "abilities", "engine.runtime", "engine.row", "engine.worker", "kernels", "memory", "step.canvas",
        "step.mixins", "step.state", "step.window",
    },
    "engine.scheduler": {
        "abilities", "engine.row", "engine.runtime", "recipe.recipe", "step.canvas", "step.contracts", "step.mixins",
        "step.shape", "step.window",
    },
    "engine.loop": {
        "abilities", "engine.batch", "engine.runtime", "engine.request", "engine.row",
        "engine.scheduler", "engine.worker", "step.canvas", "step.window",
    },
    "parallel.follower": set(),
    "parallel.__main__": {"parallel.follower"},
    "parallel.leader": {"parallel.follower"},
    "parallel.leader_worker": {
        "engine.runtime", "engine.worker", "parallel.follower", "parallel.leader",
        "recipe.recipe", "recipe.registry", "step.canvas", "step.shape", "step.state",
    },
    "engine.adaptive": {
        "engine.loop", "engine.request", "engine.row", "engine.runtime", "recipe.recipe",
        "recipe.registry", "step.contracts", "step.mixins", "step.spec",
    },
    "engine.engine": {
        "engine.adaptive", "engine.loop", "engine.request", "engine.row", "engine.runner", "engine.runtime",
        "engine.worker", "kernels", "parallel.leader", "parallel.leader_worker", "recipe.recipe",
    },
    "engine.async_engine": {"engine.engine", "engine.request"},
    "engine.runtime": {"abilities", "engine.request", "recipe.recipe", "recipe.registry"},
    "pipeline.inputs": {"abilities", "engine.request"},
    "analysis.metrics": {"demo", "engine.request", "pipeline", "recipe.registry"},
    "analysis.provenance": set(),
    "analysis.outputs": set(),
    "analysis.likelihood": {"abilities", "kernels", "layers", "step.contracts", "step.model"},
    "parallel.divided_model": {
        "engine.runtime", "engine.runner", "engine.worker", "loading.checkpoint",
        "loading.quantized", "parallel.follower", "parallel.leader", "parallel.leader_worker",
        "parallel.ranks", "parallel.split", "recipe.recipe", "step.contracts", "step.model",
        "step.state",
    },
    "pipeline.reading": {
        "abilities", "engine.engine", "engine.request", "pipeline.inputs", "step.contracts", "step.mixins", "step.spec",
        "structure",
    },
    "pipeline.form": {"abilities", "pipeline.inputs", "recipe.recipe", "recipe.registry", "structure"},
    "pipeline.pipeline": {
        "abilities", "engine.engine", "engine.request", "engine.runtime", "loading.checkpoint",
        "loading.files", "parallel.divided_model", "pipeline.inputs", "pipeline.reading",
        "pipeline.form", "pipeline.tokenizer", "recipe.presets",
        "recipe.recipe", "recipe.registry",
        "step.contracts", "step.mixins", "step.window", "structure",
    },
    "pipeline.tokenizer": {"engine.request", "loading.checkpoint", "loading.files", "pipeline.inputs"},
    "pipeline": {"pipeline.pipeline", "pipeline.tokenizer"},
    "analysis.audit": {
        "analysis.trace", "engine", "kernels", "layers", "pipeline", "recipe.registry", "step.ability", "step.canvas",
        "step.contracts", "step.mixins", "step.shape", "step.step", "step.window",
    },
    "analysis.plots": set(),
    "analysis.tuning": {"recipe.recipe", "analysis.metrics", "engine.adaptive", "recipe.registry"},
    "analysis.trace": {
        "engine", "pipeline", "recipe.recipe", "recipe.registry", "step.contracts", "step.mixins", "step.model",
    },
    "serving": {
        "abilities", "analysis.likelihood", "analysis.outputs", "analysis.trace", "engine", "parallel.leader",
        "pipeline", "pipeline.inputs", "pipeline.tokenizer", "recipe.recipe", "recipe.registry", "step.mixins",
        "step.shape", "structure",
    },
    "__init__": {"engine", "pipeline", "pipeline.inputs", "recipe.presets", "recipe.recipe", "recipe.registry"},
    "cli": {
        "analysis.audit", "layers", "loading.checkpoint", "loading.files", "loading.inspect", "loading.safetensors_io",
        "recipe.recipe", "step.spec", "engine", "analysis.metrics", "analysis.outputs", "analysis.provenance",
        "parallel.divided_model", "parallel.leader", "pipeline", "pipeline.form", "pipeline.inputs",
        "pipeline.pipeline", "analysis.plots", "demo", "step.contracts", "recipe.registry", "recipe.presets",
        "analysis.trace", "analysis.tuning", "serving",
    },
    "__main__": {"cli"},
}  # fmt: skip
# Packages beyond torch and the standard library, and who may import them at all.
OUTSIDE: dict[str, set[str]] = {
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "yaml": {"recipe.presets"},
    "rich": {"cli"},
    "matplotlib": {"analysis.audit", "analysis.plots"},
    "optuna": {"analysis.tuning"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "pydantic": {"pipeline.form", "serving"},
    "prometheus_client": {"serving"},
    "ray": {"serving"},
    "triton": {"kernels", "startup.parallel_compiling", "startup.patches", "startup.prepare"},
    "transformers": {"pipeline.tokenizer", "pipeline.pipeline", "loading.inspect"},
    "safetensors": {"loading.checkpoint", "loading.safetensors_io", "cli"},
    "huggingface_hub": {"loading.files"},
    "numpy": {"abilities", "analysis.metrics", "loading.gguf_file", "structure"},
    "gguf": {"loading.gguf_file"},
    "tokenizers": {"pipeline.tokenizer"},
    "jinja2": {"loading.inspect", "pipeline.tokenizer"},
    "vllm": set(),
    "sglang": set(),
    "lm_eval": set(),
    "evaluations": {"cli"},
}
FILES = sorted((ROOT / "dinfer").rglob("*.py"))
Nodes = Iterable[ast.AST]


@pytest.fixture(scope="module")
def syntax() -> dict[Path, list[ast.AST]]:
    """All nodes of each file, which is read once for all rules."""
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in FILES}


def below(unit: str) -> set[str]:
    """The units that a unit may import."""
    packages = MAY_IMPORT[unit] & LEVELLED - MAY_IMPORT.keys()
    return MAY_IMPORT[unit] - packages | {each for each in MAY_IMPORT if each.partition(".")[0] in packages}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def unit_of(name: str) -> str:
    """The unit that a module of dinfer belongs to: `step.step` of `dinfer.step.step.denoise_step`."""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] in LEVELLED else 1])


def unit_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if len(parts) == 2 else unit_of(".".join(parts).removesuffix(".__init__"))


def imports(nodes: Nodes) -> Iterator[str]:
    """Full names; a relative import begins with a dot; `from dinfer import x` gives dinfer.x."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ([f"{module}.{alias.name}" for alias in node.names] if module == "dinfer" else [module])


def offences(unit: str, nodes: Nodes) -> list[str]:
    found = []
    for name in imports(nodes):
        top, *rest = name.split(".")
        if not top:
            found.append(f"relative import {name}")
        elif top == "dinfer" and rest and rest[0] != "__version__" and unit_of(name) not in {unit} | below(unit):
            found.append(f"{unit} may not import {name}")
        elif top in OUTSIDE and unit not in OUTSIDE[top]:
            found.append(f"{unit} may not import {top}")
        elif name.startswith("hydra._"):
            found.append(f"{name} is Hydra's own")
    return found


def test_imports_point_down(syntax: dict[Path, list[ast.AST]]) -> None:
    found = {}
    for path, nodes in syntax.items():
        unit = unit_of_file(path)
        if unit in LEVELLED and unit not in MAY_IMPORT:
            found[relative(path)] = [f"{name}: a package has only a docstring" for name in imports(nodes)]
            continue
        assert unit in MAY_IMPORT, f"say in MAY_IMPORT what {unit} may import"
        found[relative(path)] = offences(unit, nodes)
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("decoders", "from dinfer.caches.window import DualCache"),
        ("caches", "import dinfer.iterations.sweep"),
        ("step.step", "from dinfer.decoders.threshold import Threshold"),
        ("step.step", "from dinfer import decoders"),
        ("kernels", "def f():\n    from dinfer.step.contracts import ModelSpec"),
        ("engine.engine", "from dinfer.pipeline import load"),
        ("models", "from .llada import Llada"),
        ("models", "from . import llada"),
        ("pipeline.pipeline", "if True:\n    import hydra"),
        ("layers", "import triton.language as tl"),
        ("engine.engine", "from dinfer.__main__ import main"),
        ("cli", "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper"),
    ],
)
def test_the_rule_notices(unit: str, source: str) -> None:
    assert len(offences(unit, ast.walk(ast.parse(source)))) == 1


def test_the_rule_has_no_cycle_and_nothing_idle() -> None:
    """Each unit of the table exists, and every arrow of it leads down."""
    units = {unit_of_file(path) for path in FILES} - (LEVELLED - MAY_IMPORT.keys())
    assert set(MAY_IMPORT) == units
    depth: dict[str, int] = {}
    while len(depth) < len(MAY_IMPORT):
        ready = [unit for unit in MAY_IMPORT if unit not in depth and below(unit) <= depth.keys()]
        assert ready, f"a cycle among {sorted(MAY_IMPORT.keys() - depth.keys())}"
        depth |= {unit: 1 + max((depth[each] for each in below(unit)), default=0) for unit in ready}
    siblings = {"decoders", "caches", "iterations", "models", "sampling"}
    assert not any(siblings & MAY_IMPORT[unit] for unit in MAY_IMPORT)


def test_nobody_may_import_what_nobody_does(syntax: dict[Path, list[ast.AST]]) -> None:
    """Components may import more, and who is allowed a package need not import every module of it."""
    used: dict[str, set[str]] = {unit: set() for unit in MAY_IMPORT}
    for path, nodes in syntax.items():
        if (unit := unit_of_file(path)) in used:
            used[unit] |= {unit_of(name) for name in imports(nodes) if name.startswith("dinfer.")}
    idle = {
        f"{unit} does not import {other}"
        for unit, allowed in MAY_IMPORT.items()
        for other in (allowed & MAY_IMPORT.keys()) - used[unit]
        if not allowed >= COMPONENT
    }
    assert not idle


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_through_others(syntax: dict[Path, list[ast.AST]]) -> None:
    """Imports within functions and for types alone count too, so kernels and their Triton twins have levels as well."""
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    below = {name: set(imports(syntax[path])) & modules.keys() - {name} for name, path in modules.items()}
    while ready := [name for name, others in below.items() if not others & below.keys()]:
        below = {name: others for name, others in below.items() if name not in ready}
    assert not below, f"a cycle among {sorted(below)}"


def test_only_kernels_look_inside_what_kernels_defer(syntax: dict[Path, list[ast.AST]]) -> None:
    types = "dinfer.kernels.types"
    for path in (path for path in FILES if unit_of_file(path) != "kernels"):
        nodes = [node for node in syntax[path] if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes if node.module == types for alias in node.names}
        assert not names & {"Parts", "Rounded"}, path
        assert not names or unit_of_file(path) == "layers", path


def test_no_function_is_too_large(syntax: dict[Path, list[ast.AST]]) -> None:
    found = set()
    evaluations = {path: ast.walk(ast.parse(path.read_text())) for path in (ROOT / "evaluations").rglob("*.py")}
    for path, nodes in [*syntax.items(), *evaluations.items()]:
        for node in nodes:
            if "kernels" not in path.parts and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, own = (node.end_lineno or 0) - node.lineno + 1, node.args
                parameters = len(own.posonlyargs) + len(own.args) + len(own.kwonlyargs)
                found |= {f"{relative(path)}:{node.name}"} if lines >= LINES or parameters >= PARAMETERS else set()
    assert found - LARGER == set(), "divide these functions, or give them a value instead of many parameters"
    assert LARGER - found == set(), "these are divided: take them out of the list"


def test_the_step_is_read_in_half_an_hour() -> None:
    """The files that docs/map.md names for it, and the step itself."""
    files = ["step/canvas", "step/contracts", "step/step", "decoders/threshold", "caches/window"]
    sources = [(ROOT / "dinfer" / f"{name}.py").read_text() for name in files]
    assert sum(source.count("\n") for source in sources) <= 750
    nodes = [*ast.walk(ast.parse(sources[2]))]
    assert sum(len(node.names) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)) <= 25
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert max((node.end_lineno or 0) - node.lineno + 1 for node in functions) <= 40


def test_no_text_is_run(syntax: dict[Path, list[ast.AST]]) -> None:
    """No exec and no eval: what is not imported is only read."""
    for path, nodes in syntax.items():
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not names & {"exec", "eval"}, relative(path)


CORE_FOLDERS = ("engine", "memory.py", "parallel", "recipe", "startup", "step")
EVERYDAY = {
    "adaptive",
    "block",
    "none",
}  # words of messages too: these count where they are written as choices, cache=none
NAMED = {("dinfer/recipe/recipe.py", "standard")}  # who composes a recipe in Python need not name a sampling


def test_core_names_no_component(syntax: dict[Path, list[ast.AST]]) -> None:
    """It asks what components can do, and queries the registries for what a message offers."""
    registered = {(registry.kind, name) for registry in REGISTRIES for name in registry.names()}
    written = {f"{kind}={name}" for kind, name in registered}
    words = {name for _, name in registered} - EVERYDAY
    found = set()
    for path in (path for path in FILES if path.parts[len(ROOT.parts) + 1] in CORE_FOLDERS):
        docs = {id(node.value) for node in syntax[path] if isinstance(node, ast.Expr)}
        for node in syntax[path]:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                named = {*re.findall(r"\w+=\w+", node.value)} & written | {*re.findall(r"\w+", node.value)} & words
                found |= {(relative(path), name) for name in named}
    assert found == NAMED


def test_no_module_gives_a_constant_twice(syntax: dict[Path, list[ast.AST]]) -> None:
    """Where files were merged, the second of two constants of one name would silently count for both."""
    for path, (module, *_) in syntax.items():
        assert isinstance(module, ast.Module)
        assigned = (node for node in module.body if isinstance(node, ast.Assign))
        given = [x for node in assigned for each in node.targets for x in ast.walk(each) if isinstance(x, ast.Name)]
        names = [x.id for x in given if x.id.isupper() and isinstance(x.ctx, ast.Store)]
        assert len(names) == len({*names}), f"{relative(path)}: {sorted(n for n in names if names.count(n) > 1)}"


def test_attributes_are_named(syntax: dict[Path, list[ast.AST]]) -> None:
    calls = (node for nodes in syntax.values() for node in nodes if isinstance(node, ast.Call))
    found = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")]
    assert len(found) <= REFLECTIONS


def test_no_error_is_swallowed(syntax: dict[Path, list[ast.AST]]) -> None:
    """No bare except, none that does nothing, and none that catches everything and does not pass the error on."""
    handlers = [(path, node) for path, nodes in syntax.items() for node in nodes if isinstance(node, ast.ExceptHandler)]
    for path, node in handlers:
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"all"}
        used = {name.id for line in node.body for name in ast.walk(line) if isinstance(name, ast.Name)}
        passed_on = node.name in used or any(isinstance(part, ast.Raise) for part in ast.walk(node))
        assert passed_on or not caught & {"all", "Exception", "BaseException"}, f"{path}, line {node.lineno}"
        idle = all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body)
        assert not idle, f"{path}, line {node.lineno}"


def test_importing_dinfer_is_light() -> None:
    """Nor does it cost anything to learn the name and the options of a component, or where a checkpoint is."""
    heavy = [
        "torch", "numpy", "triton", "transformers", "hydra", "omegaconf", "huggingface_hub", "rich", "tokenizers",
        "jinja2",
    ]  # fmt: skip
    code = (
        "import sys, dinfer, dinfer.loading.files as hub; hub.locate('tiny'); "
        "[r.describe(n) for r in (dinfer.MODELS, dinfer.DECODERS) for n in r.names()]; "
        f"print(*[m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
