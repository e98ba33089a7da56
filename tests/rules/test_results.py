from __future__ import annotations

import ast
from pathlib import Path

import pytest

from onnxkvrename import Finding, ModelError
from onnxkvrename.findings import build_finding
from onnxkvrename.rules import results
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport, Status

WARNING = build_finding("KV404", "x", "is in no model", "take it out")
ERROR = build_finding("KV101", "x", "has no output", "export it again")


def test_results_are_plain_values_that_touch_no_disk() -> None:
    tree = ast.parse(Path(results.__file__).read_text("utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert "os" not in imported
    assert not any(name.startswith("onnxkvrename.files") for name in imported)
    assert called.isdisjoint({"exists", "is_file", "is_dir", "is_symlink", "resolve", "stat"})


@pytest.mark.parametrize(
    ("findings", "error", "failed"),
    [
        ((), None, False),
        ((WARNING,), None, False),
        ((WARNING, ERROR), None, True),
        ((), ModelError("no"), True),
    ],
)
def test_a_model_fails_for_an_error_or_a_finding_of_one(
    findings: tuple[Finding, ...], error: ModelError | None, failed: bool
) -> None:
    report = ModelReport("m", "m", "unchanged", findings=findings, error=error)
    assert report.failed is failed


@pytest.mark.parametrize(
    ("status", "code", "code_of_check"),
    [("renamed", 0, 0), ("unchanged", 0, 0), ("would-rename", 0, 1)],
)
def test_a_name_that_would_change_counts_for_a_check_only(
    status: Status, code: int, code_of_check: int
) -> None:
    for report in (
        Report((ModelReport("m", "m", status),)),
        Report((), (SidecarReport("t", "t", status, 1),)),
    ):
        assert report.compute_exit_code() == code
        assert report.compute_exit_code(check_only=True) == code_of_check


def test_an_error_counts_for_more_than_a_finding() -> None:
    finding = ModelReport("a", "a", "failed", findings=(ERROR,))
    error = ModelReport("b", "b", "failed", error=ModelError("no"))
    assert Report((finding,)).compute_exit_code() == 1
    assert Report((finding, error)).compute_exit_code() == 2
    assert Report((finding, error)).findings == (ERROR,)
