"""SARIF 2.1.0, which code scanning services and editors read.

One run with a rule for each code of a finding; binary models have no lines, so a result
points to the file and names the value. The standard:
https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from onnxkvrename import __version__
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import CODES, Finding, Severity
from onnxkvrename.report.formats import Answer, Format, Line, Note
from onnxkvrename.report.formats.text import format_error, format_finding
from onnxkvrename.report.inert import escape_json, escape_text

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_PENDING_RULE = "names"
"""The rule for changes that ``--check`` reports; they are not findings and have no code."""
_PENDING_MEANING = "a name that --check expects to be changed already"


def _render(answer: Answer, width: int | None) -> Iterator[Line]:
    text = escape_json(json.dumps(_build_log(answer), indent=2))
    yield from map(Line, text.split("\n"))


FORMAT = Format(_render)


def _build_log(answer: Answer) -> dict[str, Any]:
    codes: dict[str, tuple[Severity, str]] = {
        **CODES,
        _PENDING_RULE: ("error", _PENDING_MEANING),
    }
    rule_indexes = {rule: index for index, rule in enumerate(codes)}
    run = {
        "tool": {
            "driver": {
                "name": "onnxkvrename",
                "version": __version__,
                "rules": [_build_rule(rule, *meaning) for rule, meaning in codes.items()],
            }
        },
        "invocations": [_build_invocation(answer)],
        "results": [
            {**result, "ruleIndex": rule_indexes[result["ruleId"]]}
            for result in _list_results(answer)
        ],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _build_rule(rule: str, severity: Severity, meaning: str) -> dict[str, Any]:
    return {
        "id": rule,
        "shortDescription": {"text": meaning},
        "help": {"text": meaning},
        "defaultConfiguration": {"level": severity},
    }


def _build_invocation(answer: Answer) -> dict[str, Any]:
    errors = [(file.error, file.path) for file in answer.files if file.error is not None]
    if answer.error is not None:
        errors.append((answer.error, ""))
    return {
        "executionSuccessful": not errors and answer.exit_code in (0, 1),
        "exitCode": answer.exit_code,
        "toolExecutionNotifications": [
            _build_notification(error, error.path or path) for error, path in errors
        ],
    }


def _build_notification(error: KvRenameError, path: str) -> dict[str, Any]:
    notification = {"level": "error", "message": {"text": format_error(error, None)}}
    return {**notification, "locations": [_build_location(path)]} if path else notification


def _list_results(answer: Answer) -> Iterator[dict[str, Any]]:
    for file in answer.files:
        for finding in file.findings:
            yield _build_finding_result(finding, file.path)
        yield from (_build_note_result(note) for note in file.notes if note.level == "error")
    yield from (_build_note_result(note) for note in answer.notes if note.level == "error")


def _build_finding_result(finding: Finding, path: str) -> dict[str, Any]:
    location = _build_location(path)
    if finding.name:
        location["logicalLocations"] = [{"name": escape_text(finding.name)}]
    message = format_finding(finding, None)
    return _build_result(finding.code, finding.severity, message, [location])


def _build_note_result(note: Note) -> dict[str, Any]:
    locations = [] if note.path is None else [_build_location(note.path)]
    return _build_result(_PENDING_RULE, note.level, escape_text(note.message), locations)


def _build_result(
    rule: str, level: str, message: str, locations: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": message},
        "locations": locations,
    }


def _build_location(path: str) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": {"uri": format_uri(path)}}}


def format_uri(path: str) -> str:
    """Return a path as a URI reference: percent-encoded, with forward slashes.

    Args:
        path: A path as given on the command line.

    Returns:
        A reference relative to the working directory, as code scanning expects it; an
        absolute ``file:`` URI for a path outside of the working directory, as relative
        ones should not begin with ``..``.
    """
    try:
        absolute = os.path.abspath(path)
        relative = os.path.relpath(absolute)
    except OSError:  # the working directory is gone
        absolute = relative = path
    if os.path.isabs(relative) or relative.split(os.sep)[0] == os.pardir:
        return f"file://{_quote_path(absolute)}"
    return _quote_path(relative)


def _quote_path(path: str) -> str:
    """Return a path percent-encoded; of a path that no file can have, its escaped form."""
    slashed = path.replace(os.sep, "/")
    try:
        return quote(os.fsencode(slashed))
    except UnicodeEncodeError:  # from a manifest, which can hold any text
        return quote(escape_text(slashed))
