from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from cache_models import MIXED, build_cache_model
from models import saved
from onnx import ModelProto, TensorProto
from schemas import VALIDATOR
from tiers import full, thin

from onnxkvrename import KvRenameError, load_rules
from onnxkvrename.layout.inspect import Inspection, ModelSummary, inspect_model
from onnxkvrename.report.documents.inspect_json import DOCUMENT, describe_inspection

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[4] / "shared" / "exports"
QEFF = load_rules()


@pytest.fixture
def inspected(tmp_path: Path):
    """Summarize a model, or one made of these kinds of layers."""

    def inspect(model: ModelProto | tuple[str, ...], **options: object) -> ModelSummary:
        proto = model if isinstance(model, ModelProto) else build_cache_model(model, **options)  # type: ignore[arg-type]
        return inspect_model(saved(proto, tmp_path / "m.onnx"), QEFF)

    return inspect


def document(*summaries: ModelSummary, error: KvRenameError | None = None) -> dict[str, Any]:
    """The parsed JSON of these models, valid under the schema and plain ASCII."""
    text = DOCUMENT.render(
        describe_inspection(Inspection(summaries, ()), QEFF.profile_choice), 0, error
    )
    assert text.isascii()
    parsed: dict[str, Any] = json.loads(text)
    VALIDATOR.validate(parsed)
    return parsed


def outside(location: str) -> TensorProto:
    """A weight of four bytes in a file beside the model."""
    weight = TensorProto(name=f"weight in {location}", dims=[1], data_type=1, data_location=1)
    weight.external_data.add(key="location", value=location)
    return weight


def test_json_has_the_names_as_they_are(inspected) -> None:
    model = build_cache_model(("full",))
    scope = "\x1b[2J[red]\u202e/"
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("past_key", f"{scope}past_key")
    for node in model.graph.node:
        node.input[:] = [name.replace("past_key", f"{scope}past_key") for name in node.input]
        node.output[:] = [name.replace("past_key", f"{scope}past_key") for name in node.output]
    (summary,) = document(inspected(model))["models"]
    key = next(buffer for buffer in summary["buffers"] if buffer["buffer"] == "past_key")
    assert (key["scope"], key["input"]) == (scope, f"{scope}past_key.0")


def test_json_holds_whatever_a_model_is(inspected, tmp_path: Path) -> None:
    summaries = [
        inspected(MIXED, tokens=("VLLM", "VLLM"), without={"k_pe.2_VLLM", "past_key.0_VLLM"}),
        inspected(("full",), weights=[outside("gone.bin")]),
        inspected(()),
        inspected(ModelProto(graph=onnx.GraphProto())),
        inspect_model(tmp_path / "gone\udcff.onnx", QEFF),
    ]
    parsed = document(*summaries, error=KvRenameError("no", hint="mend"))
    assert [len(model["buffers"]) for model in parsed["models"]] == [14, 2, 0, 0, 0]
    assert parsed["error"] == {"message": "no", "path": None, "hint": "mend"}


def test_json_of_a_fixture_says_what_it_shows() -> None:
    (summary,) = document(inspect_model(FIXTURES / "VLLM" / "hybrid.onnx", QEFF))["models"]
    assert summary["tokens"] == [{"token": "VLLM", "names": 12}]
    assert summary["layers"] == [0, 1, 2]
    assert {buffer["kind"] for buffer in summary["buffers"]} == {
        "full_attention",
        "mamba",
        "sliding_window",
    }
    assert summary["export"]["opsets"] == [{"domain": "", "version": 17}]


@pytest.mark.parametrize(
    "path",
    thin(sorted(FIXTURES.rglob("*.onnx")), 8),
    ids=lambda path: str(path.relative_to(FIXTURES)),
)
def test_json_of_every_fixture_is_valid(path: Path) -> None:
    document(inspect_model(path, QEFF))


@full
@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_json_of_every_real_export_is_valid() -> None:
    document(*(inspect_model(path, QEFF) for path in sorted(EXPORTS.rglob("*.onnx"))))
