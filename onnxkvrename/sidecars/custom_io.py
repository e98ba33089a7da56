"""``custom_io.yaml``: the precision of each input and output of a compiled model.

QEfficient writes the file, the Cloud AI compiler reads it:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``), and the Cloud AI SDK's page on custom I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    expect,
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


def _find_entries(tree: Node) -> Iterator[tuple[ScalarNode, MappingNode]]:
    for item in expect(SequenceNode, tree, "its content").items:
        entry = expect(MappingNode, item, "an entry")
        if entry.get("<<") is not None:
            raise UnreadableTextError("has an entry that is merged with another (<<)")
        name = expect(ScalarNode, entry.get("IOName"), "an IOName")
        if not name.value:
            raise UnreadableTextError("has an empty string as an IOName")
        yield name, entry
