"""Sidecar formats: a file in a folder, or a plug-in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome, Run

from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.registry import load_sidecar_formats

Rename = Callable[..., Outcome]
Install = Callable[..., None]
WITH_SIDECAR = ("--sidecar", "kv_map.txt")
NAMES = "past_key.0 -> past_key.0_RetainedState\n"
RENAMED = "past_key.0_VLLM -> past_key.0_VLLM_RetainedState\n"
FORMAT = """
import re
from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.tree import ScalarNode, SequenceNode


def parse(text):
    matches = re.finditer(r"[\\w.]+", text)
    return SequenceNode(tuple(ScalarNode(m[0], m.start(), m.end(), "") for m in matches))


def find_names(tree):
    yield from tree.items


FORMAT = SidecarFormat(
    caption="arrows",
    priority=60,
    expected_form="INPUT -> OUTPUT",
    parse=parse,
    find_names=find_names,
    file_name_pattern=re.compile(r"kv_.*\\.txt"),
    only_graph_values=True,
    requires_pairs=True,
)
"""


@pytest.fixture
def rename(decoder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Rename:
    """Return a function that renames the decoder with a sidecar beside it."""

    def rename_with(*options: str) -> Outcome:
        monkeypatch.chdir(decoder.parent)
        return run(decoder.name, "--prefix", "VLLM", *options)

    return rename_with


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with one format."""

    def install_plugin(text: str = FORMAT, name: str = "arrows", project: str = "kv") -> None:
        site = tmp_path / f"site-{project}"
        information = site / f"{project}_arrows-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {project}-arrows\nVersion: 1.0\n", "utf-8")
        entry = f"[onnxkvrename.sidecars]\n{name} = kv_arrows:FORMAT\n"
        (information / "entry_points.txt").write_text(entry, "utf-8")
        (site / "kv_arrows.py").write_text(text, "utf-8")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "kv_arrows", raising=False)

    return install_plugin


@pytest.fixture
def sidecar(decoder: Path) -> Path:
    """A sidecar of a format that nobody knows yet."""
    path = decoder.parent / "kv_map.txt"
    path.write_text(NAMES, "utf-8")
    return path


def test_built_in_formats_are_tried_in_the_order_of_their_priority() -> None:
    built_in = load_sidecar_formats().built_in
    captions = ["custom I/O", "compile parameters", "batch I/O", "node precision"]
    assert [known.caption for known in built_in[:4]] == captions
    assert len({known.priority for known in built_in}) == len(built_in)


@pytest.mark.usefixtures("sidecar")
def test_without_its_format_a_file_is_refused(rename: Rename) -> None:
    outcome = rename(*WITH_SIDECAR)
    assert outcome.code == 2
    assert "kv_map.txt: is not a sidecar of a known format (known formats: " in outcome.err


def test_a_format_is_one_file_in_a_folder(
    rename: Rename, sidecar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "kv_arrows.py").write_text(FORMAT, "utf-8")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "formats")])
    monkeypatch.delitem(sys.modules, f"{formats.__name__}.kv_arrows", raising=False)
    outcome = rename(*WITH_SIDECAR)
    assert (outcome.code, sidecar.read_text("utf-8")) == (0, RENAMED)
    assert outcome.err.endswith("kv_map.txt: 2 names changed\n")


def test_a_plug_in_adds_a_format(
    rename: Rename, install: Install, decoder: Path, sidecar: Path, renamed: bytes
) -> None:
    install()
    outcome = rename(*WITH_SIDECAR)
    assert (outcome.code, sidecar.read_text("utf-8")) == (0, RENAMED)
    assert decoder.read_bytes() == renamed


def test_its_files_are_found_beside_models(rename: Rename, install: Install, sidecar: Path) -> None:
    install()
    outcome = rename("--sidecars")
    assert (outcome.code, sidecar.read_text("utf-8")) == (0, RENAMED)


def test_its_format_is_listed_with_the_others(
    rename: Rename, install: Install, decoder: Path
) -> None:
    (decoder.parent / "notes.md").write_text("past_key.0", "utf-8")
    install()
    outcome = rename("--sidecar", "notes.md")
    assert ", arrows)" in outcome.err


@pytest.mark.usefixtures("sidecar")
@pytest.mark.parametrize("name", ["custom_io", "custom-io"])
def test_a_built_in_format_cannot_be_replaced(name: str, rename: Rename, install: Install) -> None:
    install(name=name)
    outcome = rename(*WITH_SIDECAR)
    assert outcome.code == 2
    assert "kv_map.txt: is not a sidecar of a known format (known formats: " in outcome.err
    assert "arrows" not in outcome.err


@pytest.mark.usefixtures("sidecar")
def test_two_plug_ins_with_one_name_are_both_named(
    rename: Rename, install: Install, decoder: Path, renamed: bytes
) -> None:
    install(project="kv")
    install(project="post")
    outcome = rename(*WITH_SIDECAR)
    assert outcome.code == 2
    assert "are named arrows: kv-arrows and post-arrows (uninstall all" in outcome.err
    outcome = rename()
    assert (outcome.code, decoder.read_bytes()) == (0, renamed)


def test_a_built_in_format_keeps_its_files(rename: Rename, install: Install, decoder: Path) -> None:
    greedy = FORMAT.replace(r"kv_.*\.txt", ".*").replace("priority=60", "priority=0")
    batch = decoder.parent / "decode.json"
    batch.write_text('{"IO-files": [[{"map-to": "past_key.0"}]], "past_key.0": 1}', "utf-8")
    install(greedy)
    assert rename("--sidecar", "decode.json").code == 0
    kept = '{"IO-files": [[{"map-to": "past_key.0_VLLM"}]], "past_key.0": 1}'
    assert batch.read_text("utf-8") == kept


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("OTHER = 1", "'FORMAT'"),
        ("FORMAT = 1", "of type int"),
        (FORMAT.replace("yield from tree.items", "yield 1 / 0"), "ZeroDivisionError: division"),
        (FORMAT.replace("    matches", "    raise KeyError('a')\n    matches"), "KeyError: 'a'"),
        (FORMAT.replace("yield from tree.items", "yield exit(0)"), "SystemExit: 0"),
        (FORMAT.replace("    matches", "    exit(0)\n    matches"), "SystemExit: 0"),
        (FORMAT.replace("    matches", "    parse(text)\n    matches"), "RecursionError: "),
        (
            FORMAT.replace("    matches", "    raise KeyboardInterrupt\n    matches"),
            "KeyboardInterrupt",
        ),
        (FORMAT.replace("    priority=60,\n", ""), "TypeError: "),
        (FORMAT.replace("priority=60", "priority='a'"), "its priority"),
        (FORMAT.replace("    priority", "    markers=('a',),\n    priority"), "its markers has"),
        (FORMAT.replace("    priority", "    markers=7,\n    priority"), "its markers"),
    ],
)
def test_a_broken_plug_in_is_named_in_one_line(
    text: str, problem: str, rename: Rename, install: Install, decoder: Path, sidecar: Path
) -> None:
    before = decoder.read_bytes()
    install(text)
    outcome = rename(*WITH_SIDECAR)
    assert problem in outcome.err
    assert "the plug-in arrows of kv-arrows (onnxkvrename.sidecars) cannot be used: " in outcome.err
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert (decoder.read_bytes(), sidecar.read_text("utf-8")) == (before, NAMES)


def test_a_broken_plug_in_does_not_matter_without_sidecars(
    rename: Rename, install: Install, decoder: Path, renamed: bytes
) -> None:
    install("1 +")
    outcome = rename()
    assert (outcome.code, decoder.read_bytes()) == (0, renamed)
