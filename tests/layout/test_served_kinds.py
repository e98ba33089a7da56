"""What `inspect` says of QEfficient's ways to serve a model.

Multi-head latent attention, speculative decoding (TLM), lists of context lengths (CCL) and
replicated KV heads: a buffer is as long, as wide and as large as the graph has it, and what
else these exports take as inputs counts for no buffer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx.helper
import pytest
from models import info, node, saved
from onnx import ModelProto, TensorProto

Shape = tuple[str | int, ...]
LAYERS = 2
CONTEXT: Shape = ("batch_size", 2, "ctx_len", 16)


class Served(NamedTuple):
    """An export and the sizes that it is compiled for.

    Attributes:
        buffers: The buffers of each layer, with their shapes.
        kind: Their kind.
        inputs: What else the graph takes.
        sizes: The symbols of each graph that is compiled, as in specializations.json.
        token_bytes: Bytes of each buffer of a layer for one token, in float16.
        sequence_bytes: Bytes of all layers at their full length.
    """

    buffers: Mapping[str, Shape]
    kind: str
    inputs: Mapping[str, Shape]
    sizes: list[dict[str, int]]
    token_bytes: list[int]
    sequence_bytes: int


def attention(*shape: str | int) -> dict[str, Shape]:
    return {"past_key": shape, "past_value": shape}


def read_layout(run: Any, *arguments: object) -> dict[str, Any]:
    """Return the layout that `inspect` prints of a model."""
    answer = run("inspect", *arguments, "--format", "json")
    assert answer.code == 0, answer.out
    layout: dict[str, Any]
    (layout,) = json.loads(answer.out)["layouts"]
    return layout


SERVED = {
    "mla": Served(
        {
            "compressed_kv": ("batch_size", 1, "ctx_len", 16),
            "k_pe": ("batch_size", 1, "ctx_len", 8),
        },
        "mla_attention",
        {},
        [{"batch_size": 1, "seq_len": 8, "ctx_len": 32}],
        [16 * 2, 8 * 2],
        LAYERS * 32 * (16 + 8) * 2,
    ),
    "tlm": Served(
        attention(*CONTEXT),
        "full_attention",
        {"num_logits_to_keep": ("num_logits_to_keep", 1)},
        [
            {"batch_size": 1, "seq_len": 8, "ctx_len": 32, "num_logits_to_keep": 1},
            {"batch_size": 1, "seq_len": 3, "ctx_len": 32, "num_logits_to_keep": 3},
        ],
        [2 * 16 * 2] * 2,
        LAYERS * 32 * 2 * (2 * 16 * 2),
    ),
    "ccl": Served(
        attention(*CONTEXT),
        "full_attention",
        {"comp_ctx_lengths": ("comp_ctx_lengths",)},
        [
            {"batch_size": 1, "seq_len": 8, "ctx_len": 4096, "comp_ctx_lengths": 1024},
            {"batch_size": 1, "seq_len": 1, "ctx_len": 4096, "comp_ctx_lengths": 2048},
            {"batch_size": 1, "seq_len": 1, "ctx_len": 4096, "comp_ctx_lengths": 4096},
        ],
        [2 * 16 * 2] * 2,
        LAYERS * 4096 * 2 * (2 * 16 * 2),
    ),
    "replicated heads": Served(  # 2 heads of the checkpoint, each twice, for 4 devices
        attention("full_batch_size", 4, "ctx_len", 16),
        "full_attention",
        {"batch_index": ("batch_size", 1)},
        [{"batch_size": 1, "full_batch_size": 8, "seq_len": 8, "ctx_len": 32}],
        [4 * 16 * 2] * 2,
        LAYERS * 32 * 2 * (4 * 16 * 2),
    ),
    "replicated latents": Served(
        {
            "compressed_kv": ("batch_size", 4, "ctx_len", 16),
            "k_pe": ("batch_size", 4, "ctx_len", 8),
        },
        "mla_attention",
        {},
        [{"batch_size": 1, "seq_len": 8, "ctx_len": 32}],
        [4 * 16 * 2, 4 * 8 * 2],
        LAYERS * 32 * 4 * (16 + 8) * 2,
    ),
}


def build(served: Served, token: str = "") -> ModelProto:
    """Build the export: a buffer is written at the positions of the tokens."""
    ids = {"input_ids": ("batch_size", "seq_len"), "position_ids": ("batch_size", "seq_len")}
    shapes: dict[str, Shape] = {**ids, **served.inputs}
    inputs = [info(name, *shape, dtype=TensorProto.INT64) for name, shape in shapes.items()]
    nodes = [node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT16)]
    outputs = [info("logits", "batch_size", "seq_len", dtype=TensorProto.FLOAT16)]
    names = [(f"{part}.{layer}", part) for layer in range(LAYERS) for part in served.buffers]
    for plain, part in names:
        name, shape = f"{plain}{token}", served.buffers[part]
        update = [name, f"/{plain}/indices", f"/{plain}/update"]
        nodes += [node("Shape", [name], [update[1]]), node("Neg", [name], [update[2]])]
        nodes.append(node("ScatterND", update, [f"{name}_RetainedState"]))
        inputs.append(info(name, *shape, dtype=TensorProto.FLOAT16))
        outputs.append(info(f"{name}_RetainedState", *shape, dtype=TensorProto.FLOAT16))
    graph = onnx.helper.make_graph(nodes, "served", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest) -> Served:
    return SERVED[request.param]


@pytest.mark.parametrize("token", ["", "_VLLM"])
def test_inspect_shows_buffers_as_the_graph_has_them(
    served: Served, token: str, tmp_path: Path, run
) -> None:
    path = saved(build(served, token), tmp_path / "m.onnx")
    answer = run("inspect", path, "--format", "json")
    assert answer.code == 0, answer.out
    (model,) = json.loads(answer.out)["models"]
    assert [(each["layer"], each["buffer"], each["shape"]) for each in model["buffers"]] == [
        (layer, part, list(shape))
        for layer in range(LAYERS)
        for part, shape in served.buffers.items()
    ]
    assert {(each["kind"], each["kind_guessed"]) for each in model["buffers"]} == {
        (served.kind, False)
    }
    assert not set(served.inputs) & {each["input"] for each in model["buffers"]}


def test_bytes_are_counted_by_the_heads_of_the_graph(served: Served, tmp_path: Path, run) -> None:
    path = saved(build(served), tmp_path / "m.onnx")
    context = served.sizes[0]["ctx_len"]
    layout = read_layout(run, path, "--dim", f"ctx_len={context}")
    buffers = layout["buffers"]
    assert [each["bytes_per_token"] for each in buffers] == served.token_bytes * LAYERS
    assert [each["bytes"] for each in buffers] == [
        size * context for size in served.token_bytes * LAYERS
    ]
    assert {each["sequence_axis"] for each in buffers} == {2}
    assert {each["kind"] for each in buffers} == {served.kind}
    assert layout["totals"]["sequence_bytes"] == served.sequence_bytes
    assert layout["totals"]["bytes_per_token"] == {
        "context": sum(served.token_bytes) * LAYERS,
        "window": 0,
        "encoder": 0,
    }


def test_sizes_that_differ_from_graph_to_graph_are_not_a_buffers(
    served: Served, tmp_path: Path, run
) -> None:
    """Logits to keep and lengths of a context list have several sizes; no buffer needs one."""
    path = saved(build(served), tmp_path / "m.onnx")
    layout = read_layout(run, path)
    assert layout["missing"] == ["ctx_len"]
    assert [each["name"] for each in layout["inputs"]][:2] == ["input_ids", "position_ids"]
    assert set(served.inputs) <= {each["name"] for each in layout["inputs"]}
    assert read_layout(run, path, "--dim", "ctx_len=32")["missing"] == []


def test_replicated_heads_are_in_the_shapes(tmp_path: Path, run) -> None:
    shapes = []
    for name in ("tlm", "ccl", "replicated heads"):
        path = saved(build(SERVED[name]), tmp_path / f"{name}.onnx")
        shapes.append([each["shape"] for each in read_layout(run, path)["buffers"]])
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_replicated_latent_is_refused_by_vllm_for_its_heads(tmp_path: Path, run) -> None:
    path = saved(build(SERVED["replicated latents"]), tmp_path / "m.onnx")
    answer = run("inspect", path, "--dim", "ctx_len=32", "--vllm")
    assert "its latent has 4 heads, and a page of MLA holds one" in answer.out + answer.err
    assert "see what is missing" not in answer.out + answer.err


# Paged caches: a pool of blocks, of which a block table says whose they are.

BLOCKS: Shape = ("total_num_kv_blocks", 2, "kv_block_size", 16)
TABLE: dict[str, Shape] = {
    "block_table": ("batch_size", "num_kv_blocks"),
    "slot_id": ("batch_size",),
}


def write_model(path: Path, shape: Shape, inputs: dict[str, Shape], token: str = "") -> Path:
    return saved(build(Served(attention(*shape), "", inputs, [], [], 0), token), path)


@pytest.mark.parametrize(
    ("shape", "inputs", "kind"),
    [
        (BLOCKS, TABLE, "paged_attention"),
        (BLOCKS, {}, "paged_attention"),
        (("num_pages", 2, "page_size", 16), {}, "paged_attention"),
        ((8, 2, 4, 16), TABLE, "paged_attention"),
        ((8, 2, 4, 16), {"Block_Tables_0": ("batch_size", 4)}, "paged_attention"),
        (("batch_size", 2, "ctx_len", 16), TABLE, "paged_attention"),
        (("batch_size", 2, "ctx_len", 16), {"slot_id": ("batch_size",)}, "full_attention"),
        (("batch_size", 2, "Concat/blocks.0_dim_2", 16), {}, "unknown"),
    ],
)
def test_blocks_are_told_by_a_symbol_or_by_a_block_table(
    shape: Shape, inputs: dict[str, Shape], kind: str, tmp_path: Path, run
) -> None:
    path = write_model(tmp_path / "m.onnx", shape, inputs)
    document = json.loads(run("inspect", path, "--format", "json").out)
    for described in (document["models"][0], document["layouts"][0]):
        assert {each["kind"] for each in described["buffers"]} == {kind}


def test_the_layout_of_a_paged_cache_knows_blocks_and_no_sequence(tmp_path: Path, run) -> None:
    path = write_model(tmp_path / "m.onnx", BLOCKS, TABLE)
    sizes = ("--dim", "total_num_kv_blocks=8", "--dim", "kv_block_size=4")
    layout = read_layout(run, path, *sizes)
    assert {each["sequence_axis"] for each in layout["buffers"]} == {None}
    assert layout["totals"]["sequence_bytes"] is None
    refused = run("inspect", path, *sizes, "--vllm", "--format", "json")
    (vllm,) = json.loads(refused.out)["vllm"]
    assert (refused.code, vllm["layers"], len(vllm["refusals"])) == (0, [], 1)


@pytest.mark.parametrize("target", ["vllm-qaic", "vllm-qaic-legacy", "qefficient"])
def test_consumers_that_cut_by_batch_and_context_refuse(target: str, tmp_path: Path, run) -> None:
    token = "_vllmKvCache" if target == "vllm-qaic" else ""
    path = write_model(tmp_path / "m.onnx", BLOCKS, TABLE, token)
    answer = run("verify", path, "--target", target)
    assert answer.code == 1
    assert "takes the first axis for the batch" in answer.err
    plain = write_model(tmp_path / "plain.onnx", ("batch_size", 2, "ctx_len", 16), {}, token)
    assert "paged" not in run("verify", plain, "--target", target).err


def test_a_hand_off_of_paged_caches_does_not_work(tmp_path: Path, run) -> None:
    path = write_model(tmp_path / "m.onnx", BLOCKS, TABLE, "_vllmKvCache")
    sizes = ("--dim", "total_num_kv_blocks=8", "--dim", "kv_block_size=4")
    answer = run("compare", path, path, *sizes, "--format", "json")
    assert answer.code == 1
    assert "KV610" in {finding["code"] for finding in json.loads(answer.out)["findings"]}
