"""Two workers as their ``vllm serve`` lines start them: vLLM's handshake, and their hand-off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import UNKNOWN_WORKERS, Finding, build_finding, find_similar
from onnxkvrename.handoff.compare import Basis, Handoff, compare_sides
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import find_connector_owners
from onnxkvrename.handoff.simulate import merge_ranges
from onnxkvrename.handoff.slots import find_clipped_axes
from onnxkvrename.handoff.tensor_parallel import TensorParallelSizes
from onnxkvrename.handoff.verdict import PromptFaults
from onnxkvrename.handoff.worker import (
    UNLIMITED_LENGTH,
    build_loaded_side,
    find_longest_prompt,
)
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    LoadedLayout,
    list_cache_dtype_notes,
    set_cache_dtype,
)
from onnxkvrename.options import SIDES, Option
from onnxkvrename.rules.profile import Rules
from onnxkvrename.vllm.backends import DEFAULT_BLOCK_SIZE
from onnxkvrename.vllm.compatibility import Worker
from onnxkvrename.vllm.handshake import check_handshake
from onnxkvrename.vllm.projection import build_request, list_serve_notes
from onnxkvrename.vllm.reads import PromptReads
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR, ServeSettings, read_serve_option
from onnxkvrename.vllm.specs import (
    QAIC_CACHE_DTYPE,
    VLLM_RELEASES,
    VLLM_VERSIONS,
    ProjectionRequest,
)
from onnxkvrename.vllm.workers import (
    UNKNOWN_HINT,
    Judgement,
    describe_handshake,
    judge_workers,
    list_figures,
    report_unknown,
)

_CONNECTOR_SIMILARITY = 0.92
"""How similar a slip is to the connector that is meant; further ones have names of their own."""
_ROLES = ("kv_producer", "kv_consumer")
"""The ``kv_role`` of prefill and of decode."""
_ROLE_HINT = "start prefill with kv_role kv_producer and decode with kv_consumer"
_RANK = 4
"""The axes of a cache of attention: batch, heads, context and head size."""
VLLM = Option(
    "--vllm",
    f"With --serve or --block-size: the version of vLLM, by default {VLLM_VERSIONS[-1]}.",
    choices=tuple(VLLM_RELEASES),
    needs=("serve", "block_size"),
)
BANDWIDTH = Option(
    "--bandwidth",
    "With --tokens: what each rank transfers, e.g. 25GB/s; says how long a hand-off takes.",
    "RATE",
    needs=("tokens",),
)


_NO_LINE = ServeSettings(unread=("the line",), gaps=("the line",))
"""The settings of a side without a line: vLLM's defaults, as far as nothing else is set."""


class ServedHandoff(NamedTuple):
    """A comparison, and what decode posts to vLLM's NIXL connector for each prompt."""

    handoff: Handoff
    reads: tuple[PromptReads, ...] = ()


class ServedPair(NamedTuple):
    """How prefill and decode are started.

    Attributes:
        requests: vLLM's settings of prefill and decode.
        notes: What is assumed, and what is not understood.
        from_lines: Whether lines say so, not block sizes alone.
    """

    requests: tuple[ProjectionRequest, ProjectionRequest]
    notes: tuple[str, ...] = ()
    from_lines: bool = True

    def set_bandwidth(self, bandwidth: int) -> ServedPair:
        """Return the pair where each rank transfers so many bytes in a second."""
        prefill, decode = (request._replace(bandwidth=bandwidth) for request in self.requests)
        return self._replace(requests=(prefill, decode))

    @property
    def lines(self) -> tuple[ServeSettings, ServeSettings]:
        """What the lines of prefill and of decode say; nothing where there is none."""
        prefill, decode = (request.serve or ServeSettings() for request in self.requests)
        return prefill, decode

    @property
    def context_limits(self) -> tuple[int | None, int | None]:
        """The ``--max-model-len`` of prefill and of decode, where lines say it."""
        prefill, decode = self.lines
        return prefill.max_model_len, decode.max_model_len

    @property
    def connectors(self) -> tuple[str | None, str | None]:
        """The connector of prefill and of decode, where lines name one."""
        prefill, decode = self.lines
        return prefill.connector, decode.connector

    @property
    def ranks(self) -> TensorParallelSizes | None:
        """The tensor parallel sizes, if lines say them."""
        prefill, decode = (request.tensor_parallel_size for request in self.requests)
        return TensorParallelSizes(prefill, decode) if self.from_lines else None

    def decide_full_transfers(self, is_requested: bool) -> tuple[bool, bool]:
        """Return whether vllm-qaic moves all of each buffer, in prefill and in decode.

        Raises:
            KvRenameError: It is requested, and a line turns it off.
        """
        prefill, decode = (serve.decide_full_transfer(is_requested) for serve in self.lines)
        return prefill, decode


