from __future__ import annotations

import errno
import io
import re
import sys
import time

import pytest
from rich.console import Console

from onnxkvrename.report import progress_bars
from onnxkvrename.report.progress_bars import ProgressBars


def test_nothing_is_loaded_or_drawn_within_a_second(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with ProgressBars() as bars:
        for heard in (bars.track_bytes("writing", 9), bars.track_models("writing", 9)):
            assert heard is not None
            heard(9)
        assert bars.progress is None
        assert bars.track_models("reading", 1) is None  # one model has no count to show
    assert capfd.readouterr() == ("", "")


def test_work_that_takes_long_has_a_bar_though_nothing_is_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_bars, "_SECONDS_WITHOUT_BARS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressBars() as bars:
        bars.track_bytes("writing", 9)
        deadline = time.monotonic() + 60
        while bars.progress is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert bars.progress is not None


class GoneTerminal(io.StringIO):
    """A terminal that was closed: it still calls itself one, and nothing can be written."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str = "") -> int:
        raise OSError(errno.EIO, "Input/output error")

    flush = write  # type: ignore[assignment]


def test_a_terminal_that_is_gone_disturbs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", GoneTerminal())
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBars() as bars:
        heard = bars.track_models("reading", 64)
        assert heard is not None
        bars.show()
        heard(64)


def test_bars_say_what_is_done_and_how_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressBars() as bars:
        models_heard = bars.track_models("writing", 1094)
        assert models_heard is not None
        models_heard(16)
        bars.show()  # as after a second
        models_heard(1016)
        bytes_heard = bars.track_bytes("writing", 1 << 29)
        bytes_heard(1 << 28)
        first, second = draw(bars)
        assert re.fullmatch(r"writing +\S+ +1,032 of 1,094 +\S+ *", first)
        assert re.fullmatch(r"writing +[^\d]+ +268.4 MB of 536.9 MB(, \S+ .B/s)? +\S+ *", second)
        models_heard(62)
        bytes_heard(1 << 28)
        (last,) = draw(bars)
    assert re.match(r"waiting for the disk +\S+ +536.9 MB of 536.9 MB", last)


def draw(bars: ProgressBars) -> list[str]:
    """Return the bars as a wide terminal shows them."""
    assert bars.progress is not None
    shown = io.StringIO()
    Console(file=shown, width=200).print(bars.progress.get_renderable())
    return shown.getvalue().splitlines()
