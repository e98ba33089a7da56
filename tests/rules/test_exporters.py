"""Models of other exporters: their names are known, take a token, and come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from exporter_models import (
    HEAD,
    HEADS,
    HUGGING_FACE,
    Cache,
    build_decoder,
    build_merged_decoder,
    build_model,
    build_qnn_decoder,
    list_caches,
)
from exporters_table import FOLDERS, NO_CACHE, OTHERS, TOKEN, Row, list_rows, read_table
from models import saved
from onnx import ModelProto, TensorProto
from tiers import thin

from onnxkvrename.rules.load import load_rules, read_profile
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.profile import SIDES

STATE = ("batch_size", 8, 3)
OWN = ("past_key_values.{layer}.decoder.{part}", "present.{layer}.decoder.{part}")
CROSS = ("past_key_values.{layer}.encoder.{part}", "present.{layer}.encoder.{part}")
ORT_OWN = ("past_{part}_self_{layer}", "present_{part}_self_{layer}")
ORT_CROSS = ("past_{part}_cross_{layer}", "present_{part}_cross_{layer}")
ENCODED = ("batch_size", HEADS, "encoder_sequence_length", HEAD)
PATH = "put.past_key_values.layers.{layer}.{part}"
PATHS = (f"in{PATH}", f"out{PATH}")
SPLIT_PATH = "put.past_key_values.{kind}_attention_cache.layers.{layer}.{part}"
KEYS = ("keys", "values")
COUNTER = {"update": "inplace", "shape": (), "dtype": TensorProto.INT64}
SELF = ("past_key_values.{layer}.self.{part}", "present.{layer}.self.{part}")
STATIC = ("{part}_cache.{layer}", "updated_{part}_cache.{layer}")


def build_states(names: tuple[str, str], *parts: str) -> list[Cache]:
    """States of fixed size in layer 0."""
    return list_caches(names, [0], parts, shape=STATE, update="inplace")


def drop_outputs(caches: list[Cache]) -> list[Cache]:
    return [cache._replace(output=None) for cache in caches]


def drop_inputs(caches: list[Cache]) -> list[Cache]:
    return [cache._replace(input=None) for cache in caches]


def build_cross(names: tuple[str, str]) -> list[Cache]:
    return list_caches(names, [0], shape=ENCODED, update="once")


def build_paged() -> ModelProto:
    """An int8 cache in blocks, with scales beside it."""
    shape, more = ("num_blocks", "block_size", 2, 16), {"update": "inplace"}
    return build_model(
        [
            *list_caches(HUGGING_FACE, shape=shape, dtype=TensorProto.INT8, **more),
            *list_caches(HUGGING_FACE, parts=("key_scale", "value_scale"), shape=shape[:3], **more),
        ]
    )


def name_path(side: str) -> str:
    return f"{side}.past_key_values.layers.1.keys_VLLM"


def build_paths(layers: Sequence[int] = (0, 1), **how: Any) -> list[Cache]:
    """Keys and values as transformers' own exporter names them."""
    return list_caches(PATHS, layers, KEYS, **how)


def build_split_paths() -> list[Cache]:
    """The same for the layer of an encoder-decoder."""
    own, cross = (
        (f"in{SPLIT_PATH}".replace("{kind}", kind), f"out{SPLIT_PATH}".replace("{kind}", kind))
        for kind in ("self", "cross")
    )
    return [
        *list_caches(own, [0], KEYS),
        *list_caches(cross, [0], KEYS, shape=ENCODED, update="once"),
    ]


def drop_prefixes(caches: list[Cache]) -> list[Cache]:
    """The first step of transformers' exporter: outputs alone, so that no name is in both."""
    return [
        cache._replace(input=None, output=str(cache.output).removeprefix("output."))
        for cache in caches
    ]


def build_dummies() -> list[Cache]:
    """What mobius calls the encoder's cache: inputs that are not fed back, of another rank."""
    names = "past_key_values.{layer}.cross.{part}", "present.{layer}.cross.{part}"
    caches = list_caches(names, [0], shape=ENCODED[:3])
    grown = ("batch_size", HEADS, "sequence_length", HEAD)
    alone = [cache._replace(shape=grown, grown=()) for cache in drop_inputs(caches)]
    return [*drop_outputs(caches), *alone]


def build_hybrid(names: tuple[str, str], *parts: str) -> ModelProto:
    return build_model([*build_states(names, *parts), *list_caches(HUGGING_FACE, [1])])


