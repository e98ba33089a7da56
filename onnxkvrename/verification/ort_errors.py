"""Turn onnxruntime's error messages into short reasons.

onnxruntime raises plain text with the C++ source of its checks in it; a message that no
pattern matches is only shortened.
"""

from __future__ import annotations

import re

from onnxkvrename.errors import ModelError

_MAX_PARSED_CHARS = 2000
_MAX_REASON_CHARS = 200

_MEMORY_PATTERN = "bad_?alloc|bad allocation|Failed to allocate memory|Cannot allocate memory"
"""How messages say that there is no more memory."""

_NOISE_PATTERNS = (
    (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"^Load model from .*? failed: ?", ""),
    (r"\S*onnxruntime/\S+:\d+ .*?\)(?: \[with .*?\])? (?=\S)", ""),
    (r"\w+\.cc:\d+ \w+ ", ""),
    (r"(name |Name:)''", r"\1'(unnamed)'"),
    (r"^Non-zero status code returned while running (\w+) node\. Name:'(.*?)' Status Message: "
     r"(?:.* was false\. )?", r"the \1 node \2 fails: "),
)  # fmt: skip
"""Text around onnxruntime's own reason: codes, paths, C++ signatures, conditions."""

_EXPLANATIONS = (
    (r"(the \w+ node .*?) fails: .*\b2147483647\b.*",
     r"\1 is given the index INT32_MAX: in QEfficient's exports a cache slot that is not in use, "
     r"which a device passes over and onnxruntime refuses"),
    (r".*?([\w.]+:\w+)\(-?\d+\) is not a registered function/op.*",
     r"neither it nor onnxruntime defines the operator \1"),
    (r".*Error No opset import for domain '(.*)'.*", r"it imports no operator set \1"),
    (r".*No Op registered for (\w+) with domain_version of (\d+).*",
     r"there is no operator \1 in opset \2"),
    (r"Could not find an implementation for (\w+)\((\d+)\) node with name '(.*)'.*",
     r"onnxruntime has no \1 (of opset \2) for the dtypes at node \3"),
    (r".*\(op_type:(\w+).*inconsistent type.*|.*Optype \((\w+)\) bound to different types.*",
     r"a node \1\2 is given dtypes that differ, as in a local function made for FLOAT when the "
     r"model is FLOAT16"),
    (r"Unsupported model IR version: (\d+), max supported IR version: (\d+).*",
     r"it is of IR version \1, and this onnxruntime reads up to \2"),
    (r".*Opset (\d+) is under development.*till opset (\d+).*",
     r"it is of opset \1, and this onnxruntime knows up to \2"),
    (r".*'utf-8' codec can't decode.*",
     r"its names are not all UTF-8, and onnxruntime has no others for Python"),
)  # fmt: skip
"""Plain words for some of the reasons; the first pattern that matches decides."""


class MemoryLimitError(ModelError):
    """onnxruntime got no more memory."""


def build_ort_error(
    problem: str, error: Exception, path: str, hint: str | None = None
) -> ModelError:
    """Return the error for an exception of onnxruntime.

    Args:
        problem: What onnxruntime cannot do; the reason completes it.
        error: The exception; those of onnxruntime have no common base.
        path: The file of the model.
        hint: How to fix it.
    """
    message = str(error)
    kind = MemoryLimitError if re.search(_MEMORY_PATTERN, message) else ModelError
    return kind(f"{problem}{summarize_ort_error(message)}", path=path, hint=hint)


def summarize_ort_error(message: str) -> str:
    """Return the reason in an error message of onnxruntime, as a part of one line.

    Args:
        message: The message as it is raised, with any number of lines.

    Returns:
        At most 200 characters: plain words for a known reason, else onnxruntime's own
        without codes and paths.
    """
    reason = " ".join(message[:_MAX_PARSED_CHARS].split())
    for noise, replacement in _NOISE_PATTERNS:
        reason = re.sub(noise, replacement, reason)
    for pattern, explanation in _EXPLANATIONS:
        match = re.fullmatch(pattern, reason)
        if match is not None:
            reason = match.expand(explanation)
            break
    if len(reason) <= _MAX_REASON_CHARS:
        return reason
    return reason[: _MAX_REASON_CHARS - 1] + "…"
