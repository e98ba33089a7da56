"""Prove what can be proved of a model as it is: above all that each KV buffer is retained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import ModelSource, is_in_memory
from onnxkvrename.findings import Finding, build_names_finding, promote_to_errors
from onnxkvrename.limits import MAX_LISTED
from onnxkvrename.model.file import OpenModel, open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.options import (
    VERBOSE,
    Format,
    FullTransferOfTarget,
    Jobs,
    Models,
    Option,
    Profile,
    Quiet,
    RulesFile,
    Strict,
    format_command,
)
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.checks import CONSUMER_TOKENS, find_appended_word, find_flat_values
from onnxkvrename.rules.feeds import (
    check_feed_names,
    check_folder_tokens,
    find_filled_outputs,
    is_filled,
)
from onnxkvrename.rules.kv_model import KvModel, scan_model
from onnxkvrename.rules.lone_sides import list_unmatched
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import RULES_FILE, Request, format_rename, suggest_rename
from onnxkvrename.rules.results import ModelReport, ReportCheck, report_model
from onnxkvrename.sidecars.stale import find_stale_sidecars
from onnxkvrename.text import format_list
from onnxkvrename.verification import trace_needs
from onnxkvrename.verification.dataflow import BufferFlow, check_buffer_flows, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.onnx_checker import check_onnx_validity
from onnxkvrename.verification.pairs.other_sides import explain_lone_sides, join_commands
from onnxkvrename.verification.pairs.unnamed_caches import (
    explain_no_buffers,
    find_unnamed_caches,
)
from onnxkvrename.verification.renamed_from import RenameProof, prove_renamed
from onnxkvrename.verification.strip_weights import read_model_without_weights

_TOKEN_CODES = ("KV116", "KV303", "KV601")
"""Findings that a rename fixes."""
_ALLOWED_CODES = ("KV115", "KV121", "KV402", "KV404", "KV405", "KV406")
"""Errors by which no rename is refused."""
_TRACED_CODES = ("KV110", "KV113", "KV114", "KV120")
"""Errors by which only a rename for a consumer is refused."""


class VerifyRequest(NamedTuple):
    """What a user asks for with ``verify``: the command line and the library make one each."""

    models: Models = ()
    token: Annotated[
        str | None,
        Option("--prefix", "Also: this token is on every pair, and nowhere else.", "TOKEN"),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "--target",
            "Also: this consumer selects, orders, pairs and moves the buffers of each model or set "
            "of windows. One of: {names}.",
            "NAME",
            names="consumers",
            envvar="ONNXKVRENAME_TARGET",
            yields_to=("token",),
        ),
    ] = None
    full_transfer: FullTransferOfTarget = False
    renamed_from: Annotated[
        Path | None,
        Option(
            "--renamed-from",
            "Also: this model is the rename of SOURCE to the byte, whatever tool made it; else the "
            "first difference is named. External data are not read. In a directory, the model "
            "with the same path.",
            "SOURCE",
        ),
    ] = None
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    jobs: Jobs = None
    output_format: Format = "text"
    quiet: Quiet = False
    verbose: Annotated[
        bool,
        VERBOSE._replace(
            help="Show each buffer, where it is updated, and its place in the consumer's order."
        ),
    ] = False


@show_briefly
class VerifiedModel(NamedTuple):
    """A model with everything that was proved of it.

    Attributes:
        report: The KV buffers and the findings, as for a rename.
        flows: How each output is computed from its input.
        rename_proof: The comparison with the model before its names were changed.
        model: What the checks of all models together need; ``None`` once they are done, and
            for a model that could not be read.
        filled: The outputs of buffers that are not written here: another model fills them.
    """

    report: ModelReport
    flows: tuple[BufferFlow, ...] = ()
    rename_proof: RenameProof | None = None
    model: KvModel | None = None
    filled: frozenset[str] = frozenset()


def verify_model(path: ModelSource, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    """Verify one model, in a file or in memory; :func:`verify_window_sets` completes the report.

    Of one that is not a readable model, the error is returned.

    Raises:
        RulesError: A rule makes names that could not be undone.
        KvRenameError: The source cannot be read.
    """
    try:
        with open_model(path) as opened:
            verified = _verify_open_model(opened, rules, request)
    except ModelError as error:
        return VerifiedModel(ModelReport(str(path), str(path), "failed", error=error))
    if request.renamed_from is not None:
        verified = _compare_with_source(verified, path, request.renamed_from, rules, request)
    return verified


def _compare_with_source(
    verified: VerifiedModel, path: ModelSource, source: Path, rules: Rules, request: VerifyRequest
) -> VerifiedModel:
    proof, findings = prove_renamed(path, source, rules)
    report = verified.report
    return verified._replace(
        rename_proof=proof, report=report._replace(findings=(*report.findings, *findings))
    )


def verify_window_sets(
    verified: Sequence[VerifiedModel],
    rules: Rules,
    request: VerifyRequest,
    of_consumer: Iterable[tuple[int, Finding]] = (),
    check_reports: ReportCheck = tuple,
) -> tuple[VerifiedModel, ...]:
    """Return the models with the findings that all of them together show, and a final status.

    Sets are checked only if all models could be read: another may be the missing window. That
    another profile knows the names of a model is said in any case.

    Args:
        verified: All models of the command.
        rules: The rules that recognize KV names and the parts of sets.
        request: What is asked for.
        of_consumer: What a consumer cannot use, each finding after the position of its model.
        check_reports: A further check of all models.
    """
    set_findings: list[list[Finding]] = [[] for _ in verified]
    readable = [index for index, item in enumerate(verified) if item.model is not None]
    models = [item.model._replace(is_apart=True) for item in verified if item.model is not None]
    is_complete = len(models) == len(verified)
    rename = build_rename(request)
    across = check_models_together(models, rules, rename, is_complete=is_complete)

    def format_again(*paths: Path) -> str:
        shown = request.models if len(paths) == len(models) else paths
        return _format_verify(shown, request, rules=RULES_FILE)

    if not any(is_in_memory(model.path) for model in models):
        paths = [Path(model.path) for model in models]
        explained = explain_no_buffers(across, paths, request.token, format_again)
        across = [[*found] for found in explained]
    for index, found in zip(readable, across, strict=True):
        proof = verified[index].rename_proof
        is_encoder = proof is not None and bool(proof.names) and request.target is None
        set_findings[index] += (f for f in found if not (is_encoder and f.code == "KV001"))
    unmatched = list_unmatched(models, rules)
    unnamed = find_unnamed_caches(models, unmatched, request.token, format_again)
    for index, finding in unnamed:
        set_findings[readable[index]].append(finding)
    if is_complete and any(map(_is_connected, models)):
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
        for index, finding in (
            *check_feed_names(models),
            *check_folder_tokens(models, rules, rename),
        ):
            set_findings[index].append(finding)
    items = list(verified)
    for index, finding in of_consumer:
        report = items[index].report
        findings = _add_stronger(report.findings, finding, selects_token=rename.token is not None)
        items[index] = items[index]._replace(report=report._replace(findings=findings))
    if any(each.code == "KV303" for findings in set_findings for each in findings):
        items = [_drop_lacking_names(item, rename.token) for item in items]
    reports = [
        item.report._replace(findings=(*item.report.findings, *findings))
        for item, findings in zip(items, set_findings, strict=True)
    ]
    reports = [
        _defer_to_errors(report, reports if item.model and item.model.part else [report])
        for item, report in zip(items, reports, strict=True)
    ]
    return tuple(
        item._replace(report=_settle(report, request), model=None)
        for item, report in zip(items, check_reports(reports), strict=True)
    )


def _defer_to_errors(report: ModelReport, together: Iterable[ModelReport]) -> ModelReport:
    """Return a report whose hints about tokens name the error by which a rename would be refused.

    Args:
        report: The report on a model.
        together: The reports on all models that are renamed with it.
    """
    errors = {
        finding.code
        for each in together
        for finding in each.findings
        if finding.severity == "error" and finding.code < "KV600"
    }.difference(_TOKEN_CODES, _ALLOWED_CODES)
    findings = []
    for finding in report.findings:
        refusing = errors if "--target" in finding.hint else errors.difference(_TRACED_CODES)
        if refusing and finding.code in _TOKEN_CODES:
            finding = finding._replace(hint=f"fix {min(refusing)} first")
        findings.append(finding)
    return report._replace(findings=tuple(findings))


def _drop_lacking_names(item: VerifiedModel, token: str | None) -> VerifiedModel:
    """Return a file of a set without findings about names that lack the token: KV303 has them."""
    if item.model is None or item.model.part is None:
        return item
    sides = (side for pair in item.model.pairs for side in pair.sides)
    lacking = {side.old_name for side in sides if side.token != token}
    kept = (
        finding
        for finding in item.report.findings
        if finding.code not in ("KV116", "KV601") or finding.name not in lacking
    )
    return item._replace(report=item.report._replace(findings=tuple(kept)))


def _add_stronger(
    own: Sequence[Finding], finding: Finding, *, selects_token: bool
) -> tuple[Finding, ...]:
    """Return findings with one of a consumer: an error replaces what has the same code.

    A warning about a buffer that has one of this code already is left out, and that the consumer
    does not select or pair a name whose other side is missing. Of names with different tokens, a
    consumer that selects by a token says more, and one that does not says less.
    """
    if finding.code == "KV601" and any(each.code == "KV116" for each in own):
        if not selects_token:
            return tuple(own)
        own = [each for each in own if each.code != "KV116"]
    unpaired = {each.name for each in own if each.code in ("KV101", "KV102")}
    if (finding.code == "KV601" and finding.name in unpaired) or (
        finding.code == "KV609" and unpaired
    ):
        return tuple(own)
    if finding.severity == "error":
        return (*(each for each in own if each.code != finding.code), finding)
    is_there = any((each.code, each.name) == (finding.code, finding.name) for each in own)
    return tuple(own) if is_there else (*own, finding)


def _is_connected(model: KvModel) -> bool:
    """Return whether a model fills buffers of another one, or may be filled by one."""
    return bool(model.plan.feeds) or any(pair.may_be_alone for pair in model.pairs)


def _settle(report: ModelReport, request: VerifyRequest) -> ModelReport:
    """Return the report with its final findings and status."""
    if request.strict:
        report = report._replace(findings=promote_to_errors(report.findings))
    return report._replace(status="failed" if report.failed else "unchanged")


def _verify_open_model(opened: OpenModel, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    path, beside = opened.file.path, opened.data_beside
    model = scan_model(opened.source, opened.signature, path, rules, data_beside=beside).model
    model = trace_needs(opened.source, model)
    again = _format_verify((path,), request, rules=RULES_FILE)
    hint = "" if is_in_memory(model.path) else join_commands(model.path, again)
    flows, proofs = prove_retention(
        opened.source, model.pairs, model.plan.updates_by_kind, rules.name, hint
    )
    flat = find_flat_values(model.plan)
    sides = (p.sides for p in model.pairs if any(side.old_name in flat for side in p.sides))
    unlike = {side.old_name for own_sides in sides for side in own_sides}
    proofs = tuple(finding for finding in proofs if finding.name not in unlike)
    own = explain_lone_sides(opened.source, model, model.findings, again)
    is_asked = request.token is not None or model.plan.feeds
    appended = "" if is_asked else find_appended_word(model.pairs)
    tokens: tuple[Finding, ...] = ()
    if appended:
        tokens = (_build_appended_finding(model, rules, appended),)
    elif request.token is not None or request.target is None:  # else the consumer's checks say it
        tokens = tuple(_check_token(model, rules, request))
    if tokens:  # these say more about the same names, and have the command
        own = tuple(finding for finding in own if finding.code != "KV202")
    stale: Iterable[Finding] = ()
    if beside is not None:
        stale = find_stale_sidecars(path, model.pairs, rules, is_error=True)
    findings = (*own, *proofs, *tokens, *stale)
    report = report_model(model)._replace(findings=findings)
    return VerifiedModel(report, flows, model=model)


def build_rename(request: VerifyRequest) -> Request:
    """Return the rename that gives the models the token that they are verified for."""
    of_target = (t for t, consumer in CONSUMER_TOKENS.values() if consumer == request.target)
    return Request(
        request.models,
        next(of_target, request.token),
        request.target,
        full_transfer=request.full_transfer,
        profile=request.profile,
        rules=request.rules,
        check=True,
    )


def _format_verify(models: Sequence[Path], request: VerifyRequest, **changes: Any) -> str:
    """Return the command that verifies models as asked for, with other values in some fields."""
    if "rules" in changes:
        request = request._replace(profile=None)
    return format_command("verify", request._replace(models=tuple(models), **changes))


def prove_retention(
    source: ByteSource,
    pairs: Sequence[KvPair],
    updates_by_kind: Mapping[str, str] = MappingProxyType({}),
    profile: str = "",
    hint: str = "",
) -> tuple[tuple[BufferFlow, ...], tuple[Finding, ...]]:
    """Prove that buffers are retained and that the model is valid, without its weights.

    Args:
        source: The bytes of the model.
        pairs: The KV buffers.
        updates_by_kind: How buffers of each kind are meant to be updated.
        profile: What messages call the profile that says it.
        hint: How to get rules with other updates.

    Returns:
        How each output is computed from its input, and the findings KV110, KV113 to KV115,
        KV120, KV123 and KV124.

    Raises:
        ModelError: Protobuf cannot parse the bytes.
    """
    model = read_model_without_weights(source)
    flows = trace_buffer_flows(read_graph(source), pairs)
    return flows, (
        *check_buffer_flows(flows, updates_by_kind, profile, hint),
        *check_onnx_validity(model, source),
    )


def count_proved_flows(
    flows: Iterable[BufferFlow], updates_by_kind: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Return how many buffers are shown to be updated as the rules say: nothing is found there."""
    faults = (check_buffer_flows((flow,), updates_by_kind) for flow in flows)
    return sum(not any(True for _ in found) for found in faults)