MODELS: dict[str, tuple[str, Callable[[], ModelProto], str]] = {
    "Optimum": ("huggingface", build_decoder, "past_key_values.0.key_VLLM"),
    "Optimum, keys and values in one": (
        "huggingface",
        lambda: build_model(list_caches(HUGGING_FACE, parts=["key_value"])),
        "present.1.key_value_VLLM",
    ),
    "Optimum, first step": (
        "huggingface",
        lambda: build_model(drop_inputs([*list_caches(OWN, [0]), *build_cross(CROSS)])),
        "present.0.encoder.key_VLLM",
    ),
    "Optimum, later steps": (
        "huggingface",
        lambda: build_model([*list_caches(OWN, [0]), *drop_outputs(build_cross(CROSS))]),
        "past_key_values.0.encoder.value_VLLM",
    ),
    "Optimum, merged": ("huggingface", build_merged_decoder, "present.0.decoder.key_VLLM"),
    "genai, hybrid": (
        "huggingface",
        lambda: build_hybrid(("past.{layer}.{part}", "present.{layer}.{part}"), "conv"),
        "past.0.conv_VLLM",
    ),
    "genai, linear attention": (
        "huggingface",
        lambda: build_hybrid(
            ("past.{layer}.{part}", "present.{layer}.{part}"), "conv", "recurrent"
        ),
        "present.0.recurrent_VLLM",
    ),
    "genai, paged": ("huggingface", build_paged, "past_key_values.1.value_scale_VLLM"),
    "genai, pipeline": (
        "huggingface",
        lambda: build_model(
            list_caches(("past_{part}_{layer}", "present_{part}_{layer}"), parts=("keys", "values"))
        ),
        "past_keys_0_VLLM",
    ),
    "mobius, hybrid": (
        "huggingface",
        lambda: build_hybrid(HUGGING_FACE, "conv_state", "recurrent_state"),
        "past_key_values.0.conv_state_VLLM",
    ),
    "transformers.js": (
        "huggingface",
        lambda: build_hybrid(
            ("past_{part}.{layer}", "present_{part}.{layer}"), "conv", "recurrent"
        ),
        "past_conv.0_VLLM",
    ),
    "mobius, static": (
        "mobius-static",
        lambda: build_model(
            list_caches(
                STATIC,
                shape=("batch", 32, 32),
                update="inplace",
            )
        ),
        "updated_key_cache.0_VLLM",
    ),
    "onnxruntime, decoder": (
        "ort-encdec",
        lambda: build_model([*list_caches(ORT_OWN, [0]), *drop_outputs(build_cross(ORT_CROSS))]),
        "past_key_self_0_VLLM",
    ),
    "onnxruntime, encoder": (
        "ort-encdec",
        lambda: build_model(drop_inputs(build_cross(ORT_CROSS))),
        "present_key_cross_0_VLLM",
    ),
    "transformers": ("transformers", lambda: build_model(build_paths()), name_path("output")),
    "transformers, static": (
        "transformers",
        lambda: build_model(
            [
                *list_caches(PATHS, parts=["cumulative_length"], **COUNTER),
                *build_paths(update="inplace", shape=("batch_size", HEADS, 16, HEAD)),
            ]
        ),
        name_path("input"),
    ),
    "transformers, first step": (
        "transformers",
        lambda: build_model(drop_prefixes([*build_paths(), *build_split_paths()])),
        "past_key_values.self_attention_cache.layers.0.keys_VLLM",
    ),
    "transformers, encoder-decoder": (
        "transformers",
        lambda: build_model(build_split_paths()),
        "output.past_key_values.cross_attention_cache.layers.0.values_VLLM",
    ),
    "transformers, states": (
        "transformers",
        lambda: build_model(
            [
                *build_states(PATHS, "conv_states.0", "conv_states.1", "recurrent_states.0"),
                *build_paths([1]),
                *list_caches(PATHS, [1], ["indexer_keys"]),
            ]
        ),
        "input.past_key_values.layers.0.conv_states.1_VLLM",
    ),
    "transformers, Mamba": (
        "transformers",
        lambda: build_model(
            build_states(
                tuple(name.replace("past_key_values", "cache_params") for name in PATHS),
                "conv_states.0",
                "recurrent_states.0",
            )
        ),
        "output.cache_params.layers.0.recurrent_states.0_VLLM",
    ),
    "transformers, MiniMax": (
        "transformers",
        lambda: build_model(
            [
                *build_states(
                    tuple(name.replace("layers.{layer}.{part}", "{part}") for name in PATHS),
                    "linear_cache.0",
                ),
                *build_paths([1]),
            ]
        ),
        "input.past_key_values.linear_cache.0_VLLM",
    ),
    "mobius, state space": (
        "huggingface",
        lambda: build_model(
            build_states(
                ("past_states.{layer}.{part}", "present.{layer}.{part}"), "conv_state", "ssm_state"
            )
        ),
        "past_states.0.ssm_state_VLLM",
    ),
    "mobius, encoder-decoder": (
        "huggingface",
        lambda: build_model([*build_dummies(), *list_caches(SELF)]),
        "past_key_values.1.self.value_VLLM",
    ),
    "mobius, static beside growing": (
        "huggingface",
        lambda: build_model(
            [
                *list_caches(HUGGING_FACE, [0]),
                *list_caches(STATIC, [1], shape=("batch", 32, 32), update="inplace"),
            ]
        ),
        "updated_value_cache.1_VLLM",
    ),
    "mobius, streaming": (
        "mobius-streaming",
        lambda: build_model(
            list_caches(
                ("cache_last_{part}", "cache_last_{part}_next"),
                [0],
                ("channel", "time"),
                shape=("batch", 4, 16, 8),
                update="inplace",
            )
        ),
        "cache_last_time_VLLM_next",
    ),
    "onnxruntime, stacked": (
        "ort-decoder",
        lambda: build_model(
            list_caches(
                ("past_{layer}", "present_{layer}"),
                parts=[""],
                shape=(2, "batch_size", HEADS, 16, HEAD),
                update="inplace",
            )
        ),
        "present_1_VLLM",
    ),
    "onnxruntime, Phi-2": (
        "ort-decoder",
        lambda: build_decoder(("past_{part}_{layer}", "present_{part}_{layer}")),
        "past_value_1_VLLM",
    ),
    "QNN": ("qnn", build_qnn_decoder, "past_key_0_VLLM_in"),
    "QNN with windows": ("qnn", lambda: build_qnn_decoder([1]), "swa_value_1_VLLM_out"),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_known_takes_the_token_and_comes_back(name: str, tmp_path: Path, run) -> None:
    profile, build, example = MODELS[name]
    model = saved(build(), tmp_path / "model.onnx")
    before = model.read_bytes()
    outcome = run(model, "--prefix", "VLLM", "--verify", "--format", "json")
    answer = json.loads(outcome.out)
    (renamed,) = answer["models"]
    codes = ["KV205"] if name.startswith("transformers") else []
    assert (outcome.code, [finding["code"] for finding in renamed["findings"]]) == (0, codes)
    also = ["mobius-static"] if "beside" in name else []
    assert answer["profile"] == {"name": profile, "picked": True, "also": also}
    new_names = {
        side["new"] for pair in renamed["pairs"] for side in (pair["input"], pair["output"]) if side
    }
    assert example in new_names
    assert all("VLLM" in new for new in new_names)
    assert run(model, "--strip", "-q").code == 0
    assert model.read_bytes() == before


@pytest.mark.parametrize("name", MODELS)
def test_only_a_token_is_read_as_one(name: str) -> None:
    """So the program asks it of rules of the user's own alone, which takes time."""
    profile, build, _ = MODELS[name]
    rules, own = load_rules(profile), parse_rules(read_profile(profile), profile)
    graph = build().graph
    names = [(side, value.name) for side in SIDES for value in getattr(graph, side)]
    for side, plain in names:
        match = rules.match(side, plain)
        for token in ("VLLM", "Conv", "T0") if match is not None else ():
            renamed = own.match(side, rules.rename(match, token))
            assert renamed is not None
            assert (renamed.pair_key, renamed.token) == (match.pair_key, token)


LONE = {"Optimum, later steps", "transformers, first step"}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LONE])
def test_a_model_with_a_side_lost_is_refused(name: str, tmp_path: Path, run) -> None:
    """An encoder, or a first step, has one side only: there one with both is too many."""
    model = MODELS[name][1]()
    caches = [value for value in model.graph.output if "present" in value.name]
    inputs = {value.name for value in model.graph.input}
    if not any("past" in value for value in inputs | {"past" * (not caches)}):
        (first, *_) = caches
        extra = model.graph.input.add()
        extra.CopyFrom(first)
        extra.name = first.name.replace("present", "past", 1)
        if extra.name.startswith("past."):
            extra.name = extra.name.replace("past.", "past_key_values.", 1)
    else:
        kept = [value for value in model.graph.output if value.name != model.graph.output[-1].name]
        del model.graph.output[:]
        model.graph.output.extend(kept)
    path = saved(model, tmp_path / "model.onnx")
    before = path.read_bytes()
    outcome = run(path, "--prefix", "VLLM")
    assert outcome.code == 1
    assert "error KV101" in outcome.err or "error KV102" in outcome.err
    assert path.read_bytes() == before