def read_served_pair(lines: Mapping[str, str], vllm_version: str) -> ServedPair | None:
    """Return how both sides are started; ``None`` without a line.

    Args:
        lines: The line of ``prefill`` and of ``decode``, and one for both under ``""``.
        vllm_version: The version of vLLM on both sides.

    Raises:
        KvRenameError: A line cannot be read.
    """
    if not lines:
        return None
    settings, notes = [], dict[str, list[str]]()
    for side in SIDES:
        label = f"--serve {side}:" if side in lines else "--serve"
        line = lines.get(side, lines.get(""))
        serve = _NO_LINE if line is None else read_serve_option(line, vllm_version, label)
        settings.append(serve)
        if line is None:
            notes.setdefault("no --serve line: vLLM's defaults are assumed", []).append(side)
        for note in list_serve_notes(serve, vllm_version):
            notes.setdefault(note, []).append(side)
    prefill, decode = (build_request(serve, vllm_version) for serve in settings)
    named = (
        note if len(sides) == len(SIDES) else f"{sides[0]}: {note}" for note, sides in notes.items()
    )
    return ServedPair((prefill, decode), tuple(named))


def apply_serve(loaded: LoadedLayout, serve: ServeSettings, vllm_version: str) -> LoadedLayout:
    """Return the buffers with the cache dtype of a line; that of a manifest stays.

    Raises:
        KvRenameError: A manifest has another one, or its pages are not known.
    """
    dtype = build_request(serve, vllm_version).kv_cache_dtype
    return loaded._replace(layout=set_cache_dtype(loaded.layout, dtype))


def check_cache_dtype(layout: Layout, consumer: Consumer) -> None:
    """Check that a consumer takes the ``--kv-cache-dtype`` of a line or a manifest.

    Raises:
        KvRenameError: vLLM itself does not take it.
    """
    if consumer.is_paged and layout.kv_cache_dtype == QAIC_CACHE_DTYPE:
        raise KvRenameError(
            f"--kv-cache-dtype {QAIC_CACHE_DTYPE}: {consumer.name} does not take it, only "
            "vllm-qaic does",
            hint="pass `--target vllm-qaic`",
        )


