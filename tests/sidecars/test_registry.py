"""Sidecar formats: a file in a folder, or a plug-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onnxkvrename
from onnxkvrename.sidecars.registry import load_sidecar_formats

PACKAGE = Path(onnxkvrename.__file__).parent
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


def rename(
    decoder: Path, *path: Path, options: tuple[str, ...] = ("--sidecar", "kv_map.txt")
) -> subprocess.CompletedProcess[str]:
    """Rename the decoder with a sidecar beside it, with directories in front of ``sys.path``."""
    search = os.pathsep.join(map(str, [*path, PACKAGE.parent]))
    return subprocess.run(
        [sys.executable, "-m", "onnxkvrename", decoder.name, "--prefix", "VLLM", *options],
        cwd=decoder.parent,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def sidecar(decoder: Path) -> Path:
    """A sidecar of a format that nobody knows yet."""
    path = decoder.parent / "kv_map.txt"
    path.write_text(NAMES, "utf-8")
    return path


def plug_in(
    root: Path,
    text: str = FORMAT,
    name: str = "arrows",
    value: str = "kv_arrows:FORMAT",
    project: str = "kv",
) -> Path:
    """A directory with an installed distribution that offers a format."""
    information = root / f"{project}_arrows-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Name: {project}-arrows\nVersion: 1.0\n", "utf-8")
    entry = f"[onnxkvrename.sidecars]\n{name} = {value}\n"
    (information / "entry_points.txt").write_text(entry, "utf-8")
    (root / "kv_arrows.py").write_text(text, "utf-8")
    return root


def test_built_in_formats_are_tried_in_the_order_of_their_priority() -> None:
    formats = load_sidecar_formats().built_in
    captions = ["custom I/O", "compile parameters", "batch I/O", "node precision"]
    assert [known.caption for known in formats[:4]] == captions
    assert len({known.priority for known in formats}) == len(formats)


def test_without_its_format_a_file_is_refused(decoder: Path, sidecar: Path) -> None:
    process = rename(decoder)
    assert process.returncode == 2
    assert "kv_map.txt: is not a" in process.stderr


def test_a_format_is_one_file_in_a_folder(decoder: Path, sidecar: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "onnxkvrename")
    (copy / "onnxkvrename" / "sidecars" / "formats" / "arrows.py").write_text(FORMAT, "utf-8")
    process = rename(decoder, copy)
    assert (process.returncode, sidecar.read_text("utf-8")) == (0, RENAMED)
    assert process.stderr.endswith("kv_map.txt: 2 names changed\n")


def test_a_plug_in_adds_a_format(
    decoder: Path, sidecar: Path, tmp_path: Path, renamed: bytes
) -> None:
    process = rename(decoder, plug_in(tmp_path / "site"))
    assert (process.returncode, sidecar.read_text("utf-8")) == (0, RENAMED)
    assert decoder.read_bytes() == renamed


def test_its_files_are_found_beside_models(decoder: Path, sidecar: Path, tmp_path: Path) -> None:
    process = rename(decoder, plug_in(tmp_path / "site"), options=("--sidecars",))
    assert (process.returncode, sidecar.read_text("utf-8")) == (0, RENAMED)


def test_its_format_is_listed_with_the_others(decoder: Path, tmp_path: Path) -> None:
    (decoder.parent / "notes.md").write_text("past_key.0", "utf-8")
    process = rename(decoder, plug_in(tmp_path / "site"), options=("--sidecar", "notes.md"))
    assert ", arrows)" in process.stderr


@pytest.mark.parametrize("name", ["custom_io", "custom-io"])
def test_a_built_in_format_cannot_be_replaced(
    name: str, decoder: Path, sidecar: Path, tmp_path: Path
) -> None:
    process = rename(decoder, plug_in(tmp_path / "site", name=name))
    assert process.returncode == 2
    assert "kv_map.txt: is not a" in process.stderr
    assert "arrows" not in process.stderr


def test_two_plug_ins_with_one_name_are_both_named(
    decoder: Path, sidecar: Path, tmp_path: Path, renamed: bytes
) -> None:
    sites = [plug_in(tmp_path / f"site-{project}", project=project) for project in ("kv", "post")]
    process = rename(decoder, *sites)
    assert process.returncode == 2
    assert "kv-arrows and post-arrows" in process.stderr
    process = rename(decoder, *sites, options=())
    assert (process.returncode, decoder.read_bytes()) == (0, renamed)


def test_a_built_in_format_keeps_its_files(decoder: Path, tmp_path: Path) -> None:
    greedy = FORMAT.replace(r"kv_.*\.txt", ".*").replace("priority=60", "priority=0")
    batch = decoder.parent / "decode.json"
    batch.write_text('{"IO-files": [[{"map-to": "past_key.0"}]], "past_key.0": 1}', "utf-8")
    site = plug_in(tmp_path / "site", greedy)
    assert rename(decoder, site, options=("--sidecar", "decode.json")).returncode == 0
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
    text: str, problem: str, decoder: Path, sidecar: Path, tmp_path: Path
) -> None:
    before = decoder.read_bytes()
    process = rename(decoder, plug_in(tmp_path / "site", text))
    assert problem in process.stderr
    assert "arrows of kv-arrows (onnxkvrename.sidecars)" in process.stderr
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert (decoder.read_bytes(), sidecar.read_text("utf-8")) == (before, NAMES)


def test_a_broken_plug_in_does_not_matter_without_sidecars(
    decoder: Path, tmp_path: Path, renamed: bytes
) -> None:
    process = rename(decoder, plug_in(tmp_path / "site", "1 +"), options=())
    assert (process.returncode, decoder.read_bytes()) == (0, renamed)
