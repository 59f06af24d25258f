"""A headless Chromium, driven over pipes by its DevTools protocol; needs no package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60


def find_chromium() -> str | None:
    """The browser of $HORNITO_TEST_CHROMIUM, or the first that is installed."""
    chosen = os.environ.get("HORNITO_TEST_CHROMIUM")
    return chosen or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page of one browser.

    Attributes:
        requests: the URL of every request that the page made.
        problems: what the page's console said of errors, and uncaught exceptions.
    """

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._held = b""
        self._number = 0

        def place() -> None:
            # The protocol's pipes are descriptors 3 and 4; the source may be one of them.
            a, b = os.dup(to_browser), os.dup(from_browser)
            high = [os.dup2(a, 200), os.dup2(b, 201)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [
                path,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "the browser says nothing"
            self._held += data
        line, _, self._held = self._held.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> Any:
        """Wait for an expression to be true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: str, number: int, modifiers: int = 0) -> None:
        """Press a key; modifiers are 1 for Alt and 8 for Shift."""
        plain = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **plain, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **plain)
