"""What docs/inspect.md says of vLLM's published figures, held against vLLM's own code."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path
from typing import Any

import pytest
from build_layouts import build_attention, build_layers
from vllmwheel import DType, find_wheel, make_config
from witness import Witness

from onnxkvrename.rules.kinds import BufferKind
from onnxkvrename.vllm.groups import group_layers
from onnxkvrename.vllm.memory import build_allocations
from onnxkvrename.vllm.nixl import build_transfers
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import KvCacheSpec, ProjectionRequest

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "inspect.md").read_text("utf-8")
FLASH = (0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)))
"""The compress ratio of each layer of DeepSeek-V4-Flash; 0 for a window only."""
PRO = (128, 128, *(4 if layer % 2 == 0 else 128 for layer in range(2, 61)))
"""The compress ratio of each layer of DeepSeek-V4-Pro."""


def make_deepseek_v4_specs(interface: Any, ratios: tuple[int, ...]) -> dict[str, Any]:
    """The specs that vLLM 0.24's model class of DeepSeek-V4 makes for ``fp8_ds_mla``."""
    uint8, float32 = DType("uint8", 1), DType("float32", 4)
    rows = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    shared: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}

    def make_compressed(ratio: int, head_size: int, **fields: Any) -> Any:
        return interface.MLAAttentionSpec(
            block_size=256,
            head_size=head_size,
            dtype=uint8,
            compress_ratio=ratio,
            **fields,
            **shared,
        )

    def make_window(block_size: int, head_size: int, dtype: DType, window: int, **more: Any) -> Any:
        return interface.SlidingWindowMLASpec(
            block_size=block_size,
            head_size=head_size,
            dtype=dtype,
            sliding_window=window,
            **more,
            **shared,
        )

    specs: dict[str, Any] = {}
    for layer, ratio in enumerate(ratios):
        if ratio:
            states = 2 if ratio == 4 else 1
            specs[f"{layer}.compressed"] = make_compressed(ratio, 512, **rows)
            specs[f"{layer}.compressor"] = make_window(
                4 if ratio == 4 else 8, 2 * states * 512, float32, states * ratio
            )
        if ratio == 4:
            specs[f"{layer}.indexer"] = make_compressed(ratio, 132)
            specs[f"{layer}.indexer compressor"] = make_window(4, 2 * 2 * 128, float32, 8)
        specs[f"{layer}.window"] = make_window(64, 512, uint8, 128, **rows)
    return specs


@pytest.fixture(scope="module")
def vllm() -> Witness:
    return Witness()


def group_deepseek_v4(vllm: Witness, ratios: tuple[int, ...]) -> tuple[list[Any], int]:
    """vLLM's groups, and the bytes of a block that holds all layers."""
    config = make_config()
    with vllm.modules.importable():
        groups = vllm.planning.get_kv_cache_groups(
            config, make_deepseek_v4_specs(vllm.interface, ratios)
        )
        return groups, vllm.planning._pool_bytes_per_block(config, groups)


def test_the_published_bytes_of_deepseek_v4_flash_are_whole_blocks(vllm: Witness) -> None:
    groups, stride = group_deepseek_v4(vllm, FLASH)
    # A layer's page of compressed rows, of indexer keys, and of rows that stand for 128 tokens.
    compressed, indexer, heavy = 64 * 584 + 64, 64 * 132 + 192, 2 * 584 + 560
    assert {page % 576 for page in (compressed, indexer, heavy)} == {0}
    assert stride == 1_039_680 == 22 * compressed + 21 * indexer + 20 * heavy
    # The text of vllm#46252: "17 transfers, 141 descriptors, 505,284,480 bytes", one region.
    assert divmod(505_284_480, stride) == (486, 0)
    assert 505_284_480 % 141 != 0
    blocks = [(len(group.layer_names), group.kv_cache_spec.block_size) for group in groups]
    assert blocks == [(62, 256), (22, 64), (21, 64), (42, 4), (20, 8)]
    # Two windows of 128, one of 8 and one of 128, each one block more than it fills: 26 blocks.
    windows = 2 * (128 // 64 + 1) + (8 // 4 + 1) + (128 // 8 + 1)
    assert 17 * windows + 7 * 2 + 10 * 3 == 486
    for number in ("1,039,680", "486", "505,284,480"):
        assert number in TEXT


def project_deepseek_v4(ratios: tuple[int, ...]) -> list[KvCacheSpec]:
    """The same specs as this program has them, one layer number for each cache."""

    def add(kind: BufferKind, block_size: int, page_size: int, window: int | None = None) -> None:
        specs.append(
            KvCacheSpec(
                len(specs), kind, block_size, 1, 512, 0, window, (), ("UINT8",), page_size, 1
            )
        )

    specs: list[KvCacheSpec] = []
    for ratio in ratios:
        compressed = {0: 0, 4: 64 * 584 + 64, 128: 2 * 584 + 560}[ratio]
        states = 2 if ratio == 4 else 1
        if ratio:
            add("mla_attention", 256, compressed)
            state_block = 4 if ratio == 4 else 8
            state_page = -(-state_block * 2 * states * 512 * 4 // 576) * 576
            add("sliding_window_mla", state_block, state_page, states * ratio)
        if ratio == 4:
            add("mla_attention", 256, 64 * 132 + 192)
            add("sliding_window_mla", 4, -(-4 * 512 * 4 // 576) * 576, 8)
        add("sliding_window_mla", 64, 64 * 584 + 64, 128)
    return specs


def test_deepseek_v4_flash_is_projected_as_vllm_plans_it() -> None:
    grouping = group_layers(project_deepseek_v4(FLASH))
    blocks = [(len(group.specs), group.first_spec.block_size) for group in grouping.groups]
    assert blocks == [(62, 256), (22, 64), (21, 64), (42, 4), (20, 8)]
    allocations = build_allocations(grouping, ProjectionRequest(64))
    packed = next(each for each in allocations if each.name == "packed")
    assert packed.registration is not None
    assert (packed.bytes_per_block, packed.registration.regions) == (1_039_680, 1)
    lengths = (*[512] * 7, *[768] * 10)
    transfers = build_transfers(grouping.groups, packed.registration, lengths)
    offered = [sum(count or 0 for count in each.blocks) for each in transfers]
    assert (len(offered), sum(offered) * packed.bytes_per_block) == (17, 505_284_480)


def test_the_published_stride_of_deepseek_v4_pro_comes_out(vllm: Witness) -> None:
    # vllm#48993 says 1,473,408 bytes for fp8_ds_mla, before its change.
    assert group_deepseek_v4(vllm, PRO)[1] == 1_473_408


def test_the_architectures_of_model_runner_v2_are_vllms() -> None:
    wheel = find_wheel()
    if isinstance(wheel, str):
        pytest.skip(wheel)
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read("vllm/config/vllm.py"))
        assert "cross_layers" not in archive.read("vllm/v1/worker/gpu/attn_utils.py").decode()
    (value,) = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
    ]
    assert isinstance(value, ast.Call)
    architectures = {name.removesuffix("ForCausalLM") for name in ast.literal_eval(value.args[0])}
    plain = build_layers(build_attention(0), build_attention(1))
    allocations = project_layout(plain, ProjectionRequest(16)).allocations
    (reason,) = [c.why for a in allocations for c in a.conditions if c.name == "model runner"]
    spelled = {name.replace("-", "").lower() for name in reason.replace(",", " ").split()}
    assert {name.lower() for name in architectures} <= spelled
