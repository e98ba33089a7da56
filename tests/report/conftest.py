"""Model summaries to draw."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_models import build_cache_model
from models import saved
from onnx import ModelProto

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ModelSummary, inspect_model


@pytest.fixture
def inspected(tmp_path: Path):
    """Return a function that inspects a model, or one made of these kinds of layers."""

    def inspect(model: ModelProto | tuple[str, ...], **how: object) -> ModelSummary:
        proto = model if isinstance(model, ModelProto) else build_cache_model(model, **how)  # type: ignore[arg-type]
        summary = inspect_model(saved(proto, tmp_path / "m.onnx"), load_rules())
        return summary._replace(path="m.onnx", size=1000)

    return inspect
