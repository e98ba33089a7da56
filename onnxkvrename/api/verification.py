"""Prove that buffers are retained, and find a model's buffers by its dataflow, with any names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.files.read import MemoryFile
from onnxkvrename.handoff.target import TargetCheck, check_target
from onnxkvrename.qefficient.export_reuse import check_exports
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification import list_buffer_updates
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model
from onnxkvrename.verification.pairs.unnamed_caches import explain_no_buffers
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    build_rename,
    verify_model,
    verify_window_sets,
)


@speak_python
def verify(
    model: ModelLike,
    *,
    token: str | None = None,
    target: str | None = None,
    full_transfer: bool = False,
    renamed_from: PathLike | None = None,
    strict: bool = False,
    rules: RulesLike = None,
) -> VerifiedModel:
    """Prove that every KV buffer of a model is retained; write nothing.

    Args:
        model: The model's path, its bytes or a ``ModelProto``.
        token: Also prove that every KV name carries this token, and no other name does.
        target: Also prove that this consumer can use the buffers.
        full_transfer: With ``target``: it transfers all of each buffer, not only the prompt.
        renamed_from: Also prove that this model is the rename of that one, to the byte.
        strict: Treat every warning as an error.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The report, and for each buffer how its output is computed from its input.

    Raises:
        RulesError: The rules or the token cannot be used.
        ModelError: The model cannot be read.
        TypeError: An argument has the wrong type.

    Examples:
        >>> verified = onnxkvrename.verify("model.onnx")
        >>> verified.report.failed, {flow.verdict for flow in verified.flows}
        (False, {'updated'})
    """
    arguments = read_arguments(verify, locals())
    source = arguments["model"]
    request = build_request(VerifyRequest, arguments)
    if token is not None:
        check_token_change(TokenChange(token))
    found = find_rules(arguments["profile"], arguments["rules"], [source])
    ((verified,), _) = verify_together([verify_model(source, found, request)], found, request)
    report = verified.report
    if report.error is not None:
        raise report.error
    if isinstance(source, MemoryFile):
        (findings,) = explain_no_buffers([report.findings], [source], token, str)
        return verified._replace(report=report._replace(findings=findings))
    return verified


def verify_together(
    models: Sequence[VerifiedModel], rules: Rules, request: VerifyRequest
) -> tuple[tuple[VerifiedModel, ...], TargetCheck | None]:
    """Return verified models with what all of them show together, also for a consumer.

    If a model cannot be read, nothing is checked for the consumer, and its error says so.

    Args:
        models: The models.
        rules: The rules that recognize KV names and the parts of sets.
        request: What is asked for.

    Raises:
        KvRenameError: There is no such consumer.
    """
    readable = [model.model for model in models if model.model is not None]
    in_cache = partial(check_exports, rules=rules)
    if request.target is None or len(readable) < len(models):
        for error in (model.report.error for model in models if request.target and readable):
            if error is not None:
                sentence = f"the other models were not checked for {request.target}"
                error.hint = f"{error.hint}; {sentence}" if error.hint else sentence
        return verify_window_sets(models, rules, request, check_reports=in_cache), None
    check = check_target(
        readable,
        {model.report.path: list_buffer_updates(model.flows) for model in models},
        rules,
        build_rename(request),
        strict=request.strict,
    )
    found = [own for each in check.sets for own in each.list_own_findings()]
    verified = list(verify_window_sets(models, rules, request, found, in_cache))
    for index, error in check.refused.items():
        report = verified[index].report
        if not report.failed:
            report = report._replace(status="failed", error=error)
            verified[index] = verified[index]._replace(report=report)
    return tuple(verified), check


@speak_python
def find_pairs(model: ModelLike) -> tuple[StatePair, ...]:
    """Return each input of a model that an output is a later state of, with that output.

    Args:
        model: The model's path, its bytes or a ``ModelProto``.

    Returns:
        The pairs in the order of the inputs; what cannot be proved is in none.

    Raises:
        ModelError: The model cannot be read.
        TypeError: The argument has the wrong type.

    Examples:
        >>> [pair.input.name for pair in onnxkvrename.find_pairs("model.onnx")]
        ['past_key.0', 'past_value.0', 'past_key.1', 'past_value.1']
    """
    return trace_model(read_arguments(find_pairs, locals())["model"]).pairs


@speak_python
def suggest_rules(model: ModelLike) -> Rules:
    """Return rules for exactly the caches that the graph of a model shows, for ``rules=``.

    Args:
        model: The model's path, its bytes or a ``ModelProto``.

    Returns:
        The rules.

    Raises:
        RulesError: The model has no caches, or no rules fit them.
        ModelError: The model cannot be read.
        TypeError: The argument has the wrong type.

    Examples:
        >>> rules = onnxkvrename.suggest_rules("model.onnx")
        >>> onnxkvrename.rename("model.onnx", "VLLM", rules=rules, dry_run=True).status
        'would-rename'
    """
    return infer_rules(trace_model(read_arguments(suggest_rules, locals())["model"])).rules
