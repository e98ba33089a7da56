"""Check whether vLLM's NIXL connector accepts a prefill and a decode worker with other settings.

This follows ``add_remote_agent`` and ``_validate_remote_agent_handshake`` in
``distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py`` of vLLM 0.24.0 and 0.33.0, and
``TransferTopology`` in ``kv_connector/utils.py``, for ``NixlConnector``, where decode reads. It
assumes that both sides have the same model; tensor parallelism and block size may differ. Attention
backends that do not support a whole block divide it into kernel blocks
(``_sync_block_size_with_kernel``); then the sizes of kernel blocks count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import UNKNOWN_WORKERS, Finding, build_finding, format_count
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.projection import (
    Projection,
    check_nixl,
    check_projection,
    find_nixl_allocation,
    project_layout,
)
from onnxkvrename.vllm.reads import (
    NixlSide,
    NixlWorker,
    PromptReads,
    explain_unknown_reads,
    find_read_fault,
    predict_reads,
)
from onnxkvrename.vllm.settle import find_kernel_blocks
from onnxkvrename.vllm.specs import (
    FULL_KINDS,
    MLA_KINDS,
    VERSION_TRAITS,
    VLLM_RELEASES,
    VLLM_VERSIONS,
    KvCacheGroup,
    ProjectionRequest,
    plan_request,
)

_KERNEL_HINT = "or name the backends in --serve (--attention-backend), if they divide blocks"


class Handshake(NamedTuple):
    """The result of a handshake of two workers.

    The findings, KV619 and KV622, are the reasons why vLLM refuses; it accepts without any, unless
    something is unknown. The notes say what it requires in addition. The reads are what decode then
    posts for each prompt; none if vLLM refuses, or if it is not known whether it does. The fault is
    the shortest prompt that decode does not get as prefill wrote it, and `read_findings` has KV629
    for it, or KV630 if it is unknown whether there is one. Workers are alike if they have the same
    ranks and blocks.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    reads: tuple[PromptReads, ...] = ()
    fault: PromptReads | None = None
    unknown_fault: str | None = None
    is_alike: bool = False

    @property
    def read_findings(self) -> tuple[Finding, ...]:
        """The finding for a fault, if there is one or if that is not known."""
        if self.unknown_fault is not None:
            message = f"whether decode gets every prompt is not known: {self.unknown_fault}"
            hint = "pass the sizes that are not known, or choose the same ranks and blocks"
            return (build_finding(UNKNOWN_WORKERS, "", message, hint),)
        if self.fault is None:
            return ()
        message = f"prompt of {format_count(self.fault.tokens, 'token')}: {self.fault.fault}"
        hint = "choose the same ranks and blocks for both sides"
        if self.is_alike:
            hint = "choose another connector than NIXL"
        return (build_finding("KV629", "", message, hint),)

    @property
    def faulty_prompts(self) -> tuple[PromptReads, ...]:
        """The fault, and each prompt asked for that decode does not get as prefill wrote it."""
        return tuple(each for each in (self.fault, *self.reads) if each is not None and each.fault)


