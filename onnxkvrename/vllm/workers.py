"""Judge workers of vLLM that hand KV caches over by NIXL: each alone, and prefill with decode.

`handshake` says what workers with these layouts, ranks and blocks do, `compatibility` compares the
hash. This module adds what a ``vllm serve`` line says about a worker, and joins all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import (
    UNKNOWN_WORKERS,
    Finding,
    build_finding,
    format_count,
    format_seconds,
)
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.backends import hands_over_alone
from onnxkvrename.vllm.capacity import estimate_seconds
from onnxkvrename.vllm.compatibility import (
    Worker,
    compare_factors,
    has_hybrid_manager,
    may_have_cross_layers,
)
from onnxkvrename.vllm.handshake import Handshake, check_handshake, has_known_registration
from onnxkvrename.vllm.projection import (
    check_nixl,
    check_projection,
    find_nixl_allocation,
    project_layout,
)
from onnxkvrename.vllm.reads import PromptReads
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR
from onnxkvrename.vllm.specs import (
    ENCODER_KINDS,
    FULL_KINDS,
    MLA_KINDS,
    VLLM_VERSIONS,
    WINDOWED_KINDS,
    can_merge,
    is_uniform_type,
)

UNKNOWN_HINT = "start both with vLLM and hand one prompt over, or leave out what is not known"


class Judgement(NamedTuple):
    """What vLLM makes of one worker, or of two.

    Attributes:
        findings: Why vLLM refuses: KV619, KV622 and KV628, or KV630 if it is not known whether it
            does; it accepts without any.
        notes: What it requires in addition.
        facts: What was compared, and is right.
        conditions: What is not known and must be equal, to be continued after ``both sides``.
        reads: What decode posts for each prompt, if that is known.
        read_findings: Why decode does not get a prompt although vLLM accepts both: KV629, or KV630
            if it is not known whether it does.
        faulty_prompts: What is known of the prompts that decode does not get.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    reads: tuple[PromptReads, ...] = ()
    read_findings: tuple[Finding, ...] = ()
    faulty_prompts: tuple[PromptReads, ...] = ()


def judge_worker(worker: Worker) -> Judgement:
    """Return whether vLLM's NIXL connector registers a worker, and could connect it to its like."""
    refusals, unknown = tuple(_check_settings(worker)), tuple(_list_unknown(worker))
    worker = _unify_layers(worker)
    projection = project_layout(worker.layout, worker.request)
    if not has_known_registration(projection):
        unknown = (*unknown, f"what NIXL registers in {worker.release}")
    findings = (
        *check_projection(projection),
        *(() if unknown else check_nixl(projection)),
        *refusals,
    )
    facts = () if unknown else (_name_code(worker.release),)
    return Judgement(findings or report_unknown(unknown), (), facts)


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
    judgement = describe_handshake(handshake, decode.release)
    return judgement._replace(findings=judgement.findings or report_unknown(handshake.unknown))


def describe_handshake(handshake: Handshake, release: str) -> Judgement:
    """Return the judgement of a handshake; what is unknown of it gives no finding.

    Args:
        handshake: The result of `check_handshake`.
        release: vLLM's release on both sides.
    """
    return Judgement(
        handshake.findings,
        handshake.notes,
        () if handshake.unknown else (_name_code(release),),
        (),
        handshake.reads,
        handshake.read_findings,
        handshake.faulty_prompts,
    )


def _name_code(release: str) -> str:
    return f"the code of vLLM {release}'s NIXL connector"


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
    if different := _explain_different_connectors(workers):
        return Judgement(report_unknown([different]))  # the hash is of NIXL's connector only
    compatibility = compare_factors(prefill, decode)
    findings = [*compatibility.list_findings(version)]
    notes = [*compatibility.list_notes()]
    if prefill.release != version:
        return Judgement(tuple(findings), tuple(notes))
    if not any(worker.settings is None or worker.settings.uses_nixl for worker in workers):
        reasons = dict.fromkeys(reason for worker in workers for reason in _list_unknown(worker))
        return Judgement(report_unknown(tuple(reasons)))
    for name, worker in zip(("prefill", "decode"), workers, strict=True):
        findings += (
            finding._replace(message=f"{name}: {finding.message}")
            for finding in _check_settings(worker)
        )
    unknown = [*dict.fromkeys(reason for worker in workers for reason in _list_unknown(worker))]
    if version not in VLLM_VERSIONS:
        unknown.append(f"what else the compatibility hash of {version} has")
    conditions = [compatibility.describe_unknown(), _describe_unread(workers)]
    facts = [compatibility.describe_equal()]
    handshake = Judgement()
    if unknown:
        findings += () if findings else report_unknown(unknown)
    else:
        handshake = judge_handshake(prefill, decode, kernel_block_size)
        findings += handshake.findings
        notes += handshake.notes
        facts = [*handshake.facts, *facts]
    return Judgement(
        tuple(findings),
        tuple(notes),
        tuple(filter(None, facts)),
        tuple(filter(None, conditions)),
        handshake.reads,
        handshake.read_findings,
        handshake.faulty_prompts,
    )


