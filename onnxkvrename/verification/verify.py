"""Prove what can be proved of a model as it is: above all that each KV buffer is retained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import (
    Finding,
    build_finding,
    build_names_finding,
    format_list,
    promote_to_errors,
    quote_path,
    quote_word,
)
from onnxkvrename.layout.layout import check_stamp
from onnxkvrename.limits import MAX_LISTED
from onnxkvrename.model.file import OpenModel, open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature
from onnxkvrename.options import (
    DIM,
    VERBOSE,
    Format,
    GroupWindows,
    Jobs,
    Models,
    Option,
    Pairs,
    Profile,
    Quiet,
    RulesFile,
    Strict,
)
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.checks import CONSUMER_TOKENS
from onnxkvrename.rules.feeds import (
    check_feed_names,
    check_folder_tokens,
    find_filled_outputs,
    is_filled,
)
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.kv_model import KvModel, read_kv_model, scan_model
from onnxkvrename.rules.load import format_rules_option
from onnxkvrename.rules.patterns import Pattern
from onnxkvrename.rules.pick import pick_rules
from onnxkvrename.rules.plan import KvPair, RenamePlan, TokenChange
from onnxkvrename.rules.profile import SIDES, Rules
from onnxkvrename.rules.results import ModelCheck, ModelReport, RenameJob, report_model
from onnxkvrename.rules.rewrite import describe_part
from onnxkvrename.sidecars.stale import find_stale_sidecars
from onnxkvrename.storage.read import ModelSource
from onnxkvrename.verification import trace_needs
from onnxkvrename.verification.dataflow import BufferFlow, check_buffer_flows, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.onnx_checker import check_onnx_validity
from onnxkvrename.verification.renamed_from import RenameProof, prove_renamed
from onnxkvrename.verification.running.isolated_run import check_retention
from onnxkvrename.verification.running.retention_loop import (
    RetentionRun,
    RunnableModel,
    RunnablePair,
)
from onnxkvrename.verification.strip_weights import read_model_without_weights

_DATA_CODES = ("KV501", "KV502", "KV503")


class VerifyRequest(NamedTuple):
    """What a user asks for with ``verify``: the command line and the library make one each.

    Attributes:
        checks: Further checks of each model.
    """

    models: Models = ()
    token: Annotated[
        str | None,
        Option("--prefix", "Also: this token is on every pair, and nowhere else.", "TOKEN"),
    ] = None
    select: Annotated[
        Pattern | None,
        Option(
            "--select",
            "Also: this expression matches the names of all KV buffers, and no others.",
            "REGEX",
        ),
    ] = None
    run: Annotated[
        bool, Option("--run", "Also: run the retention loop in onnxruntime (extra [run]).")
    ] = False
    reference: Annotated[
        Path | None,
        Option(
            "--reference",
            "With --run: this model must give the very same results, as the one before a rename "
            "does.",
            "FILE",
            needs=("run",),
        ),
    ] = None
    dims: Annotated[
        Mapping[str, int],
        DIM._replace(
            help="With --run: the size of a symbolic dimension, e.g. ctx_len=32; others are those "
            "of a specializations.json with the model, or guessed.",
            needs=("run",),
        ),
    ] = MappingProxyType({})
    renamed_from: Annotated[
        Path | None,
        Option(
            "--renamed-from",
            "Also: except for the names of KV buffers, this model is SOURCE to the byte, whatever "
            "tool renamed it; shows the first other difference. The order of functions, "
            "initializers and the like does not count. In a directory, the model with the same "
            "path.",
            "SOURCE",
        ),
    ] = None
    compare_data: Annotated[
        bool,
        Option(
            "--compare-data",
            "With --renamed-from: external data have the same SHA-256, too, and not only the same "
            "references.",
            needs=("renamed_from",),
        ),
    ] = False
    group_windows: GroupWindows = True
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    pairs: Pairs = None
    jobs: Jobs = None
    output_format: Format = "text"
    quiet: Quiet = False
    verbose: Annotated[
        bool, VERBOSE._replace(help="Show each buffer, and where it is updated.")
    ] = False
    checks: tuple[ModelCheck, ...] = ()


@show_briefly
class VerifiedModel(NamedTuple):
    """A model with everything that was proved of it.

    Attributes:
        report: The KV buffers and the findings, as for a rename.
        flows: How each output is computed from its input.
        run: The retention loop, if it was run.
        reference: The model that gave the same results, if there was one.
        rename_proof: The comparison with the model before its names were changed.
        model: What the checks of all models together need; ``None`` once they are done, and
            for a model that could not be read.
        filled: The outputs of buffers that are not written here: another model fills them.
    """

    report: ModelReport
    flows: tuple[BufferFlow, ...] = ()
    run: RetentionRun | None = None
    reference: Path | None = None
    rename_proof: RenameProof | None = None
    model: KvModel | None = None
    filled: frozenset[str] = frozenset()


def verify_model(path: ModelSource, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    """Verify one model, in a file or in memory; :func:`verify_window_sets` completes the report.

    Of one that is not a readable model, the error is returned.

    Raises:
        RulesError: A template of the rules makes names that could not be undone.
        KvRenameError: onnxruntime is missing, or the reference or the source cannot be read.
    """
    try:
        with open_model(path) as opened:
            verified = _verify_open_model(opened, rules, request)
            model_size = opened.file.size
    except ModelError as error:
        return VerifiedModel(ModelReport(str(path), str(path), "failed", error=error))
    if request.renamed_from is not None:
        verified = _compare_with_source(verified, path, request.renamed_from, rules, request)
    if not request.run or verified.model is None:
        return verified
    run, findings = _run_retention(verified.model, model_size, rules, request)
    proved = verified.report.findings
    is_right = run is not None and not findings
    if run is not None:
        settled = _list_settled(verified.flows, run) if is_right else ()
        proved = tuple(
            finding
            for finding in proved
            if finding.code != "KV123" and (finding.code != "KV113" or finding.name not in settled)
        )
    return verified._replace(
        run=run,
        reference=request.reference if is_right else None,
        report=verified.report._replace(findings=(*proved, *findings)),
    )


def _list_settled(flows: Iterable[BufferFlow], run: RetentionRun) -> Sequence[str]:
    """Return the outputs of which only the size was not proved, and which kept it in the run."""
    names = [
        flow.pair.sides[-1].old_name
        for flow in flows
        if flow.verdict == "updated" and flow.update.kind == "unknown"
    ]
    return [name for name in names if name in run.sized_outputs]


def _compare_with_source(
    verified: VerifiedModel, path: ModelSource, source: Path, rules: Rules, request: VerifyRequest
) -> VerifiedModel:
    proof, findings = prove_renamed(path, source, rules, compare_data=request.compare_data)
    report = verified.report
    return verified._replace(
        rename_proof=proof, report=report._replace(findings=(*report.findings, *findings))
    )


def verify_window_sets(
    verified: Sequence[VerifiedModel], rules: Rules, request: VerifyRequest
) -> tuple[VerifiedModel, ...]:
    """Return the models with the findings that all of them together show, and a final status.

    Sets are checked only if all models could be read: another may be the missing window. That
    another profile knows the names of a model is said in any case.
    """
    set_findings: list[list[Finding]] = [[] for _ in verified]
    readable = [index for index, item in enumerate(verified) if item.model is not None]
    models = [item.model._replace(is_apart=True) for item in verified if item.model is not None]
    is_complete = len(models) == len(verified)
    across = check_models_together(
        models,
        rules,
        TokenChange(request.token),
        check_current_tokens=True,
        is_complete=is_complete,
    )
    for index, found in zip(readable, across, strict=True):
        proof = verified[index].rename_proof
        is_encoder = proof is not None and bool(proof.names)
        set_findings[index] += (f for f in found if not (is_encoder and f.code == "KV001"))
    if is_complete and request.group_windows and any(map(_is_connected, models)):
        items = list(verified)
        for index, filled in enumerate(find_filled_outputs(models)):
            report = items[index].report
            dropped = [finding for finding in report.findings if is_filled(finding, filled)]
            kept = tuple(finding for finding in report.findings if finding not in dropped)
            items[index] = items[index]._replace(
                report=report._replace(findings=kept),
                filled=frozenset(finding.name for finding in dropped),
            )
        verified = items
        for index, finding in (*check_feed_names(models), *check_folder_tokens(models)):
            set_findings[index].append(finding)
    return tuple(
        _finish_report(item, findings, request)
        for item, findings in zip(verified, set_findings, strict=True)
    )


def _is_connected(model: KvModel) -> bool:
    """Return whether a model fills buffers of another one, or may be filled by one."""
    return bool(model.plan.feeds) or any(pair.may_be_alone for pair in model.pairs)


def _finish_report(
    item: VerifiedModel, set_findings: Iterable[Finding], request: VerifyRequest
) -> VerifiedModel:
    findings = (*item.report.findings, *set_findings)
    if request.strict:
        findings = promote_to_errors(findings)
    report = item.report._replace(findings=findings)
    report = report._replace(status="failed" if report.failed else "unchanged")
    return item._replace(report=report, model=None)


def _verify_open_model(opened: OpenModel, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    path, beside = opened.file.path, opened.data_beside
    model = scan_model(opened.source, opened.signature, path, rules, data_beside=beside).model
    model = trace_needs(opened.source, model)
    flows, proofs = prove_retention(
        opened.source, model.pairs, model.plan.updates_by_kind, rules.name
    )
    select, job = request.select, build_job(path)
    checks = (_check_sidecars, *request.checks) if beside is not None else ()
    findings = (
        *model.findings,
        *proofs,
        *_check_token(model, rules, request.token),
        *(_check_selection(model.signature, model.plan, select) if select is not None else ()),
        *check_stamp(model),
        *(found for check in checks for found in check(job, rules, model.plan)),
    )
    report = report_model(model)._replace(findings=findings)
    if not request.group_windows:
        model = model.set_apart()
    return VerifiedModel(report, flows, model=model)


def _check_sidecars(job: RenameJob, rules: Rules, plan: RenamePlan) -> Iterable[Finding]:
    return find_stale_sidecars(job.model, plan.pairs, rules, is_error=True)


def prove_retention(
    source: ByteSource,
    pairs: Sequence[KvPair],
    updates_by_kind: Mapping[str, str] = MappingProxyType({}),
    profile: str = "",
) -> tuple[tuple[BufferFlow, ...], tuple[Finding, ...]]:
    """Prove that buffers are retained and that the model is valid, without its weights.

    Args:
        source: The bytes of the model.
        pairs: The KV buffers.
        updates_by_kind: How buffers of each kind are meant to be updated.
        profile: What messages call the profile that says it.

    Returns:
        How each output is computed from its input, and the findings KV110, KV113 to KV115,
        KV120, KV123 and KV124.

    Raises:
        ModelError: Protobuf cannot parse the bytes.
    """
    model = read_model_without_weights(source)
    flows = trace_buffer_flows(read_graph(source), pairs)
    return flows, (
        *check_buffer_flows(flows, updates_by_kind, profile),
        *check_onnx_validity(model, source),
    )


def count_proved_flows(
    flows: Iterable[BufferFlow], updates_by_kind: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Return how many buffers are shown to be updated as the rules say: nothing is found there."""
    faults = (check_buffer_flows((flow,), updates_by_kind) for flow in flows)
    return sum(not any(True for _ in found) for found in faults)


