"""Prompts for the models of fixtures/plain/serving, and the tokens of the undivided model."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from device import Device

SIZES = {
    "batch_size": 1,
    "ctx_len": 24,
    "sliding_window": 8,
    "vision_batch_size": 1,
    "vision_size": 4,
}
"""Sizes of the symbolic dimensions, as a specializations.json has them."""
COUNT = 12
"""Tokens to generate."""
VOCABULARY = 24
IMAGE_TOKEN = 24
VISION = ("vision_embeds", "deepstack_features")


class Drawn(NamedTuple):
    """A prompt: its tokens, and the features of an image if the model takes one."""

    tokens: list[int]
    features: dict[str, np.ndarray]


def draw(device: Device, length: int) -> Drawn:
    """Draw a prompt for a model, always the same one."""
    features = draw_features(device)
    return Drawn(draw_tokens(length, image=bool(features)), features)


def draw_tokens(length: int, image: bool) -> list[int]:
    """Draw tokens; the second and third are an image's, where there is one."""
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


def generate_undivided(device: Device, prompt: Drawn) -> list[int]:
    """Return the tokens of one session that runs the prompt and generates."""
    device.reset()
    device.buffers.update(prompt.features)
    first = device.run(prompt.tokens, 0)
    return device.generate(first, len(prompt.tokens), COUNT)


def format_tokens(tokens: list[int], undivided: list[int]) -> list[str]:
    """Return lines that compare the tokens of the hand-off with those of one session."""
    rows = [("tokens", tokens), ("undivided", undivided)]
    lines = [f"  {who:10} " + " ".join(f"{token:2}" for token in said) for who, said in rows]
    return [*lines, "  the same" if tokens == undivided else "  NOT the same"]
