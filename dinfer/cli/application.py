"""Runs a command as a Hydra application, once or at each point of a sweep. Configuration and launchers are Hydra's.

A command line is divided into flags, which argparse takes, the user's text, and overrides, which Hydra takes. Text does
not go through Hydra's grammar, so it may hold anything. An argument is an override if it begins with `name=` and the
configuration has that name, or one that is spelt alike. All arguments behind `--` are text. `-` stands for the text on
standard input.

A sweep is the product of all values, but an option goes only to components that have it. In
`decoder=threshold,factor decoder.threshold=0.7,0.9 decoder.factor=0.5,1` each decoder is swept over its own option:
four points in all. A point that fails does not end the sweep. The end of the sweep names the points without a result.
Hydra's own sweeper would refuse that command whole ("Key 'factor' is not in struct"), and end at the first failure.
"""

import argparse
import difflib
import io
import itertools
import os
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from dinfer.cli import conf
from dinfer.cli.conf import components, explained, leaves_of, located, parse, ranks_of, text_of
from dinfer.cli.terminal import (
    FAILED,
    INPUT_ERRORS,
    debugging,
    failures,
    message,
    reported,
    say,
    settle_stdout,
    stdin_lines,
    unread,
)
from dinfer.core.provided import homes
from dinfer.core.registry import unknown

OVERRIDE = re.compile(r"[+]{0,2}(?P<root>[A-Za-z_]\w*)[\w./@:-]*=.*", re.DOTALL)
Task = Callable[[dict[str, Any]], None]


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
            texts.append("".join(stdin_lines()).removesuffix("\n"))  # which `echo` adds
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


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a point has no result."""

    reason: str
    failed: bool  # else its components cannot work together, which is a finding and no failure


def launch(args: Namespace, task: Task, *, text: str = "", needed: str = "") -> None:
    """Calls `task(configuration)` once, or once for each point of a sweep.

    `conf/<command>.yaml` is the configuration. `text`: the setting that a text on the command line stands for; without
    one, the command takes no text. `needed`: the error if there is none.
    """
    command, folders = args.command, args.config_dirs
    given, overrides = divided(args, cache(lambda: names(command, folders)), takes_text=bool(text))
    overrides = [one for override in overrides for one in conf.model_named(override)]
    overrides += [f"hydra.searchpath={conf.searched(folders)}"] if folders else []
    parsed = [parse(override) for override in overrides]

    def run(config: DictConfig) -> Missed | None:
        with reported():  # inside Hydra, which would add lines of its own to an error that reaches it
            values = conf.values_of(config)
            if args.multirun:
                return point(found, values)
            found(values)
        return None

    def found(values: dict[str, Any]) -> None:
        if text:
            values = values | {text: text_of(values, text, given)}
            if needed and values[text] is None:
                raise ValueError(needed)
        if "scale" in homes("provides.py"):
            join_ranks(ranks_of(values), command)
        located(values)  # before the task imports torch, so that an error comes at once
        task(values)

    if args.flags and args.multirun:
        raise ValueError("-m runs a sweep, and --cfg and its like show something and stop: leave one of them out")
    with conf.session() as loader, explained():
        check(command, folders, parsed, multirun=args.multirun)
        # Hydra names a type that is internal; the public one has the same methods.
        context = HydraContext(config_loader=loader, callbacks=Callback())  # type: ignore[arg-type]
        if args.multirun:
            return sweep(command, parsed, context, run)
        config = hydra.compose(command, [*overrides, "hydra.mode=RUN"], return_hydra_config=True)
        if not args.flags:
            job = run_job(run, config, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
            return job.return_value  # raises what the task raised
    in_hydra([*args.flags, *overrides], command)


def join_ranks(size: int, command: str) -> None:
    """Serves as a rank, if torchrun started this process as one of `size` and not the first. Raises ValueError."""
    from dinfer.scale.parallel.leader import check_copies, follows

    if command != "eval":
        check_copies(size)
    if follows(size):
        from dinfer.scale.parallel.divided_model import serve_torchrun

        serve_torchrun()


def in_hydra(argv: Sequence[str], command: str) -> None:
    """Runs Hydra's own command line, for flags that show something and stop."""
    conf.publish()
    before, sys.argv = sys.argv, ["dinfer", *argv]
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):  # Hydra has a traceback for a reader that goes away
            hydra.main(config_path=str(conf.folder()), config_name=command, version_base=conf.VERSION)(print)()
    finally:
        sys.argv = before
        print(shown.getvalue(), end="")


def roots(command: str, folders: Sequence[str]) -> set[str]:
    """All that an override may begin with. `folders`: further ones of configurations."""
    groups = [path.name for folder in folders for path in Path(folder).iterdir() if path.is_dir()]
    with conf.session(), explained():
        return {*map(str, hydra.compose(command, [])), *groups, conf.RECIPE, "hydra"}


def names(command: str, folders: Sequence[str]) -> set[str]:
    """All that an override may begin with, and options, since a user may forget to name their component."""
    described = [registry.describe(name) for registry in conf.GROUPS.values() for name in registry.names()]
    return roots(command, folders) | {option.name for description in described for option in description.options}


def check(command: str, folders: Sequence[str], overrides: Sequence[Override], *, multirun: bool) -> None:
    """Raises ValueError for wrong overrides that Hydra would accept, or refuse without naming them."""
    conf.check_once((leaf, str(one.input_line)) for one in overrides for leaf in leaves_of(one))
    for override in overrides:
        key, swept = override.key_or_group, override.is_sweep_override()
        if swept and not multirun:
            raise ValueError(f"{override.input_line} has several values: add -m for a run with each of them")
        if key in (*conf.GROUPS, conf.RECIPE) and not swept and override.value() in ("", None):
            raise ValueError(
                f"{override.input_line} names no {key}: choose one of {', '.join(conf.choices(key))}, or leave it out"
            )
        if key in conf.GROUPS and not swept and not isinstance(override.value(), (str, list)):
            raise unknown(key, override.value(), conf.GROUPS[key].names())
        if override.is_add() or override.is_force_add():
            root, known = key.replace("/", ".").partition(".")[0], roots(command, folders)
            if root not in known:
                raise unknown("setting", key, sorted(known))


