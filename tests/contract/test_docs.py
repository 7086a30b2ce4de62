"""The code in README.md and docs/ runs, and what it says of the project is so."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.models import tiny_model

from benchmarks import report
from dinfer.cli.described import table
from dinfer.core.engine.runtime import Runtime
from dinfer.core.loading.files import boxed
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.core.registry import CACHES, DECODERS, REGISTRIES
from tools.component_pages import IDEAS, MEASURED, RESULTS, components, pages

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "add_a_decoder.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def leftmost(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The tutorial's decoder, registered for the length of a test, unless a reader has written its file."""
    if "leftmost" in DECODERS.names():
        yield DECODERS.get("leftmost")
        return
    module = ModuleType("leftmost")
    monkeypatch.setitem(sys.modules, "leftmost", module)
    exec(compile(blocks(TUTORIAL, "python")[0], "leftmost.py", "exec"), module.__dict__)
    yield DECODERS.get("leftmost")
    DECODERS.unregister("leftmost")


@pytest.mark.parametrize("cache", CACHES.names())
def test_the_tutorials_decoder_decodes_from_left_to_right(leftmost: type, cache: str) -> None:
    model = tiny_model("bidirectional")
    if CACHES.build(cache).incompatibility(model.spec) is not None:
        model = tiny_model("block_causal")
    for threshold, forwards in ((0.0, 2), (0.3, None), (1.0, 16)):
        decoder = {"name": "leftmost", "threshold": threshold}
        recipe = compose(
            model, iteration={"name": "blockwise", "block": 8, "stop": "off"}, decoder=decoder, cache=cache
        )
        result = Pipeline(recipe, None, Runtime()).generate_ids([[1, 2, 3]], max_new_tokens=16, trace=True)[0]
        if forwards is not None:
            assert result.counts.forwards == forwards
        for canvas in result.trace or []:
            masked = [token == recipe.model.spec.mask_id for token in canvas]
            assert masked == sorted(masked)


@pytest.mark.skipif("tiny" not in boxed(), reason="the model in the box is not here yet")
def test_the_readmes_library_example_says_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks(README, "python")[0], "README.md", "exec"), {})
    said, shown = capsys.readouterr().out, blocks(README, "text")[0]
    assert re.sub(r"\d+ forwards", "", said) == re.sub(r"\d+ forwards", "", shown), "forwards may differ between CPUs"


@pytest.mark.skipif("tiny" not in boxed(), reason="the model in the box is not here yet")
def test_the_example_of_traces_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks((ROOT / "docs" / "trace.md").read_text(), "python")[0], "trace.md", "exec"), {})
    assert "Block(index=0" in capsys.readouterr().out


