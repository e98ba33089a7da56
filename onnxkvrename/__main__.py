"""The command as a process of its own: ``onnxkvrename``, ``python -m onnxkvrename``."""

from __future__ import annotations

import gc
import sys


def run() -> None:
    """The console script."""
    # What an import makes is there to stay. Looking through it for garbage, again and
    # again, would take a tenth of the time of a small rename.
    gc.disable()
    from onnxkvrename.cli.main import main

    gc.freeze()
    gc.enable()
    sys.exit(main())


if __name__ == "__main__":
    run()
