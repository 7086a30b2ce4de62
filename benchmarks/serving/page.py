"""The server's page in headless Chromium, by keyboard alone: the answer is the library's, in light and in dark.

    pip install selenium        # beside dinfer; Chromium and chromedriver are the system's
    python -m benchmarks.serving.page --screenshot docs/images/serve_page_dark.png \
        --out benchmarks/results/serving-page.json
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import dinfer
from benchmarks.provenance import provenance, show
from benchmarks.serving.process import serving
from dinfer.demo.problems import generate

NEW_TOKENS, SECONDS = 96, 120
SERVER = ("device=cpu", f"max_new_tokens={NEW_TOKENS}")
READABLE = 4.5  # the least contrast of text in WCAG


@contextmanager
def chromium(profile: Path, size: str, program: str | None = None) -> Iterator[Any]:
    """A headless browser with a new profile. `size`: of its window, "width,height"; `program`: its executable."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(program or shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={size}",
        f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield found
    finally:
        found.quit()


def until(browser: Any, script: str) -> Any:
    return WebDriverWait(browser, SECONDS, 0.02).until(lambda driver: driver.execute_script(f"return {script}"))


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser).send_keys(*keys).perform()


def tab_to(browser: Any, wanted: str) -> list[str]:
    """Presses the tab key until this element has the focus. Returns the passed elements that showed no focus."""
    unseen = []
    for _ in range(60):
        press(browser, Keys.TAB)
        name, outline = browser.execute_script(
            "const at = document.activeElement; return [at.id || at.tagName, getComputedStyle(at).outlineStyle]"
        )
        if outline == "none":
            unseen.append(name)
        if name == wanted:
            return unseen
    raise RuntimeError(f"the tab key does not lead to {wanted}")


def contrast(browser: Any, scheme: str) -> float:
    """The contrast ratio of the page's text, as WCAG 2 defines it, in a colour scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    colours = browser.execute_script(
        "const style = getComputedStyle(document.body);"
        "const ground = getComputedStyle(document.documentElement).backgroundColor;"
        "return [style.color, /, 0\\)$/.test(style.backgroundColor) ? ground : style.backgroundColor]"
    )
    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    if (luminance(colours[0]) > luminance(colours[1])) != (scheme == "dark"):
        raise RuntimeError(f"the page is not {scheme}: {colours}")
    return round((light + 0.05) / (dark + 0.05), 1)


def luminance(colour: str) -> float:
    channels = [int(float(value)) / 255 for value in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def looked_at(browser: Any, url: str, screenshot: Path | None) -> dict[str, Any]:
    """Checks what the page does."""
    question = generate("heldout", 1, 3)[0].question
    pipe = dinfer.load("tiny", device="cpu")
    want = pipe.generate([[{"role": "user", "content": question}]], max_new_tokens=NEW_TOKENS)[0]
    browser.get(url)
    until(browser, "document.querySelector('.settings input') !== null")
    contrasts = {scheme: contrast(browser, scheme) for scheme in ("light", "dark")}
    unseen = (
        [] if browser.execute_script("return document.activeElement.id") == "question" else tab_to(browser, "question")
    )
    press(browser, question, Keys.ENTER)
    until(browser, f"document.querySelectorAll('.canvas .cell.final').length > {NEW_TOKENS // 6}")
    if screenshot is not None:
        browser.save_screenshot(str(screenshot))
    until(browser, "document.querySelector('.facts button') !== null")
    answers = browser.execute_script("return [...document.querySelectorAll('#chat .answer')].map((a) => a.textContent)")
    unseen += tab_to(browser, "compare")
    press(browser, Keys.ENTER)
    sides = browser.execute_script("return document.querySelectorAll('.side').length")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    severe = [
        e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]
    ]
    counts = f"{want.counts.tokens} tokens in {want.counts.forwards} forwards"
    return {
        "browser": browser.capabilities["browserVersion"],
        "the answer is the library's": [answer.strip() for answer in answers] == [want.text.strip()],
        "its counts are the library's": counts in browser.page_source,
        "contrast of text": contrasts,
        "text can be read, light and dark": min(contrasts.values()) >= READABLE,
        "passed by the tab key without a visible focus": unseen,
        "two recipes by keyboard": sides == 2,
        "nothing comes from elsewhere": bool(loaded) and all(name.startswith(url) for name in loaded),
        "errors in the console": severe,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshot", type=Path, help="a PNG of an answer that is half denoised, in dark mode")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(*SERVER, log=f"{folder}/server.log") as server,
        chromium(Path(folder, "profile"), "900,640") as browser,
    ):
        found = looked_at(browser, server.url, args.screenshot)
    report = {**provenance(torch.device("cpu")), "server": list(SERVER), **found}
    show(report, args.out)
    if failed := [what for what, ok in found.items() if ok is False or (isinstance(ok, list) and ok)]:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