def _check_token(model: KvModel, rules: Rules, token: str | None) -> Iterator[Finding]:
    """Yield KV116: a consumer selects every name that contains the token, and no other."""
    signature, plan = model.signature, model.plan
    sides = (*(s for pair in plan.pairs for s in pair.sides), *(f.side for f in plan.feeds))
    tokens = {side.old_name: side.token for side in sides}
    expected = plan.token_change.final_token if token is None else token
    missing = [name for name, carried in tokens.items() if carried != expected]
    if expected and missing:
        different = sorted({tokens[name] for name in missing} - {""})
        instead = f", but {format_list(different)}" if different else ""
        ignored = f"; a consumer that selects {expected} ignores"
        yield build_names_finding(
            "KV116",
            missing,
            (
                f"does not carry {expected}{instead}{ignored} this buffer",
                f"of {len(tokens):,} do not carry {expected}{instead}{ignored} these buffers",
            ),
            _suggest_token(model.path, rules, expected, {tokens[name] for name in missing}),
        )
    names = {value.name for value in (*signature.inputs, *signature.outputs)}
    extra = sorted(name for name in names - tokens.keys() if expected and expected in name)
    if extra:
        yield build_names_finding(
            "KV116",
            extra,
            (
                f"contains {expected}, but is not a KV buffer; a consumer would select it",
                f"contain {expected}, but are not KV buffers; a consumer would select them",
            ),
            "choose another token",
            shown=MAX_LISTED,
        )


