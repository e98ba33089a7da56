from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from onnxkvrename.cli.main import COMMANDS, load_command
from onnxkvrename.cli.options import RequestCommand, parse_dim_sizes


def test_sizes_are_given_by_symbol() -> None:
    assert parse_dim_sizes(["a=1", "b=c=32", "a=1"]) == {"a": 1, "b=c": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ctx_len=--5", "pass SYMBOL=SIZE"),
        ("ctx_len=-", "pass SYMBOL=SIZE"),
        ("ctx_len=5-", "pass SYMBOL=SIZE"),
        ("ctx_len=\u0665", "pass SYMBOL=SIZE"),
        ("=5", "pass SYMBOL=SIZE"),
        ("ctx_len=-5", "a size must be at least 1"),
        ("ctx_len=0", "a size must be at least 1"),
        ("ctx_len=99999999999", "less than 2^31"),
    ],
)
def test_a_size_that_is_none_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse_dim_sizes([text])
    assert message in raised.value.message


def test_two_signs_before_a_size_are_no_bug(decoder: Path, run) -> None:
    outcome = run("inspect", decoder, "--dim", "ctx_len=--5")
    assert outcome.code == 2
    assert "pass SYMBOL=SIZE" in outcome.err
    assert "a bug in" not in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefix", "VLLM", "--token=KV"), "--prefix has two values: VLLM and KV; pass one"),
        (("--target", "a", "--target", "b"), "--target has two values: a and b; pass one"),
        (("-o", "a.onnx", "-ob.onnx"), "--output has two values: a.onnx and b.onnx; pass one"),
        (("-d", "a", "--directory", "b"), "--directory has two values: a and b; pass one"),
        (("--profile=qeff", "--profile=qnn"), "--profile has two values: qeff and qnn; pass one"),
        (("--rules", "a", "--rules", "b"), "--rules has two values: a and b; pass one"),
        (("--format=text", "--format=github"), "--format has two values: text and github"),
    ],
)
def test_two_values_of_an_option_are_an_error_and_none_is_dropped(
    words: tuple[str, ...], message: str, decoder: Path, run
) -> None:
    before = decoder.read_bytes()
    outcome = run(decoder, *words)
    assert (outcome.code, message in outcome.err + outcome.out) == (2, True)
    assert decoder.read_bytes() == before


def test_the_same_value_twice_is_one_value(decoder: Path, run) -> None:
    assert run(decoder, "--prefix", "VLLM", "--token", "VLLM").code == 0


def test_a_consumer_is_named_once(decoder: Path, run) -> None:
    outcome = run("verify", decoder, "--target", "vllm-qaic", "--target", "qefficient")
    assert outcome.code == 2
    assert "--target has two values: vllm-qaic and qefficient" in outcome.err


@pytest.mark.parametrize("command", ["rename", "verify"])
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--rules", "r.toml", "--profile", "qeff"), {"--rules", "--profile"}),
        (("--profile=auto", "--rules=r.toml"), {"--rules", "--profile"}),
        (("-q", "-v"), {"--quiet", "--verbose"}),
        (("-vq",), {"--quiet", "--verbose"}),
    ],
)
def test_options_that_say_different_things_are_not_given_together(
    command: str, words: tuple[str, ...], options: set[str], decoder: Path, run
) -> None:
    """None of the two is ignored."""
    before = decoder.read_bytes()
    token = ("--prefix", "VLLM") if command == "rename" else ()
    outcome = run(command, decoder, *token, *words)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    first, _, second, rest = outcome.err.removeprefix("error: ").split(" ", 3)
    assert ({first, second}, rest.startswith("cannot be used together")) == (options, True)
    assert decoder.read_bytes() == before


@pytest.mark.parametrize("command", ["rename", "inspect", "verify"])
def test_a_model_that_cannot_be_read_is_told_by_the_system_not_by_the_parser(
    command: str, decoder: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """Every command says the same of it, whether click looked first or not."""
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **how: mode != os.R_OK and real(path, mode)
    )
    options = {"rename": ["--prefix", "V", "-n"]}
    outcome = run(command, decoder, *options.get(command, []))
    assert "is not readable" not in outcome.err
    assert outcome.code == 0


DECLARED = {
    name: command
    for name in COMMANDS
    if isinstance(command := load_command(name).command, RequestCommand)
}


@pytest.mark.parametrize("name", DECLARED)
def test_an_option_excludes_and_needs_fields_of_its_request(name: str) -> None:
    command = DECLARED[name]
    needed = {field for option in command.options.values() for field in option.needs}
    excluded = {field for option in command.options.values() for field in option.excludes}
    assert needed <= set(command.options)
    assert excluded <= {field for other in DECLARED.values() for field in other.options}
    assert [param.name for param in command.params] == list(command.options)


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (("rename", "--strip", "--replace"), "--strip", "--replace"),
        (("rename", "--jobs", "2", "--dask", "x"), "--jobs", "--dask"),
        (("pairs", "--as", "rules", "--format", "json"), "--as", "--format"),
    ],
)
def test_two_that_contradict_are_both_named(
    words: tuple[str, ...], first: str, second: str, decoder: Path, run
) -> None:
    outcome = run(words[0], decoder, *words[1:])
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {first} and {second} cannot be used together")


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("inspect", "--tokens", "9"), "--tokens requires --vllm"),
    ],
)
def test_an_option_without_the_one_that_it_is_for_is_refused(
    words: tuple[str, ...], needed: str, decoder: Path, run
) -> None:
    outcome = run(words[0], decoder, *(word.format(decoder) for word in words[1:]))
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {needed}")


@pytest.mark.parametrize("rest", [(), ("--check",), ("true",)])
def test_an_option_with_few_values_names_them(rest: tuple[str, ...], decoder: Path, run) -> None:
    outcome = run("rename", decoder, "--sidecars", *rest)
    assert outcome.code == 2
    assert all(value in outcome.err for value in ("--sidecars", "auto", "off"))
