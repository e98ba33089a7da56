"""Judge workers of vLLM that hand KV caches over by NIXL: each alone, and prefill with decode.

`handshake` says what workers with these layouts, ranks and blocks do, `compatibility` compares the
hash. This module adds what a ``vllm serve`` line says about a worker, and joins all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.compatibility import (
    Worker,
    compare_factors,
    has_hybrid_manager,
    may_have_cross_layers,
)
from onnxkvrename.vllm.handshake import check_handshake
from onnxkvrename.vllm.projection import check_nixl, check_projection, project_layout
from onnxkvrename.vllm.reads import PromptReads
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR
from onnxkvrename.vllm.specs import (
    FULL_KINDS,
    MLA_KINDS,
    VLLM_VERSIONS,
    WINDOWED_KINDS,
    can_merge,
    is_uniform_type,
)

_UNKNOWN_MEETING = "accept each other (not known: see the notes)"
"""The condition of a success, continued after ``both sides``, if a note says what is not known."""


class Judgement(NamedTuple):
    """What vLLM makes of one worker, or of two.

    Attributes:
        findings: Why vLLM refuses: KV619, KV622 and KV628; it accepts without any.
        notes: What it requires in addition, and what is not known.
        facts: What was compared, and is right.
        conditions: What is not known and must be equal, to be continued after ``both sides``.
        reads: What decode posts for each prompt, if that is known.
        read_findings: Why decode does not get a prompt although vLLM accepts both: KV622.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    reads: tuple[PromptReads, ...] = ()
    read_findings: tuple[Finding, ...] = ()


def judge_worker(worker: Worker) -> Judgement:
    """Return whether vLLM's NIXL connector registers a worker, and could connect it to its like."""
    refusals, unknown = [*_check_settings(worker)], [*_list_unknown(worker)]
    worker = _unify_layers(worker)
    projection = project_layout(worker.layout, worker.request)
    findings = [
        *check_projection(projection),
        *(() if unknown else check_nixl(projection)),
        *refusals,
    ]
    fact = f"the code of vLLM {worker.release}'s NIXL connector"
    return Judgement(tuple(findings), tuple(unknown), () if unknown else (fact,))


def judge_handshake(
    prefill: Worker, decode: Worker, kernel_block_size: int | None = None
) -> Judgement:
    """Return whether workers with these layouts, ranks and blocks meet, whatever the hash says.

    Args:
        prefill: The worker that is read.
        decode: The worker that reads, of the same version.
        kernel_block_size: As for `judge_workers`.

    Raises:
        KvRenameError: `kernel_block_size` does not divide vLLM's block.
    """
    first, second = _unify_layers(prefill), _unify_layers(decode)
    handshake = check_handshake(
        (first.layout, second.layout),
        (first.request, second.request),
        kernel_block_size,
        has_hybrid_manager=has_hybrid_manager(decode) is not False,
    )
    fact = f"the code of vLLM {decode.release}'s NIXL connector"
    is_known = not any("not known" in note for note in handshake.notes)
    return Judgement(
        handshake.findings,
        handshake.notes,
        (fact,) if is_known else (),
        (),
        handshake.reads,
        handshake.read_findings,
    )


def judge_workers(
    prefill: Worker, decode: Worker, kernel_block_size: int | None = None
) -> Judgement:
    """Return whether vLLM's NIXL connector accepts prefill and decode.

    Args:
        prefill: The worker that is read.
        decode: The worker that reads.
        kernel_block_size: Tokens in a kernel block of the attention backends; ``None`` if these
            use vLLM's blocks undivided.

    Returns:
        The judgement. Workers of different versions never meet; then only that is compared.
        Nothing is compared if another connector than NIXL's hands over on both sides.

    Raises:
        KvRenameError: `kernel_block_size` does not divide vLLM's block.
    """
    workers = (prefill, decode)
    version = decode.release
    compatibility = compare_factors(prefill, decode)
    findings = [*compatibility.list_findings(version)]
    notes = [*compatibility.list_notes()]
    if prefill.release != version:
        return Judgement(tuple(findings), tuple(notes))
    if not any(worker.settings is None or worker.settings.uses_nixl for worker in workers):
        unknown = (note for worker in workers for note in _list_unknown(worker))
        return Judgement(notes=tuple(dict.fromkeys(unknown)), conditions=(_UNKNOWN_MEETING,))
    if version not in VLLM_VERSIONS:
        notes.append(f"vLLM: what else the compatibility hash of {version} has is not known")
    for name, worker in zip(("prefill", "decode"), workers, strict=True):
        findings += (
            finding._replace(message=f"{name}: {finding.message}")
            for finding in _check_settings(worker)
        )
        notes += (f"{name}: {note}" for note in _list_unknown(worker))
    conditions = [compatibility.describe_unknown()]
    facts = [compatibility.describe_equal()]
    is_known = False
    reads, read_findings = tuple[PromptReads, ...](), tuple[Finding, ...]()
    if not any(note for worker in workers for note in _list_unknown(worker)):
        handshake = judge_handshake(prefill, decode, kernel_block_size)
        findings += handshake.findings
        notes += handshake.notes
        facts = [*handshake.facts, *facts]
        is_known = bool(handshake.facts)
        reads, read_findings = handshake.reads, handshake.read_findings
    if not is_known:
        conditions.insert(0, _UNKNOWN_MEETING)
    return Judgement(
        tuple(findings),
        tuple(notes),
        tuple(filter(None, facts)),
        tuple(filter(None, conditions)),
        reads,
        read_findings,
    )


