"""The prefill worker: runs a prompt and writes the selected buffers to shared memory."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
from device import Device
from kvbuffers import RETAINED, selected, slots, total
from messages import Answer, HandOff, Prompt
from workers import Questions


def work(questions: Questions, path: str, sizes: dict[str, int], whole: bool) -> None:
    """Answer prompts until there are no more."""
    device = Device(path, sizes)
    for prompt in questions:
        questions.answer(prefill(device, prompt, whole))


def prefill(device: Device, prompt: Prompt, whole: bool) -> Answer:
    """Run a prompt at once; return the message for decode, and what is in the memory."""
    device.reset()
    device.buffers.update(prompt.features)
    given = slots(device.buffers, len(prompt.tokens), whole)
    first = device.run(prompt.tokens, 0)
    # Inputs give the places, outputs the bytes: paired by their position in the order.
    outputs = [name for name in selected(device.outputs) if name.endswith(RETAINED)]
    names = selected(name.removesuffix(RETAINED) for name in outputs)
    # A memory cannot have 0 bytes: if nothing is selected, it has one unused byte.
    memory = SharedMemory(prompt.memory, create=True, size=max(total(given), 1))
    for slot, name in zip(given, names, strict=True):
        np.copyto(slot.view(memory.buf), slot.part_of(device.buffers[name]))
    memory.close()
    return Answer(HandOff(prompt.memory, len(prompt.tokens), first), given, list(device.buffers))
