"""The `dinfer` command: finds the command asked for, and turns its errors into one line and an exit status."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings
from types import ModuleType

import dinfer
from dinfer.cli import commands
from dinfer.cli.errors import debugging, reported
from dinfer.cli.terminal import check_arguments
from dinfer.core.registry import unknown

HELP = """\
dinfer {version}: modular inference for diffusion language models

usage: dinfer COMMAND [arguments] [overrides ...]

commands:
{commands}

overrides (Hydra's):
  model=tiny model.checkpoint=FOLDER      which model; a checkpoint of your own
  decoder=threshold decoder.threshold=0.8 which component, and its options
  cache=prefix device=cuda dtype=bfloat16 max_new_tokens=256 runtime.rows=64
  -m decoder.threshold=0.5,0.9            one run for each value
  --cfg job                               show the configuration and stop

`dinfer COMMAND --help` explains a command, `dinfer list` every component.
DINFER_DEBUG=1, or Hydra's HYDRA_FULL_ERROR=1, shows the traceback of an error.
"""


def names() -> list[str]:
    """All commands."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def find(name: str) -> ModuleType:
    if name not in names():
        raise unknown("command", name, names())
    return importlib.import_module(f"{commands.__name__}.{name}")


def describe() -> str:
    """The help of `dinfer` itself."""
    lines = [f"  {name:<9} {(find(name).__doc__ or '').split(chr(10))[0]}" for name in names()]
    return HELP.format(version=dinfer.__version__, commands="\n".join(lines))


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exit status: 0; 2 for bad input, 1 for a failure, 130 when interrupted."""
    args = sys.argv[1:] if args is None else args
    if os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0"):
        os.environ["DINFER_DEBUG"] = "1"
    if not debugging() and not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with reported():
        check_arguments(args)
        if not args or args[0] in ("--help", "-h", "help"):
            print(describe(), end="")
        elif args[0] in ("--version", "-V"):
            print(f"dinfer {dinfer.__version__}")
        else:
            command = find(args[0])
            flags = args[1 : args.index("--")] if "--" in args else args[1:]
            if "--help" in flags or "-h" in flags:
                print((command.__doc__ or "").strip())
            else:
                command.run(args[1:])


if __name__ == "__main__":
    main()
