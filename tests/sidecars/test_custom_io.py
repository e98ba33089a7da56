"""custom_io.yaml: the names in it, and their dtypes."""

from __future__ import annotations

import pytest

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.custom_io import (
    find_custom_io_names,
)
from onnxkvrename.sidecars.tree import parse_yaml_tree

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
