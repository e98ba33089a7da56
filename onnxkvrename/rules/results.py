"""Reports: what became of each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, decide_exit_code
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, UnchangedName
from onnxkvrename.rules.profile import ProfileChoice

_NO_NAMES: Mapping[str, str] = {}

Status = Literal["renamed", "unchanged", "would-rename", "failed"]
ResultState = Literal["", "missing", "different"]


@show_briefly
class ModelReport(NamedTuple):
    """The outcome for one model.

    Attributes:
        path: The model.
        output: Where its result goes; the model itself for in place.
        status: What was done; ``failed`` if there is an error or a finding of severity error.
        pairs: The KV buffers, with the new name of each side.
        unchanged_names: The names that a rule leaves alone, and other outputs.
        findings: The problems of the model.
        error: The reason why it could not be read or written.
        feed_back_call: The call that hands the result back to its exporter.
        value_names: The names of all graph inputs and outputs in the file.
        name_map: Old to new, of the names that change in the graph.
        feeds: The outputs that fill KV buffers of another model.
        consumer: The consumer for which the result was checked; empty for none.
        proved: How many buffers the graph of the result was shown to retain; ``None`` if nothing
            was proved.
        function_name_map: Old to new, of the names that change in local functions.
        result_state: Of a check only: whether the result elsewhere, or its external data, is
            missing or different; empty for one that is there, and in place.
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
    name_map: Mapping[str, str] = _NO_NAMES
    feeds: tuple[str, ...] = ()
    consumer: str = ""
    proved: int | None = None
    function_name_map: Mapping[str, str] = _NO_NAMES
    result_state: ResultState = ""

    @property
    def has_changes(self) -> bool:
        """True if the result differs from the model."""
        return bool(self.name_map)

    @property
    def failed(self) -> bool:
        """True if this model has an error or a finding of severity error."""
        return self.error is not None or any(f.severity == "error" for f in self.findings)


ReportCheck = Callable[[Sequence[ModelReport]], Sequence[ModelReport]]
"""A further check of all models of a command: it returns their reports with what it finds."""


def report_model(model: KvModel) -> ModelReport:
    """Return the report on a model that was read, planned and checked."""
    return ModelReport(
        model.path,
        model.path,
        "unchanged",
        pairs=model.pairs,
        unchanged_names=model.plan.unchanged_names,
        findings=model.findings,
        name_map=model.plan.name_map,
        function_name_map=model.plan.function_name_map,
        feeds=tuple(feed.side.old_name for feed in model.plan.feeds),
    )


class SidecarReport(NamedTuple):
    """The outcome for one sidecar.

    Attributes:
        path: The file.
        output: Where its result goes; the file itself for in place.
        status: What was done.
        changed: How many names in it change.
    """

    path: str
    output: str
    status: Status
    changed: int


@show_briefly
class Report(NamedTuple):
    """The outcomes for all models of a command.

    Attributes:
        models: The models, in the order of the arguments.
        sidecars: The sidecars.
        profile: The profile that recognizes KV names.
    """

    models: tuple[ModelReport, ...]
    sidecars: tuple[SidecarReport, ...] = ()
    profile: ProfileChoice | None = None

    @property
    def failed(self) -> bool:
        """True if a model has an error or a finding of severity error; then all stay."""
        return any(model.failed for model in self.models)

    @property
    def has_no_buffers(self) -> bool:
        """True if the models could be read, and none has a buffer that the rules know.

        Another error, such as a full disk, does not change that.
        """
        return bool(self.models) and all(
            any(finding.code == "KV001" for finding in model.findings) for model in self.models
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all models."""
        return tuple(finding for model in self.models for finding in model.findings)

    def compute_exit_code(self, *, check_only: bool = False) -> int:
        """Return the exit code of the command.

        Args:
            check_only: Whether a name that would change counts as a finding.

        Returns:
            0 if all is done, 1 for a finding of severity error, 2 for an error.
        """
        states = [
            *(model.status for model in self.models),
            *(sidecar.status for sidecar in self.sidecars),
        ]
        has_changes = check_only and "would-rename" in states
        return decide_exit_code(
            failed=has_changes or any(model.failed for model in self.models),
            not_done=any(model.error is not None for model in self.models),
        )


class PlacedInterrupt(KeyboardInterrupt):
    """An interrupt after results were put in place, where they stay; the message says which.

    Attributes:
        report: The outcome for each model, as far as it was reached.
    """

    def __init__(self, report: Report) -> None:
        renamed = sum(model.status == "renamed" for model in report.models)
        super().__init__(
            f"{renamed:,} of {len(report.models):,} models are renamed"
            if report.failed
            else "all results are in place"
        )
        self.report = report


@contextmanager
def report_placed(results: Sequence[Report]) -> Iterator[None]:
    """Context manager that makes what ends a run say which results are in place.

    Args:
        results: The report on the run, once there is one.

    Raises:
        PlacedInterrupt: The interrupt came after a result was put in place.
        KvRenameError: The answer cannot be printed, though a result was put in place.
    """
    try:
        yield
    except PlacedInterrupt:
        raise
    except (KeyboardInterrupt, ImportError, OSError) as stop:
        for report in results:
            statuses = {model.status for model in report.models}
            if "renamed" in statuses.union(sidecar.status for sidecar in report.sidecars):
                if isinstance(stop, KeyboardInterrupt):
                    raise PlacedInterrupt(report) from None
                raise KvRenameError(
                    f"the results are in place, but the answer cannot be printed: {stop}"
                ) from None
        raise
