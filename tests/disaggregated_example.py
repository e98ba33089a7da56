"""The modules of examples/disaggregated, and the models they serve."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from conftest import FIXTURES

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EXAMPLE = EXAMPLES / "disaggregated"
SERVING = FIXTURES / "plain" / "serving"
sys.path.append(str(EXAMPLE))  # for this process, and those that it spawns

import decode  # noqa: E402
import kvbuffers  # noqa: E402
import prefill  # noqa: E402
import prompts  # noqa: E402
import serving  # noqa: E402
import workers  # noqa: E402
from device import Device  # noqa: E402
from messages import HandOff, Prompt  # noqa: E402

__all__ = [
    "EXAMPLE",
    "EXAMPLES",
    "SERVING",
    "Device",
    "HandOff",
    "Prompt",
    "decode",
    "device",
    "kvbuffers",
    "prefill",
    "prompt",
    "prompts",
    "serving",
    "undivided",
    "workers",
]


@lru_cache
def device(model: Path, role: str) -> Device:
    """A model in a session that is kept; what it did last is still in its buffers."""
    return Device(str(model), prompts.SIZES)


def prompt(model: Path, length: int) -> tuple[list[int], dict]:
    """Tokens for a model, and the features of an image if it takes one."""
    return prompts.draw(device(model, "undivided"), length)


def undivided(model: Path, length: int, piece: int | None = None) -> list[int]:
    """Return the tokens that one session computes for a prompt, fed in pieces or at once."""
    session = device(model, "undivided")
    session.reset()
    tokens, features = prompt(model, length)
    session.buffers.update(features)
    step = piece or length
    for start in range(0, length, step):
        first = session.run(tokens[start : start + step], start)
    return session.generate(first, length, prompts.COUNT)
