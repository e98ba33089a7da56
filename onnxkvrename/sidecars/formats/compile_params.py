"""``hashed_compile_params.json``: what a compile was asked for, its custom I/O included.

QEfficient writes it when a compile has succeeded, and calls the directory by its hash.
It is not read again.

After quic/efficient-transformers, ``base/modeling_qeff.py`` (``_compile``).
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.sidecars.text_edit import (
    MappingNode,
    Node,
    OpaqueNode,
    ScalarNode,
    UnreadableTextError,
    describe_node,
)

COMPILE_PARAMS_FORM = "an object with custom_io, as QEfficient writes it"


def find_compile_params_names(tree: Node) -> Iterator[ScalarNode]:
    """The keys of ``custom_io``. Raises :class:`Unreadable` for another form."""
    if not isinstance(tree, MappingNode):
        raise UnreadableTextError(f"holds {describe_node(tree)}, where an object belongs")
    buffers = tree.get("custom_io")
    if buffers is None or isinstance(buffers, OpaqueNode):
        return
    if not isinstance(buffers, MappingNode):
        raise UnreadableTextError(
            f"has {describe_node(buffers)} as custom_io, where an object belongs"
        )
    for name, _ in buffers.entries:
        if isinstance(name, ScalarNode):
            yield name
