"""vLLM's NIXL connector as a consumer: what matters to it, and what does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from cache_models import build_cache_model
from exporter_models import build_merged_decoder
from onnx import ModelProto, TensorProto

from onnxkvrename.handoff.find_consumers import load_consumer

RANKS_AND_BLOCKS = (
    *("--serve", "prefill:--tensor-parallel-size 2 --block-size 16"),
    *("--serve", "decode:--tensor-parallel-size 4 --block-size 32"),
)
LINE = "vllm serve M --attention-backend FLASH_ATTN --block-size 16"
CROSS_LAYERS = f"""{LINE} --kv-transfer-config '{{"kv_connector": "NixlConnector", \
"kv_role": "kv_both", "kv_connector_extra_config": {{"enable_cross_layers_blocks": true}}}}'"""
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def list_caches(model: ModelProto) -> list[onnx.ValueInfoProto]:
    values = (*model.graph.input, *model.graph.output)
    return [value for value in values if value.name.startswith("past_")]


def set_dtype(model: ModelProto, dtype: int) -> None:
    for value in list_caches(model):
        value.type.tensor_type.elem_type = dtype


def set_axis(model: ModelProto, axis: int, size: int) -> None:
    for value in list_caches(model):
        value.type.tensor_type.shape.dim[axis].dim_value = size


def swap_axes(model: ModelProto) -> None:
    for value in list_caches(model):
        dims = value.type.tensor_type.shape.dim
        dims[1].dim_param, dims[2].dim_value = "ctx_len", 8


def compare(
    run: Callable, decode: Callable[[ModelProto], object] | ModelProto | None, *options: str
) -> tuple[int, str]:
    """Return the exit code and what is printed for a model as prefill has it, and as changed."""
    prefill = build_cache_model(["full", "full", "full"])
    onnx.save(prefill, "prefill.onnx")
    changed = decode if isinstance(decode, ModelProto) else onnx.ModelProto()
    if not isinstance(decode, ModelProto):
        changed.CopyFrom(prefill)
        if decode is not None:
            decode(changed)
    onnx.save(changed, "decode.onnx")
    outcome = run("compare", "prefill.onnx", "decode.onnx", "--target", "vllm-nixl", *options)
    return outcome.code, outcome.out + outcome.err


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("version", ["0.24", "0.33"])
@pytest.mark.parametrize(
    ("decode", "options"),
    [
        (None, ("--block-size", "16:16")),
        (None, RANKS_AND_BLOCKS),
        (None, (*RANKS_AND_BLOCKS, "--tokens", "200")),
        (build_cache_model(["full"] * 3, tokens=("a", "a")), ("--block-size", "16:16")),
        (
            None,
            (
                "--dim",
                "prefill:ctx_len=128",
                "--dim",
                "decode:ctx_len=4096",
                "--block-size",
                "16:16",
            ),
        ),
        (swap_axes, ("--block-size", "16:16")),
    ],
    ids=["equal", "ranks and blocks", "a prompt", "names", "another context", "order of axes"],
)
def test_what_does_not_matter(run, decode, options: tuple[str, ...], version: str) -> None:
    if version == "0.24":  # which fails after it has read other blocks
        options = tuple(option.replace("--block-size 32", "--block-size 16") for option in options)
    code, text = compare(run, decode, "--vllm", version, *options)
    assert (code, text.count("hand-off works: 6 buffers of layers 0-2")) == (0, 1)
    assert "error" not in text


@pytest.mark.parametrize("dtype", [TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN])
def test_dtypes_that_vllm_has(run, dtype: int) -> None:
    model = build_cache_model(["full"])
    set_dtype(model, dtype)
    onnx.save(model, "model.onnx")
    outcome = run("compare", "model.onnx", "model.onnx", "--target", "vllm-nixl")
    assert (outcome.code, outcome.err) == (0, "")
    assert run("check-consumer", "model.onnx", "--target", "vllm-nixl").code == 0


@pytest.mark.parametrize(
    ("decode", "codes"),
    [
        (lambda model: set_dtype(model, TensorProto.BFLOAT16), ["KV612"]),
        (lambda model: set_axis(model, 1, 4), ["KV613", "KV628"]),
        (lambda model: set_axis(model, 3, 128), ["KV613", "KV628"]),
        (build_cache_model(["full"] * 2), ["KV620", "KV622"]),
        (build_cache_model(["full"] * 4), ["KV620", "KV622"]),
        (build_cache_model(["full", "window", "full"]), ["KV614", "KV622"]),
    ],
    ids=["dtype", "heads", "head size", "a layer less", "a layer more", "a window"],
)
def test_what_matters(run, decode, codes: list[str]) -> None:
    code, text = compare(run, decode)
    assert code == 1
    assert not any(word in text for word in ("compile", "--custom-io", "enable_chunking"))
    found = {word.rstrip(":") for word in text.split() if word.startswith("KV6")}
    assert sorted(found) == codes


@pytest.mark.parametrize(
    ("decode", "factor"),
    [
        ("--disable-hybrid-kv-cache-manager", "hybrid KV cache manager: on (prefill) and off"),
        ("--attention-backend FLASHINFER", "attention backend: FLASH_ATTN (prefill) and FLASHI"),
        ("--kv-cache-dtype fp8", "KV cache dtype: auto (prefill) and fp8"),
        (
            """--speculative-config '{"method": "eagle", "model": "D"}'""",
            "speculative config: none (prefill) and {",
        ),
    ],
)
def test_a_factor_of_the_hash_that_differs_is_named(run, decode: str, factor: str) -> None:
    lines = ("--serve", f"prefill:{LINE}", "--serve", f"decode:{LINE} {decode}")
    code, text = compare(run, None, *lines)
    assert code == 1
    assert f"error KV628: {factor}" in text
    assert "hand-off would fail when decode meets prefill" in text
    is_off = """ --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", \
"kv_connector_extra_config": {"enforce_handshake_compat": false}}'"""
    code, text = compare(run, None, *lines[:3], lines[3] + is_off.replace("\\\n", ""))
    assert "KV628" not in text
    assert "vLLM does not compare" in text


