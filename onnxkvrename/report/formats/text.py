"""Text for people: findings and errors as lines, and each command's own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from click import style

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.report.formats import Answer, Format, Line, Screen
from onnxkvrename.rules.results import ModelReport

_MAX_SHOWN_FINDINGS = 3
_SEVERITY_COLORS = {"error": "red", "warning": "yellow"}


def _render(answer: Answer, screen: Screen) -> Iterable[Line]:
    """Return the command's own text; an error of the whole job goes to stderr in any format."""
    return answer.render_text(screen)


FORMAT = Format(_render)


def render_findings(model: ModelReport, *, color: bool, verbose: bool) -> Iterator[str]:
    """Yield one line for each finding and for the error of a model.

    What is wrong with one layer is mostly wrong with all of them, so findings of one code
    stay together, and only the first few are shown.

    Args:
        model: The model with its findings.
        color: Whether to colour the lines.
        verbose: Whether to show every finding.
    """
    counts = Counter(finding.code for finding in model.findings)
    seen: Counter[str] = Counter()
    order = list(counts)
    for finding in sorted(model.findings, key=lambda finding: order.index(finding.code)):
        seen[finding.code] += 1
        path = apply_style(escape_unprintable(model.path), color, bold=True)
        code = apply_style(
            f"{finding.severity} {finding.code}", color, fg=_SEVERITY_COLORS[finding.severity]
        )
        if verbose or seen[finding.code] <= _MAX_SHOWN_FINDINGS:
            yield f"{path}: {code}: {format_finding(finding)}"
        elif seen[finding.code] == _MAX_SHOWN_FINDINGS + 1:
            hidden = counts[finding.code] - _MAX_SHOWN_FINDINGS
            yield f"{path}: {code}: and {hidden} more like this (-v shows all)"
    if model.error is not None:
        yield format_error(model.error, color=color)


def render_finding_lines(
    models: Iterable[ModelReport], screen: Screen, *, verbose: bool
) -> Iterator[Line]:
    """Yield the findings and errors of models as lines for stderr."""
    for model in models:
        for text in render_findings(model, color=screen.error_color, verbose=verbose):
            yield Line(text, err=True)


def format_error(error: KvRenameError, *, color: bool) -> str:
    """Return one line with the path, the problem and the fix."""
    return f"{apply_style('error', color, fg='red', bold=True)}: {escape_unprintable(str(error))}"


def format_finding(finding: Finding) -> str:
    """Return the name, the message and the hint of a finding, safe to show."""
    message = f"{finding.name} {finding.message}" if finding.name else finding.message
    return escape_unprintable(f"{message} ({finding.hint})")


def escape_unprintable(text: str) -> str:
    """Return text from a file with all escaped that moves the cursor, hides or reorders text."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_code_point(ord(char)) for char in text)


def _escape_code_point(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not UTF-8
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def apply_style(text: str, color: bool, **styles: Any) -> str:
    """Return `text` with click's `styles` where there may be colour."""
    return style(text, **styles) if color else text
