"""Who may import whom, how long a function may be, and what importing dinfer costs: read from the source."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.registry import REGISTRIES
from dinfer.core.step.ability import Ability

ROOT = Path(__file__).parents[2]
LINES, PARAMETERS = 60, 10  # of a function; what is compiled by Triton spells out its arguments
REFLECTIONS = 20  # calls of getattr and hasattr in all: each hides from the type checker what it reads

# Folders and modules of dinfer, from the ground up. A file imports what is below it, or of its own floor. Core comes
# first; the others are layers, and each can be left out.
FLOORS = (
    "core/provided", "core/options", "core/registry", "core/refusals", "core/terms", "core/ranks", "core/kernels",
    "core/memory", "core/step", "core/abilities", "core/decoders core/caches core/iterations core/sampling",
    "core/recipe", "core/layers", "core/loading/files", "core/models", "core/loading", "core/engine", "core/pipeline",
    "kernels", "families", "formats", "structure", "speed", "research", "demo", "lab", "rollouts", "serving", "scale",
    "cli", "__init__", "__main__",
)  # fmt: skip
EXCEPTIONS: dict[str, set[str]] = {}  # arrows that run up: there are none
# Packages beyond torch and the standard library, and who may import them at all.
OUTSIDE: dict[str, set[str]] = {
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "yaml": {"core/recipe/presets"},
    "rich": {"cli"},
    "matplotlib": {"lab/audit", "lab/plots"},
    "optuna": {"lab/tuning"},
    "fastapi": {"serving"},
    "starlette": {"scale/ray", "serving"},
    "uvicorn": {"scale/ray", "serving"},
    "pydantic": {"scale/ray", "structure/form", "serving"},
    "prometheus_client": {"scale/ray", "serving"},
    "ray": {"scale/ray"},
    "triton": {"kernels", "speed/startup"},
    "transformers": {"core/pipeline", "families/images", "lab/inspect"},
    "PIL": {"families/images"},
    "safetensors": {"core/loading", "formats/saving", "cli", "rollouts"},
    "huggingface_hub": {"families/hub"},
    "numpy": {"formats/gguf_file", "lab/metrics", "structure"},
    "gguf": {"formats/gguf_file"},
    "tokenizers": {"core/pipeline/tokenizer", "lab/inspect"},
    "jinja2": {"core/pipeline/tokenizer", "lab/inspect"},
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


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def floor_of(name: str) -> int:
    """The floor of a module, given as its path below dinfer without an ending: the longest entry that fits."""
    fits = {
        entry: floor
        for floor, line in enumerate(FLOORS)
        for entry in line.split()
        if f"{name}/".startswith(f"{entry}/")
    }
    assert fits, f"say in FLOORS where {name} stands"
    return fits[max(fits, key=len)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "dinfer").with_suffix("")).removesuffix("/__init__")


def imports(nodes: Nodes) -> Iterator[str]:
    """Full names; a relative import begins with a dot; `from dinfer import x` gives dinfer.x, of core too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            package = module in ("dinfer", "dinfer.core")
            yield from ([f"{module}.{alias.name}" for alias in node.names] if package else [module])


def excused(importer: str, target: str) -> tuple[str, str] | None:
    """The exception that lets a file import another."""
    pairs = ((one, other) for one, others in EXCEPTIONS.items() for other in others)
    return next(
        (pair for pair in pairs if f"{importer}/".startswith(f"{pair[0]}/") and f"{target}/".startswith(f"{pair[1]}/")),
        None,
    )


def offences(importer: str, nodes: Nodes) -> list[str]:
    found = []
    for name in imports(nodes):
        top, *rest = name.split(".")
        if not top:
            found.append(f"relative import {name}")
        elif top == "dinfer" and rest and rest[0] != "__version__":
            target = "/".join(rest)
            own, other = floor_of(importer), floor_of(target)
            sibling = own == other and " " in FLOORS[own] and importer.split("/")[:2] != target.split("/")[:2]
            if (other > own or sibling) and excused(importer, target) is None:
                found.append(f"{importer} may not import {name}")
        elif top in OUTSIDE and not any(f"{importer}/".startswith(f"{unit}/") for unit in OUTSIDE[top]):
            found.append(f"{importer} may not import {top}")
        elif name.startswith("hydra._"):
            found.append(f"{name} is Hydra's own")
    return found


