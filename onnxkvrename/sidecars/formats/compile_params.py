"""``hashed_compile_params.json``: what a compile was asked for, its custom I/O included.

QEfficient writes it when a compile has succeeded, and calls the directory by its hash.
It is not read again.

After quic/efficient-transformers, ``base/modeling_qeff.py`` (``_compile``).
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.sidecars.text_edit import Entries, Node, Other, Scalar, Unreadable, told

FORM = "an object with custom_io, as QEfficient writes it"


def names(tree: Node) -> Iterator[Scalar]:
    """The keys of ``custom_io``. Raises :class:`Unreadable` for another form."""
    if not isinstance(tree, Entries):
        raise Unreadable(f"holds {told(tree)}, where an object belongs")
    buffers = tree.get("custom_io")
    if buffers is None or isinstance(buffers, Other):
        return
    if not isinstance(buffers, Entries):
        raise Unreadable(f"has {told(buffers)} as custom_io, where an object belongs")
    for name, _ in buffers.pairs:
        if isinstance(name, Scalar):
            yield name
