"""Completion in a shell, by Hydra's plugins: `eval "$(dinfer -sc install=bash)"`."""

from __future__ import annotations

import os
from argparse import Namespace

from dinfer.cli import conf
from dinfer.cli.application import in_hydra
from dinfer.cli.arguments import OVERRIDE


def complete(args: Namespace) -> None:
    """`-sc install=bash` prints what a shell is to run; `-sc query=bash` answers it. Also zsh, fish and uninstall."""
    from dinfer.cli.program import parsers

    typed = os.environ.get("COMP_LINE", "").split(" ")[1:]
    if not any(word.startswith("query=") for word in args.words):
        in_hydra(["-sc", *args.words], conf.PRIMARY)
    elif len(typed) < 2:
        print("\n".join(parsers()[1]))
    elif typed[-1].startswith("-"):
        print("\n".join(parsers()[1][typed[0]].flags))
    elif (conf.folder() / f"{typed[0]}.yaml").is_file():
        # Hydra knows of no command and no text.
        overrides = [word for word in typed[1:-1] if OVERRIDE.fullmatch(word)]
        os.environ["COMP_LINE"] = " ".join(["dinfer", *overrides, typed[-1]])
        in_hydra(["-sc", *args.words], typed[0])