def test_imports_point_down(syntax: dict[Path, list[ast.AST]]) -> None:
    found = {relative(path): offences(name_of(path), nodes) for path, nodes in syntax.items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("core/decoders/schedule", "from dinfer.core.caches.window import DualCache"),
        ("core/caches/window", "import dinfer.core.iterations.sweep"),
        ("core/step/step", "from dinfer.core.decoders.threshold import Threshold"),
        ("core/step/step", "from dinfer.core import decoders"),
        ("core/kernels/norm", "def f():\n    from dinfer.core.step.contracts import ModelSpec"),
        ("core/engine/engine", "from dinfer.core.pipeline import load"),
        ("core/engine/engine", "from dinfer.research.abilities.branches import Branches"),
        ("core/models/llada", "from .llada import Llada"),
        ("core/models/llada", "from . import llada"),
        ("core/pipeline/pipeline", "if True:\n    import hydra"),
        ("core/layers/linear", "import triton.language as tl"),
        ("core/engine/engine", "from dinfer.__main__ import main"),
        ("cli/conf", "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper"),
    ],
)
def test_the_rule_notices(importer: str, source: str) -> None:
    assert len(offences(importer, ast.walk(ast.parse(source)))) == 1


def test_every_exception_is_needed(syntax: dict[Path, list[ast.AST]]) -> None:
    arrows = {
        (name_of(path), name.removeprefix("dinfer.").replace(".", "/"))
        for path, nodes in syntax.items()
        for name in imports(nodes)
    }
    assert {(one, other) for one, others in EXCEPTIONS.items() for other in others} == {
        excused(*arrow) for arrow in arrows
    } - {None}
    for unit in (unit for line in FLOORS for unit in line.split()):
        assert any(f"{name_of(path)}/".startswith(f"{unit}/") for path in syntax), f"{unit} is not there"


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
    types = "dinfer.core.kernels.types"
    for path in (path for path in FILES if "kernels" not in path.parts):
        nodes = [node for node in syntax[path] if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes if node.module == types for alias in node.names}
        assert not names & {"PartialSums", "Rounded"}, path
        assert not names or {"layers", "families", "rounding"} & {*path.parts}, path


def test_no_function_is_too_large(syntax: dict[Path, list[ast.AST]]) -> None:
    found = set()
    beside = [path for folder in ("evaluations", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    for path, nodes in [*syntax.items(), *((path, ast.walk(ast.parse(path.read_text()))) for path in beside)]:
        for node in nodes:
            kernel = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not kernel:
                lines, own = (node.end_lineno or 0) - node.lineno + 1, node.args
                parameters = len(own.posonlyargs) + len(own.args) + len(own.kwonlyargs)
                found |= {f"{relative(path)}:{node.name}"} if lines >= LINES or parameters >= PARAMETERS else set()
    assert found == set(), "divide these functions, or give them a value instead of many parameters"


def lines_of_fields(module: str, name: str) -> int:
    """Lines of a class of a module from its name to its last field; 0: it is no class."""
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name):
        told = [node for node in cls.body if isinstance(node, ast.AnnAssign | ast.Expr)]
        return (told[-1].end_lineno or 0) - cls.lineno + 1
    return 0


def test_the_step_is_read_in_half_an_hour() -> None:
    """The files that docs/map.md lists for it, whole, and what they import from others: of each class its docstring and
    its fields, which a reader has to know. Functions and methods say at their names what they do."""
    _, reading = (ROOT / "docs" / "map.md").read_text().split("## Reading the code")
    files = [ROOT / "dinfer" / "core" / name for name in re.findall(r"^\| `(?:core/)?([\w/]+\.py)` \|", reading, re.M)]
    sources = {module_of(path): path.read_text() for path in files}
    beside = {
        (node.module, alias.name)
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("dinfer.") and node.module not in sources
        for alias in node.names
    }
    lines = sum(source.count("\n") for source in sources.values()) + sum(lines_of_fields(*name) for name in beside)
    assert len(files) >= 6 and lines <= 900
    nodes = [*ast.walk(ast.parse(sources["dinfer.core.step.step"]))]
    assert sum(len(node.names) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)) <= 25
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert max((node.end_lineno or 0) - node.lineno + 1 for node in functions) <= 40


def test_a_class_has_its_name_almost_alone(syntax: dict[Path, list[ast.AST]]) -> None:
    """A reader who meets a name need not ask which of many is meant. Aliases of types count, type variables do not."""
    used: dict[str, list[str]] = {}
    for path, (module, *_) in syntax.items():
        assert isinstance(module, ast.Module)
        for node in module.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
                names = [x.id for x in node.targets if isinstance(x, ast.Name)]
            for name in names:
                if name[0].isupper() and not name.isupper():
                    used.setdefault(name, []).append(relative(path))
    assert {name: paths for name, paths in used.items() if len(paths) > 2} == {}


