from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from layers import attention, buffer, gpt_oss, layout, linear, mla, sliding

import onnxkvrename
from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.projection import check_projection, project_layout, projection_to_json
from onnxkvrename.vllm.specs import VLLM_VERSIONS, ProjectionRequest

SCHEMA = json.loads(
    (Path(onnxkvrename.__file__).parent / "report" / "schemas" / "projection-1.json").read_text(
        "utf-8"
    )
)
LAYOUTS = {
    "nothing": layout(),
    "plain": layout(attention(0), attention(1)),
    "window": gpt_oss(),
    "unsized": layout(attention(0), sliding(1)),
    "uneven": layout(attention(0), sliding(1, heads=3, window=128)),
    "mla": layout(mla(0), mla(1)),
    "windowed mla": layout(mla(0), mla(1, window=128)),
    "hybrid": layout(attention(0), linear(1)),
    "refused groups": layout(attention(0), mla(1, window=128)),
    "refused layer": layout((buffer(0, "key", "unknown", (1, 2, 3, 4)),)),
    "cross": layout(attention(0), attention(0, kind="cross_attention")),
    "two windows": layout(attention(0), sliding(1), sliding(2, window="other_window")),
    "mla and chunks": layout(mla(0), attention(1, kind="chunked_local_attention", window=64)),
    "chunks": layout(attention(0, kind="chunked_local_attention", window=8192)),
}


@pytest.mark.parametrize("era", VLLM_VERSIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_projection_is_as_its_schema_says(name: str, era: str) -> None:
    plain = projection_to_json(
        project_layout(
            LAYOUTS[name], ProjectionRequest(16, vllm_version=era, prompt_lengths=(1, 100))
        )
    )
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(plain)))
    assert plain["vllm"] == era


def test_the_schema_allows_nothing_else() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    whole = projection_to_json(project_layout(gpt_oss(), ProjectionRequest(16)))
    assert not validator.is_valid({**whole, "more": 1})
    for key in whole:
        assert not validator.is_valid({k: v for k, v in whole.items() if k != key})


def first(found: Layout, **asked: Any) -> dict[str, Any]:
    return projection_to_json(project_layout(found, ProjectionRequest(16, **asked)))


def test_layers_go_by_their_numbers() -> None:
    found = first(layout(attention(7, heads=2), linear(9)), tensor_parallel_size=2)
    assert [row["layer"] for row in found["layers"]] == [7, 9]
    assert found["layers"][0]["kv_heads"] == 1
    assert found["layers"][1]["states"] == [[4096, 3], [16, 128, 128]]
    assert found["groupings"][0]["groups"][1]["layers"] == [9]


def test_a_layer_that_cannot_be_projected_keeps_all_from_their_groups() -> None:
    found = first(layout(attention(0), (buffer(1, "key", "unknown", (1, 2, 3, 4)),)))
    assert [row["layer"] for row in found["layers"]] == [0]
    assert [row["layers"] for row in found["refusals"]] == [[1]]
    assert (found["groupings"], found["arrangements"]) == ([], [])


def test_heads_that_do_not_divide_are_a_finding() -> None:
    found = project_layout(
        layout(attention(0, heads=6), attention(1, heads=6)),
        ProjectionRequest(16, tensor_parallel_size=4),
    )
    (one,) = check_projection(found)
    assert (one.code, one.severity, one.name) == ("KV619", "error", "")
    assert one.message == ("layers 0-1: 6 KV heads do not divide by 4 ranks, nor ranks by heads")


@pytest.mark.parametrize("tp", [1, 2, 3, 6, 12])
def test_heads_that_divide_or_are_held_by_several_are_none(tp: int) -> None:
    found = project_layout(
        layout(attention(0, heads=6)), ProjectionRequest(16, tensor_parallel_size=tp)
    )
    assert list(check_projection(found)) == []
    assert found.refusals == ()


@pytest.mark.parametrize(
    ("refused", "era", "said"),
    [
        (layout((buffer(0, "key", "unknown", (1, 2, 3, 4)),)), "0.33", "every size is fixed"),
        (layout(attention(0, dtype="MXINT8")), "0.33", "vLLM has no such cache in MXINT8"),
        (layout(attention(0, heads="heads")), "0.24", "a size of key is not known: heads"),
        (LAYOUTS["refused groups"], "0.24", "vLLM 0.24 takes windowed MLA beside whole MLA"),
        (LAYOUTS["two windows"], "0.33", "groups depend on the size of other_window"),
    ],
)
def test_whatever_else_is_refused_is_a_finding_too(refused: Layout, era: str, said: str) -> None:
    found = list(check_projection(project_layout(refused, ProjectionRequest(16, vllm_version=era))))
    assert {(one.code, one.severity) for one in found} == {("KV622", "error")}
    assert said in found[0].message
    assert all(one.hint for one in found)


def test_what_only_some_layouts_refuse_is_no_finding() -> None:
    found = project_layout(LAYOUTS["mla and chunks"], ProjectionRequest(16))
    assert [way.refusal is None for way in found.groupings] == [False, True]
    assert list(check_projection(found)) == []


def test_an_era_that_is_not_known_is_said() -> None:
    with pytest.raises(KvRenameError) as caught:
        project_layout(gpt_oss(), ProjectionRequest(16, vllm_version="1.0"))
    assert caught.value.hint == "there are: 0.24, 0.33"
