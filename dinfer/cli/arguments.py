"""Divides a command line into flags, which argparse takes, the user's text, and overrides, which Hydra takes.

Text does not go through Hydra's grammar, so it may hold anything. An argument is an override if it begins with `name=`
and the configuration has that name, or one that is spelt alike. All arguments behind `--` are text. `-` stands for the
text on standard input.
"""

import argparse
import difflib
import os
import re
import textwrap
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin

from dinfer.cli import conf
from dinfer.cli.terminal import read_stdin
from dinfer.recipe.registry import unknown

OVERRIDE = re.compile(r"[+]{0,2}(?P<root>[A-Za-z_]\w*)[\w./@:-]*=.*", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Raises ValueError for what it cannot parse. Takes no abbreviations of flags."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    @property
    def flags(self) -> list[str]:
        """All long flags."""
        return re.findall(r"^  (?:-\w+(?: \w+)?, )?(--[a-z-]+)", self.format_help(), re.MULTILINE)


def one_of(flag: str, *known: str) -> Callable[[str], str]:
    """A type of argparse: joins the flag and its value, which must be one of those known, to an argument for Hydra."""

    def checked(value: str) -> str:
        if value not in known:
            raise argparse.ArgumentTypeError(str(unknown("value", value, list(known))))
        return f"{flag}={value}"

    return checked


def configured(parser: Parser) -> None:
    """Adds the flags of a command whose configuration Hydra composes, and its settings to the help.

    `overrides` collects flags that stand for an override; `flags` is passed on to Hydra.
    """
    parser.epilog = settings_of(parser.prog.split()[-1])
    parser.set_defaults(overrides=[], flags=[])
    group = parser.add_argument_group("configuration")
    group.add_argument("-m", "--multirun", action="store_true", help="one run for each of several values")
    group.add_argument(
        "-cd",
        "--config-dir",
        action="append",
        metavar="FOLDER",
        default=[],
        dest="config_dirs",
        help="a further folder of configurations and presets; may be given several times",
    )
    shown = one_of("--cfg", "job", "hydra", "all")
    told = one_of("--info", "all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    for short, flag, value, kind, text in (
        ("-c", "--cfg", "job", shown, "show the configuration and stop; hydra or all: Hydra's own too"),
        ("-p", "--package", "NAME", "--package={}".format, "with --cfg: only this part of it"),
        ("-i", "--info", "all", told, "show where the configuration comes from and stop"),
    ):
        group.add_argument(short, flag, dest="flags", action="append", type=kind, metavar=value, help=text)
    for flag, text in (("--resolve", "with --cfg: replace interpolations"), ("--hydra-help", "Hydra's own help")):
        group.add_argument(flag, dest="flags", action="append_const", const=flag, help=text)


def settings_of(command: str) -> str:
    """The settings of a command and of all commands, with their defaults, as the configuration explains them."""
    parts = []
    for name in (command, conf.PRIMARY):
        text = (conf.folder() / f"{name}.yaml").read_text(encoding="utf-8")
        parts += [part for part in text.split("\n\n") if not re.search("^(defaults|hydra):", part, re.MULTILINE)]
    return "settings, with their defaults (set one with name=value, or name.part=value):\n" + textwrap.indent(
        "\n\n".join(parts), "  "
    )


def divided(
    args: argparse.Namespace, names: Callable[[], set[str]], *, takes_text: bool
) -> tuple[str | None, list[str]]:
    """The text and the overrides of a command line. `names`: all that an override may begin with. Raises ValueError."""
    texts: list[str] = []
    overrides: list[str] = list(args.overrides)
    for word in args.words:
        match = OVERRIDE.fullmatch(word)
        if word == "-" and takes_text:
            texts.append(read_stdin())
        elif match and (not takes_text or texts or begins_one(word, match["root"], names())):
            overrides.append(word)
        else:
            texts.append(word)
    texts += args.literal
    if texts and not takes_text:
        raise ValueError(f"{texts[0]!r} is not an override (name=value) and this command takes no text")
    if len(texts) > 1:
        raise ValueError(f"{len(texts)} texts are given, {texts[0]!r} and {texts[1]!r}: put one question in quotes")
    return texts[0] if texts else None, overrides


def begins_one(word: str, root: str, names: set[str]) -> bool:
    """Whether `root` is the name of an override, or spelt like one. A question may hold `a=b` as well."""
    return root in names or (not re.search(r"\s", word) and bool(difflib.get_close_matches(root, names, 1)))


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
