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
from schemas import load_schema

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.layout import Layout
from onnxkvrename.report.documents.projection_json import projection_to_json
from onnxkvrename.vllm.projection import (
    check_nixl,
    check_projection,
    project_layout,
)
from onnxkvrename.vllm.specs import VLLM_VERSIONS, ProjectionRequest

SCHEMA = load_schema("projection-1")
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


@pytest.mark.parametrize("version", VLLM_VERSIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_json_of_a_projection_matches_its_schema(name: str, version: str) -> None:
    data = projection_to_json(
        project_layout(
            LAYOUTS[name], ProjectionRequest(16, vllm_version=version, prompt_lengths=(1, 100))
        )
    )
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(data)))
    assert data["vllm"] == version


def test_the_schema_rejects_missing_and_additional_keys() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    data = projection_to_json(project_layout(build_gpt_oss(), ProjectionRequest(16)))
    assert not validator.is_valid({**data, "more": 1})
    for key in data:
        assert not validator.is_valid({k: v for k, v in data.items() if k != key})


def project_to_json(model: Layout, **settings: Any) -> dict[str, Any]:
    return projection_to_json(project_layout(model, ProjectionRequest(16, **settings)))


def test_layers_keep_their_numbers() -> None:
    data = project_to_json(
        build_layers(build_attention(7, heads=2), build_linear(9)), tensor_parallel_size=2
    )
    assert [row["layer"] for row in data["layers"]] == [7, 9]
    assert data["layers"][0]["kv_heads"] == 1
    assert data["layers"][1]["states"] == [[4096, 3], [16, 128, 128]]
    assert data["groupings"][0]["groups"][1]["layers"] == [9]


def test_with_a_refused_layer_nothing_is_grouped() -> None:
    data = project_to_json(
        build_layers(build_attention(0), (build_buffer(1, "key", "unknown", (1, 2, 3, 4)),))
    )
    assert [row["layer"] for row in data["layers"]] == [0]
    assert [row["layers"] for row in data["refusals"]] == [[1]]
    assert (data["groupings"], data["arrangements"]) == ([], [])


def test_heads_that_do_not_divide_are_a_finding() -> None:
    projection = project_layout(
        build_layers(build_attention(0, heads=6), build_attention(1, heads=6)),
        ProjectionRequest(16, tensor_parallel_size=4),
    )
    (finding,) = check_projection(projection)
    assert (finding.code, finding.severity, finding.name) == ("KV619", "error", "")
    assert finding.message == (
        "layers 0-1: 6 KV heads cannot be divided among 4 ranks, nor replicated on them"
    )


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 12])
def test_heads_that_ranks_divide_or_copy_are_no_finding(tp: int) -> None:
    projection = project_layout(
        build_layers(build_attention(0, heads=6)), ProjectionRequest(16, tensor_parallel_size=tp)
    )
    assert list(check_projection(projection)) == []
    assert projection.refusals == ()


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [
        (
            build_layers((build_buffer(0, "key", "unknown", (1, 2, 3, 4)),)),
            "0.33",
            "every size is fixed",
        ),
        (
            build_layers(build_attention(0, dtype="MXINT8")),
            "0.33",
            "vLLM has no such cache with dtype MXINT8",
        ),
        (
            build_layers(build_attention(0, heads="heads")),
            "0.24",
            "a size of key is unknown: heads",
        ),
        (
            LAYOUTS["refused groups"],
            "0.24",
            "vLLM 0.24 supports windowed MLA only together with full MLA",
        ),
        (LAYOUTS["two windows"], "0.33", "groups depend on the size of other_window"),
    ],
)
def test_every_refusal_is_a_finding(model: Layout, version: str, message: str) -> None:
    projection = project_layout(model, ProjectionRequest(16, vllm_version=version))
    findings = list(check_projection(projection))
    assert {(finding.code, finding.severity) for finding in findings} == {("KV622", "error")}
    assert message in findings[0].message
    assert all(finding.hint for finding in findings)


def test_groups_that_only_some_layouts_refuse_are_no_finding() -> None:
    projection = project_layout(LAYOUTS["mla and chunks"], ProjectionRequest(16))
    assert [grouping.refusal is None for grouping in projection.groupings] == [False, True]
    assert list(check_projection(projection)) == []