def test_windows_count_where_both_sizes_are_known(run) -> None:
    model = build_cache_model(["full", "window"])
    onnx.save(model, "model.onnx")
    pair = ("compare", "model.onnx", "model.onnx", "--target", "vllm-nixl")
    sizes = ("--dim", "prefill:sliding_window=128", "--dim", "decode:sliding_window=256")
    equal = run(*pair)
    assert equal.code == 0
    assert "for any ctx_len, if both sides have the same sliding_window" in equal.out
    assert "KV614" in run(*pair, *sizes).err


@pytest.mark.parametrize("target", ["vllm-nixl", "vllm-qaic"])
@pytest.mark.parametrize(
    ("decode_block", "sizes", "code"),
    [(32, (), "KV630"), (32, ("--dim", "sliding_window=128"), "KV629"), (16, (), None)],
    ids=["unknown", "known", "alike"],
)
def test_windows_of_unknown_size_decide_between_blocks_of_several_sizes(
    run, target: str, decode_block: int, sizes: tuple[str, ...], code: str | None
) -> None:
    token = "vllmKvCache"
    onnx.save(build_cache_model(["full", "window"], tokens=(token, token)), "model.onnx")
    lines = ("prefill:--block-size 16", f"decode:--block-size {decode_block}")
    served = (option for line in lines for option in ("--serve", line))
    pair = ("compare", "model.onnx", "model.onnx", "--target", target, "--tokens", "200")
    outcome = run(*pair, *served, *sizes)
    assert outcome.code == (0 if code is None else 1)
    assert re.findall(r"error (KV\d+)", outcome.err) == ([] if code is None else [code])
    if code == "KV630":
        assert "cannot decide: whether decode gets every prompt" in outcome.out
        assert "the size of sliding_window (--dim sliding_window=SIZE)" in outcome.out
        assert "a prompt of 200 tokens: cannot decide (KV630)" in outcome.out


def test_a_side_that_vllm_cannot_register_is_refused(run) -> None:
    model = build_cache_model(["linear", "linear"])
    onnx.save(model, "model.onnx")
    outcome = run("check-consumer", "model.onnx", "--target", "vllm-nixl")
    assert outcome.code == 1
    assert "KV622" in outcome.err


def test_a_side_is_judged_for_the_version_that_is_named(run) -> None:
    onnx.save(build_cache_model(["full"]), "model.onnx")
    side = ("check-consumer", "model.onnx", "--target", "vllm-nixl", "--serve", CROSS_LAYERS)
    for version, code in (("0.24", 1), ("0.33", 0)):
        outcome = run(*side, "--vllm", version)
        assert outcome.code == code
        assert ("error KV630" in outcome.err) == bool(code)


def test_there_is_nothing_to_rename(run) -> None:
    decoder = str(FIXTURES / "plain" / "decoder.onnx")
    for options in ((), ("--prefix", "X"), ("--strip",)):
        outcome = run(decoder, "--target", "vllm-nixl", *options, "-o", "new.onnx")
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert "names of buffers do not matter" in outcome.err


def test_a_prefill_without_inputs_for_its_caches_is_one(run) -> None:
    model = build_cache_model(["full"], without=["past_key.0", "past_value.0"])
    onnx.save(model, "prefill.onnx")
    onnx.save(build_cache_model(["full"]), "decode.onnx")
    outcome = run("compare", "prefill.onnx", "decode.onnx", "--target", "vllm-nixl")
    assert "selects no buffer" not in outcome.out + outcome.err


def test_its_row_says_that_names_do_not_matter() -> None:
    consumer = load_consumer("vllm-nixl")
    assert consumer.is_paged
    assert not consumer.token


