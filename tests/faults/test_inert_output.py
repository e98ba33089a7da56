"""No text from a model, a path or a document commands what shows our output.

Each command runs on models and paths that are full of what terminals and CI runners act on,
in every format. The judge is in :mod:`faults.hostile_output`; it must catch a printer that does
not escape.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import Sample
from faults.hostile_output import (
    HOSTILE_TEXTS,
    MARKUP,
    find_active_text,
    save_hostile_model,
)
from terminals import run_on_terminal
from tiers import full, thin

from onnxkvrename import KvRenameError
from onnxkvrename.cli import output
from onnxkvrename.cli.output import print_answer, print_lines
from onnxkvrename.findings import build_finding
from onnxkvrename.report.documents.rename_json import RenameContent
from onnxkvrename.report.formats import Answer, FileResult, Line, Note, list_formats

LF = "\n"
RENAME = ("rename", "--prefix", "VLLM")
COMMAND_LINES = (
    (*RENAME, "-n"),
    (*RENAME, "-n", "-v"),
    (*RENAME, "--check"),
    (*RENAME, "--check", "-v"),
    (*RENAME, "--strict", "-n"),
    (*RENAME, "-d", "::out::\n##[x]"),
    ("rename", "--target", "vllm-qaic", "-n"),
    ("verify", "-v"),
    ("verify", "-v", "--prefix", "VLLM"),
    ("inspect",),
    ("inspect", "-v", "--vllm", "--tokens", "9"),
    ("verify", "-v", "--target", "vllm-qaic"),
)
"""Commands that take any number of models."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, to name files as briefly as a line can begin."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def build_path(text: str) -> Path:
    """Return a name of a file with the text in it, as far as a name can have it."""
    return Path(text.replace("/", "|").replace("\x00", "")[:200] + ".onnx")


def save_models(texts: Iterable[str]) -> list[Path]:
    return [save_hostile_model(build_path(text), text) for text in texts]


@pytest.mark.parametrize(
    ("args", "output_format"), thin(itertools.product(COMMAND_LINES, list_formats()), 8)
)
def test_no_command_says_what_a_terminal_or_a_runner_acts_on(
    args: tuple[str, ...], output_format: str, here: Path, run
) -> None:
    models = save_models(HOSTILE_TEXTS)
    outcome = run(*args, "--format", output_format, "--", *models)
    assert "a bug in" not in outcome.err
    assert outcome.out + outcome.err
    assert find_active_text(outcome.out, annotates=output_format == "github") == []
    assert find_active_text(outcome.err) == []
    assert max(map(len, outcome.err.splitlines()), default=0) <= 600


@pytest.mark.parametrize(
    ("text", "output_format"),
    thin(itertools.product(HOSTILE_TEXTS, ["text", "json", "github"]), 13),
    ids=ascii,
)
def test_comparing_two_models_says_nothing_of_it_either(
    text: str, output_format: str, here: Path, run
) -> None:
    model = save_hostile_model(build_path(text), text)
    layout = here / "layout.json"
    layout.write_text(run("inspect", "--format", "json", "--", model).out, "utf-8")
    for prefill in (model, layout):
        outcome = run("compare", "--format", output_format, "--", prefill, model)
        assert "a bug in" not in outcome.err
        assert find_active_text(outcome.out, annotates=output_format == "github") == []
        assert find_active_text(outcome.err) == []


def test_json_keeps_every_name_exactly(here: Path, run) -> None:
    models = save_models(HOSTILE_TEXTS)
    document = json.loads(run(*RENAME, "-n", "--format", "json", "--", *models).out)
    for text, model in zip(HOSTILE_TEXTS, document["models"], strict=True):
        assert model["path"] == str(build_path(text))
        names = [pair["input"]["old"] for pair in model["pairs"]]
        names += [item["name"] for item in model["kept"]]  # what has a line end is no KV buffer
        assert f"{text}/past_key.0{'_RetainedState' if LF in text else ''}" in names


