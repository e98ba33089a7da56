"""Releases of vLLM that are planned as another one: what is shown of them, and what is not."""

from __future__ import annotations

import pytest
from build_layouts import build_attention, build_layers, build_linear, build_mla, build_sliding

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.handshake import check_handshake
from onnxkvrename.vllm.memory_v033 import KV_CACHE_LAYOUTS
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import (
    BLOCK_OUTERMOST_LAYOUTS,
    VLLM_RELEASES,
    VLLM_VERSIONS,
    ProjectionRequest,
    list_releases,
)

PLAIN = build_layers(build_attention(0), build_attention(1))
UNEVEN = build_layers(build_attention(0, heads=1), build_sliding(1, heads=3, window=128))
MAMBA_1 = build_layers(build_attention(0), build_linear(1, (512, 3), (512, 16)))


def project(layout: Layout, release: str) -> Projection:
    return project_layout(layout, ProjectionRequest(16, 1, release, (100,)))


def list_known(layout: Layout, release: str) -> set[str]:
    """The allocations whose transfers are known."""
    allocations = project(layout, release).allocations
    return {each.name for each in allocations if each.registration is not None}


@pytest.mark.parametrize("release", VLLM_RELEASES)
def test_groups_on_which_all_versions_agree_are_known_of_every_release(release: str) -> None:
    projection = project(PLAIN, release)
    planned_as = VLLM_RELEASES[release].planned_as
    assert (projection.request.vllm_version, projection.request.release) == (planned_as, release)
    assert projection.groupings == project(PLAIN, planned_as).groupings
    assert len(projection.stages[0].bytes_per_block) == len(projection.allocations)


@pytest.mark.parametrize("release", ["0.23", "0.26", "0.27", "0.28"])
def test_groups_on_which_versions_differ_are_not_known_between_them(release: str) -> None:
    projection = project(UNEVEN, release)
    assert (projection.groupings, projection.allocations, projection.refusals) == ((), (), ())
    (unknown,) = [each for each in projection.conditions if each.name == "groups"]
    assert f"not known for vLLM {release}" in unknown.why


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("0.23", set()),
        ("0.25", {"unpacked", "cross_layers"}),
        ("0.27", set()),
        ("0.29", set()),
        ("0.30", {*KV_CACHE_LAYOUTS} - BLOCK_OUTERMOST_LAYOUTS),
        ("0.32", {*KV_CACHE_LAYOUTS} - BLOCK_OUTERMOST_LAYOUTS),
        ("0.33", {*KV_CACHE_LAYOUTS}),
    ],
)
def test_transfers_are_shown_where_a_release_has_the_same(release: str, known: set[str]) -> None:
    assert list_known(PLAIN, release) == known
    for allocation in project(PLAIN, release).allocations:
        for transfer in allocation.transfers:
            assert (transfer.unknown is None) == (allocation.name in known)


def test_a_layout_that_a_release_has_otherwise_is_left_out() -> None:
    names = {each.name for each in project(PLAIN, "0.29").allocations}
    assert names.isdisjoint(BLOCK_OUTERMOST_LAYOUTS)
    assert "LBNHC" in names


def test_states_that_a_release_also_takes_are_not_refused() -> None:
    def find_refusals(release: str) -> set[str | None]:
        allocations = project(MAMBA_1, release).allocations
        return {each.registration.refused for each in allocations if each.registration}

    assert any(reason is not None for reason in find_refusals("0.24"))
    assert find_refusals("0.25") <= {None}


@pytest.mark.parametrize(
    ("release", "layout", "is_known"),
    [
        ("0.25", build_layers(build_mla(0)), True),
        ("0.25", MAMBA_1, False),
        ("0.27", PLAIN, False),
        ("0.29", PLAIN, False),
        ("0.30", PLAIN, True),
        ("0.32", build_layers(build_mla(0)), True),
    ],
)
def test_a_handshake_that_is_not_known_is_neither_accepted_nor_refused(
    release: str, layout: Layout, is_known: bool
) -> None:
    requests = ProjectionRequest(16, 1, release), ProjectionRequest(16, 1, release)
    handshake = check_handshake((layout, layout), requests)
    assert handshake.findings == ()
    assert bool(handshake.unknown) != is_known


def test_every_version_holds_for_itself() -> None:
    assert [version in list_releases(version) for version in VLLM_VERSIONS] == [True, True]
    assert list_releases("0.33", "LBHNC") == ("0.30", "0.31", "0.32", "0.33")
    assert list_releases("0.33", "BLHNC") == ("0.33",)
