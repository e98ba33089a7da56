"""The command as a process of its own: ``onnxkvrename``, ``python -m onnxkvrename``."""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import suppress


def run() -> None:
    """Run the console script and end the process with the exit code."""
    # What an import makes is there to stay. Looking through it for garbage, again and
    # again, would take a tenth of the time of a small rename.
    gc.disable()
    try:
        _let_signals_interrupt()
        from onnxkvrename.cli.main import main

        gc.freeze()
        gc.enable()
        code = main()
    except KeyboardInterrupt:  # before there is anything that could handle it, or after
        code = 130
        with suppress(AttributeError, OSError):  # stderr may be closed, or full
            sys.stderr.write(
                "error: interrupted: no file was left half written (run the same command again)\n"
            )
    except (ImportError, OSError) as error:  # the system opens no file, not even a module
        code = 2
        with suppress(AttributeError, OSError):
            sys.stderr.write(f"error: onnxkvrename cannot be loaded: {error}\n")
    sys.exit(code)


def _let_signals_interrupt() -> None:
    """Let SIGTERM and SIGHUP end even the imports as Ctrl-C does; ignored ones stay ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    run()
