"""Headless browsers, where there are any: what a reader does with a page, in Chromium and in Firefox alike."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

PROGRAM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
FIREFOX = next((path for name in ("firefox-esr", "firefox") if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
SECONDS = 120  # for which a page may take its time: tests share two cores
ENTER, ESCAPE, RIGHT = "\ue007", "\ue00c", "\ue014"  # WebDriver's keys


def dom(page: Path, profile: Path, fragment: str = "") -> str:
    """The page's HTML once its script has run."""
    done = subprocess.run(
        [
            str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", f"{page.as_uri()}#{fragment}",
        ],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Browser:
    """Chromium by Selenium, Firefox by Marionette, its own protocol: geckodriver is in no package registry."""

    def __init__(self, driver: Any, name: str) -> None:
        self.driver, self.name = driver, name

    def get(self, address: str) -> None:
        self.driver.get(address) if self.name == "chromium" else self.driver.navigate(address)

    def js(self, script: str, *given: Any) -> Any:
        """What a function body returns. A promise is awaited."""
        if self.name == "chromium":
            return self.driver.execute_script(script, *given)
        return self.driver.execute_script(script, script_args=list(given), sandbox=None, new_sandbox=False)

    def until(self, expression: str, *given: Any) -> None:
        """Waits until an expression is true."""
        ends = monotonic() + SECONDS
        while not self.js(f"return Boolean({expression})", *given):
            assert monotonic() < ends, f"not within {SECONDS} s: {expression}"
            sleep(0.03)

    def type(self, css: str, text: str) -> None:
        self.driver.find_element("css selector", css).send_keys(text)

    def click(self, css: str) -> None:
        self.driver.find_element("css selector", css).click()

    def size(self, width: int, height: int) -> None:
        """The size of what shows the page, in CSS pixels."""
        if self.name == "chromium":
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        else:
            self.driver.set_window_rect(width=width, height=height + 200)
            shown = "const style = gBrowser.selectedBrowser.style;"
            shown += " [style.maxWidth, style.maxHeight] = arguments;"  # no window is narrower than 500 pixels
            with self.driver.using_context("chrome"):
                self.driver.execute_script(shown, script_args=[f"{width}px", f"{height}px"], sandbox="system")
            self.until("innerWidth === arguments[0] && innerHeight === arguments[1]", width, height)

    def shot(self, path: Path) -> None:
        found = self.driver.get_screenshot_as_base64 if self.name == "chromium" else self.driver.screenshot
        path.write_bytes(base64.b64decode(found() if self.name == "chromium" else found(full=False)))

    def complaints(self) -> list[str]:
        """Errors in the console since the last call. Firefox does not tell."""
        if self.name == "firefox":
            return []
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def opened(name: str, profile: Path, width: int, height: int) -> Iterator[Browser]:
    """A headless browser with a new profile, `chromium` or `firefox`. Skips the test where it is not installed."""
    with chromium(profile) if name == "chromium" else firefox(profile) as driver:
        found = Browser(driver, name)
        found.size(width, height)
        yield found


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if PROGRAM is None or (driver := shutil.which("chromedriver")) is None:
        pytest.skip("no Chromium, or no chromedriver, on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield found
    finally:
        found.quit()


@contextmanager
def firefox(profile: Path) -> Iterator[Any]:
    marionette = pytest.importorskip("marionette_driver.marionette")
    if FIREFOX is None:
        pytest.skip("no Firefox on this machine")
    found = marionette.Marionette(bin=FIREFOX, headless=True, port=0, gecko_log=str(profile / "log"))
    try:
        found.start_session()
        yield found
    finally:
        found.cleanup()
