"""Disaggregated serving in small: prefill in one process, decode in another.

    python serve.py                     the whole story; exit code 0 if all of it holds
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right

Needs onnxkvrename and its extra [run]. What is done stands in serving.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from command import Serve, Tell, build_parser, run_example


def main() -> int:
    """Tell the story, or do one hand-off; the exit code."""
    parser = build_parser("A prefill and a decode worker, and a hand-off through shared memory.")
    parser.add_argument("--full-transfer", action="store_true", help="buffers in full")
    return run_example(parser, _load, install="pip install '.[run]'")


def _load() -> tuple[Tell, Serve]:
    import serving
    import story

    return story.tell, serving.serve_models


if __name__ == "__main__":
    sys.exit(main())
