"""Traces: what they hold is what happened, and the page shows it and lets nothing out."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support.browser import PROGRAM, dom, needs_chromium
from support.models import MASK, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.mixins import LeavesDecoded
from dinfer.lab.trace.record import Trace, document, embedded, page, record_request, spans
from tools.animation import animation

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
HOSTILE = "</script><script>document.title='owned'</script><!-- \u2028 & @@style@@ <img src=x onerror=alert(1)>"
DOCS = (Path(__file__).parents[3] / "docs" / "trace.md").read_text()


SWEEP = {"name": "blockwise", "block": 8, "stop": "off", "align": True}


def pipeline(variant: str = "bidirectional", *, cache: Any = "dual", decoder: Any = None, **more: Any) -> Pipeline:
    decoder = decoder or {"name": "threshold", "threshold": 0.2}
    parts = {"iteration": SWEEP, "decoder": decoder, "cache": cache, **more}
    return Pipeline(compose(tiny_model(variant), **parts), None, Runtime())


def recorded(pipe: Pipeline, new_tokens: int = 24, options: Any = None) -> Trace:
    return record_request(pipe, pipe.requests([PROMPT], new_tokens, options)[0])


RECIPES: list[dict[str, Any]] = [
    {"cache": "none"}, {"cache": "dual"}, {"cache": "prefix"}, {"cache": "delayed"}, {"cache": "vicinity"},
    {"cache": "block", "variant": "block_causal"},
    {"cache": "dual", "decoder": "remasking"}, {"cache": "prefix", "decoder": "wino"},
    {"cache": "none", "decoder": {"name": "threshold", "threshold": 0.9}, "iteration": SWEEP | {"name": "lopa"}},
    {"cache": "dual", "sampling": {"name": "standard", "temperature": 0.9, "guidance": 0.5, "seed": 1}},
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(str(v) for v in r.values())[:40])
def test_a_trace_replays_to_the_canvas_that_generate_returns(recipe: dict[str, Any]) -> None:
    pipe = pipeline(**recipe)
    trace = recorded(pipe)
    result = pipe.generate_ids([PROMPT], max_new_tokens=24)[0]
    canvas = PROMPT + [MASK] * 24
    for number, step in enumerate(trace.steps, 1):
        assert step.forward == number
        masked = {position for position, token in enumerate(canvas) if token == MASK}
        assert {offer.position for offer in step.offers} <= masked
        assert all(0 < offer.confidence <= 1 for offer in step.offers)
        for position in step.remasked:
            canvas[position] = MASK
        for position, token in step.commits:
            canvas[position] = token
        computed = {p for start, end in step.computed for p in range(start, end)}
        if step.phase != "prefill" and not isinstance(pipe.recipe.cache, LeavesDecoded):
            assert set(range(*step.region)) <= computed
    assert canvas == trace.canvas == result.canvas
    assert trace.counts["forwards"] == result.counts.forwards == len(trace.steps)
    assert trace.counts["tokens"] == result.counts.tokens
    assert trace.counts["refreshes"] == result.counts.refreshes == sum(step.refresh for step in trace.steps)
    assert sum(block.forwards for block in trace.blocks) == len(trace.steps)
    if pipe.recipe.iteration.blocks == 1:
        assert [block.region for block in trace.blocks] == [(8, 16), (16, 24), (24, 32)]


def test_what_is_computed_is_the_caches_window() -> None:
    assert all(step.computed == [(0, 32)] and not step.refresh for step in recorded(pipeline(cache="none")).steps)
    for step in recorded(pipeline(cache="dual")).steps:
        assert step.computed == ([(0, 32)] if step.phase == "full" else [step.region])
        assert step.refresh == (step.phase == "full")
    first = recorded(pipeline("block_causal", cache="block")).steps[0]
    assert (first.phase, first.computed, first.offers, first.commits) == ("prefill", [(0, 8)], [], [])


def test_an_offer_is_the_probability_of_the_likeliest_token() -> None:
    """Against the model's own logits of the whole canvas, which is what is computed without a cache."""
    pipe, canvas = pipeline(cache="none"), PROMPT + [MASK] * 24
    for step in recorded(pipe).steps:
        prob_SV = pipe.model.score(torch.tensor([canvas]))[0].softmax(-1)
        prob_SV[:, MASK] = 0
        for position, token, confidence in step.offers:
            assert token == int(prob_SV[position].argmax())
            assert confidence == pytest.approx(float(prob_SV[position, token]), abs=1e-4)
        for position, token in step.commits:
            canvas[position] = token


def test_gaps_are_recorded_too() -> None:
    pipe = pipeline(cache="none")
    canvas = [1, 2, MASK, 4, 5, 6, MASK, MASK, 9]
    request = Request(canvas, [token == MASK for token in canvas])
    trace = record_request(pipe, request)
    assert trace.masked == [2, 6, 7] == sorted(p for step in trace.steps for p, _ in step.commits)


def test_spans() -> None:
    assert spans([5, 3, 4, 9]) == [(3, 6), (9, 10)] and spans([]) == []


def described(trace: Trace, text: str = "x") -> dict[str, Any]:
    return json.loads(json.dumps(document(text, [trace])))


