"""Finds the command asked for and runs it; turns its errors into one line and an exit status."""

import argparse
import ast
import difflib
import importlib
import inspect
import logging
import os
import pkgutil
import re
import sys
import warnings

import dinfer
from dinfer.cli import commands, conf
from dinfer.cli.application import Parser, complete, configured, in_hydra
from dinfer.cli.terminal import check_arguments, debugging, reported
from dinfer.core.registry import unknown

DESCRIPTION = f"dinfer {dinfer.__version__}: modular inference for diffusion language models"
EPILOG = """\
overrides (Hydra's):
  model=tiny model.checkpoint=FOLDER      which model; a checkpoint of your own
  decoder=threshold decoder.threshold=0.8 which component, and its options
  cache=prefix device=cuda dtype=bfloat16 max_new_tokens=256 runtime.rows=64
  -m decoder.threshold=0.5,0.9            one run for each value
  --cfg job                               show the configuration and stop

`dinfer COMMAND --help` explains a command, `dinfer list` every component.
`eval "$(dinfer -sc install=bash)"` completes names in a shell (bash, zsh or fish).
DINFER_DEBUG=1, or Hydra's HYDRA_FULL_ERROR=1, shows the traceback of an error.
"""
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # without -v, with it, with -vv


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `dinfer` and those of its commands, by name.

    A command's module has a docstring (a line of help, the usage, the description), `arguments(parser)`, which adds its
    own flags if it has any, and `run(args)`. What is no flag is in `args.words`, and in `args.literal` behind `--`. A
    command with a file in `conf` also has the flags of Hydra.
    """
    parser = Parser(prog="dinfer", usage="dinfer COMMAND [arguments]", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("-V", "--version", action="version", version=f"dinfer {dinfer.__version__}")
    parser.add_argument(
        "--hydra-help", dest="run", action="store_const", const=lambda _: in_hydra(["--hydra-help"], conf.PRIMARY),
        help="Hydra's own help",
    )  # fmt: skip
    parser.set_defaults(verbose=0, quiet=False, run=lambda args: parser.print_help())
    found = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
        module = importlib.import_module(f"{commands.__name__}.{name}")
        # Python drops docstrings with PYTHONOPTIMIZE=2; to read the source takes as long as all else here.
        text = inspect.getdoc(module) or ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
        summary, usage, description = text.split("\n\n", 2)
        command = found.add_parser(name, help=summary, usage=usage.removeprefix("usage: "), description=description)
        vars(module).get("arguments", lambda parser: None)(command)
        if (conf.folder() / f"{name}.yaml").is_file():
            configured(command)
        command.set_defaults(run=module.run)
    for each in (parser, *found.choices.values()):
        each.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help="log more; -vv: all")
        each.add_argument("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="log errors only")
    return parser, found.choices


def run(args: list[str]) -> None:
    """Runs a command line."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0"):
        os.environ["DINFER_DEBUG"] = "1"
    if not debugging() and not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with reported():
        check_arguments(args)
        end = args.index("--") if "--" in args else len(args)
        given = parsed(args[:end], args[end + 1 :])
        given.line = ["dinfer", *args]
        logging.basicConfig(format="%(name)s: %(message)s")
        level = logging.ERROR if given.quiet else LEVELS[min(given.verbose, 2)]
        logging.getLogger("dinfer").setLevel(level)
        given.run(given)


def parsed(args: list[str], literal: list[str]) -> argparse.Namespace:
    """The arguments by what they are for. Raises ValueError."""
    parser, known = parsers()
    if {"-sc", "--shell-completion"} & set(args):
        words = [arg for arg in args if "=" in arg]
        return argparse.Namespace(run=complete, words=words, commands=known, verbose=0, quiet=False)
    first = next((arg for arg in args if not arg.startswith("-")), "help")
    if first not in (*known, "help"):
        raise unknown("command", first, list(known))
    given, words = parser.parse_known_args([arg for arg in args if arg != "help"] if first == "help" else args)
    for at, word in enumerate(words):
        if re.fullmatch(r"--?[A-Za-z][\w.-]*(=.*)?", word):
            (flag, _, value), flags = word.partition("="), known.get(first, parser).flags
            if flag.startswith("--") and not difflib.get_close_matches(flag, flags, 1, 0.8):
                value = value or next(iter(words[at + 1 :]), "...")
                setting = f"{flag[2:].replace('-', '_')}={value}"
                raise ValueError(f"{flag} is no flag. Settings have no dashes: {setting}. Flags: {', '.join(flags)}.")
            raise ValueError(f"{unknown('flag', flag, flags)} Text that begins with a dash goes behind `--`.")
    return argparse.Namespace(**vars(given), words=words, literal=literal)
