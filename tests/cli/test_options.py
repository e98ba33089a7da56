from __future__ import annotations

from pathlib import Path

import click
import pytest

from onnxkvrename.cli.options import parse_dim_sizes


def test_sizes_are_given_by_symbol() -> None:
    assert parse_dim_sizes(["a=1", "b=c=32", "a=1"]) == {"a": 1, "b=c": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ctx_len=--5", "say SYMBOL=SIZE"),
        ("ctx_len=-", "say SYMBOL=SIZE"),
        ("ctx_len=5-", "say SYMBOL=SIZE"),
        ("ctx_len=\u0665", "say SYMBOL=SIZE"),
        ("=5", "say SYMBOL=SIZE"),
        ("ctx_len=-5", "a size is 1 or more"),
        ("ctx_len=0", "a size is 1 or more"),
        ("ctx_len=99999999999", "less than 2^31"),
    ],
)
def test_a_size_that_is_none_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse_dim_sizes([text])
    assert message in raised.value.message


@pytest.mark.parametrize("command", ["verify", "manifest", "check-consumer"])
def test_two_signs_before_a_size_are_no_bug(command: str, decoder: Path, run) -> None:
    run_option = ("--run",) if command == "verify" else ()
    outcome = run(command, decoder, *run_option, "--dim", "ctx_len=--5")
    assert outcome.code == 2
    assert "say SYMBOL=SIZE" in outcome.err
    assert "a bug in" not in outcome.err
