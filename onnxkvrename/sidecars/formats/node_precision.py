"""Node-precision files (NPI): the tensors that are computed in another precision.

``FP32NodeInstanceNames`` and similar keys list outputs of nodes, also of nodes within local
functions. Inputs and outputs of the graph are renamed; the values of a function
(``past_key.53_InternalRetainedState``) are not.

QEfficient has examples in ``examples/**/*npi*.yaml``
(https://github.com/quic/efficient-transformers); Glow reads them with
``-node-precision-info``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    describe_node,
)
from onnxkvrename.sidecars.yaml_tree import parse_yaml_tree

_LIST_KEY = re.compile("[A-Za-z0-9]+NodeInstanceNames")


def find_node_precision_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield every name in the lists.

    Raises:
        UnreadableTextError: The tree has another form.
    """
    if not isinstance(tree, MappingNode):
        raise UnreadableTextError(
            f"holds {describe_node(tree)}, but must hold lists with their names"
        )
    if tree.get("<<") is not None:
        raise UnreadableTextError("is merged with another mapping (<<)")
    for key, names in tree.entries:
        if isinstance(key, ScalarNode) and _LIST_KEY.fullmatch(key.value):
            yield from _find_listed_names(key.value, names)


def _find_listed_names(key: str, names: Node) -> Iterator[ScalarNode]:
    if isinstance(names, ScalarNode) and names.value in ("", "null", "~"):
        return
    if not isinstance(names, SequenceNode):
        raise UnreadableTextError(f"has {describe_node(names)} as {key}, which must be a list")
    for name in names.items:
        if not isinstance(name, ScalarNode):
            raise UnreadableTextError(
                f"lists {describe_node(name)} in {key}, which must hold names"
            )
        yield name


FORMAT = SidecarFormat(
    caption="node precision",
    priority=40,
    expected_form="FP32NodeInstanceNames or FP16NodeInstanceNames, and a list of names",
    parse=parse_yaml_tree,
    find_names=find_node_precision_names,
    markers=(b"NodeInstanceNames",),
    search_pattern=re.compile(r"[^.].*\.ya?ml"),
)
