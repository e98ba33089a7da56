from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conftest import FIXTURES

from onnxkvrename.report import formats
from onnxkvrename.report.formats import list_formats

LINES = '''
from onnxkvrename.report.formats import Format, Line


def render(answer, screen):
    """Render one line for each finding."""
    for file in answer.files:
        for finding in file.findings:
            yield Line(f"{answer.exit_code},{file.path},{finding.code}")


FORMAT = Format(render)
'''


def run_with(folder: Path, *commands: Sequence[object]) -> list[tuple[str, list[str]]]:
    """Run commands, in one process with the formats of one more folder.

    Returns:
        For each command what it printed, and the formats that have been loaded so far.
    """
    script = (
        "import contextlib, io, json, sys, onnxkvrename.report.formats as formats\n"
        "formats.__path__.append(sys.argv[1])\n"
        "from onnxkvrename.cli.main import main\n"
        "for args in json.loads(sys.argv[2]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        main(args)\n"
        "    loaded = [name for name in sys.modules if '.formats.' in name]\n"
        "    print(json.dumps([out.getvalue(), sorted(loaded)]))\n"
    )
    texts = [list(map(str, command)) for command in commands]
    command = [sys.executable, "-c", script, str(folder), json.dumps(texts)]
    process = subprocess.run(command, cwd=FIXTURES / "plain", capture_output=True, text=True)
    return [
        (out, [name.rpartition(".")[2] for name in loaded])
        for out, loaded in map(json.loads, process.stdout.splitlines())
    ]


def test_formats_are_the_files_of_their_folder() -> None:
    folder = Path(formats.__path__[0])
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert list_formats() == tuple(sorted(names))
    assert names >= {"github", "json", "text"}


def test_a_new_format_takes_one_file_and_works_for_every_command(tmp_path: Path) -> None:
    (tmp_path / "scratch_lines.py").write_text(LINES)
    cases = {
        ("decoder.onnx", "--prefix", "A", "-n"): None,
        ("verify", "decoder.onnx", "--prefix", "A"): "1,decoder.onnx,KV116",
        ("verify", "decoder.onnx", "--target", "vllm-qaic"): "1,decoder.onnx,KV601",
        ("compare", "decoder.onnx", "decoder.onnx"): "1,decoder.onnx,KV616",
        ("inspect", "internal_suffix.onnx"): "0,internal_suffix.onnx,KV112",
    }
    commands = [(*args, "--format", "scratch_lines") for args in cases]
    *answers, (page, _) = run_with(tmp_path, *commands, ["rename", "--help"])
    first_lines = [next(iter(out.splitlines()), None) for out, _ in answers]
    assert first_lines == list(cases.values())
    assert "scratch_lines" in "".join(page.split())


def test_only_the_requested_format_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemError")
    command = ("decoder.onnx", "--prefix", "A", "-n", "-q", "--format")
    answers = run_with(tmp_path, *((*command, name) for name in ("text", "json", "github")))
    assert [loaded for _, loaded in answers] == [
        ["text"],
        ["json", "text"],
        ["github", "json", "text"],
    ]
