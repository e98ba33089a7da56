"""Workers that come to a bad end."""

from __future__ import annotations

import os
from multiprocessing.shared_memory import SharedMemory

import example

KEPT = []
"""What must not be collected, and so closed, before the end."""


def after_taking_memory(questions: example.workers.Questions, *settings: object) -> None:
    """Make the shared memory that is asked for, and die."""
    for asked in questions:
        KEPT.append(SharedMemory(asked.memory, create=True, size=10))
        os._exit(3)


def after_being_left(questions: example.workers.Questions, *settings: object) -> None:
    """Refuse, and make the shared memory all the same once nobody asks any more."""
    asked = next(iter(questions))
    questions.answer(ValueError("not now"))
    for _ in questions:
        pass
    KEPT.append(SharedMemory(asked.memory, create=True, size=10))


def at_once(questions: example.workers.Questions, *settings: object) -> None:
    """Refuse before anything is asked."""
    raise ValueError("not at all")


def never(questions: example.workers.Questions, *settings: object) -> None:
    """Make shared memory under a name, say so, and wait for more to do."""
    for name in questions:
        KEPT.append(SharedMemory(name, create=True, size=10))
        questions.answer("made")