def _suggest_token(path: str, rules: Rules, expected: str, tokens: Set[str]) -> str:
    """Return what to do where names have other tokens than the one that was asked for.

    The `expected` one was asked for. The tokens are those of the names without it; one of them is
    empty if a name has none.
    """
    known, consumer = CONSUMER_TOKENS.get(expected.lower(), (expected, ""))
    words = f"{quote_path(path)} --prefix {quote_word(known)}"
    if tokens == {known}:
        words = f"verify {words}"
    elif tokens != {""}:
        words += " --replace"
    command = f"`onnxkvrename {words}{format_rules_option(rules)}`"
    return command if known == expected else f"{consumer} selects names with {known}: {command}"


def _check_selection(signature: Signature, plan: RenamePlan, select: Pattern) -> Iterator[Finding]:
    """Yield KV117: the expression must match all KV names and no others."""
    names = dict.fromkeys(value.name for value in (*signature.inputs, *signature.outputs))
    matched = {name for name in names if select.matches(name)}
    fed_names = {feed.side.old_name for feed in plan.feeds}
    for wrong, messages in (
        (
            plan.old_names - matched,
            (
                "is a KV buffer, but the expression does not match it",
                "are KV buffers, but the expression does not match them",
            ),
        ),
        (
            matched - plan.old_names - fed_names,
            (
                "is not a KV buffer, but the expression matches it",
                "are not KV buffers, but the expression matches them",
            ),
        ),
    ):
        if wrong:
            yield build_names_finding(
                "KV117",
                [name for name in names if name in wrong],
                messages,
                "an expression must match whole names, as in .*vllmKvCache.*",
                shown=MAX_LISTED,
            )


