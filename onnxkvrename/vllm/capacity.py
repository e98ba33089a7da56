"""How many requests fit into the memory for KV caches, and how long a hand-off takes.

This follows ``get_max_concurrency_for_kv_cache_config`` in ``v1/core/kv_cache_utils.py`` of vLLM
0.24.0 and 0.33.0, which vLLM logs as "Maximum concurrency", and ``max_memory_usage_bytes`` in
``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    ENCODER_KINDS,
    SLIDING_KINDS,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
)


class Capacity(NamedTuple):
    """The blocks of one request of ``--max-model-len`` tokens, and how many such requests fit.

    The first of two numbers is for windows and chunks that hold as few tokens as the prompt's last
    step needs, the second for those that hold the whole request; both are the same where the number
    of scheduled tokens is known, or matters not.

    Attributes:
        blocks: Blocks of all groups together that a request takes, fewest and most.
        requests: vLLM's "Maximum concurrency", most and fewest; ``None`` without `num_blocks`.
    """

    blocks: tuple[int, int]
    requests: tuple[float, float] | None

    def format_requests(self) -> tuple[str, str]:
        """Return how many whole requests fit, and vLLM's figure as it logs it: ``16.66x``."""
        most, fewest = self.requests or (0, 0)
        counts = dict.fromkeys(f"{math.floor(each):,}" for each in (fewest, most))
        figures = dict.fromkeys(f"{each:,.2f}x" for each in (fewest, most))
        return " to ".join(counts), " to ".join(figures)


def measure_capacity(
    groups: Sequence[KvCacheGroup], request: ProjectionRequest, num_blocks: int | None
) -> Capacity | None:
    """Return the capacity of one allocation, whose memory has room for `num_blocks` blocks.

    ``None`` without ``max_model_len``, and where a group's blocks do not follow from it.
    """
    if request.max_model_len is None:
        return None
    in_flight = request.in_flight_tokens
    bounds = (1, request.max_model_len) if in_flight is None else (in_flight, in_flight)
    blocks = [_count_request_blocks(groups, request, tokens) for tokens in bounds]
    if blocks[0] is None or blocks[1] is None:
        return None
    fewest, most = blocks[0], blocks[1]
    requests = None if num_blocks is None else (num_blocks / fewest, num_blocks / most)
    return Capacity((fewest, most), requests)


def measure_token_bytes(specs: Sequence[KvCacheSpec]) -> int:
    """Return the bytes that one token adds on one rank in all layers that keep every token."""
    limited = SLIDING_KINDS | CHUNKED_KINDS | ENCODER_KINDS
    return sum(spec.token_bytes for spec in specs if spec.kind not in limited)


def estimate_seconds(transferred: int | None, bandwidth: int | None) -> float | None:
    """Return how long the bytes of a hand-off take at least; ``None`` if a number is not known.

    The bytes are those of one rank, the bandwidth is that of one rank, in bytes in a second. The
    time to post descriptors comes on top.
    """
    if transferred is None or bandwidth is None:
        return None
    return transferred / bandwidth


def _count_request_blocks(
    groups: Sequence[KvCacheGroup], request: ProjectionRequest, in_flight: int
) -> int | None:
    """Return the blocks of a request; ``None`` if not known.

    0.24 divides the bytes of all groups by the first one's page.
    """
    assert request.max_model_len is not None
    counts = [_count_group_blocks(group, request.max_model_len, in_flight) for group in groups]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    if request.vllm_version == "0.33":
        return sum(known)
    pages = [_get_page_size(group) for group in groups]
    used = sum(count * page for count, page in zip(known, pages, strict=True))
    return -(-used // pages[0])


def _get_page_size(group: KvCacheGroup) -> int:
    return group.bytes_per_block if group.has_per_layer_specs else group.first_spec.page_size


def _count_group_blocks(group: KvCacheGroup, max_model_len: int, in_flight: int) -> int | None:
    counts = [_count_spec_blocks(spec, max_model_len, in_flight) for spec in group.specs]
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def _count_spec_blocks(spec: KvCacheSpec, max_model_len: int, in_flight: int) -> int | None:
    """Return the blocks of one layer (``max_admission_blocks_per_request``).

    A window may start within a block, and so takes one block more than it fills.
    """
    if spec.is_state:
        return 1
    if spec.kind in ENCODER_KINDS or spec.block_size is None:
        return None
    is_sliding, is_chunked = spec.kind in SLIDING_KINDS, spec.kind in CHUNKED_KINDS
    tokens = max_model_len
    if is_sliding or is_chunked:
        if not isinstance(spec.window, int):
            return None
        tokens = min(spec.window - is_sliding + in_flight, max_model_len)
    return -(-tokens // spec.block_size) + is_sliding
