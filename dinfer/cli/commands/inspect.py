"""says what a checkpoint is and whether it loads, from its small files alone

usage: dinfer inspect NAME [--json] [model.OPTION=VALUE ...]

NAME is a folder, a GGUF file, a hub name, a model in the box, or a choice of `model` such as llada2_mini. The command
reads and downloads no weights, but for tensors that must be equal or 0. It shows the family, the parameters, the memory
of the weights for each `quantize`, the special tokens and the file that names each, a chat as the model reads it, and
the recommended recipe. It also shows every problem: tensors that are missing, unexpected or of another shape, and
fields of config.json that make no network. If files are missing, it says what cannot be known without them. Options are
those of the family, such as model.block=16.

Exit status: 0 if it loads, 1 if there are problems, 2 if there is no such checkpoint, 3 if nothing can be said without
the weights: a hub name whose small files alone were downloaded, or a folder without weights.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import dinfer.core.recipe.presets as presets
from dinfer.cli import conf
from dinfer.cli.application import Parser
from dinfer.cli.terminal import FAILED, settle_stdout, show
from dinfer.core.loading.files import SMALL, boxed, local, locate
from dinfer.core.recipe.presets import attention
from dinfer.core.registry import MODELS, unknown

if TYPE_CHECKING:
    from dinfer.core.terms.spec import ModelSpec
    from dinfer.lab.inspect import Inspection

OPTION = "model."
UNKNOWN = 3  # exit status
VERDICTS = {
    True: ("it loads", "bold green"),
    False: ("would not load or answer", "bold red"),
    None: ("whether it loads cannot be said without the weights", "bold yellow"),
}


def arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="all that is known, for programs")


def run(args: Namespace) -> None:
    """Prints what is known of one checkpoint. Ends with status 1 if it has problems."""
    options = [word for word in args.words if word.startswith(OPTION) and "=" in word]
    names = [word for word in args.words if word not in options] + args.literal
    conf.check_once((option.partition("=")[0], option) for option in options)
    if len(names) != 1:
        raise ValueError(f"give one folder or name of a checkpoint, not {len(names)}: dinfer inspect tiny")
    dotted: Any = OmegaConf.to_container(OmegaConf.from_dotlist([option.removeprefix(OPTION) for option in options]))
    given = {"checkpoint": names[0]} | preset_of(names[0]) | dotted
    name = str(given["checkpoint"])

    from dinfer.lab.inspect import inspect

    found = inspect(locate(name, given.get("revision"), wanted=SMALL), given)
    if given.get("adapter"):
        found.unknown.append(f"adapter {given['adapter']}: the model is inspected without it")
    use = recommended(names[0], found, options)
    try:
        if args.json:
            print(json.dumps(described(names[0], found, use), indent=1))
        else:
            shown(names[0], found, use)
    except BrokenPipeError:  # the status is for whom the first lines are enough, too
        settle_stdout()
    if found.loads is not True:
        raise SystemExit(UNKNOWN if found.loads is None else FAILED)


def preset_of(name: str) -> dict[str, Any]:
    """The family and the options of a preset, a family or an adapter. Empty for a folder or a hub name."""
    if name in boxed() or local(name).exists():
        return {}
    if (found := presets.named(name)) is not None:
        return found.model
    if name in MODELS.names():
        return {"name": name, "checkpoint": MODELS.build(name).checkpoint}
    if "/" not in name:
        raise ValueError(
            f"{unknown('checkpoint', name, sorted({*boxed(), *conf.choices('model')}))} A folder, a GGUF file or a hub "
            "name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too."
        )
    return {}


def recommended(name: str, found: Inspection, options: list[str]) -> dict[str, str]:
    """The overrides that run the checkpoint as its authors do, as `use`, and the components that they choose."""
    if found.family is None or found.spec is None:
        return {}
    known = presets.named(name)
    if known is None and name not in MODELS.names():
        known = presets.chosen(str(found.folder.resolve()) if local(name).exists() else name, found.family)
    recipe = presets.of_family(name) if known is None else known.recipe
    return {"use": shlex.join([f"model={name}", *options])} | recipe


def described(name: str, found: Inspection, use: dict[str, str]) -> dict[str, Any]:
    """All that is known, for a program."""
    spec = found.spec
    return {
        "name": name,
        "folder": str(found.folder),
        "family": found.family,
        "parameters": found.parameters,
        "active_parameters": found.active,
        "dtype": None if found.dtype is None else str(found.dtype).removeprefix("torch."),
        "packing": found.packing,
        "memory": found.memory,  # bytes
        "attention": None if spec is None else sight(spec),
        "block": None if spec is None else spec.causal_block,
        "max_length": None if spec is None else spec.max_length,
        "mask_id": None if spec is None else spec.mask_id,
        "stop_ids": None if spec is None else list(spec.stop_ids),
        "tokens": [asdict(token) for token in found.tokens],
        "chat_template": found.template,
        "chat": found.chat,
        "recipe": use or None,
        "tensors": {
            "expected": found.expected,
            "stored": found.stored,
            "total_size": found.total_size,
            "types": found.types,
        },
        "loads": found.loads,
        "problems": found.problems,
        "unknown": found.unknown,
    }


def sight(spec: ModelSpec) -> str:
    """The kind of attention, in words."""
    causal = "causal encoder, bidirectional canvas"
    return causal if spec.encoder else attention(spec.causal_block, bool(spec.prompt_block))


def shown(name: str, found: Inspection, use: dict[str, str]) -> None:
    """Prints all that is known, for a reader."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines(found, use):
        table.add_row(label, Text(printable(text), "red" if label == "problem" else ""))
    verdict = Text.assemble(VERDICTS[found.loads])
    show(Text(printable(name), "bold", overflow="fold"), Padding(table, (0, 0, 0, 2), expand=False), verdict)