def test_the_example_of_structured_output_runs(capsys: pytest.CaptureFixture[str]) -> None:
    source = "\n".join(blocks((ROOT / "docs" / "structured.md").read_text(), "python"))
    exec(compile(source, "structured.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.startswith("Answer(steps=[")


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 900


def test_the_docs_are_short() -> None:
    """Issue 45 asks for 35,000 words: a page that grows has another shrink."""
    assert sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")) < 35_000


def test_the_readme_names_the_torch_that_is_pinned() -> None:
    pin = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin and f"torch {pin[1]}" in README and f"TORCH ?= torch=={pin[1]}" in (ROOT / "Makefile").read_text()


def test_code_fits_the_site() -> None:
    """The site shows 88 characters a line at a width of 1,280 pixels; it breaks a longer line."""
    for path in (ROOT / "docs").rglob("*.md"):
        assert "<img" not in path.read_text(), f"{path}: MkDocs moves only the addresses of Markdown's pictures"
        lines = "".join(blocks(path.read_text(), "python") + blocks(path.read_text(), "sh")).splitlines()
        assert [line for line in lines if len(line) > 88] == [], path


def test_what_the_documents_link_to_is_there() -> None:
    for path in report.documents():
        links = re.findall(r"""(?:\]\(|src=")((?!https?:|#)[^)"#]+)""", path.read_text())
        assert [link for link in links if not (path.parent / link).exists()] == [], path


def test_the_readmes_figures_are_those_of_the_result_files() -> None:
    for path, text in report.pages().items():
        assert path.read_text() == text, f"{path}: run `python -m benchmarks.report`"


def test_the_component_pages_are_those_of_the_docstrings() -> None:
    for path, text in pages().items():
        assert path.is_file(), f"{path}: run `python -m tools.component_pages`"
        assert path.read_text() == text, f"{path}: run `python -m tools.component_pages`"


def test_the_table_of_components_is_that_of_the_code() -> None:
    """It is right if it is older: then modules are imported, and each command starts later."""
    assert table() == json.loads(json.dumps(components())), "run `python -m tools.component_pages`"


def test_the_component_pages_group_components_that_exist() -> None:
    names = {(registry.kind, name) for registry in REGISTRIES for name in registry.names()}
    grouped = {(kind, name) for kind, groups in IDEAS.items() for group in groups.values() for name in group.split()}
    assert grouped <= names
    assert all((RESULTS / f"{file}.json").is_file() for file in MEASURED.values())


NAMED = re.compile(r"`((?:\w+/)*\w+\.(?:py|c|sh))`|(?:`|::: )(dinfer(?:\.\w+){2,})")
OWN = {"NAME.py", "halo.py", "leftmost.py", "plain.py", "short_first.py"}  # which the tutorials have readers write
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)  # reports are of their time
FOLDERS = ("benchmarks", "dinfer", "evaluations", "examples", "tests", "tools")


def test_modules_that_the_documents_name_exist() -> None:
    """Files such as `step/plan.py` or `plan.py`, and names such as `dinfer.core.terms.plan.window_bounds`."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    for path in PAGES:
        for file, dotted in NAMED.findall(path.read_text()):
            if file and file.split("/")[-1] not in OWN:
                assert any(each.endswith(f"/{file}") for each in files), f"{path}: {file}"
            elif dotted:
                pkgutil.resolve_name(dotted)
        for name in re.findall(rf"python -m ((?:{'|'.join(FOLDERS)})[.\w]*)", path.read_text()):
            assert importlib.util.find_spec(name), f"{path}: {name}"


def test_modules_that_benchmarks_and_tools_start_exist() -> None:
    """They name them as texts, which no import checks."""
    sources = [
        path for name in ("benchmarks", "tools") for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".sh")
    ]
    for path in sources:
        for name in re.findall(r"\b(?:benchmarks|tools)(?:\.[a-z]\w*)+", path.read_text()):
            module = importlib.util.find_spec(name.rpartition(".")[0])
            packages = module is None or module.submodule_search_locations is not None
            assert not packages or importlib.util.find_spec(name), f"{path}: {name}"


def classes_of(sources: Iterable[str]) -> dict[str, tuple[set[str], set[str]]]:
    """What each class has: names of its own, assigned attributes among them, and the names of its bases."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        own, bases = found.setdefault(node.name, (set(), set()))
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(part.name)
            elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                own.add(part.id if isinstance(part, ast.Name) else part.attr)
        bases |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    return found


def stale(text: str, classes: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """References such as `Class.attribute`, of a class of dinfer, and `dinfer.x.y` that name nothing."""

    def has(name: str, member: str) -> bool:
        own, bases = classes.get(name, ({member}, set()))  # of a class that is another's, nobody here knows more
        return member in own or any(has(base, member) for base in bases if base in classes)

    members = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)", text)
    found = [f"{name}.{member}" for name, member in members if name in classes and not has(name, member)]
    for name in {*re.findall(r"`(dinfer(?:\.\w+){2,})`", text)}:  # shorter ones are fields and entry points too
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            found.append(name)
    return found


def test_names_that_documents_docstrings_and_comments_give_exist() -> None:
    folders = ("dinfer", "evaluations", "examples", "tests", "tools")
    sources = {path: path.read_text() for name in folders for path in (ROOT / name).rglob("*.py")}
    classes = classes_of(text for path, text in sources.items() if path.is_relative_to(ROOT / "dinfer"))
    texts = sources | {path: path.read_text() for path in PAGES}
    found = {
        str(path.relative_to(ROOT)): stale(text, classes) for path, text in texts.items() if path.name != "test_docs.py"
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_names_that_do_not_exist_are_found() -> None:
    classes = classes_of(["class Base:\n    held: int\n\n\nclass Row(Base):\n    def go(self): self.gone = 1\n"])
    text = "`Row.go` `Row.gone` `Row.held` `Row.lost` `Other.x` `dinfer.core.step.step.lost`"
    assert stale(text, classes) == ["Row.lost", "dinfer.core.step.step.lost"]


def test_every_page_is_in_the_navigation_once() -> None:
    """`make docs` says so too, but this takes no time."""
    named = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


LONG = ("first_answer", "choose", "how_it_works", "rollouts")  # README's example runs in `make test`, too
TUTORIALS = (
    *(pytest.param(name, marks=pytest.mark.rest, id=name) for name in LONG),
    "evaluate", "read_a_trace", "add_a_cache", "add_an_iteration", "add_a_model", "multi-block",
    "likelihoods",
)  # fmt: skip
# Each page is a program of its own. All run in one process, which is not that of the tests: a page may register
# components, and importing torch takes longer than most pages.
RUN_PAGES = """
import importlib.util, json, sys, traceback, types
import dinfer, torch
torch.set_num_threads(1)
found = {}
for name, programs in json.loads(sys.stdin.read()).items():
    try:
        for file, source in programs.items():
            if importlib.util.find_spec(file) is None:  # else a reader has written it
                module = sys.modules[file] = types.ModuleType(file)
                exec(compile(source, f"{name}.md", "exec", dont_inherit=True), module.__dict__)
        found[name] = ""
    except BaseException:
        found[name] = traceback.format_exc()
print(json.dumps(found), file=sys.stderr)
"""


def programs_of(name: str) -> dict[str, str]:
    """The file that a page has its reader write, and its other blocks, which run without it, as modules."""
    page, future = (ROOT / "docs" / f"{name}.md").read_text(), "from __future__ import annotations\n"
    own = re.search(r"`(dinfer/\w+/\w+/\w+)\.py`:\n\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    rest = [block for block in blocks(page, "python") if own is None or block != own[2]]
    assert "assert " in "".join(rest)  # each checks what it shows
    file = {own[1].replace("/", "."): own[2]} if own else {}
    return file | {name: future + "\n".join(rest).replace(future, "")}


@pytest.fixture(scope="module")
def errors_of_tutorials(request: pytest.FixtureRequest) -> dict[str, str]:
    """The traceback of each tutorial that is to run; empty if its blocks ran."""
    chosen = {item.callspec.id for item in request.session.items if "code_of_a_tutorial" in item.nodeid}
    pages = {name: programs_of(name) for name in chosen}
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGES], cwd=ROOT, input=json.dumps(pages), capture_output=True, text=True, check=True
    )
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("name", TUTORIALS)
def test_the_code_of_a_tutorial_runs(name: str, errors_of_tutorials: dict[str, str]) -> None:
    assert errors_of_tutorials[name] == ""
