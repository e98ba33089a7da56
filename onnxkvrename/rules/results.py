"""What was asked of each model, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, TokenChange, UnchangedName, build_name_map
from onnxkvrename.rules.profile import Rules

Status = Literal["renamed", "unchanged", "would-rename", "failed"]


class RenameJob(NamedTuple):
    """A model, and where its result goes; :func:`find_models.build_job` makes one.

    Attributes:
        model: The model.
        output: Where the result goes, as the user calls it; the model itself for in place.
        target: The file that the result replaces or makes, as an absolute path.
        in_place: Whether the result replaces the model.
        same_directory: Whether the result lies beside the model, so that external data stays.
    """

    model: Path
    output: Path
    target: Path
    in_place: bool
    same_directory: bool


ModelCheck = Callable[[RenameJob, Rules, TokenChange], Iterator[Finding]]
"""What else may be wrong with a model that is about to change; it travels between processes."""


class Options(NamedTuple):
    """How to go about it.

    ``write`` is false for a look ahead, and ``place`` for one that does not mind
    where the result would go. ``strict`` makes every warning an error.
    ``force`` goes through links and over files that are in the way. ``sets`` is
    false for windows that shall not be held against each other. ``verify`` has the
    result's dataflow and soundness proved before it is written. ``checks`` are
    made of each model that changes, beside those that every model gets. ``target`` is the
    consumer that is to
    take the results, and ``whole`` says that it moves all of each buffer.
    """

    write: bool = True
    check_destination: bool = True
    strict: bool = False
    force: bool = False
    group_windows: bool = True
    verify: bool = False
    checks: tuple[ModelCheck, ...] = ()
    consumer: str | None = None
    full_transfer: bool = False


class ModelReport(NamedTuple):
    """What became of one model.

    ``error`` is what kept it from being read or written; findings are what is
    wrong with the model itself. ``feed_back`` is the call that hands the result
    back to its exporter. ``values`` are the names of all graph inputs and outputs,
    as they stand. ``stamp`` is the digest of a layout that the model gets, empty where it
    loses one.
    """

    path: str
    output: str
    status: Status
    pairs: tuple[KvPair, ...] = ()
    unchanged_names: tuple[UnchangedName, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None
    feed_back_call: str | None = None
    value_names: tuple[str, ...] = ()
    stamp: str | None = None

    @property
    def has_changes(self) -> bool:
        """Whether the result is another than the model."""
        return bool(self.name_map) or self.stamp is not None

    @property
    def name_map(self) -> dict[str, str]:
        """Old to new, of the names that change."""
        return build_name_map(self.pairs)

    @property
    def failed(self) -> bool:
        """Whether something is wrong with this very model."""
        return self.error is not None or any(f.severity == "error" for f in self.findings)


def report_model(model: KvModel) -> ModelReport:
    """Return the report on a model that nothing was asked of yet."""
    return ModelReport(
        model.path,
        model.path,
        "unchanged",
        pairs=model.pairs,
        unchanged_names=model.plan.unchanged_names,
        findings=model.findings,
    )


class SidecarReport(NamedTuple):
    """What became of a text that goes with models; ``changed`` counts its names."""

    path: str
    output: str
    status: Status
    changed: int


class Report(NamedTuple):
    """What became of all models of a command, in the order given, and of texts with them."""

    models: tuple[ModelReport, ...]
    sidecars: tuple[SidecarReport, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all models."""
        return tuple(finding for model in self.models for finding in model.findings)

    def compute_exit_code(self, *, look: bool = False) -> int:
        """0 done or nothing to do, 1 a finding (to ``look``: or a change), 2 not possible."""
        if any(model.error is not None for model in self.models):
            return 2
        states = [
            *(model.status for model in self.models),
            *(text.status for text in self.sidecars),
        ]
        changes = look and "would-rename" in states
        return int(changes or any(model.failed for model in self.models))
