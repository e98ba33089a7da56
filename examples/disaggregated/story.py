"""The story that serve.py tells: what is handed over, what stays, and what goes wrong when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from serving import SIZES, Served, Setting, say, serve
from workers import WorkerError

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Path("fixtures", "plain", "serving")
HYBRID = "hybrid"
TARGET = "--target vllm-qaic"
FULL = "--full-transfer"


class BrokenStory(Exception):
    """Something is not as the story has it."""


def tell() -> int:
    """Run every part, each with an expectation; the exit code."""
    with tempfile.TemporaryDirectory() as models:
        os.environ["MODELS"] = models
        try:
            _faithful("Two layers of attention", "decoder")
            _faithful("A vision-language model: what vision needs stays with prefill", "vlm")
            _hybrid()
            _nothing_selected()
            _mismatch()
        except (BrokenStory, WorkerError) as error:
            print(f"serve.py: {error}", file=sys.stderr)
            return 1
    print("\nAll of it is as foretold.")
    return 0


def _faithful(title: str, model: str) -> None:
    _title(title)
    _rename(model)
    _expect(True, _serve(_renamed(model), 9))


def _hybrid() -> None:
    """A state has no context that could be cut at the prompt's length."""
    _title("Attention, a linear layer, and a sliding window of 8")
    refused = _run(_renaming(HYBRID))
    error, *_ = [line for line in refused.stderr.splitlines() if "error KV605" in line] or [""]
    if refused.returncode != 1 or not error:
        raise BrokenStory("the state that would be cut was not refused (KV605)")
    print(textwrap.fill(error, 98, initial_indent="  ", subsequent_indent="  "))
    _rename(HYBRID, FULL)
    _expect(True, _serve(_renamed(HYBRID), 9, whole=True))
    print("\nand what was refused, done all the same:")
    _expect(False, _serve(_renamed(HYBRID), 3))


def _nothing_selected() -> None:
    _title("Without the token: nothing is selected, and decode starts from empty buffers")
    _expect(False, _serve(ROOT / PLAIN / "decoder.onnx", 9))


def _mismatch() -> None:
    """Each of the models is right by itself, and so is a short prompt."""
    _title("Prefill keeps the whole context where decode keeps its window of 8")
    for model in ("window_whole", "window"):
        _rename(model)
    wrong = _compare("window_whole", "window")
    setting = Setting(_renamed("window_whole"), _renamed("window"), SIZES)
    for served in serve(setting, [wrong - 1, wrong]):
        say(served)
        _expect(len(served.prompt) < wrong, served)


def _compare(first: str, second: str) -> int:
    """Ask onnxkvrename; the shortest prompt that goes wrong."""
    dims = " ".join(f"--dim {symbol}={SIZES[symbol]}" for symbol in ("ctx_len", "sliding_window"))
    command = f"compare $MODELS/{first}.onnx $MODELS/{second}.onnx {dims}"
    done = _run(command)
    if done.returncode != 1:
        raise BrokenStory(f"compare ended with {done.returncode}, and not with 1: {done.stderr}")
    print(textwrap.indent(done.stdout, "  "))
    said = json.loads(_run(f"{command} --format json", shown=False).stdout)
    return int(said["verdict"]["first_wrong"])


def _rename(model: str, *options: str) -> None:
    done = _run(_renaming(model, *options))
    if done.returncode:
        raise BrokenStory(done.stderr.strip())


def _renaming(model: str, *options: str) -> str:
    words = (f"{PLAIN / model}.onnx", TARGET, *options, "-q -o", f"$MODELS/{model}.onnx")
    return " ".join(words)


def _run(command: str, shown: bool = True) -> subprocess.CompletedProcess[str]:
    if shown:
        print(f"$ onnxkvrename {command}", flush=True)
    words = [os.path.expandvars(word) for word in command.split()]
    called = [sys.executable, "-m", "onnxkvrename", *words]
    return subprocess.run(called, cwd=ROOT, capture_output=True, text=True, timeout=60)


def _renamed(model: str) -> Path:
    return Path(os.environ["MODELS"], f"{model}.onnx")


def _serve(model: Path, length: int, whole: bool = False) -> Served:
    (served,) = serve(Setting(model, model, SIZES, whole), [length])
    say(served)
    return served


def _expect(right: bool, served: Served) -> None:
    if served.right != right:
        raise BrokenStory(f"expected {'the same' if right else 'other'} tokens")


def _title(text: str) -> None:
    print(f"\n== {text}\n")
