"""Disaggregated serving by NIXL: prefill and decode in two processes, KV buffers in blocks.

    python serve.py                     run all parts; exit code 0 if each ends as predicted
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens and the manifest's
                                        figures are right

Requires onnxkvrename, onnxruntime and NIXL. transfer.py has the steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from command import Serve, Tell, build_parser, parse_count, run_example
from kvlayout import LAYOUTS

INSTALL = "pip install . onnxruntime and pip install --no-deps nixl nixl-cu12"


def main() -> int:
    """Run all parts, or do one hand-off; return the exit code."""
    parser = build_parser("Hand KV buffers over from prefill to decode in blocks, with NIXL.")
    parser.add_argument("--block-size", type=parse_count, default=4, metavar="N")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="vLLM's memory layout"
    )
    parser.add_argument("--scattered", action="store_true", help="use free blocks in random order")
    parser.add_argument("--force", action="store_true", help="serve models whose KV layouts differ")
    return run_example(parser, _load, INSTALL)


def _load() -> tuple[Tell, Serve]:
    # Only the workers use NIXL, but here a missing package is reported in one line.
    import nixl  # noqa: F401
    import story
    import transfer

    return story.tell, transfer.serve_models


if __name__ == "__main__":
    sys.exit(main())
