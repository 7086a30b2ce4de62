"""The wall around core: copies of the package without layers, and what they run. `python -m tests.contract.core`."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dinfer"
LAYERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "core")
TINY = str(PACKAGE / "demo" / "checkpoints" / "tiny")
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"model": TINY, "cache": "dual", "iteration": {"name": "blockwise", "block": 16}},
    "tiny-llada2": {"model": f"{TINY}-llada2", "cache": "block", "iteration": {"name": "block_diffusion"}},
}
ROUNDED = {"rounded": RECIPES["tiny"] | {"quantize": "int4"}}  # kernels round in another order
QUESTION = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"
CLOSURES = {  # what is imported for each, before anything runs
    "denoise_step": "dinfer.core.step.step", "Recipe": "dinfer.core.recipe.recipe", "Pipeline": "dinfer.core.pipeline",
}  # fmt: skip
ENTRIES = (
    "dinfer.serving.run",
    *(f"dinfer.cli.commands.{path.stem}" for path in PACKAGE.glob("cli/commands/[a-z]*.py")),
)
NEEDS = {"serving": {"serving", "structure", "lab"}, "cli": {"cli", "lab"}, "cli.commands.demo": {"demo"}}
# Torch is imported once. Each copy of the package is then a child of its own.
PROGRAM = """
import json, os, sys
import tokenizers, torch, transformers
torch.set_num_threads(1)
question, copies = json.load(sys.stdin)

def lines(names):
    files = [sys.modules[name].__file__ for name in names]
    return sum(open(file, encoding="utf-8").read().count("\\n") for file in files if file)

def found(root, asked):
    sys.path.insert(0, root)
    import dinfer
    assert dinfer.__file__.startswith(root + os.sep), dinfer.__file__
    if isinstance(asked, str):
        for name in asked.split():
            __import__(name)
        names = {name for name in sys.modules if name.split(".")[0] == "dinfer" and name == sys.modules[name].__name__}
        return [len(names), lines(names)]
    answers = {}
    for name, recipe in asked.items():
        pipe = dinfer.load(device="cpu", dtype="float32", runtime=dinfer.Runtime(rows=2), **recipe)
        answers[name] = [result.ids for result in pipe.generate([question, "3 + 4 = ?"], max_new_tokens=32)]
    return answers | {"idle": [name for name in ("sympy", "dinfer.families.images.prompts") if name in sys.modules]}

for root, asked in copies:
    if (child := os.fork()) == 0:
        status = 1
        try:
            print(json.dumps(found(root, asked)), flush=True)
            status = 0
        except BaseException:
            import traceback
            print(json.dumps(traceback.format_exc()), flush=True)
        finally:
            os._exit(status)
    os.waitpid(child, 0)
"""


def entries(gone: Collection[str]) -> list[str]:
    """The modules that start the server and the commands, but for those that need one of these layers."""
    needs = {module: {layer for part in NEEDS if f"{module}.".startswith(f"dinfer.{part}.") for layer in NEEDS[part]}
             for module in ENTRIES}  # fmt: skip
    return [module for module in ENTRIES if not needs[module] & {*gone}]


def copied(folder: Path, gone: Collection[str]) -> Path:
    """A folder with the package without these layers, and with its configuration."""
    folder.mkdir(parents=True)
    left_out = {PACKAGE / name for name in gone} | {PACKAGE / "demo" / "checkpoints"}

    def ignored(parent: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if Path(parent, name) in left_out]

    shutil.copytree(PACKAGE, folder / "dinfer", ignore=ignored)
    shutil.copytree(ROOT / "conf", folder / "conf")
    return folder


def run(copies: Iterable[tuple[Path, str | dict[str, Any]]]) -> list[Any]:
    """What each copy answers by recipes, or how many modules and lines it imports for modules; else a traceback."""
    given = json.dumps([QUESTION, [(str(root), asked) for root, asked in copies]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT.anchor, input=given, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def counted(folder: Path = PACKAGE / "core") -> tuple[int, int, int]:
    """Lines, names and files of a folder. Names are the functions, classes and constants that its modules define."""
    sources = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    names = sum(_defines(node) for source in sources for node in ast.parse(source).body)
    return sum(source.count("\n") for source in sources), names, len(sources)


def _defines(node: ast.stmt) -> int:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 1
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return sum(not (each.id.startswith("__") and each.id.endswith("__")) for each in names)


def main() -> None:
    lines, names, files = counted()
    print(f"core: {lines:,} lines, {names:,} names, {files} files")
    for name, (modules, imported) in zip(CLOSURES, run((ROOT, module) for module in CLOSURES.values()), strict=True):
        print(f"{name} imports {modules} modules of {imported:,} lines")


if __name__ == "__main__":
    main()
