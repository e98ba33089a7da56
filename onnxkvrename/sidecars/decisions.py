"""What becomes of a sidecar: it follows its models, it refuses the run, or it is left as it is.

One table, for files that the user names and for those that are found: the first row of which all
facts hold for a sidecar decides. ``docs/sidecars.md`` says it for users.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, NamedTuple

Fact = Literal[
    "asked",  # the user named it
    "found",  # it was found, and follows if it fits: --sidecars auto
    "off",  # it was found, and stays: --sidecars off
    "of a compile",  # it is in a directory qpc-HASH below its models
    "known by content",  # its name alone does not show its format
    "a binding",  # a runtime finds the inputs and outputs of its models by it
    "beside both",  # it is beside a model and its renamed copy, and can match one of them
    "of an unread model",  # one of its models cannot be read: nothing is known of the names in it
    "of no buffers",  # the rules know no buffer of its models
    "unreadable",  # it cannot be read, or not in its format
    "unwritable",  # its new text cannot replace it, or be where it goes
    "stale",  # beside the result, it would have old names, or it cannot get the new ones
    "of another token",  # names in it have a token that this run may not replace
    "shared",  # it is stale, and another model beside it keeps the same names
    "refused",  # it cannot get the new names
    "nameless",  # it has no name of its models
    "foreign",  # it names buffers, but none of its models
    "misplaced",  # a model will not be where it names it
]
LEAVE_HINT = "`--sidecars off` leaves it as it is"
"""How to continue without a sidecar that was found."""


class Decision(NamedTuple):
    """A row of the table.

    Attributes:
        facts: What holds for the sidecar.
        verdict: Whether it gets the new names. With ``refuse``, no file of the run changes.
        told: What the user reads: nothing; the error, with exit code 2; the findings on its names
            (KV404 to KV406); or KV406, that it keeps its names, or that a model is misplaced.
            Findings on a sidecar that refuses are errors, others warnings.
        hint: What to do about the error or KV406; in braces what the sidecar gives.
    """

    facts: tuple[Fact, ...]
    verdict: Literal["follow", "refuse", "leave"]
    told: Literal["nothing", "the error", "its names", "it stays", "its place"]
    hint: str = "{hint}"

    def format_hint(self, hint: str | None = "", **values: str) -> str:
        """Return the hint, with that of the error or finding itself."""
        return self.hint.format(hint=hint or "", **values).removeprefix("; ")


_FOLDER = "rename the whole folder {folder} with `-d renamed`"
_TOGETHER = "rename both models together, or `--sidecar {path}` renames them here anyway"

DECISIONS = (
    Decision(("asked", "beside both"), "refuse", "the error"),
    Decision(("of an unread model",), "leave", "nothing"),
    Decision(("of a compile",), "leave", "nothing"),
    Decision(("unreadable", "off"), "leave", "nothing"),
    Decision(("unreadable", "found", "known by content"), "leave", "nothing"),
    Decision(("unreadable", "found", "of no buffers"), "leave", "nothing"),
    Decision(("unreadable", "found"), "refuse", "the error", f"{{hint}}; {LEAVE_HINT}"),
    Decision(("unwritable", "found"), "refuse", "the error", f"{{hint}}; {LEAVE_HINT}"),
    Decision(("unreadable",), "refuse", "the error"),
    Decision(("unwritable",), "refuse", "the error"),
    Decision(
        ("beside both", "of another token"),
        "leave",
        "it stays",
        "`-d renamed --replace` takes both along",
    ),
    Decision(("beside both", "stale"), "leave", "it stays", "`-d renamed` takes both along"),
    Decision(("off", "refused", "stale"), "leave", "it stays"),
    Decision(("off", "stale"), "leave", "it stays", "`--sidecar {path}` renames them"),
    Decision(("off",), "leave", "nothing"),
    Decision(("found", "shared"), "leave", "it stays", _TOGETHER),
    Decision(("found", "refused"), "refuse", "its names", f"{{hint}}; {LEAVE_HINT}"),
    Decision(("refused",), "refuse", "its names"),
    Decision(("found", "misplaced"), "leave", "its place", _FOLDER),
    Decision(("found", "nameless", "a binding"), "leave", "nothing"),
    Decision(("found", "nameless"), "leave", "its names"),
    Decision(("foreign",), "refuse", "its names"),
    Decision(("misplaced",), "refuse", "its place", _FOLDER),
    Decision((), "follow", "its names"),
)
"""The table: the first row that fits decides."""


def decide(facts: Set[Fact]) -> Decision:
    """Return the first row of which all facts hold."""
    return next(row for row in DECISIONS if facts >= set(row.facts))
