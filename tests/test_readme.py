"""The output in the README is the program's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.findall(
    r"<!-- shown -->\n```console\n\$ onnxkvrename ([^\n]+)\n(.*?)```\n<!-- /shown -->",
    (ROOT / "README.md").read_text("utf-8"),
    re.DOTALL,
)

OF_FIXTURES = re.findall(
    r"^onnxkvrename (manifest fixtures/[^#\n]+)",
    (ROOT / "README.md").read_text("utf-8"),
    re.MULTILINE,
)


def test_the_readme_shows_something() -> None:
    assert len(SHOWN) >= 2


@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[command for command, _ in SHOWN])
def test_what_the_readme_shows_is_what_a_command_says(
    command: str, said: str, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = run(*shlex.split(command))
    assert (outcome.code, outcome.out + outcome.err) == (0, said)


@pytest.mark.parametrize("command", OF_FIXTURES)
def test_what_the_readme_asks_of_its_fixtures_can_be_done(
    command: str, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = run(*shlex.split(command))
    assert (outcome.code, outcome.err) == (0, "")


def test_the_readme_asks_something_of_its_fixtures() -> None:
    assert len(OF_FIXTURES) == 2
