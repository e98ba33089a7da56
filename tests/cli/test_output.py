from __future__ import annotations

import errno
import io
import itertools
import re
import shlex
import sys
from pathlib import Path

import models
import pytest
from models import saved
from tiers import thin

from onnxkvrename import KvRenameError
from onnxkvrename.cli import output as console
from onnxkvrename.cli.output import is_color_enabled, is_terminal, print_lines, stdout_guard
from onnxkvrename.report import inert
from onnxkvrename.report.formats import Line, Span, build_line

RENAME = "$K decoder.onnx --prefix VLLM -n"
COMMANDS = (RENAME, "$K verify decoder.onnx", "$K inspect decoder.onnx")


class Stream(io.StringIO):
    """A stream to someone, or to no one."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched

    def isatty(self) -> bool:
        return self.watched


# What is said.


def test_lines_go_to_stdout_or_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines([Line("a"), Line("b", err=True), Line("c")])
    assert capsys.readouterr() == ("a\nc\n", "b\n")


def test_a_style_is_for_colour_only_and_no_text_passes_for_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = build_line("\x1b[31ma", Span("b\x1b[0m", "31;1"), "\nc")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    print_lines([line])
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_lines([line])
    assert capsys.readouterr().out == (
        "\\x1b[31mab\\x1b[0m\\x0ac\n\\x1b[31ma\x1b[31;1mb\\x1b[0m\x1b[0m\\x0ac\n"
    )


def test_whatever_is_printed_is_one_line_that_commands_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_lines([Line("::error::a\n::error::b"), Line(" ::x##[y", err=True)])
    print_lines([Line("::error title=a::b\r##[c", is_command=True)])
    assert capsys.readouterr() == (
        "\\x3a:error::a\\x0a::error::b\n::error title=a::b\\x0d#\\x23[c\n",
        " \\x3a:x#\\x23[y\n",
    )


@pytest.mark.parametrize("color", ["", "1"])
def test_one_line_that_needs_escapes_is_escaped_among_many_that_do_not(
    color: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", color)
    lines = [Line(f"past_key.{layer} -> past_key.{layer}_VLLM") for layer in range(3000)]
    for hostile, shown in {
        "::error::x": "\\x3a:error::x",
        "a\nb": "a\\x0ab",
        "é\x9b": "é\\x9b",
    }.items():
        print_lines([*lines[:1500], Line(hostile), *lines[1500:]])
        expected = [*(line.text for line in lines[:1500]), shown]
        expected += [line.text for line in lines[1500:]]
        assert capsys.readouterr().out.split("\n") == [*expected, ""]


def test_plain_lines_are_not_looked_at_character_by_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def search(text: str) -> list[tuple[int, str]]:
        searched.append(text)
        return []

    monkeypatch.setattr(inert, "_find_unsafe", search)
    print_lines(Line(f'  "name": "past_key.{number}", # [1]') for number in range(10_000))
    assert not searched
    print_lines([Line("plain"), Line("cl\u00e9")])
    assert searched == ["cl\u00e9"]


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-8", "é 漢"), ("latin-1", "é \\u6f22"), ("cp1252", "é \\u6f22")],
)
def test_what_an_encoding_does_not_have_is_escaped(
    encoding: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, newline="\n"))
    print_lines([Line("é 漢"), Line("more")])
    sys.stdout.flush()
    assert written.getvalue().decode(encoding) == f"{said}\nmore\n"


# Colour.


@pytest.mark.parametrize(
    ("watched", "environment", "painted"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": "0"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": ""}, False),
        (False, {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_terminals_unless_the_environment_says_otherwise(
    watched: bool,
    environment: dict[str, str],
    painted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_color_enabled(Stream(watched)) is painted


def test_nobody_looks_at_a_stream_that_was_closed_by_who_started_us() -> None:
    assert not is_terminal(None)
    assert not is_terminal(Stream(watched=False))
    assert is_terminal(Stream(watched=True))


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_command_paints_only_if_it_may(
    command: str, decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = models.decoder()
    broken.graph.output.pop()
    faulty = saved(broken, decoder.with_name("faulty.onnx"))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    args = (command, decoder, faulty)
    plain = run(*args)
    assert "\x1b" not in plain.out + plain.err
    monkeypatch.setenv("FORCE_COLOR", "1")
    painted = run(*args)
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", painted.out)
    bare = [
        re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()
        for line in (painted.out + painted.err).splitlines()
    ]
    assert bare == (plain.out + plain.err).splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(*args) == plain


# Answers that are not taken.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_answer_that_cannot_be_written_is_an_error(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(console, "drop_stream", dropped.append)
    with (
        pytest.raises(KvRenameError, match="the work is done, but the answer could not be given"),
        stdout_guard(),
    ):
        raise OSError(number, "reason")
    with stdout_guard():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert dropped == [1, 1]


@pytest.mark.parametrize(
    ("command", "code"),
    thin(
        [
            *((command, 0) for command in COMMANDS),
            (f"{RENAME} -o other.onnx --format json", 0),
            ("$K verify decoder.onnx -v --prefix VLLM", 1),
            ("$K verify decoder.onnx --format json --prefix VLLM", 1),
            ("$K verify decoder.onnx --format github --prefix VLLM", 1),
            ("$K inspect decoder.onnx --format json", 0),
            *((f"{command} none.onnx --format json", 2) for command in COMMANDS),
        ],
        2,
    ),
)
def test_a_reader_that_has_gone_does_not_change_the_answer(
    command: str, code: int, decoder: Path, piped
) -> None:
    process = piped(f"{command} | (exec <&-; sleep 0.6)", decoder.parent)
    assert process.returncode == code
    assert "Traceback" not in process.stderr
    assert "a bug in" not in process.stderr


@pytest.mark.parametrize(
    ("form", "command"), thin(itertools.product(["text", "json"], COMMANDS), 2)
)
def test_an_answer_that_does_not_fit_on_the_disk_is_an_error(
    form: str, command: str, decoder: Path, piped
) -> None:
    process = piped(f"{command} --format {form} > /dev/full", decoder.parent)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(
        "error: the work is done, but the answer could not be given: No space"
    )


@pytest.mark.parametrize("asked", thin(["--help", "--version", "verify -h"], 1))
def test_help_that_does_not_fit_on_the_disk_is_no_bug(asked: str, decoder: Path, piped) -> None:
    process = piped(f"$K {asked} > /dev/full", decoder.parent)
    assert process.returncode == 2
    assert "the answer could not be given: No space" in process.stderr
    assert "bug" not in process.stderr


@pytest.mark.parametrize(
    ("closed", "command"),
    thin(itertools.product(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], COMMANDS), 4),
)
def test_closed_streams_do_not_stop_the_work(
    closed: str, command: str, decoder: Path, renamed: bytes, piped
) -> None:
    """An answer that nobody can have got is an error all the same."""
    command = command.removesuffix(" -n")
    process = piped(f"{command} {closed}", decoder.parent)
    code = 2 if ">&- " in f"{closed} ".replace("2>&-", "") else 0
    assert (process.returncode, "bug" in process.stderr) == (code, False)
    assert (decoder.read_bytes() == renamed) is ("--prefix" in command)


OUTCOMES = (
    (RENAME, 0),
    ("$K decoder.onnx --prefix VLLM --check", 1),
    ("$K verify decoder.onnx --prefix VLLM -v", 1),
    ("$K inspect decoder.onnx --format json", 0),
    ("$K none.onnx --prefix VLLM --format json", 2),
    ("$K", 2),
)
BROKEN = ("2>/dev/full", "2>&-", "2> >(exec <&-; sleep 0.3)")


@pytest.mark.parametrize(
    ("broken", "command", "code"),
    thin(((broken, *outcome) for broken in BROKEN for outcome in OUTCOMES), 4),
)
def test_a_stderr_that_takes_nothing_hides_no_outcome(
    command: str, code: int, broken: str, decoder: Path, piped
) -> None:
    """Stdout is complete and the exit code right; there is no place to say more."""
    whole = piped(command, decoder.parent)
    process = piped(f"{command} {broken}", decoder.parent)
    assert (process.returncode, process.stdout) == (code, whole.stdout)


def test_stderr_is_complete_though_the_reader_of_stdout_has_gone(decoder: Path, piped) -> None:
    command = f"{RENAME} -d out"
    whole = piped(command, decoder.parent)
    process = piped(f"{command} | (exec <&-; sleep 0.6)", decoder.parent)
    assert process.stderr == whole.stderr != ""


DESCRIPTORS = """
import os, sys
from onnxkvrename.cli.output import occupy_closed_streams
occupy_closed_streams()
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(2, b"a report of some library")
os.write(3, f"{file} {os.get_inheritable(2)}".encode())
"""


def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path: Path, piped) -> None:
    """Else what a library writes on stderr would be written into a model."""
    (tmp_path / "descriptors.py").write_text(DESCRIPTORS)
    line = f"{shlex.quote(sys.executable)} descriptors.py model <&- >&- 2>&- 3> told; cat told"
    file, inheritable = piped(line, tmp_path).stdout.split()
    assert (int(file) > 3, inheritable) == (True, "True")
    assert (tmp_path / "model").read_bytes() == b""