def _run_retention(
    model: KvModel, model_size: int, rules: Rules, request: VerifyRequest
) -> tuple[RetentionRun | None, tuple[Finding, ...]]:
    """Run the retention loop; return KV119 if it could not be run."""
    expected, is_converted = None, False
    if request.reference is not None:
        own_rules = _choose_reference_rules(request.reference, rules, model)
        is_converted = own_rules.name != rules.name
        with open_model(request.reference) as opened:
            source, signature = opened.source, opened.signature
            scanned = scan_model(
                source, signature, request.reference, own_rules, data_beside=opened.file
            )
            expected = scanned.model, opened.file.size, own_rules
        ends = [{v.name for v in (*s.inputs, *s.outputs)} for s in (signature, model.signature)]
        if not model.pairs and ends[0] != ends[1]:
            message = (
                "the reference has different names, and no KV buffer is known: they are not run"
            )
            hint = "`--pairs dataflow` finds buffers in the graph, whatever their names are"
            return None, (build_finding("KV118", "", message, hint),)
    try:
        reference = None
        if expected is not None:
            reference = build_runnable_model(*expected, by_role=is_converted)
        runnable = build_runnable_model(model, model_size, rules, by_role=is_converted)
        return check_retention(runnable, reference, dims=request.dims)
    except ModelError as error:
        where = f" ({error.path})" if error.path not in (None, model.path) else ""
        hint = error.hint or "what can be proved without running is proved above"
        message = f"the retention loop could not be run{where}: {error.message}"
        return None, (build_finding("KV119", "", message, hint),)


def _choose_reference_rules(reference: Path, rules: Rules, model: KvModel) -> Rules:
    """Return the rules of a reference, whose names another profile may know: a conversion."""
    signature = read_kv_model(reference, rules, check_data=False).signature
    names = {value.name for value in (*signature.inputs, *signature.outputs)}
    if not model.pairs or any(rules.match(side, n) for n in names for side in SIDES):
        return rules
    return pick_rules([reference], None, None)


def build_runnable_model(
    model: KvModel, model_size: int, rules: Rules | None = None, *, by_role: bool = False
) -> RunnableModel:
    """Return what a run needs of a model.

    The rules say what symbols mean, and which inputs choose a branch. With `by_role`, buffers are
    identified by what is in them, as in another profile.

    Raises:
        ModelError: Not all of its external data can be used: onnxruntime must not open it.
    """
    unusable = [finding for finding in model.findings if finding.code in _DATA_CODES]
    if unusable:
        message = f"its external data cannot be used ({unusable[0].code})"
        raise ModelError(message, path=model.path)
    pairs = [
        RunnablePair(
            (pair.scope, _identify_part(pair, by_role=by_role), str(pair.layer)),
            pair.input.old_name if pair.input is not None else None,
            pair.output.old_name if pair.output is not None else None,
            model.plan.updates_by_kind.get(pair.kind, ""),
        )
        for pair in model.pairs
    ]
    data_size = sum(file.size for file in model.data_files)
    branches = {} if rules is None else {rule.input_name: rule.first for rule in rules.branches}
    meanings = model.plan.dims
    return RunnableModel(Path(model.path), pairs, model_size + data_size, meanings, branches)


def _identify_part(pair: KvPair, *, by_role: bool) -> str:
    if not by_role:
        return pair.buffer
    return describe_part(pair.cache or pair.kind, pair.buffer, pair.role)
