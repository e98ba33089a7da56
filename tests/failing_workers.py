"""Worker functions for the example that die, refuse, or answer too late."""

from __future__ import annotations

import os
from multiprocessing.shared_memory import SharedMemory

from disaggregated_example import workers

Questions = workers.Questions
OPEN_MEMORY = []
"""Shared memory that must stay open until the process ends."""


def die_after_taking_memory(questions: Questions, *settings: object) -> None:
    """Create the shared memory that is requested, and die."""
    for question in questions:
        OPEN_MEMORY.append(SharedMemory(question.memory, create=True, size=10))
        os._exit(3)


def take_memory_too_late(questions: Questions, *settings: object) -> None:
    """Refuse, and create the shared memory all the same once nobody asks any more."""
    question = next(iter(questions))
    questions.answer(ValueError("not now"))
    for _ in questions:
        pass
    OPEN_MEMORY.append(SharedMemory(question.memory, create=True, size=10))


def refuse_at_once(questions: Questions, *settings: object) -> None:
    """Refuse before anything is question."""
    raise ValueError("not at all")


def take_memory_and_wait(questions: Questions, *settings: object) -> None:
    """Create shared memory under each name that is sent, say so, and wait for the next."""
    for name in questions:
        OPEN_MEMORY.append(SharedMemory(name, create=True, size=10))
        questions.answer("made")
