"""What it costs to ask about KV buffers: `python bench/layouts.py`.

What `inspect` shows, also of vLLM, a consumer's checks and a comparison, of a graph of 100,000
nodes in 128 layers, of 500 windows, and of a model of one layer; beside them a rename. Each is a
process of its own; printed are median seconds and median CPU seconds of all rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import decoder
from sets import timed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import window_sets  # noqa: E402

TOKEN = "vllmKvCache"
SIZES = ["--dim", "ctx_len=4096"]
QUESTIONS = {
    "inspect": ["inspect", "MODEL", "--format", "json"],
    "inspect --vllm": ["inspect", "MODEL", "--vllm", "--block-size", "64", "--tokens", "4096"],
    "verify --target": ["verify", "MODEL", "--target", "vllm-qaic"],
    "compare": ["compare", "MODEL", "MODEL", *SIZES],
    "rename --check": ["MODEL", "--prefix", TOKEN, "--check", "-q"],
}


def subjects(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models to measure: names and paths, all with the token."""
    tool = [sys.executable, "-m", "onnxkvrename"]
    for name, layers, nodes in (("one layer", 1, 0), ("100,000 nodes", 128, 100_000)):
        path = work / f"{layers}.onnx"
        decoder.write(path, decoder.Decoder(layers=layers, nodes=nodes), seed=0)
        timed([*tool, str(path), "--prefix", TOKEN, "-q"])
        yield name, path
    yield "500 windows", window_sets.write_windows(work / "windows", 500, token=TOKEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as work:
        for name, path in subjects(Path(work)):
            print(f"{name}\n  seconds    CPU s")
            for question, words in QUESTIONS.items():
                asked = [str(path) if word == "MODEL" else word for word in words]
                command = [sys.executable, "-m", "onnxkvrename", *asked]
                runs = [timed(command) for _ in range(rounds)]
                taken, cpu = (statistics.median(run[at] for run in runs) for at in (0, 1))
                print(f"  {taken:7.2f}  {cpu:7.2f}  {question}")


if __name__ == "__main__":
    main()
