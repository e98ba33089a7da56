"""NIXL's transfers for a prompt: blocks of each group, regions, descriptors and bytes.

This follows ``distributed/kv_transfer/kv_connector/v1/nixl`` of vLLM 0.24.0 and 0.33.0:
``base_scheduler.py`` (``get_sw_clipped_blocks`` of 0.24, ``get_exchange_clipped_blocks`` of 0.33)
and, for what decode reads of them, ``pull_scheduler.py`` and ``allocate_slots`` of
``v1/core/kv_cache_manager.py``. `nixl_v024` and `nixl_v033` follow the registration. It assumes
that kernel blocks are vLLM's blocks, that no prefix is cached, and that both sides have the same
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    ENCODER_KINDS,
    SLIDING_KINDS,
    VERSION_TRAITS,
    KvCacheGroup,
    KvCacheSpec,
    RefusalError,
)


class NixlTransfer(NamedTuple):
    """The amounts that NIXL transfers for one prompt; unknown ones are ``None``.

    Attributes:
        tokens: The length of the prompt.
        blocks: The number of blocks of each group that prefill offers.
        read_blocks: The number of them that decode reads.
        regions: The number of regions as vLLM counts them: two for a tensor with keys and values
            apart.
        descriptors: The number of descriptors that decode posts, on each rank. NIXL merges
            neighbours, so its telemetry counts fewer.
        bytes: Bytes of all descriptors.
        unknown: The reason why amounts are unknown; ``None`` if all are known.
        refused: As in `NixlRegistration`.
        incomplete: Why the descriptors do not cover all data in the blocks; ``None`` if they do.
    """

    tokens: int
    blocks: tuple[int | None, ...]
    read_blocks: tuple[int | None, ...]
    regions: int | None
    descriptors: int | None
    bytes: int | None
    unknown: str | None = None
    refused: str | None = None
    incomplete: str | None = None


class BlockCost(NamedTuple):
    """The descriptors that NIXL needs for one block of a group.

    Attributes:
        descriptors: The number of descriptors.
        bytes: Bytes of these descriptors.
    """

    descriptors: int
    bytes: int


class NixlRegistration(NamedTuple):
    """The memory that vLLM registers with NIXL.

    Attributes:
        regions: The number of regions; ``None`` if vLLM refuses.
        costs: The cost of one block, for each group; empty if vLLM refuses.
        refused: Why vLLM refuses to register it, or to connect two workers that did; ``None`` if
            it does not.
        incomplete: Why the descriptors do not cover all data in the blocks; ``None`` if they do.
    """

    regions: int | None
    costs: tuple[BlockCost, ...] = ()
    refused: str | None = None
    incomplete: str | None = None

    @property
    def fault(self) -> str | None:
        """Why a hand-off fails or loses data; ``None`` if it does neither."""
        if self.refused is not None:
            return f"refused: {self.refused}"
        return None if self.incomplete is None else f"incomplete: {self.incomplete}"


def explain_states_only(groups: Iterable[KvCacheGroup]) -> str | None:
    """Return why no two workers meet if all layers are states; ``None`` if any is attention.

    vLLM registers such a model, but its ``_build_fa_remote`` takes the first group of attention.
    """
    if any(not spec.is_state for group in groups for spec in group.specs):
        return None
    return "StopIteration when decode meets prefill: no layer is attention, and vLLM looks for one"


def build_transfers(
    groups: Sequence[KvCacheGroup],
    registration: NixlRegistration,
    prompt_lengths: Iterable[int],
) -> tuple[NixlTransfer, ...]:
    """Return the transfer of each prompt, whose lengths are in tokens."""
    return tuple(_build_transfer(groups, registration, length) for length in prompt_lengths)


def _build_transfer(
    groups: Sequence[KvCacheGroup], registration: NixlRegistration, length: int
) -> NixlTransfer:
    blocks, read_blocks = count_blocks(groups, length), count_read_blocks(groups, length)
    amounts = NixlTransfer(length, blocks, read_blocks, None, None, None)
    if registration.refused is not None:
        return amounts._replace(refused=registration.refused)
    amounts = amounts._replace(regions=registration.regions)
    unknown = explain_unknown_blocks(groups)
    if unknown is not None:
        return amounts._replace(unknown=unknown)
    pairs = [*zip((count or 0 for count in read_blocks), registration.costs, strict=True)]
    return amounts._replace(
        descriptors=sum(count * cost.descriptors for count, cost in pairs),
        bytes=sum(count * cost.bytes for count, cost in pairs),
        incomplete=registration.incomplete,
    )


def count_transferred_tokens(groups: Iterable[KvCacheGroup], prompt_length: int) -> int:
    """Return how many tokens of a prompt prefill computes for decode.

    Beside states it is one less than the prompt has: decode computes the last token again, and
    vLLM truncates the prompt of prefill (``_truncate_mamba_request_for_prefill``, since 0.33
    ``_truncate_request_for_prefill``).
    """
    has_states = any(spec.is_state for group in groups for spec in group.specs)
    return prompt_length - 1 if has_states and prompt_length > 1 else prompt_length


def count_blocks(groups: Iterable[KvCacheGroup], prompt_length: int) -> tuple[int | None, ...]:
    """Return the number of blocks of each group that prefill offers for a prompt.

    The length of the prompt is in tokens. ``None`` where a number is not known.
    """
    groups = tuple(groups)
    tokens = count_transferred_tokens(groups, prompt_length)
    return tuple(_count_spec_blocks(group.first_spec, tokens) for group in groups)


def count_read_blocks(groups: Iterable[KvCacheGroup], prompt_length: int) -> tuple[int | None, ...]:
    """Return the number of blocks of each group that decode reads.

    Decode does not allocate the blocks that the next token does not see, so it does not read them.

    The length of the prompt is in tokens. ``None`` where a number is not known.
    """
    groups = tuple(groups)
    tokens = count_transferred_tokens(groups, prompt_length)
    return tuple(_count_read_spec_blocks(group.first_spec, tokens) for group in groups)


def explain_unknown_blocks(groups: Iterable[KvCacheGroup]) -> str | None:
    """Return why the blocks of a group are not known; ``None`` if those of all groups are."""
    for group in groups:
        if _count_read_spec_blocks(group.first_spec, 1) is None:
            window = group.first_spec.window
            if isinstance(window, str):
                return f"the size of {window} ({format_size_option(window)})"
            return f"how many blocks {group.kind} takes: it does not follow from the prompt alone"
    return None


def _count_spec_blocks(spec: KvCacheSpec, prompt_length: int) -> int | None:
    """Return the blocks of a prompt; ``None`` if not known.

    vLLM clips windows to ``blocks_per_sw``. A window may start within a block, and so takes one
    block more than it fills. Chunks are not clipped.
    """
    if spec.is_state:
        return 1
    if spec.kind in ENCODER_KINDS or spec.block_size is None:
        return None
    prompt_blocks = -(-prompt_length // spec.block_size)
    if spec.kind not in SLIDING_KINDS:
        return prompt_blocks
    if not isinstance(spec.window, int):
        return None
    return min(prompt_blocks, -(-spec.window // spec.block_size) + 1)


def _count_read_spec_blocks(spec: KvCacheSpec, tokens: int) -> int | None:
    """Return the number of blocks that the next token sees (``get_num_skipped_tokens``)."""
    offered = _count_spec_blocks(spec, tokens)
    is_limited = spec.kind in SLIDING_KINDS | CHUNKED_KINDS
    if offered is None or not is_limited or spec.block_size is None:
        return offered
    if not isinstance(spec.window, int):
        return None
    if spec.kind in CHUNKED_KINDS:
        skipped = tokens // spec.window * spec.window
    else:
        skipped = max(0, tokens - spec.window + 1)
    return min(offered, -(-tokens // spec.block_size) - skipped // spec.block_size)


def split_states(groups: Iterable[KvCacheGroup], vllm_version: str) -> BlockCost | None:
    """Return the cost of a block's states in one region, the same for all regions with states.

    The first layer of states decides (``derive_mamba_conv_split``). A convolution's state has a
    descriptor for each projection, the recurrent state has one.
    ``None`` without states. The version is one of `VLLM_VERSIONS`.

    Raises:
        RefusalError: NIXL's connector does not support these states.
    """
    spec = next((spec for group in groups for spec in group.specs if spec.is_state), None)
    if spec is None:
        return None
    shapes = spec.state_shapes
    takes_mamba_1 = VERSION_TRAITS[vllm_version].takes_mamba_1
    projections = _count_projections(shapes, takes_mamba_1=takes_mamba_1)
    if projections is None:
        kinds = "Mamba and GDN" if takes_mamba_1 else "Mamba 2 and GDN"
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise RefusalError(
            [spec.layer],
            f"NIXL's connector takes only states of {kinds}, but these are {found}",
            "choose another connector",
        )
    return BlockCost(projections + 1, spec.unpadded_page_size)


def _count_projections(shapes: Sequence[tuple[int, ...]], *, takes_mamba_1: bool) -> int | None:
    """Return the number of projections in a convolution's state; ``None`` if vLLM finds none.

    vLLM treats a recurrent state of three axes as Mamba 2's or GDN's, whose convolution has three
    projections whatever its size, and one of two axes as Mamba 1's, whose convolution has one.
    """
    if len(shapes) != 2 or len(shapes[0]) != 2:
        return None
    convolution, recurrent = shapes
    if len(recurrent) == 3:
        return 3
    is_mamba_1 = len(recurrent) == 2 and recurrent[0] == convolution[0]
    return 1 if is_mamba_1 and takes_mamba_1 else None