def test_the_documentation_names_every_field() -> None:
    found = described(recorded(pipeline()))
    run = found["runs"][0]
    for part in (found, run, run["steps"][0], run["blocks"][0], run["counts"], run["recipe"]):
        assert [name for name in part if f"`{name}`" not in DOCS] == []
    assert f"`{found['schema']}`" in DOCS


class _Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_whatever_the_texts_are() -> None:
    """The same elements as for a harmless text: no part of the hostile one is markup, no marker is filled in."""
    plain, hostile = described(recorded(pipeline())), described(recorded(pipeline()), HOSTILE)
    hostile["runs"][0] |= {"text": HOSTILE, "name": HOSTILE}
    hostile["runs"][0]["pieces"] = dict.fromkeys(hostile["runs"][0]["pieces"], HOSTILE)
    elements = _Elements(page(hostile)).found
    assert [tag for tag, _ in elements] == [tag for tag, _ in _Elements(page(plain)).found]
    assert not [attrs for _, attrs in elements if attrs.keys() & {"src", "href", "srcset", "action", "onclick"}]
    assert json.loads(embedded(hostile)) == hostile and not set("<>&\u2028") & set(embedded(hostile))
    policy = next(attrs["content"] for tag, attrs in elements if tag == "meta" and "http-equiv" in attrs)
    assert policy and policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/)", page(plain))


@needs_chromium
def test_the_page_shows_the_forward_that_is_asked_for(tmp_path: Path) -> None:
    """In a browser: its policy lets its own script run, and hostile texts stay texts."""
    first, second = recorded(pipeline()), recorded(pipeline(cache="none"))
    found = described(first) | {"runs": [described(first)["runs"][0], described(second)["runs"][0]]}
    found["runs"][0]["name"] = HOSTILE
    (tmp_path / "trace.html").write_text(page(found))
    shown = dom(tmp_path / "trace.html", tmp_path / "profile", "forward=2&view=confidence")
    assert "<title>Denoising: x</title>" in shown
    assert shown.count('<section class="run') == 2
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown and "<img" not in shown
    cells = re.findall(r'<li class="cell([^"]*)"[^>]*aria-label="([^"]*)"[^>]*>([^<]*)<', shown)
    assert len(cells) == 2 * 24
    fresh = [label for classes, label, _ in cells[:24] if "fresh" in classes]
    assert len(fresh) == len(first.steps[1].commits)
    assert all("committed by forward 2 with confidence" in label for label in fresh)
    masked = [label for classes, label, _ in cells[:24] if "masked" in classes]
    assert len(masked) == 24 - len(first.steps[0].commits) - len(fresh)
    assert sum("active" in classes for classes, *_ in cells[:24]) == 8
    assert re.search(r'role="status"[^>]*>Forward 2 of ', shown)


@needs_chromium
def test_the_page_is_played_by_keyboard(tmp_path: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    trace = recorded(pipeline())
    last = len(trace.steps)
    (tmp_path / "trace.html").write_text(page(described(trace)))
    with sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        tab = browser.new_page()
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text))
        tab.goto((tmp_path / "trace.html").as_uri())
        where = lambda: tab.inner_text("#where")  # noqa: E731
        assert where() == f"0 / {last}"
        for key, expected in (("ArrowRight", 1), ("End", last), ("ArrowLeft", last - 1), ("Home", 0)):
            tab.keyboard.press(key)
            assert where() == f"{expected} / {last}"
        tab.locator(".cell").first.focus()
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(".detail").startswith("Position 9: masked") and where() == f"0 / {last}"
        tab.select_option("#speed", "120")
        tab.click("#play")
        sync.expect(tab.locator("#where")).to_have_text(f"{last} / {last}")  # runs no script, which the policy forbids
        assert tab.get_attribute("#play", "aria-label") == "Play"
        for role, name in (("slider", "Forward"), ("combobox", "Colour by"), ("combobox", "Speed"), ("button", "Play")):
            assert tab.get_by_role(role, name=name).count() == 1
        assert errors == []
        browser.close()


@pytest.mark.parametrize("decoder", ["threshold", "remasking"])
def test_the_animation_shows_the_canvas_after_every_forward(decoder: str) -> None:
    trace = recorded(pipeline(decoder=decoder))
    hostile = replace(trace, stop_ids=[], pieces=trace.pieces | {trace.canvas[-1]: '</svg>&"\x1d'})
    root = ElementTree.fromstring(animation(json.loads(json.dumps(asdict(hostile))), HOSTILE))
    spans = [
        (element, *map(int, found.groups()))
        for element in root.iter()
        if (found := re.search(r"\bs(\d+)-(\d+)", element.get("class", "")))
    ]
    masked = dict.fromkeys(trace.masked, True)
    for number, step in enumerate([None, *trace.steps]):
        masked |= {} if step is None else dict.fromkeys(step.remasked, True) | {p: False for p, _ in step.commits}
        shown = [element.get("class", "").split()[0] for element, first, end in spans if first <= number < end]
        assert shown.count("mask") == sum(masked.values())
    card = next(element for element in root.iter() if element.get("class") == "card")  # its lines are 1 wide
    assert all(float(root.get(side, 0)) - float(card.get(side, 0)) == 1 for side in ("width", "height"))
    last = [element.text for element, _, end in spans if end > len(trace.steps) and element.text]
    assert last[1:] == ['</svg>&"·' if t == trace.canvas[-1] else trace.pieces[t] for t in trace.canvas[len(PROMPT) :]]
