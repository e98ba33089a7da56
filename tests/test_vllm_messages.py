"""The table of vLLM's messages: complete for the known versions, and without a row too many."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from vllm_messages import LEFT, VERSIONS, collect_messages, find_row, list_new
from vllmwheel import find_wheel

from onnxkvrename.cli.main import load_command
from onnxkvrename.findings import CODES
from onnxkvrename.vllm.messages import VllmMessage, load_messages, match_message

ROWS = load_messages()
PLACEHOLDERS = {"MODEL": "m.onnx", "PREFILL": "p.onnx", "DECODE": "d.onnx"}


def get_wheel(version: str) -> Path:
    wheel = find_wheel(f"{version}.0")
    if isinstance(wheel, str):
        pytest.skip(wheel)
    return wheel


@pytest.mark.parametrize("version", VERSIONS)
def test_every_message_of_a_known_version_is_explained_or_left(version: str) -> None:
    wheel = get_wheel(version)
    assert list_new(wheel) == []
    assert sum(find_row(message) is not None for message in collect_messages(wheel)) > 40


@pytest.mark.parametrize("version", VERSIONS)
def test_a_row_names_the_versions_that_have_its_message(version: str) -> None:
    messages = collect_messages(get_wheel(version))
    having = [row for row in ROWS if any(match_message(row, message.text) for message in messages)]
    assert having == [row for row in ROWS if version in row.versions]


def test_a_message_has_one_row_or_one_reason() -> None:
    messages = {
        message.text for version in VERSIONS for message in collect_messages(get_wheel(version))
    }
    texts = [text for texts in LEFT.values() for text in texts]
    assert [text for text in texts if not any(each.startswith(text) for each in messages)] == []
    for message in messages:
        rows = [row.text for row in ROWS if match_message(row, message) is not None]
        reasons = [text for text in texts if message.startswith(text)]
        assert not (rows and reasons), message
        assert len(rows) <= 1, message


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text[:40])
def test_a_row_can_be_found_and_shown(row: VllmMessage) -> None:
    names = re.findall(r"\{(\w+)\}", row.text)
    assert row.text[0] != "{"
    assert len(names) == len(set(names))
    line = row.text.format_map({name: f"<{name}>" for name in names})
    match = match_message(row, f"(Worker_TP0 pid=7) AssertionError: {line}")
    assert match is not None
    assert "{" not in f"{row.describe_cause(match[1])}{row.fix}{row.command}"
    assert row.code in CODES
    assert set(row.versions) <= {*VERSIONS, "vllm-qaic"}


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS if row.command}))
def test_a_command_in_the_table_is_valid(command: str) -> None:
    _, name, *words = (PLACEHOLDERS.get(word, word) for word in shlex.split(command))
    load_command(name).command.make_context(name, words)
