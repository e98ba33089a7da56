"""Disaggregated serving in small: prefill in one process, decode in another.

    python serve.py                     run all parts; exit code 0 if each ends as predicted
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right

Requires onnxkvrename and onnxruntime. serving.py has the steps.
"""

from __future__ import annotations

import sys

from command import Serve, Tell, build_parser, run_example


def main() -> int:
    """Run all parts, or do one hand-off; return the exit code."""
    parser = build_parser("Hand KV buffers over from prefill to decode through shared memory.")
    parser.add_argument("--full-transfer", action="store_true", help="move all of each buffer")
    return run_example(parser, _load, install="pip install . onnxruntime")


def _load() -> tuple[Tell, Serve]:
    import serving
    import story

    return story.tell, serving.serve_models


if __name__ == "__main__":
    sys.exit(main())
