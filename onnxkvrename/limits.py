"""The limits: how much is taken from files that others made, each with its reason.

What grows only with the size of a file that was admitted has no limit of its own, and neither
have the user's own rules and options. What exceeds a limit is refused in one line, or is not
known.
"""

from __future__ import annotations

from onnxkvrename.errors import ModelError

MAX_MODEL_BYTES = (1 << 31) - 1
"""Bytes of a model: what protobuf, and so every ONNX reader, accepts."""
MAX_TEXT_BYTES = 1 << 23
"""Bytes of a text that is parsed: its values take up to 40 times as much memory."""
MAX_YAML_CHARS = 1 << 18
"""Characters of a YAML text: ruamel.yaml takes up to 10 seconds for a megabyte."""
MAX_DEPTH = 100
"""Messages, lists and objects in each other: protobuf's parsers accept so many."""
MAX_ENTRIES = 1 << 16
"""Things of one kind that are held together: one of two bytes in a file takes some 300."""
MAX_BUFFERS = 1 << 12
"""KV buffers: checks and reports hold several kilobytes for each."""
MAX_FILES = 1 << 10
"""Files that one file or folder leads to: each costs as much as to read a kilobyte."""
MAX_TEMPLATES = 1 << 8
"""Templates of a configuration, and groups of its models: each is held against every name."""
MAX_NAME_BYTES = 1 << 16
"""Bytes of a name in a model: names are shown, compared and written often."""
MAX_MATCHED_CHARS = 1 << 12
"""Characters of a name that a pattern is tried on: that may take more than linear time."""
MAX_RANK = 256
"""Dimensions of a value: they multiply with the values that have them."""
MAX_INT64 = (1 << 63) - 1
"""Elements, bytes and numbers: ONNX's own integers hold no more."""
STEPS_PER_NODE = 16
"""Steps of a walk for each node of a graph; what takes more is not known."""
MAX_SEARCHED_NODES = 1 << 14
"""Nodes in which a rename looks for caches that no profile matches, which takes a second."""
MAX_ALTERNATIVES = 16
"""Possible answers that are followed side by side; with more, there is none."""
MAX_SHOWN_CHARS = 80
"""Characters of a name or a value in a message, which is one line."""
MAX_REASON_CHARS = 200
"""Characters of another program's reason in a message."""
MAX_LISTED = 5
"""Names that a message lists before it counts the rest."""
_EXPORTER_HINT = "no known exporter writes so many; if yours does, please report it"


def describe_excess(limit: int, what: str) -> str:
    """Return what is wrong with a file beyond a limit: ``has more than 256 templates``."""
    return f"has more than {limit:,} {what}"


def build_limit_error(
    limit: int, what: str, *, path: str | None = None, hint: str = _EXPORTER_HINT
) -> ModelError:
    """Return the error for a file that is refused since it would cost too much.

    Args:
        limit: The limit.
        what: What it counts, in the plural, such as ``KV buffers``.
        path: The file, if it is known here.
        hint: How to get around it.
    """
    return ModelError(describe_excess(limit, what), path=path, hint=hint)


def shorten_text(text: str, length: int = MAX_SHOWN_CHARS) -> str:
    """Return a text from a file or another program, cut to a length that fits into a message."""
    return text if len(text) <= length else f"{text[:length]}…"
