"""talks to a model, turn by turn

usage: dinfer chat [model=NAME] [overrides ...]
       dinfer chat < QUESTIONS > ANSWERS

Shows the canvas of an answer while it is denoised, and then its text. Ctrl-C ends an answer, and Ctrl-D ends the chat.
/help explains /set, /save and other commands. A line that ends in a backslash continues in the next one.

In a pipe each line is a question or a command, and standard output holds the answers alone.

Examples:
  dinfer chat model=llada2_mini device=cuda system="Answer in one sentence."
  printf '%s\\n' "What is 3 + 4?" "/set decoder.threshold=0.5" "And doubled?" | dinfer chat
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dinfer.cli.application import launch
from dinfer.cli.conf import pipeline, text_of
from dinfer.cli.terminal import debugging, failures, message, say, stdin_lines, unread

PROMPT, MORE = "> ", ". "


def run(args: Any) -> None:
    """Talks until the input ends."""
    if args.multirun:
        raise ValueError("-m starts one chat after the other: change a setting within the chat with /set instead")
    launch(args, partial(chat, folders=args.config_dirs))


def chat(config: dict[str, Any], *, folders: Sequence[str]) -> None:
    """Answers each line of standard input."""
    system = text_of(config, "system", None)
    from dinfer.cli.watch import Conversation, Ended, interruptible

    talk = Conversation(config, pipeline(config), system=system, folders=folders)
    if not sys.stdin.isatty():
        with suppress(Ended):
            for line in stdin_lines():
                talk.take(line.removesuffix("\n"))
        return
    survived: tuple[type[Exception], ...] = (ValueError, OSError, *failures())
    say("Ctrl-C ends an answer, Ctrl-D the chat. /help explains the commands.")
    with interruptible() as interrupts:
        for line in typed_lines():
            try:
                talk.take(line, interrupts)
            except Ended:
                return
            except survived as error:
                if debugging() or unread(error):
                    raise
                say(f"dinfer: {message(error)}")


def typed_lines() -> Iterator[str]:
    """What a person types, with the usual keys to edit it and to recall earlier lines."""
    import readline  # noqa: F401  # `input` then uses it

    while True:
        try:
            line = ask(PROMPT)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + ask(MORE)
        except KeyboardInterrupt:
            say("\n(Ctrl-D ends the chat)")
        except EOFError:
            say("")
            return
        else:
            yield line


def ask(prompt: str) -> str:
    """A line. The prompt goes to stderr if stdout is no terminal: that holds answers alone."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()
