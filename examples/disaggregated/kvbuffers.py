"""KV buffers that a worker hands over: their selection, order and offsets.

The rules are those of vllm-qaic at 10d331f (model_loader/qaic_session_np.py and qaic_connector.py),
written again in a few lines. Each worker applies them to its own graph; names and shapes are not
sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

PATTERN = "vllmKvCache"
RETAINED = "_RetainedState"


class Slot(NamedTuple):
    """The place of a buffer in the shared memory; ``offset`` is in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, memory: memoryview) -> np.ndarray:
        """Return the slot as an array, without a copy."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, offset=self.offset)

    def part_of(self, buffer: np.ndarray) -> np.ndarray:
        """Return the part of a graph's buffer that is handed over, without a copy."""
        return buffer[tuple(slice(size) for size in self.shape)]


def selected(names: Iterable[str]) -> list[str]:
    """Return the names with the pattern in them, sorted by layer, then by name."""
    return sorted((name for name in names if PATTERN in name), key=_layer_and_name)


def slots(inputs: Mapping[str, np.ndarray], tokens: int, whole: bool) -> list[Slot]:
    """Return the slots for a prompt of this length; ``inputs`` are the graph's input buffers.

    With ``whole``, all of each buffer is moved, as with VLLM_QAIC_USE_FULL_KV_TRANSFER=1.
    """
    found: list[Slot] = []
    offset = 0
    for name in selected(inputs):
        shape = _moved(inputs[name].shape, tokens, whole)
        found.append(Slot(name, shape, inputs[name].dtype, offset))
        offset += found[-1].size
    return found


def total(given: Iterable[Slot]) -> int:
    """Return the bytes of all slots."""
    return sum(slot.size for slot in given)


def _layer_and_name(name: str) -> tuple[int, str]:
    return int(name.split(".")[1].split("_")[0]), name


def _moved(shape: tuple[int, ...], tokens: int, whole: bool) -> tuple[int, ...]:
    """Return one sequence's shape; of rank 4 only the prompt's part of axis 2, whatever it is."""
    if whole or len(shape) <= 3:
        return (1, *shape[1:])
    return (1, shape[1], min(tokens, shape[2]), *shape[3:])
