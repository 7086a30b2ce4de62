"""Takes a command's arguments apart: the user's text, Hydra's flags, and overrides.

Text never goes through Hydra's grammar, so that it may hold anything. An argument is an override if it begins with
`name=` and the name is one that the configuration has, or a slip of the pen for one; `--` puts an end to overrides.
`-` stands for the text on standard input.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dinfer.cli.terminal import read_stdin
from dinfer.core.registry import unknown

_OVERRIDE = re.compile(r"[+]{0,2}(?P<root>[A-Za-z_]\w*)[\w./@:-]*=.*", re.DOTALL)
_SWITCHES = ("--multirun", "-m", "--resolve")
_SHOWN = ("job", "hydra", "all")
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd")


@dataclass(slots=True)
class Arguments:
    """A command's arguments, by what they are for."""

    text: str | None = None
    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)  # for Hydra
    multirun: bool = False


def flags_of(args: list[str]) -> Iterator[tuple[str, str]]:
    """What each argument would be as a flag with a value: `--flag=value`, or `--flag` and the argument behind it."""
    for arg, following in itertools.pairwise([*args, ""]):
        flag, equals, value = arg.partition("=")
        yield flag, value if equals else following


def split(
    args: list[str], *, roots: list[str], words: list[str], switches: Mapping[str, str], takes_text: bool
) -> Arguments:
    """Sorts `args`.

    `roots` are the first parts of all settings, `words` all that may be misspelt in an override, `switches` flags that
    stand for an override. Raises ValueError.
    """
    found, texts, rest = Arguments(), [], list(args)
    while rest:
        arg = rest.pop(0)
        flag, _, value = arg.partition("=")
        if arg == "--":
            texts += rest
            break
        if arg in switches:
            found.overrides.append(switches[arg])
        elif arg == "-" and takes_text:
            texts.append(read_stdin())
        elif arg in _SWITCHES:
            found.flags.append(arg)
            found.multirun |= arg in ("--multirun", "-m")
        elif flag in _WITH_VALUE:
            if not value and not rest:
                raise ValueError(f"{flag} needs a value")
            value = value or rest.pop(0)
            if flag in ("--cfg", "-c") and value not in _SHOWN:
                raise unknown(f"value of {flag}:", value, list(_SHOWN))
            found.flags += [flag, value]
        elif re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", arg):
            message = unknown("flag", flag, [*switches, *_SWITCHES, *_WITH_VALUE, "--help", "--"])
            raise ValueError(f"{message} Text that begins with a dash goes after `--`." if takes_text else str(message))
        elif (match := _OVERRIDE.fullmatch(arg)) is None:
            texts.append(arg)
        elif match["root"] in roots or texts or not takes_text or not _is_question(arg, match["root"], words):
            found.overrides.append(arg)
        else:
            texts.append(arg)
    if texts and not takes_text:
        raise ValueError(f"{texts[0]!r} is not an override (name=value) and this command takes no text")
    if len(texts) > 1:
        raise ValueError(f"{len(texts)} texts are given, {texts[0]!r} and {texts[1]!r}: put one question in quotes")
    found.text = texts[0] if texts else None
    return found


def _is_question(arg: str, root: str, words: list[str]) -> bool:
    """Whether something like `a=b` is a question: a slip of the pen in an override must not be taken for one."""
    return bool(re.search(r"\s", arg)) or not difflib.get_close_matches(root, words, 1)
