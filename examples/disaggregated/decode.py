"""The decode worker: reads its buffers from shared memory and generates tokens."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
from device import Device
from kvbuffers import Slot, slots, total
from messages import Answer, HandOff
from workers import Questions


def work(questions: Questions, path: str, sizes: dict[str, int], whole: bool, count: int) -> None:
    """Answer each hand-off with ``count`` tokens, until there are no more."""
    device = Device(path, sizes)
    for handed in questions:
        given = take(device, handed, whole)
        tokens = device.generate(handed.first_token, handed.prompt_length, count)
        questions.answer(Answer(tokens, given, list(device.buffers)))


def take(device: Device, handed: HandOff, whole: bool) -> list[Slot]:
    """Fill empty buffers from the memory, and free the memory."""
    device.reset()
    given = slots(device.buffers, handed.prompt_length, whole)
    memory = SharedMemory(handed.memory)
    try:
        # The only check that the consumer has.
        if memory.size < total(given):
            raise ValueError(f"the memory has {memory.size} bytes, and not {total(given)}")
        for slot in given:
            np.copyto(slot.part_of(device.buffers[slot.name]), slot.view(memory.buf))
    finally:
        memory.close()
        memory.unlink()
    return given