def check_handshake(
    layouts: tuple[Layout, Layout],
    requests: tuple[ProjectionRequest, ProjectionRequest],
    kernel_block_size: int | None = None,
    *,
    has_hybrid_manager: bool = True,
) -> Handshake:
    """Return whether vLLM's NIXL connector accepts prefill and decode.

    Args:
        layouts: The buffers of prefill, and of decode.
        requests: The settings of each, for the same version of vLLM.
        kernel_block_size: Tokens in a kernel block of the attention backends on both sides;
            ``None`` for those of the backends that lines name, else vLLM's blocks undivided.
        has_hybrid_manager: Whether decode's hybrid KV cache manager is on.

    Returns:
        The findings and notes. If vLLM refuses a side by itself, only that is reported. Nothing
        is checked if a side has no groups, if the ranks of neither side are a multiple of the
        other's (``handoff.tensor_parallel`` reports that), or if only some layers are MLA.

    Raises:
        KvRenameError: `kernel_block_size` does not divide vLLM's block.
    """
    requests = plan_request(requests[0]), plan_request(requests[1])
    release = requests[0].release
    if not VLLM_RELEASES[release].has_same_handshake:
        return Handshake(unknown=(f"the handshake of {release}",))
    projections = [
        project_layout(layout, request) for layout, request in zip(layouts, requests, strict=True)
    ]
    if not all(map(_has_known_registration, projections)):
        return Handshake(unknown=(f"what NIXL registers in {release}",))
    kernel_blocks = [kernel_block_size or _find_kernel_block(each) for each in projections]
    sides = [*map(_build_side, projections, kernel_blocks)]
    is_known = all(map(_has_known_blocks, projections, kernel_blocks))
    refusals = [
        finding._replace(message=f"{name}: {finding.message}")
        for name, projection in zip(("prefill", "decode"), projections, strict=True)
        for finding in chain(
            check_projection(projection), check_nixl(projection) if is_known else ()
        )
        if finding.code == "KV622"
    ]
    differences = [tuple(_list_differences(each)) for each in projections]
    if differences[0] != differences[1] or (any(differences) and sides[0] != sides[1]):
        unknown = (
            f"{name}: {difference}"
            for name, found in zip(("prefill", "decode"), differences, strict=True)
            for difference in found
        )
        return Handshake(tuple(refusals), unknown=tuple(unknown))
    if not is_known:
        unknown_blocks = "kernel blocks of pages with padding, of several sizes or of packed groups"
        return Handshake(tuple(refusals), unknown=(unknown_blocks,))
    if sides[0] == sides[1] and not refusals and any(differences):
        return Handshake(is_alike=True)
    if sides[0] == sides[1] and not refusals:
        # Whatever they are, vLLM accepts workers that are alike.
        return _add_reads(Handshake(is_alike=True), projections, sides, layouts[0])
    if refusals or None in sides or max(_list_ranks(requests)) % min(_list_ranks(requests)):
        return Handshake(tuple(refusals), ())
    if any(map(_has_mixed_attention, projections)):
        return Handshake(unknown=("models of which only some layers are MLA",))
    prefill, decode = (side for side in sides if side is not None)
    decode = decode._replace(is_hybrid=decode.is_hybrid and has_hybrid_manager)
    version = requests[0].vllm_version
    heads = _find_head_count(layouts[0], requests[0])
    findings = tuple(_check_sides(prefill, decode, heads, version))
    if findings:
        return Handshake(findings)
    notes = tuple(_list_notes(prefill, decode, heads, version))
    if heads is None and prefill.ranks != decode.ranks and not prefill.uses_mla:
        return Handshake((), notes, ("layers that differ in their KV heads",))
    return _add_reads(Handshake((), notes), projections, sides, layouts[0])


def _add_reads(
    handshake: Handshake,
    projections: Sequence[Projection],
    sides: Sequence[NixlSide | None],
    layout: Layout,
) -> Handshake:
    """Fill in what decode posts for each prompt; nothing if a side is not known."""
    prefill, decode = map(_build_worker, projections, sides)
    request = projections[1].request
    if prefill is None or decode is None or len(prefill.groups) != len(decode.groups):
        return handshake  # blocks of other groups are not paired
    if request.release not in VLLM_VERSIONS:
        unknown = f"what decode reads in vLLM {request.release}"
        reads = (PromptReads(tokens, unknown=unknown) for tokens in request.prompt_lengths)
        return handshake._replace(reads=tuple(reads))
    heads, version = _find_head_count(layout, request), request.vllm_version
    return handshake._replace(
        reads=tuple(
            predict_reads(prefill, decode, heads, tokens, version)
            for tokens in request.prompt_lengths
        ),
        fault=find_read_fault(prefill, decode, heads, version),
        unknown_fault=explain_unknown_reads(prefill, decode),
    )


def _build_worker(projection: Projection, side: NixlSide | None) -> NixlWorker | None:
    allocation = find_nixl_allocation(projection)
    if side is None or allocation is None or allocation.registration is None:
        return None
    groups = projection.groupings[allocation.grouping_index].groups
    return NixlWorker(side, groups, allocation.registration)


def _has_mixed_attention(projection: Projection) -> bool:
    """Return whether only some layers of attention are MLA."""
    return len({each.kind in MLA_KINDS for each in projection.specs if not each.is_state}) > 1


