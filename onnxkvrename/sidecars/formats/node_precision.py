"""Node-precision files (NPI): which tensors are computed in another precision.

``FP32NodeInstanceNames`` and its like list the outputs of nodes, those inside local
functions among them. A value of the graph itself follows a rename; a function's own
(``past_key.53_InternalRetainedState``) is none of its business.

After quic/efficient-transformers, ``examples/**/*npi*.yaml``, and Glow's
``-node-precision-info``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxkvrename.sidecars.text_edit import Entries, Items, Node, Scalar, Unreadable, told

FORM = "FP32NodeInstanceNames or FP16NodeInstanceNames, and a list of names"

_LIST = re.compile("[A-Za-z0-9]+NodeInstanceNames")


def names(tree: Node) -> Iterator[Scalar]:
    """Every name in the lists. Raises :class:`Unreadable` for another form."""
    if not isinstance(tree, Entries):
        raise Unreadable(f"holds {told(tree)}, where lists with their names belong")
    if tree.get("<<") is not None:
        raise Unreadable("is merged with another mapping (<<)")
    for key, listed in tree.pairs:
        if isinstance(key, Scalar) and _LIST.fullmatch(key.value):
            yield from _listed(key.value, listed)


def _listed(key: str, listed: Node) -> Iterator[Scalar]:
    if isinstance(listed, Scalar) and listed.value in ("", "null", "~"):
        return
    if not isinstance(listed, Items):
        raise Unreadable(f"has {told(listed)} as {key}, where a list belongs")
    for name in listed.items:
        if not isinstance(name, Scalar):
            raise Unreadable(f"lists {told(name)} in {key}, where a name belongs")
        yield name
