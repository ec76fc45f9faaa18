"""Headless Chromium, driven over its debugging pipe: no other package is needed.

Debian's package ``chromium`` is enough. The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
_PIPE = 'exec "$0" "$@" 3<&{} 4>&{}'  # the protocol reads from 3 and writes to 4


def found() -> str | None:
    """The path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in a browser of its own.

    Args:
        path: of the browser.

    Attributes:
        said: what the page wrote to the console, and errors that it caused.
    """

    def __init__(self, path: str) -> None:
        self.said: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()  # (read, write): to the browser, and from it
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        options += ["--no-first-run", "--hide-scrollbars", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", _PIPE.format(ours[0], theirs[1]), path, *options],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._pending, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        os.close(self._to)
        self._process.kill()
        self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something; returns its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._from, 1 << 16) if ready else b""
            assert read, "the browser ended, or does not answer"
            self._pending += read
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(str(event["args"]))
        elif method == "Log.entryAdded":
            self.said.append(str(event["entry"]["text"]))
        elif method == "Network.requestWillBeSent" and event["type"] != "Document":
            self.said.append(f"asked for {event['request']['url'][-80:]}")

    def open(self, file: Path, width: int, dark: bool) -> None:
        """Show a file at a width in pixels; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = file.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self.wait(lambda: bool(self.run("document.readyState + location.href") == f"complete{url}"))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds; what the browser says meanwhile is noted."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, self.said
            time.sleep(0.02)
            self.run("0")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """Save the page as PNG: all of it, or so many pixels from its top."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        taken = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={**clip, "scale": 1},
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(taken["data"]))
