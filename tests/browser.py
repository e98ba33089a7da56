"""Look at pages in a real Chromium, which is driven through two pipes without a library.

The protocol is Chromium's own: https://chromedevtools.github.io/devtools-protocol/. A message is a
JSON text that ends with a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    """Return a Chromium that can be driven: not on Windows, and no snap, which cannot read /tmp."""
    names = ("chromium", "google-chrome", "chromium-browser", "chrome")
    found = (path for path in map(shutil.which, names) if path)
    usable = (path for path in found if os.path.basename(os.path.realpath(path)) != "snap")
    return next(usable, None) if os.name == "posix" else None


CHROMIUM = find_chromium()
SKIP_REASON = "no Chromium: install Debian's package chromium, or put google-chrome into PATH"
_KEY_CODES = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
_TIMEOUT = 60
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # root has none, nor have most containers; the pages are our own
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
)


class Browser:
    """A running Chromium without a window; use it as a context.

    Args:
        directory: An empty directory for its profile.
    """

    def __init__(self, directory: Path) -> None:
        assert CHROMIUM is not None
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()

        def take_pipes() -> None:
            # It reads descriptor 3 and writes 4; either may be the number of the other pipe now.
            first, second = os.dup(commands), os.dup(answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *_SWITCHES, f"--user-data-dir={directory}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(directory)},
            close_fds=False,
            preexec_fn=take_pipes,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(_TIMEOUT)
        except (OSError, TimeoutError, EOFError, subprocess.TimeoutExpired):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            os.close(self._out)
            os.close(self._in)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; events that come before are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read_message()
            if reply.get("id") == self._count:
                assert "error" not in reply, (method, reply["error"])
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def wait_for(self, is_wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for an event that has not been looked at."""
        while not any(map(is_wanted, self.events)):
            self.events.append(self._read_message())

    def _read_message(self) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise EOFError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(
        self,
        path: Path,
        *,
        width: int = 1280,
        dark: bool = False,
        script: bool = True,
        letters: int = 16,
    ) -> Page:
        """Open a file as a page.

        Args:
            path: The file; it may end with a fragment such as ``#tokens=9``.
            width: The width of the window in pixels.
            dark: Whether the reader prefers dark pages.
            script: Whether scripts may run.
            letters: The size of text that the reader prefers, in pixels.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            page.call(f"{domain}.enable")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Emulation.setScriptExecutionDisabled", value=not script)
        sizes = {"standard": letters, "fixed": letters * 13 // 16}
        page.call("Page.setFontSizes", fontSizes=sizes)
        file, _, fragment = str(path).partition("#")
        address = Path(file).as_uri() + (f"#{fragment}" if fragment else "")
        page.call("Page.navigate", url=address)
        self.wait_for(lambda event: event.get("method") == "Page.loadEventFired")
        return page


class Page:
    """A page of a browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; raise for an exception in it."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": _KEY_CODES[key]}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **named)

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer to a place of the screen."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def list_accessible(self) -> list[tuple[str, str]]:
        """Return the role and the name of everything that a screen reader meets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def list_problems(self) -> list[str]:
        """Return errors and messages of the page so far: exceptions, refused sources, the log."""
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [
            json.dumps(event["params"])
            for event in self._browser.events
            if event["method"] in wanted
        ]

    def list_requests(self) -> list[str]:
        """Return the addresses that the page asked for, without its own."""
        addresses = [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return addresses[1:]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
