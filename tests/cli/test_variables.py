"""Settings from the environment: which options take them, what is typed beside them, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.cli.main import COMMANDS, load_command

TARGET, PREFIX = "ONNXKVRENAME_TARGET", "ONNXKVRENAME_PREFIX"
PROFILE, RULES = "ONNXKVRENAME_PROFILE", "ONNXKVRENAME_RULES"
NAMED = "VLLM_RetainedState"
FOR_QAIC = "vllmKvCache_RetainedState"


def test_variables_set_what_is_listed_and_nothing_that_writes_or_undoes() -> None:
    found: dict[str, set[str]] = {}
    for name in COMMANDS:
        for field, option in load_command(name).command.options.items():
            if option.envvar:
                assert option.envvar == f"ONNXKVRENAME_{option.flags.split()[0][2:].upper()}"
                found.setdefault(field, set()).add(name)
    checks = {"verify", "compare"}
    names = {"rename", "inspect", *checks}
    assert found == {
        "token": {"rename"},
        "target": {"rename", "verify", "compare"},
        "strict": {"rename", *checks},
        "profile": names,
        "rules": names,
        "jobs": {"rename", "verify"},
        "output_format": {*COMMANDS} - {"explain", "profiles"},
    }


@pytest.mark.parametrize(
    ("variables", "args", "shown"),
    [
        ({TARGET: "vllm-qaic"}, (), FOR_QAIC),
        ({PREFIX: "VLLM"}, (), NAMED),
        ({TARGET: "vllm-qaic"}, ("--prefix", "VLLM"), NAMED),
        ({TARGET: "nope"}, ("--token", "VLLM"), NAMED),
        ({PREFIX: "VLLM"}, ("--target", "vllm-qaic"), FOR_QAIC),
        ({PREFIX: "", TARGET: "vllm-qaic"}, (), FOR_QAIC),
        ({TARGET: "vllm-qaic"}, ("--full-transfer",), FOR_QAIC),
        ({RULES: "none.toml"}, ("--prefix", "VLLM", "--profile", "qeff"), NAMED),
        ({PROFILE: "nope"}, ("--prefix", "VLLM", "--profile", "qeff"), NAMED),
        ({"ONNXKVRENAME_JOBS": "2"}, ("--prefix", "VLLM"), NAMED),
        ({"ONNXKVRENAME_STRICT": "0"}, ("--prefix", "VLLM"), NAMED),
        ({"ONNXKVRENAME_FORMAT": "json"}, ("--prefix", "VLLM", "--format", "text"), NAMED),
    ],
)
def test_a_variable_sets_an_option_and_what_is_typed_wins(
    variables: dict[str, str],
    args: tuple[str, ...],
    shown: str,
    decoder: Path,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = run(decoder, "-n", *args)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[1].endswith(shown)


@pytest.mark.parametrize("variables", [{TARGET: "vllm-qaic"}, {PREFIX: "Other"}])
def test_what_strip_removes_is_not_for_a_variable_to_decide(
    variables: dict[str, str], decoder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = decoder.read_bytes()
    assert run(decoder, "--prefix", "VLLM").code == 0
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(decoder, "--strip").code == 0
    assert decoder.read_bytes() == source


@pytest.mark.parametrize(
    ("variables", "args", "said"),
    [
        ({TARGET: "nope"}, "", ("no such target: nope", "; set by ONNXKVRENAME_TARGET)")),
        ({PREFIX: "a_b"}, "", ("the token 'a_b' may", "; set by ONNXKVRENAME_PREFIX)")),
        (
            {TARGET: "vllm-qaic", PREFIX: "VLLM"},
            "",
            ("requires vllmKvCache", "; set by ONNXKVRENAME_PREFIX and ONNXKVRENAME_TARGET)"),
        ),
        ({RULES: "x.toml"}, "--prefix V", ("x.toml: no such file (set by ONNXKVRENAME_RULES)",)),
        (
            {RULES: "x.toml", PROFILE: "qeff"},
            "--prefix V",
            ("ONNXKVRENAME_PROFILE and ONNXKVRENAME_RULES cannot be used together",),
        ),
        ({PROFILE: "nope"}, "--prefix V", ("profile: nope", "; set by ONNXKVRENAME_PROFILE)")),
        ({"ONNXKVRENAME_FORMAT": "xml"}, "", ("invalid value for ONNXKVRENAME_FORMAT: 'xml'",)),
        ({"ONNXKVRENAME_JOBS": "0"}, "", ("invalid value for ONNXKVRENAME_JOBS: 0",)),
        ({"ONNXKVRENAME_STRICT": "so"}, "", ("invalid value for ONNXKVRENAME_STRICT: 'so'",)),
        (
            {TARGET: "vllm-qaic"},
            "--prefix X --full-transfer",
            ("--full-transfer requires --target NAME (add",),
        ),
        ({TARGET: ""}, "", ("no token given",)),
    ],
)
def test_an_error_names_the_variable_that_causes_it(
    variables: dict[str, str],
    args: str,
    said: tuple[str, ...],
    decoder: Path,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = run(decoder, "-n", *args.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert [text for text in said if text not in outcome.err] == []


def test_no_variable_is_named_for_what_was_typed(
    decoder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TARGET, "nope")
    typed = run(decoder, "--target", "nope")
    monkeypatch.delenv(TARGET)
    assert typed == run(decoder, "--target", "nope")
    assert typed.code == 2


def test_the_format_of_a_variable_is_that_of_an_error_too(
    decoder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXKVRENAME_FORMAT", "json")
    monkeypatch.setenv(TARGET, "nope")
    error = json.loads(run(decoder).out)["error"]
    assert error["hint"].endswith("; set by ONNXKVRENAME_TARGET")


def test_a_variable_without_a_meaning_in_a_call_is_ignored(
    decoder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXKVRENAME_FORMAT", "json")
    assert run("explain", "KV402").out.startswith("KV402")
    assert run("pairs", decoder, "--as", "rules").out.startswith("#")
