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

from onnxkvrename.sidecars.text_edit import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    UnreadableTextError,
    describe_node,
)

NODE_PRECISION_FORM = "FP32NodeInstanceNames or FP16NodeInstanceNames, and a list of names"

_LIST_KEY = re.compile("[A-Za-z0-9]+NodeInstanceNames")


def find_node_precision_names(tree: Node) -> Iterator[ScalarNode]:
    """Every name in the lists. Raises :class:`Unreadable` for another form."""
    if not isinstance(tree, MappingNode):
        raise UnreadableTextError(
            f"holds {describe_node(tree)}, where lists with their names belong"
        )
    if tree.get("<<") is not None:
        raise UnreadableTextError("is merged with another mapping (<<)")
    for key, listed in tree.entries:
        if isinstance(key, ScalarNode) and _LIST_KEY.fullmatch(key.value):
            yield from _find_listed_names(key.value, listed)


def _find_listed_names(key: str, listed: Node) -> Iterator[ScalarNode]:
    if isinstance(listed, ScalarNode) and listed.value in ("", "null", "~"):
        return
    if not isinstance(listed, SequenceNode):
        raise UnreadableTextError(f"has {describe_node(listed)} as {key}, where a list belongs")
    for name in listed.items:
        if not isinstance(name, ScalarNode):
            raise UnreadableTextError(f"lists {describe_node(name)} in {key}, where a name belongs")
        yield name
