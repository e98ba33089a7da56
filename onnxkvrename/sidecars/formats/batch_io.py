"""``aic_batch_io.json``: the files that qaic-runner reads inputs from and writes outputs to.

Only ``map-to`` names a buffer. Paths of files that contain a buffer's name stay, because the
files keep their names.

QEfficient writes the file, the SDK's ``qaic-runner`` reads it:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/utils/generate_inputs.py
and the callers of ``write_io_files``.
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
    ScalarNode,
    SequenceNode,
    describe_node,
)


def find_batch_io_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield the ``map-to`` of every entry that has one.

    Raises:
        UnreadableTextError: The tree has another form.
    """
    batches = tree.get("IO-files") if isinstance(tree, MappingNode) else None
    if not isinstance(batches, SequenceNode):
        raise UnreadableTextError("has no list of IO-files")
    for batch in batches.items:
        for entry in batch.items if isinstance(batch, SequenceNode) else (batch,):
            if not isinstance(entry, MappingNode):
                raise UnreadableTextError(
                    f"lists {describe_node(entry)} in IO-files, which must hold entries"
                )
            name = entry.get("map-to")
            if isinstance(name, ScalarNode):
                yield name
            elif name is not None:
                raise UnreadableTextError(
                    f"has {describe_node(name)} for a map-to, which must be a name"
                )


FORMAT = SidecarFormat(
    caption="batch I/O",
    priority=30,
    expected_form="IO-files, and in it lists of entries with map-to",
    parse=parse_json_tree,
    find_names=find_batch_io_names,
    file_name_pattern=re.compile(r"aic_batch_io.*\.json"),
    markers=(b'"IO-files"',),
    only_graph_values=True,
)
