"""custom_io.yaml: the names in it, and a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from onnxkvrename import KvRenameError, ModelError
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.custom_io import (
    PRECISIONS,
    check_precision,
    find_custom_io_dtypes,
    find_custom_io_names,
    render_custom_io,
)
from onnxkvrename.sidecars.tree import parse_yaml_tree

REAL = Path(__file__).resolve().parents[3] / "shared" / "exports" / "llama2l"
WRITTEN = """\
 - IOName: past_key.0_VLLM
   Precision: mxint8

 - IOName: past_key.0_VLLM_RetainedState
   Precision: mxint8

"""


def read(text: str) -> list[str]:
    tree = parse_yaml_tree(text)
    assert tree is not None
    return [name.value for name in find_custom_io_names(tree)]


def pairs(*inputs: str) -> list[tuple[str, str]]:
    return [(name, f"{name}_RetainedState") for name in inputs]


def test_a_new_file_looks_as_qefficient_writes_it() -> None:
    assert render_custom_io(pairs("past_key.0_VLLM"), "mxint8") == WRITTEN


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real exports: {REAL} is not there")
@pytest.mark.parametrize(("kind", "token"), [("plain", ""), ("VLLM", "_VLLM")])
def test_a_new_file_is_that_of_a_real_compile(kind: str, token: str) -> None:
    inputs = [f"past_{part}.{layer}{token}" for layer in (0, 1) for part in ("key", "value")]
    real = (REAL / f"compile-{kind}" / "custom_io.yaml").read_bytes()
    assert render_custom_io(pairs(*inputs), "float16").encode() == real


def test_what_is_no_kv_comes_last_with_a_precision_of_its_own() -> None:
    text = render_custom_io(pairs("k_pe.0"), "mxint8", [("vision_embeds", "float16")])
    assert text.endswith("\n\n - IOName: vision_embeds\n   Precision: float16\n\n")


@pytest.mark.parametrize(
    "name",
    [
        *("layer_5/past_key.5", "null", "Yes", "~", "1e3", "", "a ", "- a", "a: b", "a #b", "[a]"),
        *("'", '"\\', "*a", "@a", "é", "😀", "a\nb", "\x1b[2J", "a\u2028b\x85", "\u202e"),
    ],
)
def test_any_name_can_be_read_again(name: str) -> None:
    text = render_custom_io([(name, "out")], "float16")
    assert [entry["IOName"] for entry in yaml.safe_load(text)] == [name, "out"]
    assert text.replace("\n", "").isprintable()


def test_a_name_that_is_not_utf_8_cannot_be_written() -> None:
    with pytest.raises(ModelError, match="not UTF-8"):
        render_custom_io([("past_key\udcff.0", "out")], "float16")


def dtypes_of(text: str) -> list[tuple[str, str]]:
    tree = parse_yaml_tree(text)
    assert tree is not None
    return list(find_custom_io_dtypes(tree))


def test_each_name_has_the_dtype_that_its_precision_means() -> None:
    assert dtypes_of(WRITTEN) == [
        ("past_key.0_VLLM", "MXINT8"),
        ("past_key.0_VLLM_RetainedState", "MXINT8"),
    ]


@pytest.mark.parametrize("precision", ["float16", "Float16", "FLOAT16"])
def test_a_precision_in_capitals_is_onnxs_name(precision: str) -> None:
    assert dtypes_of(f"- IOName: a\n  Precision: {precision}\n") == [("a", "FLOAT16")]


@pytest.mark.parametrize(
    ("entry", "said"),
    [("", "nothing"), ("\n  Precision: ''", "a string"), ("\n  Precision: []", "a list")],
)
def test_an_entry_without_a_precision_is_refused(entry: str, said: str) -> None:
    with pytest.raises(UnreadableTextError, match=f"has a with {said}"):
        dtypes_of(f"- IOName: a{entry}\n")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_of_the_compiler_are_known(precision: str) -> None:
    assert check_precision(precision) == precision


@pytest.mark.parametrize(
    ("precision", "hint"),
    [
        ("mxint", "did you mean mxint8?"),
        ("FLOAT16", "did you mean float16?"),
        ("int8", "mxint8 keeps"),
        ("", "there are: float16, mxint8, float"),
        ("float16\n", "did you mean float16?"),
    ],
)
def test_another_precision_is_refused_with_what_may_be_meant(precision: str, hint: str) -> None:
    for others in ([], [("x", precision)]):
        with pytest.raises(KvRenameError, match="unknown precision") as caught:
            render_custom_io(pairs("k_pe.0"), "float16" if others else precision, others)
        assert hint in caught.value.hint


def test_names_are_found_in_every_style_of_yaml() -> None:
    text = "- IOName: a\n- {Precision: float, IOName: 'b'}\n- Layout: [x]\n  ? IOName\n  : \"c\"\n"
    assert read(text) == ["a", "b", "c"]


def test_only_the_name_must_be_written_out() -> None:
    assert read("- {IOName: a, Precision: &p mxint8}\n- {IOName: b, Precision: *p}\n") == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("IOName: a", "has a mapping"),
        ("- a", "has a string"),
        ("- - IOName: a", "has a list"),
        ("- Precision: a", "nothing as an"),
        ("- IOName:", "string as an"),
        ("- IOName: [a]", "list as an"),
        ("- &e {IOName: a}\n- *e", "has an alias"),
        ("- IOName: &n a\n- IOName: *n", "alias as an"),
        ("- &e {IOName: a}\n- {<<: *e}", "merged"),
    ],
)
def test_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnreadableTextError, match=message):
        read(text)
