"""A headless Chromium, driven over the WebDriver protocol by its own chromedriver: no package is needed."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ESCAPE = "\ue007", "\ue00c"
LEFT, DOWN = "\ue012", "\ue015"


class Browser:
    """One window."""

    def __init__(self, port: int, capabilities: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._path = ""
        self._path = (
            "/session/" + self._do("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]
        )

    def _do(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        value = json.loads(response.read())["value"]
        assert response.status == 200, value
        return value

    def open(self, url: str) -> None:
        self._do("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function body in the page."""
        return self._do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def _find(self, selector: str) -> str:
        return str(self._do("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def click(self, selector: str) -> None:
        self._do("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._do("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def until(self, script: str, why: str, *, seconds: float = 15.0) -> Any:
        """Waits until an expression in the page is true; its value."""
        limit = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < limit, f"{why}; the page says: {self.text('body')[:1500]}"
            time.sleep(0.03)
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def screenshot(self) -> bytes:
        """As PNG."""
        return base64.b64decode(self._do("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """What the page said in its console since the last call: errors, refused requests, broken rules of its policy."""
        entries = self._do("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Every address that the page has asked for."""
        return list(self.run("return performance.getEntries().filter(e => e.initiatorType).map(e => e.name)"))

    def close(self) -> None:
        self._do("DELETE", "")
        self._connection.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """A driver and a window of its own; both are gone afterwards."""
    assert CHROMIUM is not None and DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="tradewind-browser-", ignore_cleanup_errors=True) as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(lambda: socket.create_connection(("127.0.0.1", port), timeout=1).close())
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder}", "--window-size=1400,900"]}
            capabilities = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            window = Browser(port, capabilities)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
            driver.wait(10)


def _wait(attempt: Callable[[], None]) -> None:
    limit = time.monotonic() + 20
    while True:
        try:
            attempt()
            return
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
