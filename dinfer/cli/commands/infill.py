"""fills gaps in a text

usage: dinfer infill "The capital of [MASK:4] is Paris." [overrides ...]
       echo "text with gaps" | dinfer infill -

[MASK:n] is a gap of n tokens. A text may have any number of gaps, anywhere. \\[MASK:n] is that text itself. Prints the
text with its gaps filled on stdout. Prints what fills each gap, tokens, forwards, tokens per forward (TPF) and seconds
on stderr. max_new_tokens has no effect here.

  dinfer infill "Tom has [MASK:2] coins." "regex='[0-9]+'" scope=gap
  dinfer infill "[MASK:3] has [MASK:2] coins." "regex=['[A-Z][a-z]+','[0-9]+']" scope=gap
  dinfer infill "Tom has [MASK:2] coins." sampling.temperature=0.7 sampling.seed=3 decoder=fixed
"""

from functools import partial
from typing import Any

from dinfer.cli.application import launch
from dinfer.cli.conf import held_of, pipeline, setting
from dinfer.cli.terminal import say


def infill(config: dict[str, Any]) -> None:
    """Fills the gaps of the text."""
    stop, scope, held = setting(config, "stop", bool), setting(config, "scope", str), held_of(config)
    pipe = pipeline(config)
    from dinfer.core.pipeline.inputs import figures

    result = pipe.infill(config["text"], stop=stop, scope=scope, **held)
    print(result.text)
    for index, words in enumerate(result.gap_texts, 1):
        say(f"[{index}] {words}")
    say(figures(result.counts))


NEEDED = 'a text with gaps is needed: dinfer infill "The capital of [MASK:4] is Paris."'
run = partial(launch, task=infill, text="text", needed=NEEDED)