def _find_kernel_block(projection: Projection) -> int | None:
    """Return the smaller blocks into which a side's backend divides; ``None`` if it does not."""
    allocation = find_nixl_allocation(projection)
    grouping_index = 0 if allocation is None else allocation.grouping_index
    groupings = projection.groupings[grouping_index : grouping_index + 1]
    specs = [spec for grouping in groupings for group in grouping.groups for spec in group.specs]
    kernel_blocks = find_kernel_blocks(projection.request, specs)
    divided = {size for block, size in kernel_blocks.items() if size and size != block}
    return min(divided, default=None)


def _list_differences(projection: Projection) -> Iterator[str]:
    """Yield what differs between what a line starts and its projection; two alike still meet."""
    for condition in projection.conditions:
        is_known = condition.name in ("kernel block size", "state kind")
        if condition.by_line and condition.state == "not met" and not is_known:
            yield f"{condition.name}: {condition.why}"
    stages = projection.request.pipeline_parallel_size
    if stages > 1:
        yield f"{stages} pipeline stages"


def _list_ranks(requests: tuple[ProjectionRequest, ProjectionRequest]) -> list[int]:
    return [request.tensor_parallel_size for request in requests]


def _build_side(projection: Projection, kernel_block_size: int | None) -> NixlSide | None:
    """Return a side; ``None`` if vLLM forms no groups.

    Raises:
        KvRenameError: `kernel_block_size` does not divide vLLM's block.
    """
    allocation = find_nixl_allocation(projection)
    groups = next((g.groups for g in projection.groupings if g.groups), ())
    if allocation is not None and allocation.is_possible:
        groups = projection.groupings[allocation.grouping_index].groups
    if not groups:
        return None
    request = projection.request
    attention = [spec for spec in projection.specs if not spec.is_state]
    if request.vllm_version == "0.24":
        block_sizes = [spec.block_size or 1 for spec in attention[:1]]
    else:
        first_specs = [group.first_spec for group in groups]
        block_sizes = [spec.block_size or 1 for spec in first_specs if not spec.is_state]
    block_size = math.lcm(*block_sizes) if block_sizes else request.block_size
    kernel_block = kernel_block_size or block_size
    if block_size % kernel_block:
        raise KvRenameError(
            f"a kernel's block of {kernel_block} tokens does not divide vLLM's of {block_size}",
            hint="choose it as the attention backend does: it divides both",
        )
    registration = None if allocation is None else allocation.registration
    if request.vllm_version == "0.24":
        memory_layout = "" if request.serve is None else request.serve.kv_cache_layout or ""
    else:
        memory_layout = "" if allocation is None else allocation.name
    return NixlSide(
        request.tensor_parallel_size,
        kernel_block,
        block_size // kernel_block,
        memory_layout or VERSION_TRAITS[request.vllm_version].head_layouts[0],
        None if registration is None else registration.regions,
        _list_region_layers(allocation) if request.vllm_version != "0.24" else (),
        bool(attention) and all(spec.kind in MLA_KINDS for spec in attention),
        len(attention) < len(projection.specs),
        any(_is_hybrid_group(group, request.vllm_version) for group in groups),
    )


def _list_region_layers(allocation: Allocation | None) -> tuple[int, ...]:
    """Return the first layer of each piece of memory: 0.33 names its region after it."""
    if allocation is None:
        return ()
    first_layers: dict[int, int] = {}
    for placement in allocation.placements:
        for member, start in placement.locate_members():
            first_layers[start] = min(member.layer, first_layers.get(start, member.layer))
    return tuple(sorted(first_layers.values()))


def _has_known_registration(projection: Projection) -> bool:
    """Return whether it is known what NIXL's connector registers, or that vLLM refuses it."""
    allocation = find_nixl_allocation(projection)
    if allocation is None or not allocation.is_possible or len(projection.stages) > 1:
        return True
    return allocation.registration is not None


