"""Completion in a shell, by Hydra's plugins: `eval "$(dinfer -sc install=bash)"`."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import suppress

from hydra.errors import HydraException

from dinfer.cli import conf
from dinfer.cli.application import in_hydra
from dinfer.cli.arguments import OVERRIDE


def complete(args: Namespace) -> None:
    """`-sc install=bash` prints what a shell is to run; `-sc query=bash` answers it. Also zsh, fish and uninstall.

    `args.commands`: the parser of each command.
    """
    if not any(word.startswith("query=") for word in args.words):
        in_hydra(["-sc", *args.words], conf.PRIMARY)
        return
    command, *typed = os.environ["COMP_LINE"].split(" ")[1:]
    commands = args.commands
    if not typed:
        print("\n".join(commands))
    elif command in commands and typed[-1].startswith("-"):
        print("\n".join(commands[command].flags))
    elif command in commands and (conf.folder() / f"{command}.yaml").is_file():
        # Hydra knows of no command and no text. What it cannot parse yet, it cannot complete.
        overrides = [word for word in typed[:-1] if OVERRIDE.fullmatch(word)]
        os.environ["COMP_LINE"] = " ".join(["dinfer", *overrides, typed[-1]])
        with suppress(HydraException, ValueError):
            in_hydra(["-sc", *args.words], command)
