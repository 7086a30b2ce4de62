"""answers a question

usage: dinfer generate "question" [--watch] [overrides ...]
       dinfer generate -- "--a question that begins with a dash"
       echo "question" | dinfer generate -

Prints the answer on stdout; on a terminal, while it is decoded. Prints tokens, forwards, tokens per forward (TPF) and
seconds on stderr. An answer may be empty, if the model ends it at once: stderr says so.

Components and their options are overrides; `dinfer list` shows all of them:
  dinfer generate "question" decoder=threshold decoder.threshold=0.8 cache=prefix iteration.block=16
  dinfer generate "question" model=llada_8b_instruct device=cuda
  dinfer generate "question" model.checkpoint=/path/to/folder
  dinfer generate "question" image=FILE          # a picture, for a model with a vision tower
  dinfer generate "question" schema=FILE         # or regex='...', choice=[yes,no], grammar=FILE: the answer's form
  dinfer generate "question" -m decoder.threshold=0.5,0.7,0.9
"""

import sys
from functools import partial
from typing import Any

from dinfer.cli.application import Parser, launch
from dinfer.cli.conf import asked, held_of, pipeline, setting
from dinfer.cli.terminal import say


def arguments(parser: Parser) -> None:
    parser.add_argument(
        "--watch", dest="overrides", action="append_const", const="watch=true",
        help="show the canvas while it is denoised: masks, commits, the active block",
    )  # fmt: skip


def generate(config: dict[str, Any]) -> None:
    """Answers the prompt."""
    chat, new_tokens = setting(config, "chat", bool | None), setting(config, "max_new_tokens", int)
    live, delay = setting(config, "watch", bool), setting(config, "delay", float)
    held, prompt = held_of(config), asked(config, chat)
    pipe = pipeline(config)
    from dinfer.cli.watch import explain_empty, watch, write_answer
    from dinfer.core.pipeline.inputs import figures

    if live:
        updates = pipe.updates(prompt, max_new_tokens=new_tokens, chat=chat, **held)
        counts = watch(pipe, pipe.encode(prompt, chat=chat), updates, delay).counts
    elif sys.stdout.isatty():
        counts = write_answer(pipe.stream(prompt, max_new_tokens=new_tokens, chat=chat, **held)).counts
    else:
        result = pipe.generate(prompt, max_new_tokens=new_tokens, chat=chat, **held)
        print(result.text)
        counts = result.counts
    say(figures(counts))
    explain_empty(pipe, counts)


NEEDED = 'a question is needed: dinfer generate "question"'
run = partial(launch, task=generate, text="prompt", needed=NEEDED)