def lines(found: Inspection, use: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Labels and texts."""
    if found.family is not None:
        yield "family", f"{found.family}: {MODELS.describe(found.family).summary}"
    if found.parameters is not None and found.active is not None:
        active = f", {found.active:,} of them for each token" if found.active < found.parameters else ""
        yield "parameters", f"{found.parameters:,}{active}"
    if found.packing:
        yield "weights", found.packing
    if found.memory:
        dtype = str(found.dtype).removeprefix("torch.")
        sizes = [f"{kind} {decimal(size)}" for kind, size in found.memory.items() if size is not None]
        blocks = "; blocks: none on a CPU" if "blocks" in found.memory else ""
        yield "memory", f"{', '.join(sizes)} (by quantize; none is {dtype}{blocks})"
    if (spec := found.spec) is not None:
        yield "attention", sight(spec) + ("; logits predict the next token" if spec.shift else "")
        yield "positions", f"{spec.max_length:,}"
        if spec.mask_id is None:
            yield "mask", "none: open positions hold uniform noise"
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for token in found.tokens:
        label = token.role if token.role in ("mask", "stop") else "special"
        text = " ".join(str(part) for part in (token.id, token.text) if part is not None)
        rows.setdefault((label, token.source or "id not known"), {}).setdefault(token.role, []).append(text)
    for (label, source), roles in rows.items():
        texts = [("" if role == label else f"{role} ") + ", ".join(texts) for role, texts in roles.items()]
        yield label, f"{'; '.join(texts)} ({source})"
    if found.chat is not None:
        yield "chat", f"({found.template})\n{found.chat}"
    if use:
        yield "recipe", use["use"]
        yield "", " ".join(f"{kind}={choice}" for kind, choice in use.items() if kind != "use")
    if found.stored is not None and found.expected is not None:
        total = "" if found.total_size is None else f"; total_size {found.total_size:,} bytes"
        types = "".join(f"; {number:,} {name}" for name, number in found.types.items())
        yield "tensors", f"{found.stored:,} named, {found.expected:,} wanted{types}{total}"
    yield from (("not known", text) for text in found.unknown)
    yield from (("problem", text) for text in found.problems)


def printable(text: str) -> str:
    """The text with its control characters spelt out: it comes from the files of strangers."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
