"""``aic_batch_io.json``: which file goes into, or comes from, which input or output.

Only ``map-to`` names a buffer; paths of files that are called after one stay, as the
files do.

After quic/efficient-transformers, ``utils/generate_inputs.py`` and its callers of
``write_io_files``, and the SDK's ``qaic-runner``, which reads the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.sidecars.text_edit import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    UnreadableTextError,
    describe_node,
)

BATCH_IO_FORM = "IO-files, and in it lists of entries with map-to"


def find_batch_io_names(tree: Node) -> Iterator[ScalarNode]:
    """What every entry is mapped to. Raises :class:`Unreadable` for another form."""
    batches = tree.get("IO-files") if isinstance(tree, MappingNode) else None
    if not isinstance(batches, SequenceNode):
        raise UnreadableTextError("holds no list of IO-files")
    for batch in batches.items:
        for entry in batch.items if isinstance(batch, SequenceNode) else (batch,):
            if not isinstance(entry, MappingNode):
                raise UnreadableTextError(
                    f"lists {describe_node(entry)} in IO-files, where an entry belongs"
                )
            name = entry.get("map-to")
            if isinstance(name, ScalarNode):
                yield name
            elif name is not None:
                raise UnreadableTextError(
                    f"has {describe_node(name)} for a map-to, where a name belongs"
                )
