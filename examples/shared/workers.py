"""A worker: a process of its own that is asked through a pipe, and ends with the one who asks."""

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
        """Say what came out, if anybody listens."""
        with suppress(OSError):
            self._pipe.send(answer)


class Worker:
    """The other end: ``work`` is a function at the top of a module, called with the questions."""

    def __init__(self, name: str, work: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, work, args), name=name, daemon=True
        )
        # Inherited, so a worker never hears Ctrl-C: who asks will end it, and say so.
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, interrupted)
        theirs.close()

    def ask(self, question: object) -> Any:
        """Ask, and wait; raises :class:`WorkerError`. Who does not answer is stopped."""
        name = self.process.name
        try:
            with suppress(BrokenPipeError):  # who has ended may have said why
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
        """Let it end, or end it."""
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