def _has_known_blocks(projection: Projection, kernel_block_size: int | None) -> bool:
    """Return whether it is known how NIXL registers blocks: whole, or divided evenly."""
    allocation = find_nixl_allocation(projection)
    if kernel_block_size is None or allocation is None or not allocation.is_possible:
        return True
    groups = projection.groupings[allocation.grouping_index].groups
    attention = [spec for group in groups for spec in group.specs if not spec.is_state]
    block_sizes = {spec.block_size for spec in attention}
    is_even = all(spec.page_size == spec.unpadded_page_size for spec in attention)
    return block_sizes <= {kernel_block_size} or (
        len(block_sizes) == 1 and is_even and allocation.name != "packed"
    )


def _is_hybrid_group(group: KvCacheGroup, vllm_version: str) -> bool:
    """Return whether a group is not full attention; 0.24 also counts pages of several sizes."""
    if vllm_version == "0.24" and group.has_per_layer_specs:
        return True
    return any(spec.kind not in FULL_KINDS for spec in group.specs)


def _find_head_count(layout: Layout, request: ProjectionRequest) -> int | None:
    """Return the KV heads of all ranks together; ``None`` if layers have different numbers."""
    whole = build_specs(layout, request._replace(tensor_parallel_size=1))
    counts = {spec.kv_heads for spec in whole.specs if not spec.is_state}
    return counts.pop() if len(counts) == 1 else None


def _check_sides(
    prefill: NixlSide, decode: NixlSide, heads: int | None, version: str
) -> Iterator[Finding]:
    """Yield a finding for each reason why vLLM refuses."""
    yield from _check_memory(prefill, decode, heads, version)
    has_more_ranks = prefill.ranks > decode.ranks
    is_replicated = heads is not None and prefill.ranks > heads
    if has_more_ranks and is_replicated and not (prefill.uses_mla or prefill.has_states):
        yield build_finding(
            "KV619",
            "",
            f"{prefill.ranks} ranks of prefill hold copies of {heads} KV heads, which vLLM "
            f"{version} does not read into {decode.ranks} ranks of decode",
            f"choose at most {heads} ranks of prefill, or no more than decode has",
        )
    written, read = prefill.block_size, decode.block_size
    if read % written and not _can_split_blocks(prefill, decode, version):
        yield build_finding(
            "KV622",
            "",
            f"blocks of {written:,} tokens in prefill and {read:,} in decode: vLLM {version} "
            "requires decode's to be a multiple of prefill's",
            f"choose block sizes that divide (--block-size); {_KERNEL_HINT}",
        )
    elif read != written and version == "0.24" and decode.is_hybrid:
        yield build_finding(
            "KV622",
            "",
            f"blocks of {written:,} tokens in prefill and {read:,} in decode: vLLM 0.24 requires "
            "equal blocks unless all layers are full attention of one size",
            f"choose settings with equal blocks (manifest shows them); {_KERNEL_HINT}",
        )
    elif read != written and has_more_ranks and _reads_several_slices(prefill, decode, heads):
        yield build_finding(
            "KV622",
            "",
            f"blocks of {written:,} tokens in prefill and {read:,} in decode: vLLM {version} "
            "requires equal blocks where prefill has more ranks",
            f"choose one block size for both sides; {_KERNEL_HINT}",
        )
    elif read != written and version == "0.24" and not (decode.uses_mla or has_more_ranks):
        if heads is None and prefill.ranks != decode.ranks:
            return  # vLLM may refuse before decode reads
        yield build_finding(
            "KV622",
            "",
            f"blocks of {written:,} tokens in prefill and {read:,} in decode: vLLM 0.24 accepts "
            "them, but decode fails when it has read them, where the backend's cache is "
            "(blocks, 2, ...), as FLASH_ATTN's",
            f"choose one block size for both sides; {_KERNEL_HINT}",
        )


