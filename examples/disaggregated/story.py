"""The parts of serve.py: what is handed over, what stays, and which prompts go wrong."""

from __future__ import annotations

import os
import shlex
import textwrap
from pathlib import Path

import storytelling
from calling import ROOT
from prompts import SIZES
from serving import Setting, say, serve
from storytelling import PLAIN, BrokenStory, expect, rename, run, say_title

HYBRID = "hybrid"
FULL = "--full-transfer"


def tell() -> int:
    """Run every part and check its result; return the exit code."""
    return storytelling.tell([_attention, _vision, _hybrid, _nothing_selected, _mismatch])


def _attention() -> None:
    say_title("Two layers of attention")
    expect(True, _serve(rename("decoder"), 9))


def _vision() -> None:
    say_title("A vision-language model: what vision needs stays with prefill")
    expect(True, _serve(rename("vlm"), 9))


def _hybrid() -> None:
    """A state has no context that could be cut at the prompt's length."""
    say_title("Attention, a linear layer, and a sliding window of 8")
    refused = run(f"{PLAIN / HYBRID}.onnx --target vllm-qaic -q -o $MODELS/{HYBRID}.onnx")
    error, *_ = [line for line in refused.stderr.splitlines() if "error KV605" in line] or [""]
    if refused.returncode != 1 or not error:
        raise BrokenStory("the state that would lose a part was not refused (KV605)")
    result = f"{os.environ['MODELS']}/{HYBRID}.onnx"
    error = error.replace(shlex.quote(result), f"$MODELS/{HYBRID}.onnx")
    print(textwrap.fill(error, 98, initial_indent="  ", subsequent_indent="  "))
    hybrid = rename(HYBRID, FULL)
    expect(True, _serve(hybrid, 9, whole=True))
    print("\nThe refused hand-off, done anyway:")
    expect(False, _serve(hybrid, 3))


def _nothing_selected() -> None:
    say_title("Without the token: nothing is selected, and decode starts from empty buffers")
    expect(False, _serve(ROOT / PLAIN / "decoder.onnx", 9))


def _mismatch() -> None:
    """Each model alone gives the right tokens, and so does a short prompt."""
    say_title("Prefill keeps the whole context where decode keeps its window of 8")
    whole, window = rename("window_whole"), rename("window")
    wrong = storytelling.compare("window_whole", "window")
    for served in serve(Setting(whole, window, SIZES), [wrong - 1, wrong]):
        say(served)
        expect(len(served.prompt) < wrong, served.right)


def _serve(model: Path, length: int, whole: bool = False) -> bool:
    (served,) = serve(Setting(model, model, SIZES, whole), [length])
    say(served)
    return served.right
