"""The command as a process of its own: ``onnxkvrename``, ``python -m onnxkvrename``."""

from __future__ import annotations

import gc
import sys


def run() -> None:
    """Run the console script and end the process with the exit code."""
    # What an import makes is there to stay. Looking through it for garbage, again and
    # again, would take a tenth of the time of a small rename.
    gc.disable()
    try:
        from onnxkvrename.cli.main import main
    except KeyboardInterrupt:  # before there is anything that could handle it
        sys.stderr.write("error: interrupted: no file was left half written\n")
        sys.exit(130)
    gc.freeze()
    gc.enable()
    sys.exit(main())


if __name__ == "__main__":
    run()
