"""A layout projected onto vLLM: pages, groups, memory, and what a prompt moves.

Two eras are known, 0.24 and 0.33; each says what it has, and what only the other has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from onnxkvrename.findings import Finding, finding
from onnxkvrename.layout.layout import Layout
from onnxkvrename.rules.window_diff import layers_text
from onnxkvrename.vllm import hybrid_blocks as aligning
from onnxkvrename.vllm import v024 as allocation
from onnxkvrename.vllm import v033 as strides
from onnxkvrename.vllm.groups import Grouping, group
from onnxkvrename.vllm.specs import Asked, Condition, Refusal, Refused, Spec, check, specs
from onnxkvrename.vllm.uniform_specs import Group
from onnxkvrename.vllm.v024 import Arrangement


class Projection(NamedTuple):
    """What vLLM makes of a layout, as far as its graph and vLLM's code tell.

    ``specs`` are those of the layers that have one, before groups change their
    blocks; with any ``refusals`` there are no groupings. ``groupings`` is one, in
    0.33 a second one for block-outermost layouts.
    """

    asked: Asked
    specs: tuple[Spec, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...]
    groupings: tuple[Grouping, ...]
    arrangements: tuple[Arrangement, ...]


def project(layout: Layout, asked: Asked) -> Projection:
    """The projection of a layout.

    Layers that vLLM cannot have are told as refusals, never raised. Raises
    :class:`~onnxkvrename.errors.KvRenameError` for an era that is not known and
    for sizes below 1, or of 2^31 and more.
    """
    check(asked)
    found = specs(layout, asked)
    if found.refusals or not found.specs:
        return Projection(asked, found.specs, found.conditions, found.refusals, (), ())
    try:
        aligned = aligning.align(found.specs, asked)
    except Refused as error:
        return Projection(asked, found.specs, found.conditions, (error.refusal,), (), ())
    conditions = (*found.conditions, *aligning.conditions(aligned, asked))
    whole = group(aligned, asked.era)
    if asked.era == "0.24":
        arranged = allocation.arrangements(whole, asked.tokens)
        return Projection(asked, aligned, conditions, (), (whole,), arranged)
    packed = group(aligned, asked.era, block_outermost=True)
    arranged = strides.arrangements(aligned, whole, packed, asked.tokens)
    return Projection(asked, aligned, conditions, (), (whole, packed), arranged)


def findings(projection: Projection) -> Iterator[Finding]:
    """KV619 for layers that do not divide by tensor parallelism, KV622 for all others refused.

    Groups that only some layouts of memory refuse are none: another one takes them.
    """
    ways = projection.groupings
    refused = [way.refusal for way in ways if way.refusal is not None]
    whole = dict.fromkeys(refused) if len(refused) == len(ways) else {}
    for refusal in (*projection.refusals, *whole):
        said = f"{layers_text(refusal.layers)}: {refusal.reason}"
        yield finding(refusal.code, "", said, refusal.hint)


def as_dict(projection: Projection) -> dict[str, Any]:
    """Plain data for JSON, every key always there; see ``schemas/projection-1.json``."""
    asked = projection.asked
    return {
        "vllm": asked.era,
        "block_size": asked.block_size,
        "tp": asked.tp,
        "layers": [_spec(spec) for spec in projection.specs],
        "conditions": _plain(projection.conditions),
        "refusals": _plain(projection.refusals),
        "groupings": [_grouping(found) for found in projection.groupings],
        "arrangements": _plain(projection.arrangements),
    }


def _spec(spec: Spec) -> dict[str, Any]:
    sizes = None if spec.kind == "mamba" else spec
    return {
        "layer": spec.layer,
        "kind": spec.kind,
        "block_size": spec.block_size,
        "kv_heads": None if sizes is None else sizes.heads,
        "head_size": None if sizes is None else sizes.head_size,
        "head_size_v": None if sizes is None else sizes.head_size_v,
        "window": spec.window,
        "states": _plain(spec.states),
        "dtypes": list(spec.dtypes),
        "page_size": spec.page,
        "unpadded_page_size": spec.unpadded,
    }


def _grouping(found: Grouping) -> dict[str, Any]:
    return {
        "way": found.way,
        "group_size": found.group_size,
        "padding_layers": found.padding_layers,
        "uniform_page_size": found.uniform_page_size,
        "groups": [_group(one) for one in found.groups],
        "conditions": _plain(found.conditions),
        "refusal": _plain(found.refusal),
    }


def _group(one: Group) -> dict[str, Any]:
    pages = [spec.page for spec in one.specs]
    windows = {spec.window for spec in one.specs}
    return {
        "kind": one.kind,
        "block_size": one.first.block_size,
        "window": one.first.window if len(windows) == 1 else None,
        "layers": list(one.layers),
        "page_sizes": pages,
        "unpadded_page_sizes": [spec.unpadded for spec in one.specs],
    }


def _plain(value: Any) -> Any:
    """Named tuples as objects, tuples as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