@pytest.mark.parametrize(
    ("blocks", "verdict", "outcome"),
    [
        ((128, 64), "hand-off would corrupt prompts of ", "all of 6 buffers wrong (KV629)"),
        ((64, 128), "hand-off would fail for prompts of ", "refused: decode stops (KV629)"),
    ],
    ids=["misplaced", "assertion"],
)
def test_prompts_that_go_wrong_after_both_are_accepted(
    run, blocks: tuple[int, int], verdict: str, outcome: str
) -> None:
    prefill, decode = (f"--attention-backend FLASHMLA --block-size {size}" for size in blocks)
    lines = ("--serve", f"prefill:{prefill}", "--serve", f"decode:{decode}")
    code, text = compare(run, None, *lines, "--tokens", "10", "--tokens", "128")
    assert code == 1
    assert text.startswith(f"{verdict}up to 1 token and of 10 tokens")
    assert f"a prompt of 10 tokens: {outcome}" in text
    assert "a prompt of 128 tokens: ok" in text


PUSH = """--kv-transfer-config '{"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}'"""
CROSS_LAYERS = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", \
"kv_connector_extra_config": {"enable_cross_layers_blocks": true}}'"""


@pytest.mark.parametrize(
    ("line", "version", "reason"),
    [
        ("-pp 2", "0.33", "pipeline stages"),
        ("-tp 2 -dcp 2", "0.33", "context parallelism"),
        (PUSH.replace("NixlPush", "NixlPul"), "0.33", "the connector NixlPulConnector"),
        (PUSH, "0.33", "NixlPushConnector"),
        (CROSS_LAYERS, "0.24", "enable_cross_layers_blocks"),
        ("--block-size 16", "0.30", "what else the compatibility hash of 0.30 has"),
    ],
)
def test_what_is_not_known_of_vllm_is_no_success(run, line: str, version: str, reason: str) -> None:
    code, text = compare(run, None, "--serve", line, "--vllm", version)
    assert (code, text.count("cannot decide: whether")) == (1, 1)
    assert re.search(f"error KV630: .*{reason}", text)


@pytest.mark.parametrize("connectors", [("LMCacheConnectorV1", None), ("X", "OffloadingConnector")])
def test_two_different_connectors_are_the_cause(run, connectors: tuple[str, str | None]) -> None:
    config = '{{"kv_connector": "{}", "kv_role": "kv_both"}}'
    lines = [
        "--block-size 16" if name is None else f"--kv-transfer-config '{config.format(name)}'"
        for name in connectors
    ]
    code, text = compare(
        run, None, "--serve", f"prefill:{lines[0]}", "--serve", f"decode:{lines[1]}"
    )
    assert (code, re.findall(r"error (KV\d+)", text)) == (1, ["KV630"])
    first, second = connectors[0], connectors[1] or "NixlConnector"
    assert f"two different connectors, {first} on prefill and {second} on decode" in text


def test_a_worker_of_which_it_is_not_known_whether_vllm_registers_it(run) -> None:
    onnx.save(build_cache_model(["full"] * 2), "model.onnx")
    outcome = run("check-consumer", "model.onnx", "--target", "vllm-nixl", "--serve", "-pp 2")
    assert outcome.code == 1, outcome
    assert "error KV630" in outcome.err, outcome
    assert "not known whether vllm-nixl can use it" in outcome.out


def test_what_fits_on_each_side_and_how_long_a_hand_off_takes(run) -> None:
    size = "--kv-cache-memory-bytes 3G --max-model-len 4096"
    lines = ("--serve", f"prefill:{LINE} {size}", "--serve", f"decode:{LINE} -tp 2 {size}")
    code, text = compare(run, None, *lines, "--tokens", "1000", "--bandwidth", "25GB/s")
    assert code == 0
    # A token has 3 layers of 8 heads of 64 keys and values of 2 bytes: 6,144 bytes on one rank.
    requests = 3 * 2**30 // (6144 * 16) / 256
    assert f"{int(requests)} requests of 4,096 tokens fit ({requests:,.2f}x)" in text
    assert f"note: decode: {int(2 * requests)} requests of 4,096" in text
    seconds = 63 * 16 * 3072 / 25e9
    assert f"a hand-off takes {seconds * 1e6:.3g} µs at least" in text
    assert compare(run, None, "--tokens", "9", "--bandwidth", "25GB/s")[0] == 2


def test_the_hash_is_not_compared_by_other_connectors(run: Callable) -> None:
    other = "--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role kv_both"
    lines = ("--serve", f"prefill:{other} --dtype half", "--serve", f"decode:{other} --dtype float")
    code, printed = compare(run, None, *lines)
    assert code == 1
    assert "error KV630: whether vLLM accepts them is not known: the connector X" in printed
    assert "KV628" not in printed


def test_an_attention_backend_that_vllm_does_not_have_is_refused(run) -> None:
    code, text = compare(run, None, "--serve", "decode:--attention-backend FLASH_ATN")
    assert code == 2
    assert "--serve decode: --attention-backend 'FLASH_ATN': vLLM 0.33 has no" in text
    assert "did you mean FLASH_ATTN?" in text


def test_cross_attention_is_a_condition(run) -> None:
    onnx.save(build_merged_decoder(), "m.onnx")
    line = ("--target", "vllm-nixl", "--serve", "vllm serve M")
    outcome = run("compare", "m.onnx", "m.onnx", *line, "--profile", "auto")
    assert "if both sides" in outcome.out
    assert "hand over all blocks of cross attention, which is not known" in outcome.out
