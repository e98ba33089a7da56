from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from build_layouts import (
    build_attention,
    build_buffer,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)
from schema_tables import SCHEMA as INSPECT_SCHEMA

from onnxkvrename.layout.layout import Layout
from onnxkvrename.records import serialize
from onnxkvrename.report.documents.projection_json import describe_projection
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

DEFINITIONS = INSPECT_SCHEMA["$defs"]
SCHEMA = {**DEFINITIONS["ProjectionContent"], "$defs": DEFINITIONS}
LAYOUTS = {
    "nothing": build_layers(),
    "plain": build_layers(build_attention(0), build_attention(1)),
    "window": build_gpt_oss(),
    "unsized": build_layers(build_attention(0), build_sliding(1)),
    "uneven": build_layers(build_attention(0), build_sliding(1, heads=3, window=128)),
    "mla": build_layers(build_mla(0), build_mla(1)),
    "windowed mla": build_layers(build_mla(0), build_mla(1, window=128)),
    "hybrid": build_layers(build_attention(0), build_linear(1)),
    "refused groups": build_layers(build_attention(0), build_mla(1, window=128)),
    "refused layer": build_layers((build_buffer(0, "key", "unknown", (1, 2, 3, 4)),)),
    "cross": build_layers(build_attention(0), build_attention(0, kind="cross_attention")),
    "two windows": build_layers(
        build_attention(0), build_sliding(1), build_sliding(2, window="other_window")
    ),
    "mla and chunks": build_layers(
        build_mla(0), build_attention(1, kind="chunked_local_attention", window=64)
    ),
    "chunks": build_layers(build_attention(0, kind="chunked_local_attention", window=8192)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_json_of_a_projection_matches_its_schema(name: str) -> None:
    data = project_to_json(LAYOUTS[name], prompt_lengths=(1, 100))
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(data)))
    assert data["vllm"] == "0.24"


def test_the_schema_rejects_missing_and_additional_keys() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    data = project_to_json(build_gpt_oss())
    assert not validator.is_valid({**data, "more": 1})
    for key in data:
        assert not validator.is_valid({k: v for k, v in data.items() if k != key})


def project_to_json(model: Layout, **settings: Any) -> dict[str, Any]:
    projection = project_layout(model, ProjectionRequest(16, **settings))
    values: dict[str, Any] = serialize(describe_projection(projection))
    return values


def test_layers_keep_their_numbers() -> None:
    data = project_to_json(
        build_layers(build_attention(7, heads=2), build_linear(9)), tensor_parallel_size=2
    )
    assert [row["layer"] for row in data["layers"]] == [7, 9]
    assert data["layers"][0]["kv_heads"] == 1
    assert data["layers"][1]["states"] == [[4096, 3], [16, 128, 128]]
    assert data["grouping"]["groups"][1]["layers"] == [9]


def test_with_a_refused_layer_nothing_is_grouped() -> None:
    data = project_to_json(
        build_layers(build_attention(0), (build_buffer(1, "key", "unknown", (1, 2, 3, 4)),))
    )
    assert [row["layer"] for row in data["layers"]] == [0]
    assert [row["layers"] for row in data["refusals"]] == [[1]]
    assert (data["grouping"], data["arrangements"]) == (None, [])


def test_heads_that_do_not_divide_are_refused() -> None:
    projection = project_layout(
        build_layers(build_attention(0, heads=6), build_attention(1, heads=6)),
        ProjectionRequest(16, tensor_parallel_size=4),
    )
    (refusal,) = projection.refusals
    assert refusal.layers == (0, 1)
    assert refusal.reason == "6 KV heads cannot be divided among 4 ranks, nor replicated on them"


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 12])
def test_heads_that_ranks_divide_or_copy_are_not_refused(tp: int) -> None:
    projection = project_layout(
        build_layers(build_attention(0, heads=6)), ProjectionRequest(16, tensor_parallel_size=tp)
    )
    assert projection.refusals == ()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            build_layers((build_buffer(0, "key", "unknown", (1, 2, 3, 4)),)),
            "every size is fixed",
        ),
        (
            build_layers(build_attention(0, dtype="MXINT8")),
            "vLLM has no such cache with dtype MXINT8",
        ),
        (
            build_layers(build_attention(0, heads="heads")),
            "a size of key is unknown: heads",
        ),
        (
            LAYOUTS["refused groups"],
            "vLLM supports windowed MLA only together with full MLA",
        ),
        (LAYOUTS["two windows"], "groups depend on the size of other_window"),
    ],
)
def test_what_vllm_cannot_have_is_refused_with_a_hint(model: Layout, message: str) -> None:
    (refusal,) = project_layout(model, ProjectionRequest(16)).refusals
    assert message in refusal.reason
    assert refusal.hint