NARROW_VALUES = build_layers(build_attention(0, heads=2, size=128, size_v=64))
PADDED_PAGES = build_layers(
    *(build_attention(n, size=96) for n in (0, 2)),
    *(build_sliding(n, heads=5, window=128) for n in (1, 3)),
)
STATES_ALONE = build_layers(build_linear(0, (12288, 3)), build_linear(1, (12288, 3)))


@pytest.mark.parametrize(
    ("layout", "version", "reason", "hint"),
    [
        (NARROW_VALUES, "0.24", "keys and values differ in size", "choose another connector"),
        (NARROW_VALUES, "0.33", None, None),
        (PADDED_PAGES, "0.33", "cannot be partitioned", "VLLM_KV_CACHE_LAYOUT=B"),
        (STATES_ALONE, "0.24", "StopIteration", "choose another connector"),
        (STATES_ALONE, "0.33", "StopIteration", "choose another connector"),
        (LAYOUTS["mla and chunks"], "0.33", "not possible: groups", "VLLM_KV_CACHE_LAYOUT=B"),
        (LAYOUTS["hybrid"], "0.33", None, None),
        (LAYOUTS["window"], "0.24", None, None),
    ],
)
def test_what_nixls_connector_refuses_in_its_own_layout_is_a_finding(
    layout: Layout, version: str, reason: str | None, hint: str | None
) -> None:
    projection = project_layout(layout, ProjectionRequest(16, vllm_version=version))
    assert list(check_projection(projection)) == []
    found = [(finding.code, finding.message, finding.hint) for finding in check_nixl(projection)]
    if reason is None or hint is None:
        assert found == []
    else:
        ((code, message, advice),) = found
        assert (code, reason in message, hint in advice) == ("KV622", True, True), found


def test_regions_of_stages_are_not_known_and_no_finding() -> None:
    request = ProjectionRequest(16, vllm_version="0.24", pipeline_parallel_size=2)
    layers = build_layers(*(build_attention(n, heads=2, size=128, size_v=64) for n in range(2)))
    assert list(check_nixl(project_layout(layers, request))) == []


def test_the_layers_of_a_draft_model_are_grouped_with_the_others() -> None:
    # vLLM's own example: gpt-oss-20b with EAGLE has 12 windows and 13 whole layers, padded to 13.
    draft = build_layers(build_attention(0))
    projection = project_layout(build_gpt_oss(), ProjectionRequest(64), draft)
    (windows, whole) = projection.groupings[0].groups
    assert (len(windows.layers), len(whole.layers), whole.layers[-1]) == (12, 13, 24)
    assert projection.groupings[0].padding_layers == 1
    assert projection.request.draft_start == 24
    reasons = {condition.name: condition.why for condition in projection.conditions}
    assert reasons["parallelism"].endswith("and the draft model has as many ranks")


def test_a_draft_model_takes_the_blocks_of_its_model() -> None:
    hybrid = build_layers(build_attention(0, heads=2, size=256), build_linear(1))
    alone = project_layout(hybrid, ProjectionRequest(16, vllm_version="0.24"))
    both = project_layout(
        hybrid,
        ProjectionRequest(16, vllm_version="0.24"),
        build_layers(build_attention(0, heads=8, size=64)),
    )
    assert both.refusals == ()
    assert both.specs[2].layer == 2
    assert both.specs[2].block_size == alone.specs[0].block_size == both.specs[0].block_size


def test_sizes_of_a_draft_model_are_its_own() -> None:
    draft = build_layers(build_attention(3, heads="heads"), sizes={"heads": 2})
    projection = project_layout(build_gpt_oss(), ProjectionRequest(64), draft)
    assert (projection.specs[-1].layer, projection.specs[-1].kv_heads) == (24, 2)


def test_a_draft_model_in_stages_is_not_known() -> None:
    with pytest.raises(KvRenameError, match="draft model in pipeline stages"):
        project_layout(
            build_gpt_oss(), ProjectionRequest(16, pipeline_parallel_size=2), build_gpt_oss()
        )
