"""Signals that interrupt, held back while files get their names or are put back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def defer_signals() -> Iterator[Callable[[], None]]:
    """Hold back signals that would interrupt, until the context ends without an error.

    Only those with a handler of Python, and only in the main thread: others get none.

    Yields:
        A function that delivers those that have come.
    """
    came = list[int]()
    handlers: dict[int, Callable[..., object]] = {}

    def deliver() -> None:
        while came:
            number = came.pop(0)
            handlers[number](number, None)

    with suppress(ValueError):  # not the main thread
        for name in _NAMES:
            number = getattr(signal, name, None)
            handler = None if number is None else signal.getsignal(number)
            if number is not None and callable(handler):
                signal.signal(number, lambda number, frame: came.append(number))
                handlers[number] = handler
    try:
        yield deliver
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    deliver()
