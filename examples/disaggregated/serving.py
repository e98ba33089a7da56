"""One hand-off after the other: starts both workers, and compares with the undivided model."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

import decode
import numpy as np
import prefill
from device import Device
from kvbuffers import Slot, total
from messages import Answer, Prompt
from workers import Worker

SIZES = {
    "batch_size": 1,
    "ctx_len": 24,
    "sliding_window": 8,
    "vision_batch_size": 1,
    "vision_size": 4,
}
"""Of the symbolic dimensions, as a specializations.json would give them."""
COUNT = 12
"""Tokens to generate."""
VOCABULARY = 24
IMAGE_TOKEN = 24
VISION = ("vision_embeds", "deepstack_features")


class Setting(NamedTuple):
    """Two models, and how they are used."""

    prefill: Path
    decode: Path
    sizes: dict[str, int]
    whole: bool = False


class Served(NamedTuple):
    """The result of a prompt."""

    prompt: list[int]
    tokens: list[int]
    undivided: list[int]
    sent: Answer
    taken: Answer

    @property
    def right(self) -> bool:
        """True if the tokens are those of the undivided model."""
        return self.tokens == self.undivided


def serve(setting: Setting, lengths: Sequence[int]) -> list[Served]:
    """Run prompts of these lengths on both workers; raises :class:`workers.WorkerError`."""
    sizes, whole = setting.sizes, setting.whole
    memory = f"kv_{secrets.token_hex(8)}"
    try:
        with (
            Worker("prefill", prefill.work, str(setting.prefill), sizes, whole) as first,
            Worker("decode", decode.work, str(setting.decode), sizes, whole, COUNT) as second,
        ):
            undivided = Device(str(setting.decode), sizes)
            return [_served(first, second, undivided, memory, length) for length in lengths]
    finally:  # no worker is left who could take it once more
        release(memory)


def _served(first: Worker, second: Worker, undivided: Device, memory: str, length: int) -> Served:
    undivided.reset()
    features = draw_features(undivided)
    tokens = draw_prompt(length, image=bool(features))
    sent = first.ask(Prompt(tokens, features, memory))
    taken = second.ask(sent.result)
    undivided.buffers.update(features)
    begun = undivided.run(tokens, 0)
    expected = undivided.generate(begun, length, COUNT)
    return Served(tokens, taken.result, expected, sent, taken)


def release(name: str) -> None:
    """Give a shared memory back that a worker may have left behind."""
    try:
        memory = SharedMemory(name)
    except FileNotFoundError:
        return
    memory.close()
    memory.unlink()


def draw_prompt(length: int, image: bool) -> list[int]:
    """Tokens; the second and third are an image's, where there is one."""
    drawn = random.Random(8)
    tokens = [drawn.randrange(VOCABULARY) for _ in range(length)]
    if image:
        tokens[1:3] = [IMAGE_TOKEN] * len(tokens[1:3])
    return tokens


def draw_features(device: Device) -> dict[str, np.ndarray]:
    """Draw image embeddings for the inputs that take them."""
    drawn = random.Random(4)
    return {
        name: np.array([drawn.uniform(-1, 1) for _ in range(buffer.size)], buffer.dtype).reshape(
            buffer.shape
        )
        for name, buffer in device.buffers.items()
        if name in VISION
    }


def say(served: Served) -> None:
    """Print what was handed over, and the tokens on both sides."""
    sent, taken = served.sent, served.taken
    lines = [f"a prompt of {len(served.prompt)} tokens: {len(sent.slots)} buffers are selected"]
    lines += _table(sent.slots)
    stays = [name for name in sent.buffers if name not in {slot.name for slot in sent.slots}]
    if stays:
        lines.append(f"  stays behind: {', '.join(stays)}")
    lines.append(f"  handed over: {total(sent.slots):,} bytes and three words: {_words(sent)}")
    if _layout(sent.slots) != _layout(taken.slots):
        lines += ["  decode takes them for", *_table(taken.slots)]
    for who, tokens in (("tokens", served.tokens), ("undivided", served.undivided)):
        lines.append(f"  {who:10} " + " ".join(f"{token:2}" for token in tokens))
    lines.append("  the same" if served.right else "  NOT the same")
    print("\n".join(lines), flush=True)


def _words(sent: Answer) -> str:
    _, length, first = sent.result
    return f"the memory's name, prompt length {length}, first token {first}"


def _layout(slots: list[Slot]) -> list[tuple[int, int]]:
    return [(slot.offset, slot.size) for slot in slots]


def _table(slots: list[Slot]) -> list[str]:
    return [
        f"  {slot.offset:8,} {slot.size:6,} B  {'x'.join(map(str, slot.shape)):9} {slot.name}"
        for slot in slots
    ]
