from __future__ import annotations

import pytest

from onnxkvrename.verification.running.ort_session import summarize_ort_error


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/m.onnx failed:No Op registered "
            "for Foo with domain_version of 18",
            "there is no operator Foo in opset 18",
        ),
        (
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for "
            "Where(16) node with name 'w'",
            "onnxruntime has no Where (of opset 16) for the dtypes at node w",
        ),
        (
            "Unsupported model IR version: 99, max supported IR version: 11",
            "it is of IR version 99, and this onnxruntime reads up to 11",
        ),
    ],
)
def test_a_known_reason_is_explained(message: str, reason: str) -> None:
    assert reason in summarize_ort_error(message)


def test_an_unknown_reason_is_one_line_without_codes() -> None:
    message = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : first line\n\tsecond line"
    assert summarize_ort_error(message) == "first line second line"


def test_a_long_reason_is_cut() -> None:
    reason = summarize_ort_error("x" * 5000)
    assert reason == "x" * 200 + "…"
