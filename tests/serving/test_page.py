"""The page as a browser shows it: a question is typed, the answer appears, and it is the library's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from support.browser import chromium, needs_chromium
from support.serving import Client, listening, served

from dinfer.serving.settings import Settings

DRIVER = shutil.which("chromedriver")
pytestmark = [needs_chromium, pytest.mark.skipif(DRIVER is None, reason="no chromedriver on this machine")]
SECONDS = 30
QUESTION = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(Settings(port=0), careful={"decoder": {"name": "fixed", "steps": 32}, "cache": "none"}) as found:
        yield found


@pytest.fixture(scope="module")
def address(client: Client) -> Iterator[str]:
    with listening(client) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile"), "1200,1000") as found:
        yield found


def until(browser: Any, script: str) -> Any:
    return WebDriverWait(browser, SECONDS, 0.05).until(lambda driver: driver.execute_script(f"return {script}"))


def answers(browser: Any) -> list[str]:
    return [found.text for found in browser.find_elements(By.CSS_SELECTOR, "#chat .answer")]


def test_a_question_is_answered_as_the_library_does(client: Client, address: str, browser: Any) -> None:
    browser.get(address)
    length = int(until(browser, "document.querySelector('.settings input')?.value"))
    (want,) = client.pipe.generate([[{"role": "user", "content": QUESTION}]], max_new_tokens=length)
    browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
    until(browser, "document.querySelectorAll('.canvas .cell.final').length > 20")
    if shots := os.environ.get("DINFER_SCREENSHOTS"):  # for the documentation
        browser.save_screenshot(str(Path(shots) / "serve_page.png"))
    until(browser, "document.querySelector('.facts button') !== null")
    assert answers(browser) == [want.text]
    assert f"{want.counts.tokens} tokens in {want.counts.forwards} forwards" in browser.page_source


def test_the_saved_trace_is_that_of_the_answer(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.execute_script("""
        const labels = [...document.querySelectorAll(".settings label")];
        labels.find((label) => label.textContent.startsWith("temperature")).querySelector("input").value = 1;
        URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return ""; };
        HTMLAnchorElement.prototype.click = () => {};
    """)
    browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
    until(browser, "document.querySelector('.facts button') !== null")
    browser.find_element(By.CSS_SELECTOR, ".facts button").click()
    (answer,) = answers(browser)
    assert answer and answer.splitlines()[0] in until(browser, "window.saved")


def test_two_recipes_stand_side_by_side(client: Client, address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.find_element(By.ID, "compare").click()
    browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
    until(browser, "document.querySelectorAll('.facts button').length === 2")
    shown = [s.get_attribute("value") for s in browser.find_elements(By.CSS_SELECTOR, ".side select")]
    assert shown == ["tiny", "tiny:careful"] and len(answers(browser)) == 2
    if shots := os.environ.get("DINFER_SCREENSHOTS"):
        browser.save_screenshot(str(Path(shots) / "serve_compare.png"))


def test_gaps_are_filled_by_keyboard_alone(client: Client, address: str, browser: Any) -> None:
    text = "<|user|>What is 12 + 5?<|assistant|>12 + 5 = [MASK:2]"
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.find_element(By.ID, "tab-chat").send_keys(Keys.ARROW_RIGHT)
    browser.find_element(By.ID, "gaps").send_keys(text)
    browser.find_element(By.CSS_SELECTOR, "#fill .main").send_keys(Keys.ENTER)
    until(browser, "document.getElementById('filled').textContent !== ''")
    (gap,) = client.pipe.infill(text).gap_texts
    assert browser.find_element(By.ID, "filled").text == text.replace("[MASK:2]", gap)
    assert [mark.text for mark in browser.find_elements(By.CSS_SELECTOR, "#filled mark")] == [gap]


def test_what_fails_can_be_tried_again(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.execute_script("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
    until(browser, "document.querySelector('.retry') !== null")
    assert "does not answer" in browser.find_element(By.CSS_SELECTOR, ".facts").text
    assert browser.find_element(By.CSS_SELECTOR, ".user").text == QUESTION
    browser.execute_script("window.fetch = window.real")
    browser.find_element(By.CSS_SELECTOR, ".retry").click()
    until(browser, "document.querySelector('.replay') !== null && document.querySelector('.facts button') !== null")
    assert len(answers(browser)) == 1 and answers(browser)[0]


def test_the_denoising_is_replayed_and_a_new_chat_keeps_settings(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.find_element(By.CSS_SELECTOR, "#examples button").click()
    browser.execute_script("document.querySelector('.settings input').value = 64")
    browser.find_element(By.ID, "send").click()
    until(browser, "document.querySelector('.facts button') !== null")
    decided = "return document.querySelectorAll('.cell.final').length"
    whole = browser.execute_script(decided)
    slide = "const bar = document.querySelector('.replay input'); bar.value = 1; bar.dispatchEvent(new Event('input'))"
    browser.execute_script(slide)
    assert 0 <= browser.execute_script(decided) < whole
    browser.find_element(By.ID, "fresh").click()
    assert browser.execute_script("return [document.querySelectorAll('.turn').length, "
                                  "document.querySelector('.settings input').value]") == [0, "64"]  # fmt: skip


def test_an_answer_is_held_to_a_schema_and_shows_what_it_forced(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.find_element(By.CSS_SELECTOR, "#form summary").click()
    schema = browser.find_element(By.ID, "schema")
    schema.send_keys('{"type": ')
    browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
    until(browser, "document.getElementById('error').textContent.includes('The JSON Schema is not JSON')")
    assert browser.find_element(By.ID, "question").get_attribute("value") == QUESTION
    schema.clear()
    schema.send_keys('{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}')
    assert browser.find_element(By.CSS_SELECTOR, "#form summary").text == "JSON Schema: on"
    browser.find_element(By.ID, "send").click()
    until(browser, "document.querySelector('.facts button') !== null")
    assert isinstance(json.loads(answers(browser)[0])["answer"], int)
    forced = browser.find_elements(By.CSS_SELECTOR, ".canvas .cell.forced")
    assert forced and browser.find_element(By.CSS_SELECTOR, ".legend").is_displayed()
    forced[0].click()
    assert "the JSON Schema left no other token" in browser.find_element(By.CSS_SELECTOR, ".turn .about").text
    lines = {state: browser.execute_script("return getComputedStyle(arguments[0]).borderBottomStyle", found)
             for state in ("forced", "final:not(.forced)")
             for found in browser.find_elements(By.CSS_SELECTOR, f".canvas .cell.{state}")[:1]}  # fmt: skip
    assert lines == {"forced": "double", "final:not(.forced)": "solid"}, "colour is not all that tells them apart"
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_the_key_is_asked_for_before_anything_is_sent(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_KEY", "secret-of-the-page")
    with served(Settings(port=0, api_key="env:PAGE_KEY")) as locked, listening(locked) as address:
        browser.get(address)
        until(browser, "!document.getElementById('unlock').hidden")
        browser.find_element(By.ID, "question").send_keys(QUESTION + Keys.ENTER)
        assert browser.find_element(By.ID, "question").get_attribute("value") == QUESTION
        browser.find_element(By.ID, "key").send_keys("secret-of-the-page" + Keys.ENTER)
        until(browser, "document.getElementById('unlock').hidden")
        browser.find_element(By.ID, "send").click()
        until(browser, "document.querySelector('.facts button') !== null")
        browser.get_log("browser")  # the answers of 401, which this test is about


def test_enter_that_ends_a_composed_word_sends_nothing(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    browser.find_element(By.ID, "question").send_keys(QUESTION)
    browser.execute_script(
        "document.getElementById('question').dispatchEvent("
        "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true }))"
    )
    assert browser.find_elements(By.CSS_SELECTOR, ".turn") == []
    assert browser.find_element(By.ID, "question").get_attribute("value") == QUESTION


def test_the_page_asks_nobody_else_and_breaks_no_rule(address: str, browser: Any) -> None:
    browser.get(address)
    until(browser, "document.querySelector('.settings input') !== null")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(address) for name in loaded)
    said = [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]
    assert [entry["message"] for entry in said if entry["level"] == "SEVERE"] == []