def _build_appended_finding(model: KvModel, rules: Rules, word: str) -> Finding:
    """Return KV116 for names that end with a word as with a token, on one side of each buffer."""
    sides = (side for pair in model.pairs for side in pair.sides)
    return build_names_finding(
        "KV116",
        [side.old_name for side in sides if side.token],
        (
            f"has {word} on one side of its buffer only, which no rename leaves",
            f"have {word} on one side of their buffers only, which no rename leaves",
        ),
        f"`{format_rename(Request((Path(model.path),), strip=True), rules)}` removes it",
    )


def _check_token(model: KvModel, rules: Rules, request: VerifyRequest) -> Iterator[Finding]:
    """Yield KV116: a consumer selects every name that contains the token, and no other."""
    signature, plan = model.signature, model.plan
    sides = (*(s for pair in plan.pairs for s in pair.sides), *(f.side for f in plan.feeds))
    tokens = {side.old_name: side.token for side in sides}
    expected = plan.token_change.final_token if request.token is None else request.token
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
            _suggest_token(model, rules, request, expected, {tokens[name] for name in missing}),
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


def _suggest_token(
    model: KvModel, rules: Rules, request: VerifyRequest, expected: str, tokens: Set[str]
) -> str:
    """Return what to do where names have other tokens than the one that was asked for.

    The `expected` one was asked for. The tokens are those of the names without it; one of them is
    empty if a name has none.
    """
    path = Path(model.path)
    known, consumer = CONSUMER_TOKENS.get(expected.lower(), (expected, ""))
    is_joined = model.part is not None or model.plan.feeds or model.needs
    models = request.models if is_joined else (path,)
    rename = Request(models, known, replace=tokens != {""})
    command = suggest_rename(rename, rules)
    if tokens == {known}:
        command = f"`{_format_verify((path,), request, token=known)}`"
    return command if known == expected else f"{consumer} selects names with {known}: {command}"
