"""The command as a process of its own: ``onnxkvrename``, ``python -m onnxkvrename``.

Nothing is imported before there is something to catch Ctrl-C.
"""

from __future__ import annotations

import gc
import sys


def run() -> None:
    """Run the console script and end the process with the exit code."""
    # What an import makes is there to stay. Looking through it for garbage, again and
    # again, would take a tenth of the time of a small rename.
    gc.disable()
    is_loaded = False
    try:
        _let_signals_interrupt()
        from onnxkvrename.cli.main import main

        gc.freeze()
        gc.enable()
        is_loaded = True
        code = main()
    except KeyboardInterrupt:  # before there is anything that could handle it, or after
        code = 130
        state = "" if is_loaded else ": no model was changed"
        _print_error(f"interrupted{state}; run the same command again")
    except (ImportError, OSError) as error:  # the system opens no file, not even a module
        code = 2
        _print_error(f"onnxkvrename cannot be loaded: {error}")
    sys.exit(code)


def _let_signals_interrupt() -> None:
    """Let SIGTERM and SIGHUP end even the imports as Ctrl-C does; ignored ones stay ignored."""
    import signal

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _print_error(message: str) -> None:
    from contextlib import suppress

    with suppress(AttributeError, OSError):  # stderr may be closed, or full
        sys.stderr.write(f"error: {message}\n")


if __name__ == "__main__":
    run()
