from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import FIXTURES

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import build_finding
from onnxkvrename.report import formats
from onnxkvrename.report.formats import FileResult, Note, list_formats

LINES = '''
from onnxkvrename.report.formats import Format, Line


def render(answer, screen):
    """Render one line for each finding."""
    for file in answer.files:
        for finding in file.findings:
            yield Line(f"{answer.command},{answer.exit_code},{file.path},{finding.code}")


FORMAT = Format(render)
'''


def run_with(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command with the formats of one more folder."""
    script = (
        "import sys, onnxkvrename.report.formats as formats;"
        "formats.__path__.append(sys.argv[1]);"
        "from onnxkvrename.cli.main import main; code = main(sys.argv[2:]);"
        "print(code, *(name for name in sys.modules if '.formats.' in name), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, folder, *args]
    return subprocess.run(
        list(map(str, command)), cwd=FIXTURES / "plain", capture_output=True, text=True
    )


def test_formats_are_the_files_of_their_folder() -> None:
    folder = Path(formats.__path__[0])
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert list_formats() == tuple(sorted(names))
    assert names >= {"github", "json", "sarif", "text"}


def test_a_file_has_failed_by_its_error_a_finding_or_a_note() -> None:
    sound = FileResult("m.onnx", notes=(Note("renamed", "4 names"),))
    assert not sound.has_failed
    assert not sound._replace(findings=(build_finding("KV112", "", "", ""),)).has_failed
    assert sound._replace(findings=(build_finding("KV101", "", "", ""),)).has_failed
    assert sound._replace(notes=(Note("names", "would change", level="error"),)).has_failed
    assert sound._replace(error=KvRenameError("no such file")).has_failed


def test_a_new_format_takes_one_file_and_works_for_every_command(tmp_path: Path) -> None:
    (tmp_path / "scratch_lines.py").write_text(LINES)
    for args, line in (
        (("decoder.onnx", "--prefix", "A", "-n"), None),
        (("verify", "decoder.onnx", "--prefix", "A"), "verify,1,decoder.onnx,KV116"),
        (("check-consumer", "decoder.onnx"), "check-consumer,1,decoder.onnx,KV601"),
        (("compare", "decoder.onnx", "decoder.onnx"), "compare,1,decoder.onnx,KV616"),
        (("inspect", "internal_suffix.onnx"), "inspect,0,internal_suffix.onnx,KV112"),
        (("manifest", "internal_suffix.onnx"), "manifest,0,internal_suffix.onnx,KV112"),
    ):
        process = run_with(tmp_path, *args, "--format", "scratch_lines")
        first = next(iter(process.stdout.splitlines()), None)
        assert first == line, (args, process.stderr)
    assert "scratch_lines" in "".join(run_with(tmp_path, "--help").stdout.split())


def test_only_the_requested_format_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemError")
    for name, loaded in (
        ("text", ["text"]),
        ("json", ["json", "text"]),
        ("sarif", ["sarif", "text"]),
    ):
        process = run_with(tmp_path, "decoder.onnx", "--prefix", "A", "-n", "-q", "--format", name)
        code, *modules = process.stderr.split()
        assert code == "0"
        assert sorted(module.rpartition(".")[2] for module in modules) == loaded
