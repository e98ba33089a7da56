"""A worker: a separate process that answers questions through a pipe, and ends with its parent."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE = 60
"""Seconds to wait for an answer."""


class WorkerError(Exception):
    """A worker refused, died, or did not answer."""


class Questions:
    """The worker's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self._pipe.recv()
            except (EOFError, OSError):
                return

    def answer(self, answer: object) -> None:
        """Send an answer; do nothing if the other end is closed."""
        with suppress(OSError):
            self._pipe.send(answer)


class Worker:
    """The parent's end of the pipe, and the process.

    Args:
        name: The worker's name, for messages.
        work: A function at the top of a module, which gets the questions and then `args`.
        args: Further arguments, which must be picklable.
    """

    def __init__(self, name: str, work: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, work, args), name=name, daemon=True
        )
        # The worker inherits this and ignores Ctrl-C; the parent ends it, and reports that.
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, interrupted)
        theirs.close()

    def ask(self, question: object) -> Any:
        """Send a question, and return the answer.

        Raises:
            WorkerError: The worker refused the question; or it died or did not answer within 60
                seconds, and is stopped.
        """
        name = self.process.name
        try:
            with suppress(BrokenPipeError):  # a worker that has ended may have sent the reason
                self._pipe.send(question)
            if not self._pipe.poll(_PATIENCE):
                self.stop()
                raise WorkerError(f"{name} did not answer")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            raise WorkerError(f"{name} died (exit code {self.process.exitcode})") from None
        if isinstance(answer, Exception):
            raise WorkerError(f"{name} refuses: {answer}")
        return answer

    def stop(self) -> None:
        """Wait a second for the worker to end, then kill it."""
        self._pipe.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _serve(pipe: Connection, work: Callable[..., None], args: tuple[object, ...]) -> None:
    questions = Questions(pipe)
    try:
        work(questions, *args)
    except Exception as error:
        questions.answer(error)