@pytest.mark.parametrize(
    ("text", "output_format"),
    thin(itertools.product(HOSTILE_TEXTS, ["text", "github", "json"]), 7),
    ids=ascii,
)
def test_no_mistake_is_repeated_as_it_is(text: str, output_format: str, here: Path, run) -> None:
    """Missing files, options, documents: whatever is wrong with them is quoted escaped."""
    save_hostile_model(here / "m.onnx", "x")
    name = text.replace("\x00", "").replace("/", "|")
    document = here / f"{name}.json"
    document.write_text(json.dumps({text: text, "specializations": [{text: text}]}))
    rules = here / f"{name}.toml"
    rules.write_text(f"{json.dumps(text)} = 1\n".replace("\\u007f", "\x7f"))
    model = ("--format", output_format, "--", "m.onnx")
    for args in (
        (*RENAME, "--format", output_format, "--", f"{name}.onnx"),
        ("rename", "--prefix", name, *model),
        ("rename", "--target", name, *model),
        (*RENAME, "--profile", name, *model),
        (*RENAME, f"--rules={rules.name}", *model),
        (*RENAME, f"--sidecar={document.name}", *model),
        (*RENAME, "-o", f"{name}/x/m.onnx", *model),
        (*RENAME, f"--{name}", *model),
        ("verify", f"--renamed-from={name}", *model),
        ("inspect", f"--dim={name}=x", *model),
        ("compare", "--format", output_format, "--", document.name, document.name),
    ):
        outcome = run(*args)
        assert outcome.code in (1, 2)
        assert "a bug in" not in outcome.err, args
        annotates = output_format == "github"
        assert find_active_text(outcome.out, annotates=annotates) == [], args
        assert find_active_text(outcome.err) == [], args
        assert max(map(len, outcome.err.splitlines()), default=0) <= 600


def test_a_page_is_as_inert_as_text(here: Path, run) -> None:
    models = save_models(HOSTILE_TEXTS)
    run("inspect", "--html=p.html", "--", *models)
    text = (here / "p.html").read_text("utf-8").replace("\xa0", " ").replace("&#160;", " ")
    assert find_active_text(text) == []


def test_every_code_point_is_printed_as_itself_or_as_an_escape(
    capsys: pytest.CaptureFixture[str], sample: Sample
) -> None:
    """Whatever the format, a line leaves through one function."""
    blocks = [
        "".join(map(chr, range(start, start + 4096))) for start in range(0, sys.maxunicode, 4096)
    ]
    blocks = [blocks[0], *sample(blocks[1:], 20)]
    print_lines(Line(block) for block in blocks)
    printed = capsys.readouterr().out
    assert printed.count("\n") == len(blocks)
    assert find_active_text(printed) == []


@pytest.mark.parametrize("output_format", thin(list_formats(), 1))
def test_every_code_point_of_the_basic_plane_passes_each_format(
    output_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = ["".join(map(chr, range(start, start + 32))) for start in range(0, 0x10000, 32)]
    blocks.append("".join(map(chr, range(0xE0000, 0xE0080))))
    files = tuple(
        FileResult(
            block,
            (build_finding("KV101", block, block, block),),
            KvRenameError(block, path=block, hint=block),
            (Note(block, block, block, "error"),),
        )
        for block in blocks
    )
    answer = Answer(
        "rename",
        1,
        lambda: RenameContent(None, (), (), dict.fromkeys(blocks, 0), None),
        lambda screen: (Line(block, err=True) for block in blocks),
        files,
        (Note("title", "".join(blocks[:9])),),
    )
    print_answer(answer, output_format)
    printed = capsys.readouterr()
    assert find_active_text(printed.out, annotates=output_format == "github") == []
    assert find_active_text(printed.err) == []
    if output_format == "json":
        assert list(json.loads(printed.out)["summary"]) == list(dict.fromkeys(blocks))


@pytest.mark.parametrize("text", [text for text in HOSTILE_TEXTS if text is not MARKUP], ids=ascii)
def test_the_judge_catches_a_printer_that_does_not_escape(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_lines([Line(text)])
    assert find_active_text(capsys.readouterr().out) == []
    monkeypatch.setattr(output, "escape_line", lambda text, cuts=(), is_command=False: [text])
    print_lines([Line(text)])
    assert find_active_text(capsys.readouterr().out)


def read_terminal(*args: object, **environment: str) -> tuple[int, str]:
    """Return the exit code of the command on a terminal, and all that the terminal gets."""
    return run_on_terminal(
        [sys.executable, "-m", "onnxkvrename", *map(str, args)],
        {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LANG": "C.UTF-8", **environment},
    )


@pytest.mark.parametrize(
    "args",
    [
        (*RENAME, "-n", "-v"),
        ("verify", "-v"),
        *(
            pytest.param(args, marks=full)
            for args in (
                (*RENAME, "--check", "-v"),
                ("inspect",),
                ("inspect", "--vllm"),
                ("verify", "-v", "--target", "vllm-qaic"),
                ("compare",),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_terminal_gets_nothing_but_styles(args: tuple[str, ...], here: Path) -> None:
    texts = ("::error::\x1b[8m##[x]\u202e\n", f"{MARKUP}\x9b2J\r##vso[x]\u200b")
    models = save_models(texts)
    code, text = read_terminal(*args, "--", *models)
    assert code in (0, 1, 2)
    assert "a bug in" not in text
    assert find_active_text(text, styled=True) == []
    assert "\x1b[8m" not in text
    assert "\\u202e" in text or "\\x9b" in text
