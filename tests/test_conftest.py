"""Tests of conftest.py: what it refuses, which tier runs, and what a child shares."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import conftest
import pytest

pytest_plugins = ["pytester"]

CASES = "@pytest.mark.parametrize('case', [])\ndef test_it(case): pass"


def choose(pytester: pytest.Pytester, text: str, *, full: bool = False) -> list[str]:
    """Return the names of the tests of a module that are run."""
    items = pytester.getitems(f"import pytest\n{text}")
    config = Mock(getoption=lambda name: full)
    conftest.pytest_collection_modifyitems(config, items)
    return [item.name for item in items]


def test_a_parametrization_without_cases_fails(pytester: pytest.Pytester) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_it\[NOTSET\]: no cases were found for this"):
        choose(pytester, CASES)


@pytest.mark.parametrize("condition", [True, False])
def test_cases_may_be_absent_where_a_mark_says_why(
    condition: bool, pytester: pytest.Pytester
) -> None:
    text = f"@pytest.mark.skipif({condition}, reason='no real exports')\n{CASES}"
    if condition:
        assert choose(pytester, text) == ["test_it[NOTSET]"]
    else:
        with pytest.raises(pytest.UsageError):
            choose(pytester, text)


@pytest.mark.parametrize("full", [True, False])
def test_the_full_tier_runs_what_the_default_one_leaves_out(
    full: bool, pytester: pytest.Pytester
) -> None:
    text = """
from tiers import full, thin
@full
def test_one(): pass
@pytest.mark.parametrize("case", thin("abcd", 2))
def test_two(case): pass
@pytest.mark.parametrize("pair", thin([pytest.param((1, 2), id="x"), pytest.param((3, 4))], 1))
def test_three(pair): pass
"""
    few = ["test_two[a]", "test_two[c]", "test_three[x]"]
    rest = ["test_one", "test_two[b]", "test_two[d]", "test_three[pair1]"]
    assert sorted(choose(pytester, text, full=full)) == sorted(few + rest if full else few)


def test_children_share_a_bytecode_cache_where_none_may_be_beside_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    cache = SimpleNamespace(mkdir=lambda name: tmp_path / name)
    config = SimpleNamespace(getoption=request.config.getoption, cache=cache)
    for name in ("pycache_prefix", "dont_write_bytecode"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "before")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    conftest.pytest_configure(config)
    assert os.environ["PYTHONPYCACHEPREFIX"] == "before"
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    conftest.pytest_configure(config)
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