def _has_states(layout: Layout) -> bool:
    return any(buffer.is_state for buffer in layout.buffers)


def _check_settings(worker: Worker) -> Iterator[Finding]:
    """Yield KV622 for settings with which vLLM or its NIXL connector does not start."""
    settings = worker.settings
    if settings is None:
        return
    if has_hybrid_manager(worker) is False and _needs_hybrid_manager(worker):
        yield build_finding(
            "KV622",
            "",
            "the hybrid KV cache manager is off, and vLLM cannot plan these layers as one kind",
            "remove --disable-hybrid-kv-cache-manager on both sides",
        )


def _needs_hybrid_manager(worker: Worker) -> bool:
    """Return whether layers do not become one kind (``unify_hybrid_kv_cache_specs``).

    Without the manager NIXL's connector does not take states. Windows that become full attention
    must have one size, and so must chunks (``merge_window_sizes``).
    """
    if _has_states(worker.layout):
        return True
    if any(buffer.kind in MLA_KINDS for buffer in worker.layout.buffers):
        return False  # which is not known
    specs = project_layout(_unify_layers(worker).layout, worker.request).specs
    version = worker.version
    if specs and not (can_merge(specs, version) or is_uniform_type(specs, version)):
        return True
    kinds = {buffer.kind: set[object]() for buffer in worker.layout.buffers}
    for buffer in worker.layout.buffers:
        kinds[buffer.kind].add(worker.layout.resolve_shape((buffer.window,))[0])
    has_full = not FULL_KINDS.isdisjoint(kinds)
    return has_full and any(len(kinds[kind]) > 1 for kind in WINDOWED_KINDS & kinds.keys())


def _list_unknown(worker: Worker) -> Iterator[str]:
    """Yield why it is not known whether vLLM accepts a worker."""
    settings, kinds = worker.settings, {buffer.kind for buffer in worker.layout.buffers}
    if settings is None:
        return
    if not settings.pulls_by_nixl:
        yield f"vLLM: not known for {settings.connector}"
    if settings.context_parallel_size > 1:
        yield "vLLM: not known for context parallelism"
    if worker.request.pipeline_parallel_size > 1:
        yield "vLLM: not known for pipeline stages"
    if may_have_cross_layers(worker):
        yield (
            "vLLM 0.24: not known for enable_cross_layers_blocks: whether it has an effect depends "
            "on the attention backend and the model runner"
        )
    is_unified = _unify_layers(worker).layout != worker.layout
    value_sizes = {
        worker.layout.resolve_shape(buffer.shape)
        for buffer in worker.layout.buffers
        if buffer.part == "value" and buffer.shape is not None
    }
    if is_unified and worker.version == "0.24" and len({each[-1] for each in value_sizes}) > 1:
        yield "vLLM 0.24: not known for values of several sizes without the hybrid KV cache manager"
    if has_hybrid_manager(worker) is False and kinds & MLA_KINDS and len(kinds) > 1:
        yield "vLLM: not known for several kinds of MLA without the hybrid KV cache manager"


def _unify_layers(worker: Worker) -> Worker:
    """Return a worker of NIXL's connector as one with the hybrid manager that plans the same.

    Without the manager windows become full attention, only beside full attention
    (``unify_hybrid_kv_cache_specs``).
    """
    buffers, settings = worker.layout.buffers, worker.settings
    if settings is None:
        return worker
    is_on = has_hybrid_manager(worker) is not False
    connector = settings.connector or DEFAULT_CONNECTOR
    settings = settings._replace(has_hybrid_manager=True, connector=connector)
    worker = worker._replace(request=worker.request._replace(serve=settings))
    if is_on or not any(buffer.kind in FULL_KINDS for buffer in buffers):
        return worker
    unified = tuple(
        buffer._replace(kind="full_attention", window=None)
        if buffer.kind in WINDOWED_KINDS
        else buffer
        for buffer in buffers
    )
    return worker._replace(layout=worker.layout._replace(buffers=unified))
