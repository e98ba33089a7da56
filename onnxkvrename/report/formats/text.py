"""Text for people: findings and errors as lines, and each command's own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, Severity
from onnxkvrename.report.formats import Answer, Format, Line, Screen, Span, build_line
from onnxkvrename.report.inert import shorten_parts
from onnxkvrename.rules.results import ModelReport

BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"
"""Styles of a :class:`Span`."""
_MAX_SHOWN_FINDINGS = 3
_SEVERITY_STYLES: dict[Severity, str] = {"error": RED, "warning": YELLOW}


def _render(answer: Answer, screen: Screen) -> Iterable[Line]:
    """Return the command's own text; an error of the whole job goes to stderr in any format."""
    return answer.render_text(screen)


FORMAT = Format(_render)


def render_finding_lines(models: Iterable[ModelReport], *, verbose: bool) -> Iterator[Line]:
    """Yield one line for stderr for each finding and for the error of each model.

    What is wrong with one layer is mostly wrong with all of them, so findings of one code
    stay together, and only the first few are shown.

    Args:
        models: The models with their findings.
        verbose: Whether to show every finding.
    """
    for model in models:
        yield from _render_model_findings(model, verbose=verbose)


def _render_model_findings(model: ModelReport, *, verbose: bool) -> Iterator[Line]:
    counts = Counter(finding.code for finding in model.findings)
    seen: Counter[str] = Counter()
    order = list(counts)
    for finding in sorted(model.findings, key=lambda finding: order.index(finding.code)):
        seen[finding.code] += 1
        if verbose or seen[finding.code] <= _MAX_SHOWN_FINDINGS:
            parts = (finding.subject, finding.message, finding.hint)
        elif seen[finding.code] == _MAX_SHOWN_FINDINGS + 1:
            hidden = counts[finding.code] - _MAX_SHOWN_FINDINGS
            parts = ("", f"and {hidden} more like this", "-v shows all")
        else:
            continue
        path, *shown = shorten_parts((model.path, *parts))
        severity = Span(f"{finding.severity} {finding.code}", _SEVERITY_STYLES[finding.severity])
        yield build_line(Span(path, BOLD), ": ", severity, f": {_join_parts(*shown)}", err=True)
    if model.error is not None:
        yield build_error_line(model.error)


def build_error_line(error: KvRenameError) -> Line:
    """Return the line for stderr with the path, the problem and the fix."""
    return build_line(Span("error", f"{RED};{BOLD}"), f": {format_error(error)}", err=True)


def format_error(error: KvRenameError) -> str:
    """Return the path, the problem and the fix as one short text, safe to show."""
    path, message, hint = shorten_parts((error.path or "", error.message, error.hint or ""))
    return str(KvRenameError(message, path=path or None, hint=hint or None))


def format_finding(finding: Finding) -> str:
    """Return a finding as one sentence with its hint, short and safe to show."""
    return _join_parts(*shorten_parts((finding.subject, finding.message, finding.hint)))


def _join_parts(name: str, message: str, hint: str) -> str:
    """Return a sentence with the fix in brackets."""
    return f"{name} {message} ({hint})" if name else f"{message} ({hint})"
