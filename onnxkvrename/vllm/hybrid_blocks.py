"""Blocks of a hybrid: attention's page grown until it covers a state, and states padded to it.

After vLLM 0.24.0 and 0.33.0, ``platforms/interface.py`` (``_align_hybrid_block_size``),
for a ``mamba_cache_mode`` other than ``all``, and backends that take the block size asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.vllm.specs import (
    MLA_KINDS,
    Condition,
    KvCacheSpec,
    ProjectionRequest,
    RefusalError,
)

_MIN_MLA_BLOCK_SIZE = 128
"""In 0.33 blocks of MLA beside states are no smaller than this, in tokens."""


def align_blocks(specs: Sequence[KvCacheSpec], asked: ProjectionRequest) -> tuple[KvCacheSpec, ...]:
    """The specs of a hybrid as vLLM sizes them; those of other models as they are.

    Raises :class:`~onnxkvrename.pages.Refused` where attention layers differ in
    what a token takes: vLLM goes by the model's own, which a graph does not say.
    """
    states = [spec for spec in specs if spec.kind == "mamba"]
    attention = [spec for spec in specs if spec.kind != "mamba"]
    if not states or not attention:
        return tuple(specs)
    token = _resolve_token_bytes(attention)
    state = max(spec.unpadded_page_size for spec in states)
    unit = asked.block_size
    if asked.vllm_version == "0.33" and any(spec.kind in MLA_KINDS for spec in attention):
        unit = max(unit, _MIN_MLA_BLOCK_SIZE)
    block = max(asked.block_size, unit * -(-state // (unit * token)))
    padded = None if block * token == state else block * token
    return tuple(
        spec._replace(page_size_padded=padded)
        if spec.kind == "mamba"
        else spec._replace(block_size=block)
        for spec in specs
    )


def list_alignment_conditions(
    specs: Sequence[KvCacheSpec], asked: ProjectionRequest
) -> tuple[Condition, ...]:
    """What the size of a hybrid's blocks depends on, and a graph does not show."""
    kinds = {spec.kind for spec in specs}
    if "mamba" not in kinds or len(kinds) == 1:
        return ()
    why = f"the smallest block of each attention backend divides {asked.block_size}"
    return (Condition("block alignment", "requires", why),)


def _resolve_token_bytes(attention: Sequence[KvCacheSpec]) -> int:
    """Bytes of a token in attention; vLLM takes a value's head to be as large as a key's."""
    tokens = {
        spec.token_bytes
        if spec.kind in MLA_KINDS
        else spec._replace(head_size_v=spec.head_size).token_bytes
        for spec in attention
    }
    if len(tokens) > 1:
        raise RefusalError(
            [spec.layer for spec in attention],
            "attention layers of several sizes beside states: vLLM aligns blocks to one of them",
            "not known: the graph does not say which the model's own is",
        )
    return tokens.pop()