def _explain_different_connectors(workers: tuple[Worker, Worker]) -> str | None:
    """Return that lines name two connectors, of which one hands over alone; ``None`` if not.

    Whether NIXL's connectors meet, and those that may be built on it, the compatibility hash says.
    """
    if any(worker.settings is None for worker in workers):
        return None
    prefill, decode = (
        (worker.settings and worker.settings.connector) or DEFAULT_CONNECTOR for worker in workers
    )
    if prefill == decode or not any(map(hands_over_alone, (prefill, decode))):
        return None
    return f"two different connectors, {prefill} on prefill and {decode} on decode"


def report_unknown(reasons: Sequence[str], hint: str = UNKNOWN_HINT) -> tuple[Finding, ...]:
    """Return KV630 if there are reasons why it is not known whether vLLM accepts."""
    if not reasons:
        return ()
    message = f"whether vLLM accepts them is not known: {'; '.join(reasons)}"
    return (build_finding(UNKNOWN_WORKERS, "", message, hint),)


def list_figures(workers: tuple[Worker, Worker], reads: Sequence[PromptReads]) -> Iterator[str]:
    """Yield how many requests fit on each side, and how long a hand-off takes at least.

    Args:
        workers: Prefill and decode. Requests fit where both ``--max-model-len`` and the memory for
            KV caches are known; a hand-off is timed where a bandwidth is.
        reads: What decode posts for each prompt.
    """
    for name, worker in zip(("prefill", "decode"), workers, strict=True):
        allocation = find_nixl_allocation(project_layout(worker.layout, worker.request))
        capacity = None if allocation is None else allocation.capacity
        if capacity is not None and capacity.requests is not None:
            count, figure = capacity.format_requests()
            requests = "1 request" if count == "1" else f"{count} requests"
            verb = "fits" if count == "1" else "fit"
            length = worker.request.max_model_len
            yield f"{name}: {requests} of {length:,} tokens {verb} ({figure})"
    for each in reads:
        most_bytes = max((rank.bytes for rank in each.ranks), default=None)
        seconds = estimate_seconds(most_bytes, workers[1].request.bandwidth)
        if seconds is not None:
            prompt = format_count(each.tokens, "token")
            yield f"prompt of {prompt}: a hand-off takes {format_seconds(seconds)} at least"


def _describe_unread(workers: Sequence[Worker]) -> str:
    """Return what a success requires of caches whose blocks do not follow from the prompt."""
    kinds = {buffer.kind for worker in workers for buffer in worker.layout.buffers}
    if ENCODER_KINDS.isdisjoint(kinds):
        return ""
    return "hand over all blocks of cross attention, which is not known"


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
        yield f"the connector {settings.connector}"
    if settings.context_parallel_size > 1:
        yield "context parallelism"
    if worker.request.pipeline_parallel_size > 1:
        yield "pipeline stages"
    if may_have_cross_layers(worker):
        yield (
            "enable_cross_layers_blocks in vLLM 0.24, whose effect depends on the attention "
            "backend and the model runner"
        )
    is_unified = _unify_layers(worker).layout != worker.layout
    value_sizes = {
        worker.layout.resolve_shape(buffer.shape)
        for buffer in worker.layout.buffers
        if buffer.part == "value" and buffer.shape is not None
    }
    if is_unified and worker.version == "0.24" and len({each[-1] for each in value_sizes}) > 1:
        yield "values of several sizes in vLLM 0.24 without the hybrid KV cache manager"
    if has_hybrid_manager(worker) is False and kinds & MLA_KINDS and len(kinds) > 1:
        yield "several kinds of MLA without the hybrid KV cache manager"


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