def compare_served(
    paths: tuple[Path | None, Path | None],
    sides: tuple[LoadedLayout, LoadedLayout],
    consumer: Consumer,
    rules: Rules,
    served: ServedPair | None = None,
    *,
    full_transfer: bool = False,
    tokens: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> ServedHandoff:
    """Compare two sides, and what vLLM's NIXL connector says of how they are started.

    Args:
        paths: The model, directory or manifest that was read for prefill, and for decode;
            ``None`` for what was read at another time, or from no file.
        sides: Their buffers.
        consumer: The consumer.
        rules: The rules that recognize KV names.
        served: How both are started; ``None`` if that is not known.
        full_transfer: Whether all of each buffer is moved, whatever the lines say.
        tokens: Prompts of these lengths are simulated as well.
        notes: Further notes on both sides.

    Raises:
        KvRenameError: The consumer does not take the cache dtype, or a manifest has another cache
            dtype than its line.
    """
    judgement, transfers = Judgement(), (full_transfer, full_transfer)
    one_sided: tuple[Finding, ...] = ()
    if served is None and consumer.is_paged:
        request = ProjectionRequest(DEFAULT_BLOCK_SIZE)
        served = ServedPair((request, request), from_lines=False)
    if served is not None:
        one_sided = tuple(_check_unread_dtypes(served))
        prefill, decode = (
            loaded
            if one_sided
            else loaded._replace(layout=set_cache_dtype(loaded.layout, request.kv_cache_dtype))
            for loaded, request in zip(sides, served.requests, strict=True)
        )
        for side in (prefill, decode):
            check_cache_dtype(side.layout, consumer)
        limit = min((each for each in served.context_limits if each is not None), default=None)
        lengths = [each for each in tokens if limit is None or each < limit]
        workers = _build_workers((prefill, decode), served, lengths)
        judgement = _judge_pair(workers, consumer, served)
        # Other connectors have workers of their own: vllm-qaic's plan by requests, not by memory.
        is_nixl = consumer.is_paged or not any(served.connectors)
        figures = list_figures(workers, judgement.reads) if is_nixl else ()
        if not judgement.findings:
            roles = (f"{each}: are the roles right?" for each in _find_wrong_roles(served.lines))
            notes = (*notes, *roles)
        notes = (*notes, *served.notes, *_list_cache_dtype_notes(sides, served), *figures)
        # What a compiled model hands over has the bytes of its compile, whatever the line says.
        if consumer.is_paged or not any(side.layout.has_compiled_dtypes for side in sides):
            sides = (prefill, decode)
        transfers = served.decide_full_transfers(full_transfer)
    one_sided = (*one_sided, *_check_full_transfers(transfers, consumer))
    judgement = judgement._replace(findings=(*one_sided, *judgement.findings))
    if served is not None:
        judgement = _admit_unread(judgement, served)
    faults = _list_faults(judgement)
    if one_sided and one_sided[0] in judgement.findings:
        # Only a prompt that fills the context moves the same with and without it.
        longest = min(find_longest_prompt(side.layout) for side in sides)
        last = longest if longest == UNLIMITED_LENGTH else max(longest - 1, 1)
        faults = faults._replace(corrupt_ranges=merge_ranges(faults.corrupt_ranges, ((1, last),)))
    writer, reader = (
        build_loaded_side(label, path, loaded, consumer, rules)
        for label, path, loaded in zip(SIDES, paths, sides, strict=True)
    )
    handoff = compare_sides(
        writer,
        reader,
        consumer,
        ranks=None if served is None else served.ranks,
        full_transfer=all(transfers),
        tokens=tokens,
        more_findings=(*judgement.findings, *judgement.read_findings),
        more_notes=(*notes, *judgement.notes),
        more_basis=Basis(judgement.facts, judgement.conditions),
        faults=faults,
        context_limits=(None, None) if served is None else served.context_limits,
        connectors=(None, None) if served is None else served.connectors,
    )
    return ServedHandoff(handoff, judgement.reads)


def _admit_unread(judgement: Judgement, served: ServedPair) -> Judgement:
    """Return what is known although something of the lines is not read.

    A success has a condition. A refusal is not known if flags or variables that are read elsewhere
    may be in what is not read.
    """
    settings = [request.serve or ServeSettings() for request in served.requests]
    unread, gaps = (
        ", ".join(_name_sides(*(getattr(each, field) for each in settings)))
        for field in ("unread", "gaps")
    )
    findings = (*judgement.findings, *judgement.read_findings)
    refusal = next((each for each in findings if each.code != UNKNOWN_WORKERS), None)
    if gaps and refusal is not None:
        message = f"whether vLLM accepts them depends on what is not read ({gaps}); without it, "
        hint = "pass a line for each side with --serve, and write each flag with its value"
        finding = build_finding(UNKNOWN_WORKERS, "", message + refusal.message, hint)
        return Judgement((finding,), judgement.notes)
    condition = f"change no cache by what is not read ({unread})"
    conditions = (*judgement.conditions, condition) if unread else judgement.conditions
    return judgement._replace(conditions=conditions)


def _name_sides(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """Yield what is of both sides, and what is of one, with that side."""
    for name in dict.fromkeys((*prefill, *decode)):
        is_both = name in prefill and name in decode
        yield name if is_both else f"{name} of {SIDES[name in decode]}"


def _list_cache_dtype_notes(
    sides: tuple[LoadedLayout, LoadedLayout], served: ServedPair
) -> Iterator[str]:
    if not served.from_lines:
        return
    for label, side, request in zip(SIDES, sides, served.requests, strict=True):
        for note in list_cache_dtype_notes(side.layout, request.kv_cache_dtype):
            yield f"{label}: {note}"


def _build_workers(
    sides: tuple[LoadedLayout, LoadedLayout], served: ServedPair, tokens: Sequence[int]
) -> tuple[Worker, Worker]:
    prefill, decode = (
        Worker(
            side.layout,
            request._replace(
                kv_cache_dtype=side.layout.kv_cache_dtype, prompt_lengths=tuple(tokens)
            ),
        )
        for side, request in zip(sides, served.requests, strict=True)
    )
    return prefill, decode


def _check_unread_dtypes(served: ServedPair) -> Iterator[Finding]:
    """Yield KV612 if only one side has a cache dtype, and the other may have it, too, unread."""
    dtypes = [request.kv_cache_dtype for request in served.requests]
    for side, dtype, other in zip(SIDES, dtypes, served.requests[::-1], strict=True):
        if dtype is not None and other.kv_cache_dtype is None and other.serve and other.serve.gaps:
            yield build_finding("KV612", "", f"--kv-cache-dtype {dtype} is on {side} only", "")


def _check_full_transfers(transfers: tuple[bool, bool], consumer: Consumer) -> Iterator[Finding]:
    """Yield KV618 if one side moves all of each buffer, and the other only the prompt.

    Only for a consumer that moves less than all without vllm-qaic's variable.
    """
    if transfers[0] == transfers[1] or not find_clipped_axes(consumer, _RANK, full_transfer=False):
        return
    side = SIDES[transfers[1]]
    yield build_finding(
        "KV618",
        "",
        f"VLLM_QAIC_USE_FULL_KV_TRANSFER=1 is set on {side} only: each side computes its own "
        "offsets, and decode cannot detect it",
        "set it on both sides or on neither",
    )


def _list_faults(judgement: Judgement) -> PromptFaults:
    """Return the prompts that go wrong after vLLM has accepted both sides."""
    prompts = judgement.faulty_prompts
    refused, corrupt = (
        merge_ranges((each.tokens, each.tokens) for each in prompts if each.stops is stops)
        for stops in (True, False)
    )
    return PromptFaults(refused, corrupt)


def check_connectors(consumer: Consumer, connectors: Sequence[str | None]) -> tuple[Finding, ...]:
    """Return KV630 if lines name a connector that is not the consumer's, or two connectors.

    Args:
        consumer: The consumer. If it has pages of its own, its workers say whether two of its
            connectors meet.
        connectors: The connector of each line; ``None`` for a line that names none. Nothing is
            checked if no line names one.
    """
    if not any(connectors):
        return ()
    names = [connector or DEFAULT_CONNECTOR for connector in connectors]
    foreign = [name for name in names if name not in consumer.connectors]
    if len(set(names)) > 1 and (foreign or not consumer.is_paged):
        reason = "two different connectors, {} on prefill and {} on decode".format(*names)
        hint = "start both sides with the same kv_connector (--kv-transfer-config)"
    elif foreign:
        own = f" ({', '.join(consumer.connectors)})" if consumer.connectors else ""
        reason = f"the connector {foreign[0]} is not one of {consumer.name}{own}"
        owner = find_connector_owners().get(foreign[0])
        hint = f"--target {owner} checks {foreign[0]}" if owner else UNKNOWN_HINT
    else:
        return ()
    return report_unknown([reason], _suggest_connector(foreign, consumer) or hint)


def check_role(consumer: Consumer, serve: ServeSettings) -> tuple[Finding, ...]:
    """Return KV622 if the connector of a line does not start with its ``kv_role``."""
    if serve.connector not in consumer.one_role_connectors or serve.kv_role != "kv_both":
        return ()
    message = f"{serve.connector} does not start with kv_role kv_both"
    return (build_finding("KV622", "", message, _ROLE_HINT),)


def _check_roles(consumer: Consumer, served: ServedPair) -> tuple[Finding, ...]:
    """Return KV622 for a side that does not start with its role, or KV630 for swapped roles."""
    lines = served.lines
    if findings := tuple(
        each._replace(message=f"{side}: {each.message}")
        for side, serve in zip(SIDES, lines, strict=True)
        for each in check_role(consumer, serve)
    ):
        return findings
    if lines[0].connector not in consumer.one_role_connectors:
        return ()
    return report_unknown([*_find_wrong_roles(lines)], _ROLE_HINT)


def _find_wrong_roles(lines: tuple[ServeSettings, ServeSettings]) -> Iterator[str]:
    """Yield the roles of two lines if these are not those of prefill and of decode."""
    roles = [serve.kv_role or "kv_both" for serve in lines]
    if any(role not in ("kv_both", own) for role, own in zip(roles, _ROLES, strict=True)):
        yield "prefill is started as {} and decode as {}".format(*roles)


def _suggest_connector(names: Sequence[str], consumer: Consumer) -> str | None:
    """Return the hint "did you mean X?" for a slip in the name of a connector."""
    owners = find_connector_owners()
    for name in names:
        similar = find_similar(name, owners, _CONNECTOR_SIMILARITY)
        if similar is not None and similar != name:
            is_own = similar in consumer.connectors
            return f"did you mean {similar}?{'' if is_own else f' --target {owners[similar]}'}"
    return None


def judge_unless_unknown(judgement: Judgement, unknown: tuple[Finding, ...]) -> Judgement:
    """Return a judgement of vLLM's workers; without a refusal, their connectors are unknown."""
    if not unknown:
        return judgement
    refusals = tuple(each for each in judgement.findings if each.code != UNKNOWN_WORKERS)
    return judgement._replace(findings=refusals or unknown)


def _judge_pair(
    workers: tuple[Worker, Worker], consumer: Consumer, served: ServedPair
) -> Judgement:
    """Return what vLLM says of prefill and decode, as they are started.

    Only NIXL's handshake is known here; of another connector of the consumer it is a condition.
    """
    connectors = served.connectors
    unknown = check_connectors(consumer, connectors) or _check_roles(consumer, served)
    if consumer.is_paged:
        return judge_unless_unknown(judge_workers(*workers), unknown)
    if unknown or connectors[0] is not None:
        condition = f"connect by {connectors[0]}, whose handshake is not checked"
        return Judgement(unknown, conditions=() if unknown else (condition,))
    if any(worker.request.kv_cache_dtype == QAIC_CACHE_DTYPE for worker in workers):
        note = f"vLLM: the handshake of --kv-cache-dtype {QAIC_CACHE_DTYPE} is not known here"
        return Judgement(notes=(note,))
    prefill, decode = workers
    handshake = check_handshake((prefill.layout, decode.layout), (prefill.request, decode.request))
    judgement = describe_handshake(handshake, decode.release)
    notes = (f"vLLM: not known for {reason}" for reason in handshake.unknown)
    return judgement._replace(notes=(*judgement.notes, *notes))