def test_no_text_is_run(syntax: dict[Path, list[ast.AST]]) -> None:
    """No exec and no eval: what is not imported is only read."""
    for path, nodes in syntax.items():
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not names & {"exec", "eval"}, relative(path)


CORE_FOLDERS = (
    "core/engine", "core/memory", "core/ranks", "core/recipe", "core/step", "scale/parallel", "speed/settling",
    "speed/startup",
)  # fmt: skip
EVERYDAY = {
    "adaptive",
    "block",
    "none",
}  # words of messages too: these count where they are written as choices, cache=none
NAMED = {("dinfer/core/recipe/recipe.py", "standard")}  # who composes a recipe in Python need not name a sampling


def test_core_names_no_component(syntax: dict[Path, list[ast.AST]]) -> None:
    """It asks what components can do, and queries the registries for what a message offers."""
    registered = {(registry.kind, name) for registry in REGISTRIES for name in registry.names()}
    written = {f"{kind}={name}" for kind, name in registered}
    words = {name for _, name in registered} - EVERYDAY
    found = set()
    for path in (path for path in FILES if name_of(path).startswith(CORE_FOLDERS)):
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


def test_admitting_a_request_waits_for_no_device(syntax: dict[Path, list[ast.AST]]) -> None:
    """What takes slots of new requests copies by `uploaded`: other copies wait for all steps under way."""
    waits = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path, nodes in syntax.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any(one.arg == "slot_A" for one in node.args.args)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in ("tolist", "item", "cpu") or (call.func.attr == "to" and "device)" in ast.unparse(call))
    ]
    assert not waits


def test_importing_dinfer_is_light() -> None:
    """Nor does it cost anything to learn the name and the options of a component, or where a checkpoint is."""
    heavy = [
        "torch", "numpy", "triton", "transformers", "hydra", "omegaconf", "huggingface_hub", "rich", "tokenizers",
        "jinja2",
    ]  # fmt: skip
    code = (
        "import sys, dinfer, dinfer.core.loading.files as hub; hub.locate('tiny'); "
        "[r.describe(n) for r in (dinfer.MODELS, dinfer.DECODERS) for n in r.names()]; "
        f"print(*[m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_no_command_waits_for_torch_to_say_what_it_does() -> None:
    code = "import sys\nfrom dinfer.cli import program\nprogram.parsers()\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False"], "import what needs torch within functions, in dinfer/cli/commands"


def test_addresses_without_a_layer_give_the_same_modules() -> None:
    """People import `dinfer.core.step.contracts`, which is in core."""
    found = importlib.import_module
    for name, home in (
        ("step", "core.step"),
        ("recipe.registry", "core.registry"),
        ("caches.chosen", "research.caches.chosen"),
        ("kernels.selection", "core.kernels.selection"),
        ("models.dream", "families.models.dream"),
        ("loading.files", "core.loading.files"),
        ("decoders.schedule", "core.decoders.schedule"),
        ("kernels.linear", "core.kernels.linear"),
    ):
        assert found(".".join(["dinfer", name])) is found(f"dinfer.{home}")
    assert found("dinfer.kernels").__name__ == "dinfer.kernels"
    for name, home in (
        ("loading.checkpoint.save_network", "formats.saving"),
        ("loading.checkpoint.random_network", "lab.random_network"),
        ("layers.linear.quantize", "formats.holding"),
        ("step.model.ModelFamily", "core.models.family"),
    ):
        module, _, own = name.rpartition(".")
        assert vars(found(f"dinfer.{home}"))[own] is attrgetter(own)(found(".".join(["dinfer", module])))
    with pytest.raises(ModuleNotFoundError, match=r"dinfer\.core\.step\.nothing"):
        found(".".join(["dinfer", "step", "nothing"]))


def test_an_ability_has_no_method_that_nobody_calls() -> None:
    """A hook that is renamed leaves those of its old name behind, which a step never asks."""
    unknown = []
    for ability in ABILITIES.ordered():
        own = {name for name, value in vars(ability).items() if inspect.isfunction(getattr(value, "__func__", value))}
        source = Path(inspect.getfile(ability)).read_text()
        names = sorted(name for name in own if not name.startswith("_") and not hasattr(Ability, name))
        unknown += [f"{ability.__qualname__}.{name}" for name in names if f".{name}" not in source]
    assert unknown == []
