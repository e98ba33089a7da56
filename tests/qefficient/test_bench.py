"""The script that checks these promises against QEfficient itself, where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_without_qefficient_it_says_so_and_claims_nothing(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    missing = tmp_path / "no-python"
    command = [sys.executable, BENCH / "qefficient.py", "--python", missing, "--json", written]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no {missing}" in done.stderr
    assert not written.exists()


def test_kinds_are_told_apart_and_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from qefficient_kinds import KINDS

    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        sent = [dict(kind.config), dict(kind.load), dict(kind.compile)]
        assert json.loads(json.dumps(sent)) == sent
