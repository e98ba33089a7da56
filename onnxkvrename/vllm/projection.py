"""A layout projected onto vLLM: pages, groups, memory, and what a prompt moves.

Two eras are known, 0.24 and 0.33; each says what it has, and what only the other has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.layout import Layout
from onnxkvrename.rules.window_diff import format_layers
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.hybrid_blocks import align_blocks, list_alignment_conditions
from onnxkvrename.vllm.specs import (
    Condition,
    KvCacheSpec,
    ProjectionRequest,
    Refusal,
    RefusalError,
    build_specs,
    check_request,
)
from onnxkvrename.vllm.uniform_specs import KvCacheGroup
from onnxkvrename.vllm.v024 import Allocation, build_allocations_v024
from onnxkvrename.vllm.v033 import build_allocations_v033


class Projection(NamedTuple):
    """What vLLM makes of a layout, as far as its graph and vLLM's code tell.

    ``specs`` are those of the layers that have one, before groups change their
    blocks; with any ``refusals`` there are no groupings. ``groupings`` is one, in
    0.33 a second one for block-outermost layouts.
    """

    request: ProjectionRequest
    specs: tuple[KvCacheSpec, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...]
    groupings: tuple[Grouping, ...]
    allocations: tuple[Allocation, ...]


def project_layout(layout: Layout, asked: ProjectionRequest) -> Projection:
    """The projection of a layout.

    Layers that vLLM cannot have are told as refusals, never raised. Raises
    :class:`~onnxkvrename.errors.KvRenameError` for an era that is not known and
    for sizes below 1, or of 2^31 and more.
    """
    check_request(asked)
    found = build_specs(layout, asked)
    if found.refusals or not found.specs:
        return Projection(asked, found.specs, found.conditions, found.refusals, (), ())
    try:
        aligned = align_blocks(found.specs, asked)
    except RefusalError as error:
        return Projection(asked, found.specs, found.conditions, (error.refusal,), (), ())
    conditions = (*found.conditions, *list_alignment_conditions(aligned, asked))
    whole = group_layers(aligned, asked.vllm_version)
    if asked.vllm_version == "0.24":
        arranged = build_allocations_v024(whole, asked.prompt_lengths)
        return Projection(asked, aligned, conditions, (), (whole,), arranged)
    packed = group_layers(aligned, asked.vllm_version, block_outermost=True)
    arranged = build_allocations_v033(aligned, whole, packed, asked.prompt_lengths)
    return Projection(asked, aligned, conditions, (), (whole, packed), arranged)


def check_projection(projection: Projection) -> Iterator[Finding]:
    """KV619 for layers that do not divide by tensor parallelism, KV622 for all others refused.

    Groups that only some layouts of memory refuse are none: another one takes them.
    """
    ways = projection.groupings
    refused = [way.refusal for way in ways if way.refusal is not None]
    whole = dict.fromkeys(refused) if len(refused) == len(ways) else {}
    for refusal in (*projection.refusals, *whole):
        said = f"{format_layers(refusal.layers)}: {refusal.reason}"
        yield build_finding(refusal.code, "", said, refusal.hint)


def projection_to_json(projection: Projection) -> dict[str, Any]:
    """Plain data for JSON, every key always there; see ``schemas/projection-1.json``."""
    asked = projection.request
    return {
        "vllm": asked.vllm_version,
        "block_size": asked.block_size,
        "tp": asked.tensor_parallel_size,
        "layers": [_spec_to_json(spec) for spec in projection.specs],
        "conditions": _value_to_json(projection.conditions),
        "refusals": _value_to_json(projection.refusals),
        "groupings": [_grouping_to_json(found) for found in projection.groupings],
        "arrangements": _value_to_json(projection.allocations),
    }


def _spec_to_json(spec: KvCacheSpec) -> dict[str, Any]:
    sizes = None if spec.kind == "mamba" else spec
    return {
        "layer": spec.layer,
        "kind": spec.kind,
        "block_size": spec.block_size,
        "kv_heads": None if sizes is None else sizes.kv_heads,
        "head_size": None if sizes is None else sizes.head_size,
        "head_size_v": None if sizes is None else sizes.head_size_v,
        "window": spec.window,
        "states": _value_to_json(spec.state_shapes),
        "dtypes": list(spec.dtypes),
        "page_size": spec.page_size,
        "unpadded_page_size": spec.unpadded_page_size,
    }


def _grouping_to_json(found: Grouping) -> dict[str, Any]:
    return {
        "way": found.method,
        "group_size": found.group_size,
        "padding_layers": found.padding_layers,
        "uniform_page_size": found.uniform_page_size,
        "groups": [_group_to_json(one) for one in found.groups],
        "conditions": _value_to_json(found.conditions),
        "refusal": _value_to_json(found.refusal),
    }


def _group_to_json(one: KvCacheGroup) -> dict[str, Any]:
    pages = [spec.page_size for spec in one.specs]
    windows = {spec.window for spec in one.specs}
    return {
        "kind": one.kind,
        "block_size": one.first_spec.block_size,
        "window": one.first_spec.window if len(windows) == 1 else None,
        "layers": list(one.layers),
        "page_sizes": pages,
        "unpadded_page_sizes": [spec.unpadded_page_size for spec in one.specs],
    }


def _value_to_json(value: Any) -> Any:
    """Named tuples as objects, tuples as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _value_to_json(item) for name, item in value._asdict().items()}
    return [_value_to_json(item) for item in value] if isinstance(value, tuple) else value
