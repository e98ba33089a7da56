"""Disaggregated serving in small: prefill in one process, decode in another.

    python serve.py                     the whole story; exit code 0 if all of it holds
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right

Needs onnxkvrename and its extra [run].
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
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
from workers import Worker, WorkerError

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
    """What a prompt came to."""

    prompt: list[int]
    tokens: list[int]
    undivided: list[int]
    sent: Answer
    taken: Answer

    @property
    def right(self) -> bool:
        """Whether the tokens are those of the undivided model."""
        return self.tokens == self.undivided


def serve(setting: Setting, lengths: Sequence[int]) -> list[Served]:
    """Run prompts of these lengths on both workers; raises :class:`WorkerError`."""
    sizes, whole = setting.sizes, setting.whole
    with (
        Worker("prefill", prefill.work, str(setting.prefill), sizes, whole) as first,
        Worker("decode", decode.work, str(setting.decode), sizes, whole, COUNT) as second,
    ):
        undivided = Device(str(setting.decode), sizes)
        return [_served(first, second, undivided, length) for length in lengths]


def _served(first: Worker, second: Worker, undivided: Device, length: int) -> Served:
    undivided.reset()
    features = draw_features(undivided)
    tokens = draw_prompt(length, image=bool(features))
    memory = f"kv_{secrets.token_hex(8)}"
    try:
        sent = first.ask(Prompt(tokens, features, memory))
        taken = second.ask(sent.result)
    finally:
        release(memory)
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
    """What a vision tower might have made of an image, for the inputs that take it."""
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


def one(args: argparse.Namespace) -> int:
    """Hand over between two models; the exit code."""
    sizes = SIZES | {symbol: int(size) for symbol, _, size in (d.partition("=") for d in args.dim)}
    setting = Setting(args.prefill, args.decode or args.prefill, sizes, args.full_transfer)
    (served,) = serve(setting, [args.prompt_length])
    say(served)
    return 0 if served.right else 1


def main() -> int:
    """Tell the story, or do one hand-off; the exit code."""
    parser = argparse.ArgumentParser(description="A prefill and a decode worker, and a hand-off.")
    parser.add_argument("prefill", nargs="?", type=Path, help="a model; none: the whole story")
    parser.add_argument("decode", nargs="?", type=Path, help="another one for decode")
    parser.add_argument("--dim", action="append", default=[], metavar="SYMBOL=SIZE")
    parser.add_argument("--prompt-length", type=int, default=9, metavar="N")
    parser.add_argument("--full-transfer", action="store_true", help="buffers in full")
    args = parser.parse_args()
    for model in (args.prefill, args.decode):
        if model is not None and not model.is_file():
            parser.error(f"{model}: no such file")
    try:
        if args.prefill is None:
            import story

            return story.tell()
        return one(args)
    except WorkerError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
