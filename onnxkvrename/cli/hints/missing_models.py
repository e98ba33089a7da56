"""Paths that name no model, because another word was meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import quote_path
from onnxkvrename.handoff.find_consumers import list_consumers
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.storage.read import is_occupied


def check_models_exist(paths: Sequence[Path]) -> None:
    """Check that there are models at some paths.

    Raises:
        ModelError: A path does not exist, cannot be listed, or has no model below it; the name of
            a consumer is answered with ``--target``.
    """
    consumers = list_consumers()
    words = [str(path) for path in paths]
    for word in words:
        others = " ".join(quote_path(other) for other in words if other != word) or "MODEL"
        if word in consumers and not is_occupied(word):
            hint = f"`onnxkvrename {others} --target {word}`"
            raise ModelError("no such file", path=word, hint=hint)
    find_jobs(paths)
