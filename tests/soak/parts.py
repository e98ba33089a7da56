"""What the parts of the soak share: a time to work in, and a record of what was run and found."""

from __future__ import annotations

import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MAX_FAILURES = 20


class Part:
    """The record of one part.

    Args:
        name: What it does.
        deadline: When it has to end, as of :func:`time.monotonic`.
        seed: Decides what is tried first.
    """

    def __init__(self, name: str, deadline: float, seed: int) -> None:
        self.name, self.deadline, self.seed = name, deadline, seed
        self.cases: Counter[str] = Counter()
        self.failures: list[str] = []
        self.failed = 0
        self.controls: dict[str, bool] = {}
        self.skipped: str | None = None
        self.started = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() >= self.deadline

    def take(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items until the time is up."""
        for item in items:
            if self.is_over:
                return
            yield item

    def try_case(self, kind: str, case: Callable[[], object]) -> bool:
        """Run one case; an assertion that fails is a finding. Returns whether all was well."""
        self.cases[kind] += 1
        try:
            case()
        except Exception as error:
            self.fail(f"{kind}: {_describe(error)}")
            return False
        return True

    def fail(self, text: str) -> None:
        """Record a finding."""
        self.failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(text[:2000])

    def check_control(self, name: str, cases: Iterable[Callable[[], object]]) -> None:
        """Run cases of a program that is broken on purpose until one shows it."""
        self.controls[name] = False
        for case in cases:
            try:
                case()
            except AssertionError:
                self.controls[name] = True
                return

    def build_document(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "part": self.name,
            "seconds": round(time.monotonic() - self.started),
            "cases": sum(self.cases.values()),
            "kinds": dict(sorted(self.cases.items())),
            "failed": self.failed,
            "failures": self.failures,
            "controls": self.controls,
            "skipped": self.skipped,
        }


def _describe(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error).split("\nassert")[0]
    return "".join(traceback.format_exception(error)[-3:])


def find_missing(*programs: str) -> str | None:
    """Return why a part cannot run here, if one of these programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    return f"needs {', '.join(missing)}" if missing else None
