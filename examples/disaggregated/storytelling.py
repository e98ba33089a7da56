"""Run the parts of an example: a title, commands as a user types them, an expected result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from calling import call
from prompts import SIZES
from workers import WorkerError

PLAIN = Path("fixtures", "plain", "serving")


class BrokenStory(Exception):
    """A part did not end as predicted."""


def tell(parts: Iterable[Callable[[], None]]) -> int:
    """Run every part; return the exit code. ``$MODELS`` is a temporary directory."""
    with tempfile.TemporaryDirectory() as models:
        os.environ["MODELS"] = models
        try:
            for part in parts:
                part()
        except (BrokenStory, WorkerError) as error:
            print(f"serve.py: {error}", file=sys.stderr)
            return 1
    print("\nAll parts end as predicted.")
    return 0


def say_title(text: str) -> None:
    """Begin a part."""
    print(f"\n== {text}\n", flush=True)


def rename(model: str, *options: str) -> Path:
    """Rename a fixture for vllm-qaic into ``$MODELS``."""
    words = (
        f"{PLAIN / model}.onnx",
        "--target vllm-qaic",
        *options,
        "-q -o",
        f"$MODELS/{model}.onnx",
    )
    done = run(" ".join(words))
    if done.returncode:
        raise BrokenStory(done.stderr.strip())
    return Path(os.environ["MODELS"], f"{model}.onnx")


def compare(first: str, second: str) -> int:
    """Compare two models in ``$MODELS``; return the shortest prompt that goes wrong."""
    dims = " ".join(f"--dim {symbol}={SIZES[symbol]}" for symbol in ("ctx_len", "sliding_window"))
    command = f"compare $MODELS/{first}.onnx $MODELS/{second}.onnx {dims}"
    done = run(command)
    if done.returncode != 1:
        raise BrokenStory(f"compare exited with {done.returncode} instead of 1: {done.stderr}")
    print(textwrap.indent(done.stdout, "  "))
    said = json.loads(run(f"{command} --format json", shown=False).stdout)
    return int(said["verdict"]["first_wrong"])


def run(command: str, shown: bool = True) -> subprocess.CompletedProcess[str]:
    """Call onnxkvrename, and show the command."""
    if shown:
        print(f"$ onnxkvrename {command}", flush=True)
    return call([os.path.expandvars(word) for word in command.split()])


def expect(right: bool, outcome: bool) -> None:
    """Raise an error if a result is not the expected one."""
    if outcome != right:
        raise BrokenStory(f"expected {'the same' if right else 'different'} tokens")
