"""The prefill worker: runs a prompt, and puts the buffers that are selected into shared memory."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
from device import Device
from kvbuffers import RETAINED, selected, slots, total
from messages import Answer, HandOff, Prompt
from workers import Questions


def work(questions: Questions, path: str, sizes: dict[str, int], whole: bool) -> None:
    """Answer prompts until nobody asks any more."""
    device = Device(path, sizes)
    for prompt in questions:
        questions.answer(prefill(device, prompt, whole))


def prefill(device: Device, prompt: Prompt, whole: bool) -> Answer:
    """Run a prompt in one piece; what the decode worker is to get, and what lies in the memory."""
    device.reset()
    device.buffers.update(prompt.features)
    given = slots(device.buffers, len(prompt.tokens), whole)
    first = device.run(prompt.tokens, 0)
    # Inputs say where bytes go, outputs are what goes there: paired by their place in the order.
    outputs = [name for name in selected(device.outputs) if name.endswith(RETAINED)]
    names = selected(name.removesuffix(RETAINED) for name in outputs)
    # A memory of no bytes cannot be made: where nothing is selected, one byte carries nothing.
    memory = SharedMemory(prompt.memory, create=True, size=max(total(given), 1))
    for slot, name in zip(given, names, strict=True):
        np.copyto(slot.view(memory.buf), slot.part_of(device.buffers[name]))
    memory.close()
    return Answer(HandOff(prompt.memory, len(prompt.tokens), first), given, list(device.buffers))