def numbered(path: Path) -> Path:
    """The path, in a sweep with the number of the point, so that no two points write one file."""
    settings = HydraConfig.get()
    return path.with_stem(f"{path.stem}-{settings.job.num}") if settings.mode == RunMode.MULTIRUN else path


def point(task: Task, settings: dict[str, Any]) -> Missed | None:
    """Runs one point of a sweep. Returns why it has no result, if it has none, so that the other points still run."""
    job = HydraConfig.get()
    number = "\n" if job.job.num else ""
    try:
        print(f"{number}# {' '.join(job.overrides.task)}", flush=True)
        task(settings)
    except (*INPUT_ERRORS, *failures()) as error:
        if unread(error):
            settle_stdout()
            say(f"dinfer: nobody reads standard output any more: the sweep ends at {' '.join(job.overrides.task)}")
            raise SystemExit(FAILED) from None
        from dinfer.core.recipe.recipe import IncompatibleRecipe

        failed = not isinstance(error, IncompatibleRecipe)
        if failed and debugging():
            raise
        sys.stdout.flush()
        say(f"dinfer: {message(error)}")
        return Missed(message(error), failed)
    return None


def sweep(command: str, overrides: Sequence[Override], context: HydraContext, task: TaskFunction) -> None:
    """Runs the task at every point, by the launcher of the configuration. Raises ValueError before any point runs."""
    loader = context.config_loader
    own = [str(override.input_line) for override in overrides if override.is_hydra_override()]
    # A preset may hold settings of Hydra's too. Options are left out: the components may differ from point to point.
    plain = [one for one in overrides if not one.is_hydra_override() and "." not in one.key_or_group]
    single = [str(one.input_line) for one in plain if not one.is_sweep_override()]
    if not any(text.startswith(("hydra.sweep.dir=", "hydra/launcher=")) for text in own):
        own += ["hydra.sweep.dir=.", "hydra.sweep.subdir=."]  # no folder of Hydra's for points that run here
    config = hydra.compose(command, [*own, *single, "hydra.mode=MULTIRUN"], return_hydra_config=True)
    if (sweeper := config.hydra.runtime.choices["hydra/sweeper"]) != "basic":
        raise ValueError(f"hydra/sweeper={sweeper}: dinfer has a sweeper of its own. Leave it out, or use dinfer tune")
    arguments = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    arguments += [str(override.input_line) for override in overrides if not override.is_hydra_override()]
    found = points(arguments, loader, config)
    for point in found:
        components(loader.load_sweep_config(config, point))
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    size, jobs = config.hydra.sweeper.max_batch_size or len(found), list[JobReturn]()
    for first in range(0, len(found), size):
        jobs += launcher.launch(found[first : first + size], initial_job_idx=first)
    report(jobs)


def points(arguments: list[str], loader: ConfigLoader, config: DictConfig) -> list[list[str]]:
    """The different points, each without the options that its components do not have.

    Says what it leaves out. Raises ValueError for an option that no component of the sweep has.
    """
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    choices = {override.key_or_group for override in overrides if loader.get_group_options(override.key_or_group)}
    parts_at = cache(lambda point: components(loader.load_sweep_config(config, list(point))))
    found: dict[tuple[str, ...], None] = {}
    kept: set[str] = set()
    left_out: dict[str, dict[str, list[str]]] = {}  # key -> component -> the options that it has
    for values in itertools.product(*map(written, overrides)):
        pairs = list(zip((override.key_or_group for override in overrides), values, strict=True))
        parts = parts_at(tuple(value for key, value in pairs if key in choices))
        point = []
        for key, value in pairs:
            kind, _, option = key.partition(".")
            if option and kind in parts and option.partition(".")[0] not in parts[kind]:
                own = [name for name in parts[kind] if name != "name"]
                left_out.setdefault(key, {})[parts[kind]["name"]] = own
            else:
                kept.add(key)
                point.append(value)
        found[tuple(point)] = None
    for key in left_out.keys() - kept:
        kind, _, option = key.partition(".")
        known = {name for own in left_out[key].values() for name in own}
        raise unknown(f"option of {kind} {' or '.join(map(repr, left_out[key]))}:", option, sorted(known))
    if left_out:
        told = sorted(f"{key} of {key.partition('.')[0]}={name}" for key, names in left_out.items() for name in names)
        say(f"# no such option, so not swept: {', '.join(told)}")
    return [list(point) for point in found]


def written(override: Override) -> list[str]:
    """The values of an override, each as an override of its own. Raises ValueError."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line}: an interval has no steps. Write range(START,STOP,STEP), or values")
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def report(jobs: Sequence[JobReturn]) -> None:
    """Names the points without a result; ends the program with a failure if some failed."""
    missed = [(job, job.return_value) for job in jobs if isinstance(job.return_value, Missed)]
    for failed, title in ((False, "left out, since the components cannot work together"), (True, "failed")):
        listed = [(job, miss) for job, miss in missed if miss.failed == failed]
        if listed:
            say(f"\n# {title}: {len(listed)} of {len(jobs)}")
        for job, miss in listed:
            say(f"{' '.join(job.overrides or [])}: {miss.reason}")
    if any(miss.failed for _, miss in missed):
        raise SystemExit(FAILED)
