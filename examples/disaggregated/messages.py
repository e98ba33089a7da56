"""Messages between the processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from kvbuffers import Slot


class Prompt(NamedTuple):
    """To the prefill worker: tokens, the features of an image if there is one, a name to use."""

    tokens: list[int]
    features: dict[str, np.ndarray]
    memory: str


class HandOff(NamedTuple):
    """From prefill to decode: all that travels besides the shared memory itself."""

    memory: str
    prompt_length: int
    first_token: int


class Answer(NamedTuple):
    """A worker's result; for the output also its slots and the names of all its buffers."""

    result: Any
    slots: list[Slot]
    buffers: list[str]
