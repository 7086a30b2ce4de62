"""The page as a reader meets it, in Chromium and in Firefox: one server and one window for all tests of a browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.browser import ENTER, ESCAPE, RIGHT, Browser, opened
from support.serving import Client, listening, served

from dinfer.serving.settings import Settings
from tools.vendor import published

QUESTION = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"
SHORT = "What is 12 + 5?"
MARKDOWN = """# A title

A **bold** word, `code` and [a link](https://example.org), [not one](javascript:alert(1)).

```python
first = 1

second = 2
```

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="window.broken = 1"><script>window.broken = 1</script> ![picture](https://example.org/x.png)
"""
IDLE = "document.getElementById('halt').hidden"
ANSWERED = f"({IDLE} && document.querySelector('.turn:last-child .answer .below > *') !== null)"
SCRIPTED = (Path(__file__).parent.parent / "support" / "scripted_chat.js").read_text()
AXE = "axe-core", "4.14.1", "axe.min.js"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(Settings(port=0), careful={"decoder": {"name": "fixed", "steps": 32}, "cache": "none"}) as found:
        yield found


@pytest.fixture(scope="module")
def address(client: Client) -> Iterator[str]:
    with listening(client) as found:
        yield found


@pytest.fixture(scope="module", params=["chromium", pytest.param("firefox", marks=pytest.mark.rest)])
def window(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(request.param, tmp_path_factory.mktemp("profile"), 1280, 800) as found:
        yield found


@pytest.fixture
def page(window: Browser, address: str) -> Iterator[Browser]:
    """The page as someone sees it who comes for the first time. No test leaves an error in the console."""
    window.size(1280, 800)
    begin(window, address)
    yield window
    assert window.complaints() == []


def begin(page: Browser, address: str, *, clean: bool = True) -> None:
    page.get(address)
    if clean:
        page.js("localStorage.clear()")
        page.get("about:blank")  # an address that differs after # alone loads nothing
        page.get(address)
    page.until("document.querySelectorAll('#controls .control').length > 3")


def reload(page: Browser) -> None:
    page.js("window.old = true; location.reload()")
    page.until("!window.old && document.querySelectorAll('#controls .control').length > 3")


def ask(page: Browser, question: str) -> None:
    page.type("#question", question + ENTER)
    page.until(ANSWERED)


def texts(page: Browser, css: str) -> list[str]:
    return page.js("return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText.trim())", css)


def requests_of(page: Browser) -> None:
    """Keeps the bodies of all requests in window.sent."""
    page.js("""
        const real = window.fetch;
        window.sent = [];
        window.fetch = (path, given) => {
          window.sent.push([path, given.body && JSON.parse(given.body)]);
          return real(path, given);
        };
    """)


def shot(page: Browser, name: str) -> None:
    """For the documentation: DINFER_SCREENSHOTS=FOLDER."""
    if (folder := os.environ.get("DINFER_SCREENSHOTS")) and page.name == "chromium":
        page.shot(Path(folder) / f"{name}.png")


def test_a_dropped_picture_goes_with_the_question_and_is_kept(page: Browser) -> None:
    drop = """
        const given = new DataTransfer();
        for (const [name, type, bytes] of arguments[0])
          given.items.add(new File([new Uint8Array(bytes)], name, { type }));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
    """
    page.js(drop, [["a.png", "image/png", [1, 2, 3]], ["b.gif", "image/gif", [4]]])
    page.until("document.querySelectorAll('#pictures img').length === 2")
    page.click("#pictures figure:last-child button")
    page.until("document.querySelectorAll('#pictures img').length === 1")
    page.js(drop, [["notes.txt", "text/plain", [1]], ["large.png", "image/png", [0] * 10]])
    page.until("document.getElementById('error').textContent.startsWith('notes.txt is no picture')")
    page.js("""
        window.sent = [];
        window.fetch = async (path, given) => {
          window.sent.push(JSON.parse(given.body));
          throw new Error("stopped here");
        };
    """)
    ask(page, SHORT)
    parts = page.js("return window.sent[0].messages[0].content")
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"] and parts[2]["text"] == SHORT
    assert parts[0]["image_url"] == {"url": "data:image/png;base64,AQID"}
    assert page.js("return document.getElementById('pictures').hidden") is True
    reload(page)
    assert page.js("return document.querySelectorAll('.bubble img').length") == 2


def drop_wide(page: Browser) -> None:
    """Drops six wide pictures."""
    page.js("""
        const board = Object.assign(document.createElement("canvas"), { width: 3000, height: 40 });
        board.toBlob((blob) => {
          const given = new DataTransfer();
          for (let i = 0; i < 6; i++)
            given.items.add(new File([blob], `${"long".repeat(9)}${i}.png`, { type: blob.type }));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
        });
    """)
    page.until("document.querySelectorAll('#pictures img').length === 6")


def test_pictures_fit_a_phone(page: Browser) -> None:
    """Wide ones and many of them, before they are sent and in the conversation."""
    drop_wide(page)
    page.size(390, 844)
    outside = """
        const width = document.documentElement.clientWidth;
        const seen = "#pictures figure, #pictures button, .bubble, .bubble img, #ask, #send";
        return [document.documentElement.scrollWidth > width ? "page" : "", ...[...document.querySelectorAll(seen)]
          .map((part) => [part.outerHTML.slice(0, 60), part.getBoundingClientRect()])
          .filter(([, box]) => box.width && (box.left < -1 || box.right > width + 1))
          .map(([name]) => name)].filter(Boolean);
    """
    fits = f"!(() => {{{outside}}})().length"
    try:
        page.until(fits)  # a browser lays a page out anew some time after its size has changed
        shot(page, "serve_page_phone_pictures")
        page.js("window.real ??= window.fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
        ask(page, SHORT)
        page.until("document.querySelectorAll('.bubble img').length === 6")
        page.until(fits)
    finally:
        page.js("window.fetch = window.real ?? window.fetch")
        page.size(1280, 800)


def test_an_answer_is_the_librarys_and_is_kept_over_a_reload(client: Client, address: str, page: Browser) -> None:
    (want,) = client.pipe.generate([[{"role": "user", "content": QUESTION}]], max_new_tokens=64)
    assert page.js("return [document.title, document.activeElement.id]") == ["dinfer", "question"]
    page.js("""
        new MutationObserver(() => {
          if (document.querySelectorAll(".running .decided").length > 2)
            window.during ??= [document.title, favicon.href, document.querySelector(".canvas .fold").textContent];
        }).observe(document.getElementById("turns"), { subtree: true, childList: true });
    """)
    page.type("#question", QUESTION + ENTER)
    if "DINFER_SCREENSHOTS" in os.environ:
        page.until("document.querySelectorAll('.decided').length > 20 && document.querySelector('.canvas .guess')")
        shot(page, "serve_page")
    page.until(ANSWERED)
    assert texts(page, ".answer .text") == [want.text]
    assert f"{want.counts.tokens} tokens · {want.counts.forwards} steps" in texts(page, ".facts")[0]
    assert f"+{64 - want.counts.tokens}" in texts(page, ".facts .fold"), "unused positions are one mark"
    during = page.js("return window.during")
    assert during[0].startswith("Answering… ") and during[1].endswith("icon-busy.svg") and during[2].startswith("+")
    assert page.js("return document.title").startswith("Take the number 71")
    assert page.js("return document.getElementById('favicon').href").endswith("icon.svg")
    assert page.js("return document.getElementById('said').textContent").endswith(want.text.splitlines()[-1])
    loaded = page.js("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(address) for name in loaded)

    reload(page)
    assert texts(page, ".answer .text") == [want.text] and texts(page, ".bubble") == [QUESTION]
    page.click(".replays")
    page.until("document.querySelector('.replay .decided') !== null")
    shown = "document.querySelectorAll('.replay .decided').length"
    slide = "const bar = document.querySelector('.replay input'); bar.value = arguments[0]; "
    slide += f"bar.dispatchEvent(new Event('input')); return {shown}"
    assert page.js(slide, 0) == 0 < page.js(slide, 3) < page.js(slide, 999)
    page.js("document.querySelector('.replay .token').focus()")
    assert "Position 1: decided" in texts(page, ".replay .about")[0]
    page.type(".replay .token", RIGHT)
    assert "Position 2: " in texts(page, ".replay .about")[0]

    page.js("document.querySelector('#chat-list li .icon').click()")
    assert texts(page, "#chat-list .armed") == ["Delete?"] and len(texts(page, ".turn")) == 1
    page.js("document.querySelector('#chat-list .armed').click()")
    kept = "Object.keys(localStorage).filter((key) => key.startsWith('dinfer.chat')).length"
    assert page.js(f"return [document.querySelectorAll('.turn').length, {kept}]") == [0, 0]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_newest_answer_stays_in_view_unless_the_reader_scrolled_up(page: Browser, width: int) -> None:
    page.size(width, 800)
    page.js(SCRIPTED, "one two three four five six\n\n" * 12, 20)
    bottom = "[...document.querySelectorAll('.turn .canvas, .turn .below')].at(-1).getBoundingClientRect().bottom"
    seen = f"{bottom} <= document.querySelector('footer').getBoundingClientRect().top"
    ask(page, "First")
    page.js("window.most = 12")  # the first block and a half
    page.type("#question", "Second" + ENTER)
    for paragraphs in (1, 5):
        written = f"document.querySelectorAll('.turn:nth-child(2) .text p').length >= {paragraphs}"
        page.until(f"document.querySelector('.running') && {written} && {seen}")
    answer, over, composer = page.js("""
        return [document.querySelector(".answer").getBoundingClientRect().width,
          document.documentElement.scrollWidth - innerWidth,
          document.getElementById("ask").getBoundingClientRect().bottom];
    """)
    assert answer <= 760 and over <= 0 and composer <= 800
    page.js("document.getElementById('log').scrollTop = 0; window.most = Infinity")
    page.until("!document.getElementById('newest').hidden")
    page.until(ANSWERED)
    assert page.js("return document.getElementById('log').scrollTop") == 0
    page.click("#newest")
    page.until(f"{seen} && document.getElementById('newest').hidden")


def test_the_length_follows_the_room_and_a_full_conversation_offers_a_new_one(page: Browser) -> None:
    page.js(SCRIPTED, "word " * 12, 1)
    requests_of(page)
    while not texts(page, ".notice"):
        ask(page, SHORT)
    rooms = page.js("return window.sent.filter(([path]) => path.includes('chat')).map(([_, body]) => body.max_tokens)")
    assert rooms[0] == 64 > rooms[-1] >= 32
    assert "This conversation is full" in texts(page, ".notice")[0]
    notice = "document.querySelector('.notice').getBoundingClientRect().bottom"
    assert page.js(f"return {notice} <= document.querySelector('footer').getBoundingClientRect().top")
    shot(page, "serve_page_full")
    page.click(".notice button")
    page.until(ANSWERED)
    assert texts(page, ".bubble") == [SHORT] and texts(page, ".notice") == [] and len(texts(page, "#chat-list li")) == 2
    page.click("#fresh")
    ask(page, "x" * 600)
    assert "question is too long" in texts(page, ".notice")[0] and texts(page, ".notice button") == []


def test_what_a_model_writes_becomes_text_and_never_markup_of_its_own(page: Browser) -> None:
    page.js(SCRIPTED, MARKDOWN, 10, "It *thinks*.", 10)
    page.type("#question", "Write" + ENTER)
    page.until("document.querySelector('.running .text h1') !== null && document.querySelector('.canvas .token')")
    page.js("window.most = Infinity")
    page.until(ANSWERED)
    assert texts(page, ".thought summary") == ["Thoughts"] and texts(page, ".thought[open]") == []
    has = "return arguments[0].map((css) => document.querySelectorAll(`.answer .body > .text ${css}`).length)"
    kept = ["h1", "strong", ".code pre", ".code button", "td", "a[target=_blank][rel~=noopener]"]
    assert page.js(has, kept) == [1, 1, 1, 1, 2, 1]
    assert page.js(has, ["img", "script", "[style]", "[onerror]", "a[href^=javascript]"]) == [0, 0, 0, 0, 0]
    assert "first = 1\n\nsecond = 2" in texts(page, ".code pre")[0] and page.js("return window.broken ?? null") is None
    assert '<img src=x onerror="window.broken = 1">' in texts(page, ".body > .text")[0], "it is shown as it stands"


def test_settings_have_names_and_reach_the_request(client: Client, page: Browser) -> None:
    card = client.ask("/v1/models/tiny").json()["dinfer"]["options"]
    page.click("#settings-button")
    labels = page.js("return [...document.querySelectorAll('#controls label')].map((one) => one.textContent)")
    assert len(labels) == len(card) + 3 and not set(labels) & set(card), "their own, length, system prompt, colours"
    assert {*card, "max_tokens", "system"} == set(page.js(
        "return [...document.querySelectorAll('#controls .raw')].map((one) => one.textContent)"))  # fmt: skip
    wide = page.js("return [document.getElementById('settings').getBoundingClientRect().left, "
                   "document.querySelector('footer').getBoundingClientRect().right]")  # fmt: skip
    assert wide[0] >= wide[1], "they stand beside the conversation"
    shot(page, "serve_page_settings")
    page.type("#system", "Be brief.")
    page.js("""
        for (const [id, value] of [["set-threshold", 0.95], ["set-max_tokens", 60], ["set-seed", 3]]) {
          document.getElementById(id).value = value;
          document.getElementById(id).dispatchEvent(new Event("input"));
        }
    """)
    requests_of(page)
    ask(page, QUESTION)
    sent = page.js("return window.sent.at(-1)[1]")
    assert sent["dinfer"] == {"threshold": 0.95, "seed": 3, "drafts": True} and sent["max_tokens"] == 60
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.size(390, 844)
    page.until("document.getElementById('settings').hidden")
    shot(page, "serve_page_phone")
    page.click("#settings-button")
    assert page.js("return document.querySelector('#sheet[open] #set-threshold').value") == "0.95", (
        "a sheet, on a phone"
    )
    page.type("#system", ESCAPE)
    page.until("!document.getElementById('sheet').open && document.activeElement.id === 'settings-button'")


def test_a_question_is_edited_asked_again_and_copied(page: Browser) -> None:
    ask(page, QUESTION)
    ask(page, SHORT)
    page.js("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.js("document.querySelectorAll('.answer [title=\"Copy the answer\"]')[0].click()")
    assert page.js("return window.copied") == texts(page, ".answer .text")[0]
    page.js("document.querySelectorAll('.answer [title=\"Ask again\"]')[1].click()")
    page.until(ANSWERED)
    assert texts(page, ".bubble") == [QUESTION, SHORT]
    page.js("document.querySelector('.asked [title=\"Edit the question\"]').click()")
    assert page.js("return document.activeElement.value") == QUESTION
    page.js("document.activeElement.value = 'What is 7 + 8?'")
    page.js("document.querySelector('.editing .main').click()")
    page.until(ANSWERED)
    assert texts(page, ".bubble") == ["What is 7 + 8?"] and texts(page, ".answer .text")[0]


def test_what_fails_can_be_tried_again_and_what_runs_can_be_stopped(page: Browser) -> None:
    page.js("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page, QUESTION)
    assert "The server does not answer" in texts(page, ".notice.bad")[0] and texts(page, ".bubble") == [QUESTION]
    page.js("window.fetch = window.real")
    page.click(".notice button")
    page.until(f"{ANSWERED} && document.querySelector('.facts') !== null")
    assert texts(page, ".notice") == [] and len(texts(page, ".turn")) == 1
    page.js(SCRIPTED, "word " * 128, 1, "", 4)
    page.type("#question", "Go on" + ENTER)
    page.until("document.querySelectorAll('.canvas .decided').length > 3")
    page.type("#question", ESCAPE)
    page.until(ANSWERED)
    assert "Stopped." in texts(page, ".turn:last-child .notice")[0]
    assert page.js("return document.querySelectorAll('.turn:last-child .canvas .decided').length") > 3, "as it stood"
    page.js("window.fetch = window.real")
    page.js("document.getElementById('question').value = 'half a word'")
    page.js("document.getElementById('question').dispatchEvent("
            "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true }))")  # fmt: skip
    assert len(texts(page, ".turn")) == 2, "Enter that ends a composed word sends nothing"


def test_two_recipes_stand_side_by_side(page: Browser) -> None:
    page.click("#compare")
    ask(page, QUESTION)
    assert [who.split("\n")[0] for who in texts(page, ".who")] == ["tiny", "tiny:careful"]
    assert len(texts(page, ".answer .text")) == 2 and "tiny beside tiny:careful" in texts(page, "#versus")[0]
    left, right = page.js(
        "return [...document.querySelectorAll('.answer')].map((one) => one.getBoundingClientRect().top)"
    )
    assert left == right
    page.js("document.querySelectorAll('.choice')[1].click()")
    requests_of(page)
    ask(page, SHORT)
    sent = page.js("return window.sent.filter(([path]) => path.includes('chat')).map(([_, body]) => body)")
    assert {body["model"] for body in sent} == {"tiny", "tiny:careful"} and len(sent) == 2
    assert {body["messages"][1]["content"] for body in sent} == {texts(page, ".answer .text")[1]}, "the chosen answer"


def test_a_key_is_asked_for_and_one_recipe_is_compared_by_thresholds(
    window: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_KEY", "secret-of-the-page")
    with served(Settings(port=0, api_key="env:PAGE_KEY")) as locked, listening(locked) as address:
        window.get(address)
        window.until("!document.getElementById('unlock').hidden")
        window.type("#question", QUESTION + ENTER)
        assert window.js("return document.getElementById('question').value") == QUESTION
        window.type("#key", "secret-of-the-page" + ENTER)
        window.until("document.getElementById('unlock').hidden")
        window.click("#compare")
        window.click("#send")
        window.until(ANSWERED)
        names = [who.split("\n")[0] for who in texts(window, ".who")]
        assert names == ["tiny · confidence 0.9", "tiny · confidence 0.6"] and len(texts(window, ".facts")) == 2
        shot(window, "serve_page_compare")
        window.complaints()  # of the 401, which this test is about


def test_gaps_are_filled(client: Client, page: Browser) -> None:
    text = "<|user|>What is 12 + 5?<|assistant|>12 + 5 = [MASK:2]"
    page.type("#tab-chat", RIGHT)
    assert page.js("return document.activeElement.id") == "tab-fill"
    page.type("#question", "no gap" + ENTER)
    assert "has no gap" in page.js("return document.getElementById('error').textContent")
    page.js("document.getElementById('question').value = ''")
    page.click("#gap-button")
    page.type("#question", "9")
    assert page.js("return document.getElementById('question').value") == "[MASK:9]", "its length is typed over"
    page.js("document.getElementById('question').value = ''")
    ask(page, text)
    (gap,) = client.pipe.infill(text).gap_texts
    assert texts(page, ".filled mark") == [gap.strip()] and texts(page, ".bubble .gap") == ["2"]
    shot(page, "serve_page_fill")


def test_an_answer_is_held_to_a_shape_and_shows_what_it_forced(page: Browser) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    page.click("#form-button")
    page.js("document.querySelector('#form-kinds [value=json]').click()")
    page.type("#form-text", '{"type": ')
    page.click("#form-use")
    page.until("document.getElementById('form-error').textContent.includes('The JSON Schema is not JSON')")
    page.js("document.getElementById('form-text').value = arguments[0]", json.dumps(schema))
    page.click("#form-use")
    assert texts(page, "#form-name") == ["JSON"]
    ask(page, QUESTION)
    shown = texts(page, ".answer .code pre")[0]
    assert isinstance(json.loads(shown)["answer"], int) and shown.startswith('{\n  "answer": ')
    page.click(".replays")
    page.until("document.querySelector('.replay .forced') !== null")
    styles = "return ['.forced', '.decided:not(.forced)'].map((css) => getComputedStyle("
    styles += "document.querySelector(`.replay ${css}`)).borderBottomStyle)"
    page.until("document.querySelector('.replay .decided:not(.forced)') !== null")
    assert page.js(styles) == ["double", "none"], "colour is not all that tells them apart"


@pytest.fixture(scope="module")
def axe() -> str:
    try:
        return published(*AXE).decode()
    except (OSError, CalledProcessError) as error:
        pytest.skip(f"axe-core cannot be brought from the npm registry: {error}")


@pytest.mark.rest  # seven seconds each
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Browser, address: str, axe: str, theme: str) -> None:
    if page.name == "firefox":
        pytest.skip("the same page, and Chromium has said it")
    page.js("localStorage.setItem('dinfer.settings', JSON.stringify({ theme: arguments[0] }))", theme)
    reload(page)
    page.js(axe)

    def serious(where: str) -> list[Any]:
        found = page.js("""
            for (const one of document.getAnimations()) one.finish();
            return axe.run().then(({ violations }) => violations
              .filter(({ impact }) => ["serious", "critical"].includes(impact))
              .map(({ id, nodes }) => [id, nodes[0].html]));
        """)
        return [(where, *one) for one in found]

    found = serious("empty")
    ask(page, QUESTION)
    page.click(".replays")
    page.js("const bar = document.querySelector('.replay input'); bar.value = 6; bar.dispatchEvent(new Event('input'))")
    page.js("""
        for (const line of ["canvas", "canvas heat"])
          for (const kind of ["guess", "decided"])
            for (let sure = 0; sure <= 10; sure++) {
              const word = document.createElement("span");
              Object.assign(word, { className: `token ${kind}`, textContent: "word" });
              const found = Object.assign(document.createElement("p"), { className: line });
              word.dataset.sure = sure;
              found.append(word);
              document.querySelector(".replay").before(found);
            }
    """)
    found += serious("replay, and every sureness")
    page.js("for (const one of document.querySelectorAll('.body > p.canvas')) one.remove()")
    shot(page, f"serve_page_{theme}")
    page.js(SCRIPTED, MARKDOWN, 1)
    ask(page, "Write")
    page.js("window.fetch = window.real")
    found += serious("answers")
    page.click("#settings-button")
    page.js("for (const more of document.querySelectorAll('#controls details')) more.open = true")
    found += serious("settings")
    page.click("#compare")
    page.js("window.fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page, QUESTION)
    page.js("window.fetch = window.real")
    found += serious("compare, and errors")
    page.click("#form-button")
    page.js("document.querySelector('#form-kinds [value=json]').click()")
    found += serious("shape")
    page.js("document.getElementById('form').close()")
    page.size(390, 844)
    page.click("#tab-fill")
    ask(page, "<|user|>What is 12 + 5?<|assistant|>12 + 5 = [MASK:2]")
    found += serious("phone, gaps")
    page.click("#chats-button")
    found += serious("phone, conversations")
    begin(page, address)
    page.js("localStorage.setItem('dinfer.settings', JSON.stringify({ theme: arguments[0] }))", theme)
    reload(page)
    page.js(axe)
    drop_wide(page)
    found += serious("phone, pictures")
    page.js("window.fetch = () => Promise.reject(new TypeError('gone'))")
    ask(page, SHORT)
    page.until("document.querySelectorAll('.bubble img').length === 6")
    found += serious("phone, pictures of a question")
    assert found == []
