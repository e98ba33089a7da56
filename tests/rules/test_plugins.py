"""Plug-ins of other distributions: one rule for profiles and consumers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run

from onnxkvrename.errors import KvRenameError, RulesError
from onnxkvrename.rules.plugins import find_plugins

GROUP = "onnxkvrename.tests"
MODULE = """
NUMBER = 3
TEXT = "three"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with one module and some entry points."""

    def install_distribution(
        *entries: str,
        project: str = "numbers",
        module: str = MODULE,
        metadata: str | None = None,
        group: str = GROUP,
    ) -> None:
        site = tmp_path / "site"
        info = site / f"{project}_dist-1.0.dist-info"
        info.mkdir(parents=True)
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {project}-dist\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries]), "utf-8")
        (site / f"kv_{project}.py").write_text(module, "utf-8")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, f"kv_{project}", raising=False)

    return install_distribution


def test_a_plugin_is_found_by_its_name_and_loaded_when_it_is_asked_for(install: Install) -> None:
    install("three = kv_numbers:NUMBER", "text = kv_numbers:TEXT")
    plugins = find_plugins(GROUP, ())
    assert sorted(plugins) == ["text", "three"]
    assert "kv_numbers" not in sys.modules
    assert plugins["three"].load(int) == 3
    assert plugins["text"].load(object) == "three"


def test_groups_are_apart(install: Install) -> None:
    install("three = kv_numbers:NUMBER")
    assert find_plugins("onnxkvrename.others", ()) == {}


@pytest.mark.parametrize("name", ["built-in", "built_in"])
@pytest.mark.parametrize("builtin_name", ["built-in", "built_in"])
def test_a_built_in_name_cannot_be_shadowed(name: str, builtin_name: str, install: Install) -> None:
    install(f"{name} = nowhere:NUMBER", "three = kv_numbers:NUMBER")
    assert list(find_plugins(GROUP, {builtin_name})) == ["three"]


def test_two_plugins_with_one_name_are_an_error_when_it_is_asked_for(install: Install) -> None:
    install("three = kv_numbers:NUMBER", "text = kv_numbers:TEXT")
    install("three = kv_digits:NUMBER", project="digits")
    plugins = find_plugins(GROUP, ())
    assert plugins["text"].load(str) == "three"
    with pytest.raises(KvRenameError) as raised:
        plugins["three"].load(int)
    assert "three: digits-dist and numbers-dist" in str(raised.value)


@pytest.mark.parametrize(
    ("value", "module", "problem"),
    [
        ("nowhere:NUMBER", MODULE, "'nowhere'"),
        ("kv_numbers:OTHER", MODULE, "'kv_numbers' has no"),
        ("kv_numbers:NUMBER", "1 / 0", "ZeroDivisionError: division by zero"),
        ("kv_numbers:NUMBER", "1 +", "SyntaxError: invalid syntax"),
        ("kv_numbers:NUMBER", "raise SystemExit(0)", "SystemExit: 0"),
        ("kv_numbers:NUMBER", f"raise ValueError('{'x' * 9999}')", f"ValueError: {'x' * 188}…"),
        ("kv_numbers:NUMBER", "raise ValueError", "ValueError"),
        ("kv_numbers:NUMBER", "raise ValueError('a\\nb')", "ValueError: a b"),
        ("kv_numbers:TEXT", MODULE, "TEXT is of type str"),
        ("kv_numbers", MODULE, "kv_numbers is of type module"),
        ("not a reference", MODULE, "'not a reference' does"),
        ("", MODULE, "'' does"),
    ],
)
def test_a_broken_plugin_is_one_clear_error_when_it_is_asked_for(
    value: str, module: str, problem: str, install: Install
) -> None:
    install(f"three = {value}", module=module)
    plugin = find_plugins(GROUP, ())["three"]
    with pytest.raises(KvRenameError) as raised:
        plugin.load(int)
    assert "three of numbers-dist (onnxkvrename.tests)" in raised.value.message
    assert f"{problem}" in raised.value.message
    assert "\n" not in raised.value.message
    assert "uninstall numbers-dist" in raised.value.hint


def test_errors_have_the_type_of_the_caller(install: Install) -> None:
    install("three = nowhere:NUMBER")
    plugin = find_plugins(GROUP, (), RulesError)["three"]
    with pytest.raises(RulesError):
        plugin.load(int)
    assert isinstance(plugin.build_error("it is odd"), RulesError)


def test_a_distribution_without_a_name_is_no_second_error(install: Install) -> None:
    install("three = nowhere:NUMBER", metadata="")
    with pytest.raises(KvRenameError, match="unnamed distribution"):
        find_plugins(GROUP, ())["three"].load(int)


def test_two_distributions_without_a_name_are_one_clear_error(install: Install) -> None:
    install("three = kv_numbers:NUMBER", metadata="Metadata-Version: 2.1\n")
    install("three = kv_digits:NUMBER", project="digits", metadata="")
    with pytest.raises(KvRenameError, match="unnamed distribution and an unnamed"):
        find_plugins(GROUP, ())["three"].load(int)


@pytest.mark.parametrize("entry_points", [b"[other.group]\na b c\n", b"[other.group]\na = \xff\n"])
def test_a_distribution_that_cannot_be_read_hides_no_other(
    entry_points: bytes, install: Install, tmp_path: Path
) -> None:
    install("three = kv_numbers:NUMBER")
    install("four = kv_digits:NUMBER", project="digits")
    (tmp_path / "site" / "digits_dist-1.0.dist-info" / "entry_points.txt").write_bytes(entry_points)
    plugins = find_plugins(GROUP, ())
    assert list(plugins) == ["three"]
    assert plugins["three"].load(int) == 3


def test_a_distribution_without_any_name_hides_no_other(install: Install, tmp_path: Path) -> None:
    install("three = kv_numbers:NUMBER")
    install("four = kv_digits:NUMBER", project="digits", metadata="")
    site = tmp_path / "site"
    (site / "digits_dist-1.0.dist-info").rename(site / ".dist-info")
    assert "three" in find_plugins(GROUP, ())


def test_a_distribution_that_is_twice_on_the_path_offers_one_plugin(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("three = kv_numbers:NUMBER")
    monkeypatch.syspath_prepend(shutil.copytree(tmp_path / "site", tmp_path / "copy"))
    assert find_plugins(GROUP, ())["three"].load(int) == 3


def test_an_interrupt_while_a_plugin_loads_is_not_its_error(install: Install) -> None:
    install("three = kv_numbers:NUMBER", module="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        find_plugins(GROUP, ())["three"].load(int)


SEND_INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"


@pytest.mark.skipif(os.name == "nt", reason="no signals between processes")
@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("raise GeneratorExit", 2, "numbers-dist (onnxkvrename.profiles)"),
        ("raise SystemExit(0)", 2, "numbers-dist (onnxkvrename.profiles)"),
        (
            SEND_INTERRUPT,
            130,
            "interrupted: ",
        ),
    ],
)
def test_a_plugin_cannot_end_the_command_but_ctrl_c_can(
    module: str, code: int, message: str, install: Install, decoder: Path, run: Run
) -> None:
    install("mine = kv_numbers:NUMBER", module=module, group="onnxkvrename.profiles")
    outcome = run(decoder, "--prefix", "VLLM", "--profile", "mine")
    assert (outcome.code, outcome.out) == (code, "")
    (line,) = outcome.err.strip().splitlines()
    assert message in line