def test_a_scale_is_no_key_with_a_token(tmp_path: Path, run) -> None:
    """A token that would make another part's name of one is refused."""
    model = saved(build_paged(), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "scale")
    assert outcome.code == 2
    assert "past_key_values.0.key_scale'" in outcome.err
    assert "does not read as key, layer 0, with scale as a word" in outcome.err
    assert "for example VLLM" in outcome.err


def test_an_unknown_state_is_named(tmp_path: Path, run) -> None:
    odd = list_caches(HUGGING_FACE, parts=["odd"])
    model = saved(build_model([*list_caches(HUGGING_FACE), *odd]), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM")
    assert outcome.code == 0
    assert "warning KV111: present.0.odd" in outcome.err


def list_buffers(model: ModelProto, tmp_path: Path, run) -> dict[str, dict[str, object]]:
    path = saved(model, tmp_path / "model.onnx")
    (layout,) = json.loads(run("inspect", path, "--format", "json").out)["layouts"]
    return {f"{b['layer']} {b['part']}": b for b in layout["buffers"]}


def test_a_layout_knows_kinds_contexts_and_what_moves_beside(tmp_path: Path, run) -> None:
    found = list_buffers(MODELS["Optimum, later steps"][1](), tmp_path, run)
    assert {part: b["kind"] for part, b in found.items()} == {
        "0 key": "full_attention",
        "0 value": "full_attention",
        "0 key_cross": "cross_attention",
        "0 value_cross": "cross_attention",
    }
    assert found["0 key_cross"]["axes"] == ["batch", "", "encoder", ""]
    found = list_buffers(build_paged(), tmp_path, run)
    assert found["0 key"]["sequence_axis"] is None  # blocks, which are no context
    assert found["1 value_scale"]["beside"] == "value"
    found = list_buffers(build_qnn_decoder([1]), tmp_path, run)
    assert (found["0 key"]["sequence_axis"], found["0 value"]["sequence_axis"]) == (3, 2)
    assert found["1 key"]["kind"] == "sliding_window"
    assert found["1 key"]["update"] == "delta"
    static = list_buffers(MODELS["mobius, static"][1](), tmp_path, run)["0 key"]
    assert (static["kind"], static["kind_guessed"], static["sequence_axis"]) == (
        "full_attention",
        False,
        1,
    )
    sliding = list_caches(HUGGING_FACE, [0], past="past_sliding_length")
    window = list_buffers(build_model(sliding), tmp_path, run)["0 key"]
    assert (window["kind"], window["kind_guessed"]) == ("sliding_window", False)
    assert window["window"] == "past_sliding_length"


def test_heads_and_their_size_are_read_by_the_axes(tmp_path: Path, run) -> None:
    """QNN has the heads before the batch, and keys transposed."""
    model = saved(build_qnn_decoder(), tmp_path / "model.onnx")
    document = json.loads(run("inspect", model, "--vllm", "--format", "json").out)
    found = {(layer["kv_heads"], layer["head_size"]) for layer in document["vllm"][0]["layers"]}
    assert found == {(HEADS, HEAD)}


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        ("transformers", "transformers' own runner"),
        ("transformers.js", "transformers.js"),
        ("Optimum", ""),
    ],
)
def test_a_rename_warns_of_a_program_that_needs_the_old_names(
    name: str, runner: str, tmp_path: Path, run
) -> None:
    model = saved(MODELS[name][1](), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM")
    assert (outcome.code, "KV205" in outcome.err) == (0, bool(runner))
    assert f"warning KV205: {runner} looks for the names" in outcome.err or not runner
    for more in (("verify", model), (model, "--prefix", "VLLM"), (model, "--strip")):
        assert "KV205" not in run(*more).err


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row.export)
def test_the_page_shows_no_export_that_fails(row: Row) -> None:
    assert row.options.startswith(f"`--prefix {TOKEN}") == bool(row.options)
    assert (row.names == NO_CACHE) == (not row.options)
    if row.options:
        assert (row.verify, row.strip) == ("holds", "same bytes")


@pytest.mark.skipif(not OTHERS.is_dir(), reason=f"no other exporters' models: no {OTHERS}")
def test_the_page_shows_every_export() -> None:
    exports = {path.relative_to(OTHERS).as_posix() for path in OTHERS.rglob("*.onnx")}
    assert {row.export for row in read_table()} == exports


@pytest.mark.skipif(not OTHERS.is_dir(), reason=f"no other exporters' models: no {OTHERS}")
@pytest.mark.parametrize("folder", thin(FOLDERS, 2))
def test_real_exports_do_what_the_page_says(folder: str) -> None:
    shown = [row for row in read_table() if row.export.startswith(f"{folder}/")]
    assert shown
    assert list_rows([folder]) == shown
