"""Disaggregated serving by NIXL: prefill and decode in two processes, KV buffers in blocks.

    python serve.py                     the whole story; exit code 0 if all of it holds
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right

Needs onnxkvrename with its extra [run], and NIXL. What is done stands in transfer.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from command import Serve, Tell, build_parser, parse_count, run_example
from kvlayout import LAYOUTS

INSTALL = "pip install '.[run]' and pip install --no-deps nixl nixl-cu12"


def main() -> int:
    """Tell the story, or do one hand-off; the exit code."""
    parser = build_parser("A prefill and a decode worker, and a hand-off by NIXL.")
    parser.add_argument("--block-size", type=parse_count, default=4, metavar="N")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="vLLM's name of it")
    parser.add_argument("--scattered", action="store_true", help="free blocks are in any order")
    parser.add_argument("--force", action="store_true", help="serve KV layouts that differ, too")
    return run_example(parser, _load, INSTALL)


def _load() -> tuple[Tell, Serve]:
    # Only the processes need it, but here it is missed in one line.
    import nixl  # noqa: F401
    import story
    import transfer

    return story.tell, transfer.serve_models


if __name__ == "__main__":
    sys.exit(main())
