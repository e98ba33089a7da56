"""A name says nothing but itself: whatever it contains, no hint makes a command of it.

Hints are pasted into shells. So a name that looks like a command, in a model, a path or an
option, is one quoted word in a hint.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES
from hints import find_commands, split_words
from hypothesis import given
from hypothesis import strategies as st
from tiers import thin

from onnxkvrename.cli.main import main
from onnxkvrename.report.inert import escape_text
from onnxkvrename.text import quote_path, quote_word

NAMES = st.text(max_size=8) | st.text(st.sampled_from("`'\"$\\-#;&|! \nMODEL\udcff"), max_size=8)
"""Any names, and such as shells and hints give a meaning."""
PAYLOADS = (
    "`--force;touch PWN`",
    "`onnxkvrename MODEL;touch PWN`",
    "$(touch${IFS}PWN)",
    "'`-q`\"",
)
OWN_RULES = """\
[[kv]]
kind = "attention"
input = '(?P<part>past_key|past_value)\\.{layer}(?P<token>(?:_.+?)?)'
output = '{input}_RetainedState'
"""


@given(NAMES)
def test_a_quoted_name_is_one_word_without_a_backtick(name: str) -> None:
    word = quote_word(name)
    assert "`" not in word
    assert "\n" not in word
    if not re.search("[\ud800-\udc7f\udd00-\udfff\0]", name):  # which no path of Linux has
        assert split_words(word) == [name]
    assert not split_words(quote_path(name))[0].startswith("-")


def _save_models(part: str) -> None:
    """Put models, rules and directories here, whose names and symbols end with a text."""
    for source, name in (("plain", "m"), ("VLLM", "v")):
        shutil.copyfile(FIXTURES / source / "decoder.onnx", f"{name}{part}.onnx")
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "ctx_len":
                dim.dim_param += part
    onnx.save(model, "dims.onnx")
    model = onnx.load(FIXTURES / "VLLM" / "decoder.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("VLLM", f"VLLM{part}")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("VLLM", f"VLLM{part}") for name in names]
    onnx.save(model, "names.onnx")
    Path("wide.onnx").write_bytes((FIXTURES / "plain" / "hybrid.onnx").read_bytes())
    Path(f"r{part}.toml").write_text(OWN_RULES)
    Path(f"d{part}").mkdir()
    shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", f"d{part}/model.onnx")
    shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", f"d{part}/modem.onnx")


COMMANDS = (
    ("vX.onnx", "--prefix", "Y"),
    ("vX.onnx", "--prefix", "Y", "--rules", "rX.toml"),
    ("mX.onnx", "--prefix", "Y", "-o", "vX.onnx"),
    ("mX.onnx", "--prefix", "Y", "-o", "dX"),
    ("mX.onnx", "--prefix", "Y", "-o", "dX/"),
    ("mX.onnx", "--prefix", "T-X"),
    ("mX.onnx", "--target", "vllm-qaicX"),
    ("mX.onnx", "--prefix", "Y", "--profile", "qeffX"),
    ("mX.onnx", "--prefix", "Y", "--rules", "rX.tom"),
    ("m.onnx", "--prefix", "Y"),
    ("vllm-qaic", "mX.onnx"),
    ("verify", "v.onnx"),
    ("verify", "mX.onnx", "--prefix", "Y"),
    ("verify", "names.onnx", "--prefix", "Y", "--rules", "rX.toml"),
    ("verify", "dX", "mX.onnx", "--prefix", "Y"),
    ("names.onnx", "--prefix", "Y", "--rules", "rX.toml"),
    ("names.onnx", "--strip", "--prefix", "Z", "--rules", "rX.toml"),
    ("names.onnx", "mX.onnx", "--prefix", "Y", "--rules", "rX.toml"),
    ("inspect", "names.onnx", "dims.onnx"),
    ("inspect", "mX.on"),
    ("pairs", "dX"),
    ("pairs", "--as", "rules", "dX"),
    ("verify", "mX.onnx", "names.onnx", "--target", "vllm-qaic"),
    ("verify", "dims.onnx", "--target", "vllm-qaicX"),
    ("compare", "mX.onnx", "vX.onnx"),
    ("compare", "dims.onnx", "wide.onnx", "--target", "vllm-qaic"),
    ("compare", "dims.onnx", "wide.onnx"),
    ("compare", "dims.onnx", "names.onnx", "--format", "github"),
    ("inspect", "dims.onnx", "--vllm"),
    ("inspect", "dims.onnx", "--dim", "ctx_lenXa=3"),
    ("inspect", "dims.onnx", "--html", "vX.onnx"),
    ("explain", "KV1X"),
)


@pytest.mark.parametrize("payload", thin(PAYLOADS, 1))
def test_output_with_a_name_that_looks_like_a_command_is_that_with_a_plain_one(
    payload: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = []
    for part in (f"@{'P' * (len(payload) - 2)}@", payload):
        folder = tmp_path / str(len(outputs))
        folder.mkdir()
        monkeypatch.chdir(folder)
        _save_models(part)
        outputs.append(list(_run_all(part, capsys)))
    for plain, hostile in zip(*outputs, strict=True):
        assert hostile.splitlines() == plain.splitlines()


def _run_all(part: str, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield what each command prints, with X where a name has a text, and without quotes."""
    for command in COMMANDS:
        main([re.sub("X", lambda _: part, word) for word in command])
        out, err = capsys.readouterr()
        _check_commands(out, err)
        shown = {part, escape_text(part), quote_word(f" {part}")[3:-1], repr(part)[1:-1]}
        for text in sorted(shown, key=len, reverse=True):
            out, err = out.replace(text, "X"), err.replace(text, "X")
        out = re.sub("[0-9a-f]{64}", "digest", out)
        shown_line = f"{' '.join(command)}\n{out}\n{err}"
        yield re.sub(r"\$?['\"]|\\(?=['\"])| {2,}", "", shown_line)


def _check_commands(out: str, err: str) -> None:
    """Let a shell run the commands of hints, and check that it runs no others."""
    commands = find_commands(out + err)
    if commands and (bash := shutil.which("bash")):
        script = "\n".join(["onnxkvrename() { :; }", *commands])
        subprocess.run([bash, "-c", os.fsencode(script)], check=True, capture_output=True)
        assert not Path("PWN").exists(), (out, err)


def test_a_path_that_begins_with_a_dash_stays_a_path_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "-oX.onnx")
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "b.onnx")
    Path("-d").mkdir()
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "-d/-m.onnx")
    for command in (
        "compare ./-oX.onnx b.onnx --target vllm-qaic",
        "compare ./-oX.onnx b.onnx --target vllm-qaic --format json",
        "verify ./-oX.onnx --target vllm-qaic",
        "verify ./-oX.onnx --prefix T",
        "b.onnx --prefix T -o ./-d",
        "./-ox.onnx --prefix T",
    ):
        main(command.split())
        out, err = capsys.readouterr()
        found = re.findall(r"\S*-(?:oX\.onnx|d\b)", "\n".join(_list_suggestions(out, err)))
        assert found, (command, out, err)
        assert all(path.startswith("./-") for path in found), err


def _list_suggestions(out: str, err: str) -> list[str]:
    similar = re.findall(r"did you mean (.*)\?", err)
    named = re.findall(r"(?:such as|`-d) (\S+?)[`)]", err)
    return [*find_commands(out + err), *similar, *named]
