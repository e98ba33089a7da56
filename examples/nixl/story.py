"""The parts of serve.py: blocks, regions and descriptors, and two models that do not match."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import storytelling
from calling import ROOT
from command import Refused
from kvlayout import LAYOUTS
from prompts import SIZES
from storytelling import PLAIN, BrokenStory, expect, rename, say_title
from transfer import Served, Setting, describe, say, serve, write_specializations


def tell() -> int:
    """Run every part and check its result; return the exit code."""
    return storytelling.tell(
        [
            partial(_faithful, "Two layers of attention, in blocks of 4 tokens", "decoder"),
            partial(_faithful, "Blocks that are scattered", "decoder", scattered=True),
            partial(_faithful, "A block that holds all layers", "decoder", layout="BLNHC"),
            partial(_faithful, "A linear layer, and a sliding window of 8", "hybrid"),
            _window,
            _mismatch,
        ]
    )


def _faithful(title: str, model: str, layout: str = LAYOUTS[0], scattered: bool = False) -> None:
    say_title(title)
    for served in _serve(f"{PLAIN / model}.onnx", [9], layout=layout, scattered=scattered):
        _expect(True, served)


def _window() -> None:
    """A window takes fewer blocks than the context once it is full."""
    say_title("A longer prompt, in blocks of 2 tokens: what has left the window is not read")
    for served in _serve(f"{PLAIN / 'window'}.onnx", [12], block_size=2):
        _expect(True, served)


def _mismatch() -> None:
    """Each model alone gives the right tokens, and so does a short prompt."""
    say_title("Prefill keeps the whole context where decode keeps its window of 8")
    for model in ("window_whole", "window"):
        rename(model)
    names = ("$MODELS/window_whole.onnx", "$MODELS/window.onnx")
    try:
        _serve(names[0], [8, 9], names[1])
    except Refused as error:
        said = f"stopped: {error}".replace(os.environ["MODELS"], "$MODELS")
        print(textwrap.fill(said, 98, initial_indent="  ", subsequent_indent="  "))
    else:
        raise BrokenStory("two models with different KV layouts were served")
    wrong = storytelling.compare("window_whole", "window")
    print("The refused hand-off, done anyway (--force):")
    for served in _serve(names[0], [wrong - 1, wrong], names[1], forced=True):
        _expect(len(served.prompt) < wrong, served)


def _serve(
    prefill: str,
    lengths: Sequence[int],
    decode: str = "",
    *,
    block_size: int = 4,
    layout: str = LAYOUTS[0],
    scattered: bool = False,
    forced: bool = False,
) -> list[Served]:
    models = [prefill, decode or prefill]
    paths = [ROOT / os.path.expandvars(model) for model in models]
    setting = Setting(*paths, SIZES, block_size, layout, scattered, forced)
    manifests = [_describe(model, block_size, tuple(lengths)) for model in models]
    return serve(setting, lengths, manifests)


@cache
def _describe(model: str, block_size: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return a manifest; show its command the first time."""
    write_specializations(SIZES, Path(os.environ["MODELS"]))
    return describe(model, "$MODELS/specializations.json", block_size, lengths, _call)


def _call(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return storytelling.run(" ".join(words))


def _expect(right: bool, served: Served) -> None:
    say(served)
    expect(right, served.has_same_tokens)
    if not served.is_as_counted:
        raise BrokenStory("NIXL moved different amounts than the manifest says")
