"""Drive a real Chromium through its DevTools protocol, over two pipes: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any


def find_binary() -> str | None:
    """A Chromium that can be driven: not on Windows, and no snap, which cannot read /tmp."""
    names = ("chromium", "google-chrome", "chromium-browser", "chrome")
    found = (path for path in map(shutil.which, names) if path)
    usable = (path for path in found if os.path.basename(os.path.realpath(path)) != "snap")
    return next(usable, None) if os.name == "posix" else None


BINARY = find_binary()
SKIP_REASON = "no Chromium: install Debian's package chromium, or put google-chrome into PATH"
_SECONDS = 60
"""How long one command may take; a machine may have a lot to do beside it."""


class Chromium:
    """A headless browser with one tab, without a network."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()

        def place_pipes() -> None:  # the browser reads file descriptor 3 and writes 4
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [
                BINARY,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"),
                *("--disable-component-update", f"--user-data-dir={profile}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self._send(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = ""
        with suppress(OSError, AssertionError):  # it may be gone already
            self._send("Browser.close")
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def show(self, path: Path, width: int, *, scheme: str = "light", height: int = 800) -> None:
        """Open a file on a screen of that width, with a light or a dark color scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", {"features": features})
        self.events.clear()
        self._send("Page.navigate", {"url": path.resolve().as_uri()})
        self._wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of an expression in the page."""
        answer = self._send("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key, named as ``KeyboardEvent.key`` names it."""
        codes = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37}
        codes |= {"ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        event = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": codes[key]}
        self._send("Input.dispatchKeyEvent", {"type": "rawKeyDown", **event})
        self._send("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer to a place of the screen."""
        self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def list_accessible(self) -> list[tuple[str, str]]:
        """Return the role and the name of everything that a screen reader meets."""
        nodes = self._send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def save_screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write what the page looks like as a PNG file."""
        options = {"format": "png", "captureBeyondViewport": whole}
        data = self._send("Page.captureScreenshot", options)["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _wait_for(self, event: str) -> None:
        while not any(item.get("method") == event for item in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "Chromium does not answer"
            if select.select([self._answers], [], [], left)[0]:
                data = os.read(self._answers, 1 << 20)
                assert data, f"Chromium ended with {self._process.poll()}"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
