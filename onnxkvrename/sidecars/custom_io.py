"""``custom_io.yaml``: the precision of each input and output of a compiled model.

QEfficient writes the file, the Cloud AI compiler reads it:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``), and the Cloud AI SDK's page on custom I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import ModelError
from onnxkvrename.limits import shorten_text
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    describe_node,
    expect,
    parse_yaml_tree,
)

CAPTION = "custom I/O"
EXPECTED_FORM = "a list of entries with IOName and Precision, as QEfficient writes it"


def find_custom_io_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield the name in every entry.

    Raises:
        UnreadableTextError: The tree has another form.
    """
    for name, _ in _find_entries(tree):
        yield name


def parse_custom_io_dtypes(text: str, path: str) -> Mapping[str, str]:
    """Return the dtype of each name in the text of a file; messages name the path.

    Precisions are in capitals, which are ONNX's dtypes where ONNX has them.

    Raises:
        ModelError: The text is not YAML, or does not have the expected form.
    """
    try:
        tree = parse_yaml_tree(text)
        return dict(find_custom_io_dtypes(tree)) if tree is not None else {}
    except UnreadableTextError as error:
        raise ModelError(
            f"cannot be read as {CAPTION}: it {error}",
            path=path,
            hint=error.hint or f"expected: {EXPECTED_FORM}",
        ) from None


def find_custom_io_dtypes(tree: Node) -> Iterator[tuple[str, str]]:
    """Yield each name with its dtype, the precision in capitals.

    Raises:
        UnreadableTextError: The tree has another form, or an entry has no precision.
    """
    for name, entry in _find_entries(tree):
        precision = entry.get("Precision")
        if not isinstance(precision, ScalarNode) or not precision.value:
            raise UnreadableTextError(
                f"has {shorten_text(name.value)} with {describe_node(precision)} as a Precision"
            )
        yield name.value, precision.value.upper()


def _find_entries(tree: Node) -> Iterator[tuple[ScalarNode, MappingNode]]:
    for item in expect(SequenceNode, tree, "its content").items:
        entry = expect(MappingNode, item, "an entry")
        if entry.get("<<") is not None:
            raise UnreadableTextError("has an entry that is merged with another (<<)")
        name = expect(ScalarNode, entry.get("IOName"), "an IOName")
        if not name.value:
            raise UnreadableTextError("has an empty string as an IOName")
        yield name, entry
