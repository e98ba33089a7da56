"""Cases that only the full tier runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

full = pytest.mark.full
"""Marks a test or a case that runs only with ``--full``."""


def thin(cases: Iterable[Any], default: int) -> list[Any]:
    """Leave `default` of the cases in the default tier, spread evenly; mark the others as full.

    Args:
        cases: Values, or ``pytest.param`` of them.
        default: How many stay in the default tier, at least one.
    """
    listed = list(cases)
    kept = {index * len(listed) // default for index in range(default)}
    return [case if index in kept else mark_full(case) for index, case in enumerate(listed)]


def mark_full(case: Any) -> Any:
    """Return the case with the mark of the full tier."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, full], id=case.id)
    values: Sequence[Any] = case if type(case) is tuple else (case,)  # a named tuple is one value
    return pytest.param(*values, marks=full)
