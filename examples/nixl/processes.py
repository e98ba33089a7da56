"""The two processes. NIXL is loaded in them only."""

from __future__ import annotations

from prompts import Drawn
from records import Setup
from workers import Questions


def prefill(questions: Questions, setup: Setup) -> None:
    """Say how to be reached, then answer prompts until nobody asks any more."""
    from roles import Prefill

    role = Prefill(setup)
    for question in questions:
        questions.answer(role.run(question) if isinstance(question, Drawn) else role.agent.peer)


def decode(questions: Questions, setup: Setup) -> None:
    """Take the peer, then answer hand-offs until nobody asks any more."""
    from roles import Decode

    role = Decode(setup, next(iter(questions)))
    questions.answer("connected")
    for handed in questions:
        questions.answer(role.run(handed))
