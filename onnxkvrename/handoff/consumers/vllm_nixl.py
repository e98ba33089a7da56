"""Describe vLLM's NIXL connector, which hands over pages that vLLM itself allocates.

It knows layers by the model, not by names of a graph, and nothing is selected, sorted or sliced.
What it refuses, `onnxkvrename.vllm` says: the commands join that with what a layout shows.
"""

from __future__ import annotations

from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.layout.layout import Layout


def select_layout(layout: Layout) -> Consumer:
    """Return the consumer with all KV buffers of a layout selected, whatever their names are."""
    inputs = frozenset(buffer.input for buffer in layout.buffers)
    outputs = {buffer.output: buffer.input or "" for buffer in layout.buffers}
    return CONSUMER._replace(
        selects_input=inputs.__contains__,
        selects_output=outputs.__contains__,
        input_name_of=lambda name: outputs.get(name, name),
    )


CONSUMER = Consumer(
    name="vllm-nixl",
    token="",
    source="vLLM 0.24.0 and 0.33.0",
    selects_input=lambda name: True,
    selects_output=lambda name: True,
    input_name_of=lambda name: name,
    needs_in_place=False,
    is_written_elsewhere=lambda name: True,
    memory="paged",
    connectors=("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    configure=select_layout,
)
