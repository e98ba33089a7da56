"""``hashed_compile_params.json``: the parameters of a compile, its custom I/O included.

QEfficient writes the file after a successful compile, names the directory after the file's
hash, and does not read it again:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.json_tree import parse_json_tree
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    OpaqueNode,
    ScalarNode,
    describe_node,
)


def find_compile_params_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield the keys of ``custom_io``.

    Raises:
        UnreadableTextError: The tree has another form.
    """
    if not isinstance(tree, MappingNode):
        raise UnreadableTextError(f"holds {describe_node(tree)}, but must hold an object")
    buffers = tree.get("custom_io")
    if buffers is None or isinstance(buffers, OpaqueNode):
        return
    if not isinstance(buffers, MappingNode):
        raise UnreadableTextError(
            f"has {describe_node(buffers)} as custom_io, which must be an object"
        )
    for name, _ in buffers.entries:
        if isinstance(name, ScalarNode):
            yield name


FORMAT = SidecarFormat(
    caption="compile parameters",
    priority=20,
    expected_form="an object with custom_io, as QEfficient writes it",
    parse=parse_json_tree,
    find_names=find_compile_params_names,
    file_name_pattern=re.compile(r"hashed_compile_params\.json"),
    only_graph_values=True,
    requires_pairs=True,
)
