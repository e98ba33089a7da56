from __future__ import annotations

import errno
import io
import re
import sys

import pytest
from rich.console import Console

from onnxkvrename.report import progress_bars
from onnxkvrename.report.progress_bars import ProgressBars

HOSTILE = "[red]\x1b[2J\u202e:smiley:[/red]\\/past_key.0"
SHOWN = "[red]\\x1b[2J\\u202e:smiley:[/red]\\/past_key.0"


def test_a_bar_is_drawn_only_for_what_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        assert bars.track_data_file("w.bin", (1 << 28) - 1) is None
        assert bars.track_models("reading", 63) is None
    assert capfd.readouterr() == ("", "")
    with ProgressBars() as bars:
        for heard, amount in (
            (bars.track_data_file("w.bin", 1 << 28), 1 << 28),
            (bars.track_models("r", 64), 64),
        ):
            assert heard is not None
            heard(amount)
    assert capfd.readouterr().out == ""


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
        heard(64)


def test_bars_say_what_is_done_and_how_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        progress_bars, "Console", lambda **how: Console(file=io.StringIO(), width=100)
    )
    with ProgressBars() as bars:
        models_heard, data_heard = (
            bars.track_models("writing", 94),
            bars.track_data_file(HOSTILE, 1 << 29),
        )
        assert models_heard is not None
        assert data_heard is not None
        models_heard(16)
        models_heard(16)
        data_heard(1 << 28)
        shown = io.StringIO()
        Console(file=shown, width=200).print(bars.progress.get_renderable())
        first, second = shown.getvalue().splitlines()
        data_heard(1 << 28)
        assert [task.visible for task in bars.progress.tasks] == [True, False]
    assert re.fullmatch(r"writing +\S+ +32 of 94 *", first)
    assert re.fullmatch(rf"copying {re.escape(SHOWN)} +\S+ +268.4 MB of 536.9 MB *", second)
