"""Completion in a shell, by Hydra's plugins: `eval "$(dinfer -sc install=bash)"`."""

import os
from argparse import Namespace
from contextlib import suppress
from typing import Any

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin

from dinfer.cli import conf
from dinfer.cli.arguments import OVERRIDE
from dinfer.recipe.registry import unknown


def complete(args: Namespace) -> None:
    """`install=bash` prints what a shell is to run, `query=bash` answers it. Also zsh, fish and uninstall.

    `args.words`: what follows `-sc`. `args.commands`: the parser of each command. Raises ValueError.
    """
    found: list[Any] = Plugins.instance().discover(CompletionPlugin)
    plugins = {plugin.provides(): plugin for plugin in found}
    known = [f"{verb}={shell}" for verb in ("install", "uninstall", "query") for shell in plugins]
    (asked,) = args.words or [""]
    if asked not in known:
        raise unknown("completion", asked, known)
    verb, _, shell = asked.partition("=")
    with conf.session() as loader:
        plugin = plugins[shell](loader)
        if verb != "query":
            return plugin.install() if verb == "install" else plugin.uninstall()
        command, *typed = os.environ["COMP_LINE"].split(" ")[1:]
        if not typed:
            print("\n".join(args.commands))
        elif command in args.commands and typed[-1].startswith("-"):
            print("\n".join(args.commands[command].flags))
        elif command in args.commands and (conf.folder() / f"{command}.yaml").is_file():
            # Hydra knows of no command and no text. What it cannot parse yet, it cannot complete.
            overrides = [word for word in typed[:-1] if OVERRIDE.fullmatch(word)]
            os.environ["COMP_LINE"] = " ".join(["dinfer", *overrides, typed[-1]])
            with suppress(HydraException, ValueError):
                plugin.query(command)
