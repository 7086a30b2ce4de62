"""reads the probabilities of a few answers

usage: dinfer read "question" choice=[yes,no] [overrides ...]
       dinfer read "question" "answer='It is [SLOT:what].'" "slots={what:[fish,fowl]}" [overrides ...]
       dinfer read "question" choice=[yes,no] image=FILE
       echo "question" | dinfer read - choice=[yes,no]

One forward, or a few (steps=2), says how probable each option is in its slot of the answer, whose other text stands
already. Prints a JSON object on stdout: the answer with the most probable options, and for each slot its choice, the
probabilities, what the model gives all options together (mass), and with seeds=8 the standard errors. Quote an answer
with markers for Hydra, as above, and options that it would take for numbers: "choice=['1','2']".
"""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from dinfer.cli.application import launch
from dinfer.cli.conf import asked, counted, pipeline, setting
from dinfer.cli.terminal import say, several


def read(config: dict[str, Any]) -> None:
    """Reads the slots of the answer to the prompt."""
    answer, chat = setting(config, "answer", str | None), setting(config, "chat", bool | None)
    slots_of = {"choice": setting(config, "choice", tuple[str, ...] | None), "slots": config["slots"]}
    prompt = asked(config, chat)
    steps, seeds, seed = counted(config, "steps"), counted(config, "seeds"), setting(config, "seed", int)
    found = pipeline(config).read(prompt, answer, **slots_of, steps=steps, seeds=seeds, seed=seed, chat=chat)
    slots = {name: asdict(slot) for name, slot in found.slots.items()}
    print(json.dumps({"text": found.text, "slots": slots}, ensure_ascii=False, indent=2))
    forwards, seconds = sum(one.forwards for one in found.counts), max(one.seconds for one in found.counts)
    say(f"{several(len(slots), 'slot')}, {several(forwards, 'forward')}, {seconds:.2f} s")


NEEDED = 'a question is needed: dinfer read "question" choice=[yes,no]'
run = partial(launch, task=read, text="prompt", needed=NEEDED)