def _check_memory(
    prefill: NixlSide, decode: NixlSide, heads: int | None, version: str
) -> Iterator[Finding]:
    """Yield KV622 for other regions, and for layouts that do not let ranks share a block."""
    regions = prefill.regions, decode.regions
    if None not in regions and regions[0] != regions[1]:
        yield build_finding(
            "KV622",
            "",
            f"prefill registers {regions[0]} regions and decode {regions[1]}: vLLM {version} "
            "requires the same number",
            "start both sides with the same layers, draft model and allocation of memory",
        )
    elif prefill.region_layers != decode.region_layers:
        yield build_finding(
            "KV622",
            "",
            f"the regions of prefill and decode have different layers: vLLM {version} requires "
            "those of one model",
            "start both sides with the same layers and draft model",
        )
    if prefill.uses_mla:
        has_rows = version != "0.24" and decode.memory_layout.startswith("B")
        rows = [(side.memory_layout, side.block_size) for side in (prefill, decode)]
        if has_rows and not decode.has_states and rows[0] != rows[1]:
            yield build_finding(
                "KV622",
                "",
                f"decode has rows of all layers ({decode.memory_layout}, blocks of "
                f"{decode.block_size:,} tokens) and prefill has other ones "
                f"({prefill.memory_layout}, {prefill.block_size:,} tokens): vLLM {version} "
                "requires equal rows",
                "choose one VLLM_KV_CACHE_LAYOUT and one block size for both sides",
            )
        return
    if prefill.memory_layout != decode.memory_layout:
        yield build_finding(
            "KV622",
            "",
            f"memory is laid out as {prefill.memory_layout} on prefill and {decode.memory_layout} "
            f"on decode: vLLM {version} requires one layout",
            "set the same VLLM_KV_CACHE_LAYOUT on both sides, or on none",
        )
        return
    is_shared = heads is not None and prefill.ranks <= heads
    is_apart = prefill.memory_layout in VERSION_TRAITS[version].head_layouts
    if prefill.ranks != decode.ranks and is_shared and not is_apart:
        layouts = " or ".join(VERSION_TRAITS[version].head_layouts)
        yield build_finding(
            "KV622",
            "",
            f"{prefill.ranks} ranks of prefill and {decode.ranks} of decode share heads, and "
            f"{prefill.memory_layout} does not store the heads of a block apart",
            f"set VLLM_KV_CACHE_LAYOUT to {layouts} on both sides, or on none",
        )


def _reads_several_slices(prefill: NixlSide, decode: NixlSide, heads: int | None) -> bool:
    """Return whether a rank of decode reads heads of several ranks of prefill.

    Beside states, heads may be replicated (``_build_local_splits_from_plan`` of 0.33), so several
    ranks may hold the same heads.
    """
    if prefill.uses_mla:
        return False
    if prefill.has_states:
        return heads is not None and heads > decode.ranks
    return heads is None or heads >= prefill.ranks


def _can_split_blocks(prefill: NixlSide, decode: NixlSide, version: str) -> bool:
    """Return whether vLLM splits blocks that do not divide (``_split_remote_blocks``)."""
    if not (decode.has_states and decode.uses_mla):
        return False
    unit = math.gcd(prefill.block_size, decode.block_size)
    pieces = max(prefill.block_size, decode.block_size) // unit
    return pieces <= VERSION_TRAITS[version].max_block_split


def _list_notes(
    prefill: NixlSide, decode: NixlSide, heads: int | None, version: str
) -> Iterator[str]:
    """Yield what vLLM requires if it does not refuse."""
    start = f"vLLM {version}, NIXL"
    if decode.block_size % prefill.block_size:
        yield f"{start}: blocks are paired in pieces, if prefill's pages have no padding"
    elif decode.block_size != prefill.block_size:
        count = decode.block_size // prefill.block_size
        yield f"{start}: {count} blocks of prefill make one of decode"
    if version == "0.33" and (prefill.block_size, prefill.ranks) != (
        decode.block_size,
        decode.ranks,
    ):
        yield f"{start}: in a block-outermost layout both sides must pack their blocks alike"
    is_split = decode.block_size % prefill.block_size
    if decode.has_states and (is_split or prefill.kernel_blocks != decode.kernel_blocks):
        yield f"{start}: prefix caching must be off: blocks have different numbers of kernel blocks"
    if prefill.ranks == decode.ranks or prefill.uses_mla:
        return
    if heads is not None and prefill.ranks <= heads:
        layouts = " or ".join(VERSION_TRAITS[version].head_layouts)
        yield f"{start}: both sides need a layout with the heads apart: {layouts}"
