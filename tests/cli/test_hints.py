"""A hint says what to do: with a command that works when it is pasted, or with an option to add."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES, Run
from hints import find_commands, split_words

import onnxkvrename


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with and without a token, in a directory to run commands in."""
    monkeypatch.chdir(tmp_path)
    for source, name in (
        ("plain/decoder.onnx", "m.onnx"),
        ("plain/decoder.onnx", "n.onnx"),
        ("plain/decoder.onnx", "my model; rm -rf $HOME.onnx"),
        ("plain/decoder.onnx", "-m.onnx"),
        ("plain/decoder.onnx", "two\nlines.onnx"),
        ("VLLM/decoder.onnx", "v.onnx"),
        ("plain/internal_suffix.onnx", "suffix.onnx"),
    ):
        shutil.copyfile(FIXTURES / source, name)
    shutil.copyfile("m.onnx", "target.onnx")
    Path("linked.onnx").symlink_to("target.onnx")
    Path("other").mkdir()
    onnxkvrename.rename("m.onnx", "vllmkvcache", output="wrong.onnx")
    shutil.copytree(FIXTURES / "plain" / "windows", "half")
    window = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    shutil.copyfile(FIXTURES / "VLLM" / window, window.replace("windows", "half"))
    qeff = Path(onnxkvrename.__file__).parent / "rules" / "profiles" / "qeff.toml"
    shutil.copyfile(qeff, "my rules.toml")


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("verify m.onnx --prefix X", "m.onnx --prefix X"),
        ("verify v.onnx --prefix X -q", "v.onnx --prefix X --replace"),
        ("verify 'my model; rm -rf $HOME.onnx' --prefix X",
         "'my model; rm -rf $HOME.onnx' --prefix X"),
        ("verify 'two\nlines.onnx' --prefix X", r"$'two\012lines.onnx' --prefix X"),
        ("verify --prefix X -- -m.onnx", "./-m.onnx --prefix X"),
        ("verify m.onnx --prefix X --pairs dataflow", "m.onnx --prefix X --pairs dataflow"),
        ("verify m.onnx --prefix X --rules 'my rules.toml'",
         "m.onnx --prefix X --rules 'my rules.toml'"),
        ("check-consumer m.onnx", "m.onnx --target vllm-qaic"),
        ("check-consumer ./-m.onnx", "./-m.onnx --target vllm-qaic"),
        ("check-consumer v.onnx", "v.onnx --target vllm-qaic --replace"),
        ("compare m.onnx n.onnx", "m.onnx n.onnx --target vllm-qaic"),
    ],
)  # fmt: skip
def test_after_a_suggested_command_the_same_is_not_found_again(
    typed: str, suggested: str, run: Run
) -> None:
    words = shlex.split(typed)
    found = run(*words)
    assert find_commands(found.err) == [f"onnxkvrename {suggested}"]
    codes = re.findall(r"error (KV\d+):", found.err)
    assert run(*split_words(suggested)).code == 0
    assert codes
    assert not re.search("|".join(codes), run(*words).err)


@pytest.mark.parametrize(
    ("typed", "hint", "mended"),
    [
        ("v.onnx --prefix X", "`--replace`", "v.onnx --prefix X --replace"),
        ("v.onnx --prefix X --check", "`--replace`", "v.onnx --prefix X --replace"),
        ("v.onnx --strip --prefix X", "`--strip --prefix VLLM`", "v.onnx --strip --prefix VLLM"),
        ("m.onnx --prefix X -o v.onnx", "`--force`", "m.onnx --prefix X -o v.onnx --force"),
        ("m.onnx --prefix X -o other", "`-d other`", "m.onnx --prefix X -d other"),
        ("m.onnx n.onnx --prefix X -o new.onnx", "`-d renamed`",
         "m.onnx n.onnx --prefix X -d renamed"),
        ("linked.onnx --prefix X", "`-d renamed`", "linked.onnx --prefix X -d renamed"),
        ("m.onnx --check", "`--target vllm-qaic`", "m.onnx -n --target vllm-qaic"),
        ("v.onnx --strip --pairs dataflow", "`--prefix VLLM`",
         "v.onnx --strip --pairs dataflow --prefix VLLM"),
        ("m.onnx --prefix vllmkvcache --strict", "`--prefix vllmKvCache --replace`",
         "m.onnx --prefix vllmKvCache --replace --strict"),
        ("suffix.onnx --prefix X --strict", "`--normalize`",
         "suffix.onnx --prefix X --strict --normalize"),
        ("verify wrong.onnx --strict", "`--prefix vllmKvCache --replace`",
         "wrong.onnx --prefix vllmKvCache --replace --strict"),
        ("verify half", "`--prefix VLLM`", "half --prefix VLLM"),
        ("verify m.onnx n.onnx --run --reference v.onnx", "such as m.onnx",
         "verify m.onnx --run --reference v.onnx"),
        ("custom-io half --precision float16", "such as half/",
         "custom-io m.onnx --precision float16"),
        ("explain 402", "`onnxkvrename explain` lists all codes", "explain"),
    ],
)  # fmt: skip
def test_an_option_that_is_named_mends_the_command(
    typed: str, hint: str, mended: str, run: Run
) -> None:
    outcome = run(*shlex.split(typed))
    assert outcome.code in (1, 2)
    assert hint in outcome.err.rpartition("(")[2]
    assert run(*shlex.split(mended)).code == 0
