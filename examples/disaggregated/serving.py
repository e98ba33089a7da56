"""Start both workers, hand over one prompt after the other, and compare with one session."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

import decode
import prefill
from device import Device
from kvbuffers import Slot, total
from messages import Answer, Prompt
from prompts import COUNT, draw, format_tokens, generate_undivided
from workers import Worker


class Setting(NamedTuple):
    """Two models, and their settings."""

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
    finally:  # no worker is left that could use it
        release(memory)


def _served(first: Worker, second: Worker, undivided: Device, memory: str, length: int) -> Served:
    prompt = draw(undivided, length)
    sent = first.ask(Prompt(prompt.tokens, prompt.features, memory))
    taken = second.ask(sent.result)
    expected = generate_undivided(undivided, prompt)
    return Served(prompt.tokens, taken.result, expected, sent, taken)


def serve_models(args: argparse.Namespace, sizes: dict[str, int]) -> int:
    """Hand over once between the models in the arguments; return the exit code."""
    setting = Setting(args.prefill, args.decode, sizes, args.full_transfer)
    (served,) = serve(setting, [args.prompt_length])
    say(served)
    return 0 if served.right else 1


def release(name: str) -> None:
    """Free a shared memory that a worker may have left."""
    try:
        memory = SharedMemory(name)
    except FileNotFoundError:
        return
    memory.close()
    memory.unlink()


def say(served: Served) -> None:
    """Print what was handed over, and the tokens on both sides."""
    sent, taken = served.sent, served.taken
    lines = [
        f"a prompt of {_count(served.prompt, 'token')}: {_count(sent.slots, 'buffer')} selected"
    ]
    lines += _table(sent.slots)
    stays = [name for name in sent.buffers if name not in {slot.name for slot in sent.slots}]
    if stays:
        lines.append(f"  stays on prefill: {', '.join(stays)}")
    lines.append(f"  handed over: {total(sent.slots):,} bytes, and {_words(sent)}")
    if _layout(sent.slots) != _layout(taken.slots):
        lines += ["  decode reads them as", *_table(taken.slots)]
    lines += format_tokens(served.tokens, served.undivided)
    print("\n".join(lines), flush=True)


def _count(values: Sequence[object], noun: str) -> str:
    return f"{len(values)} {noun if len(values) == 1 else noun + 's'}"


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
