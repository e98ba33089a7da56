"""Prove that buffers are retained, and find a model's buffers by its dataflow, with any names."""

from __future__ import annotations

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.qefficient.export_cache import check_cache_state
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    verify_model,
    verify_window_sets,
)


@speak_python
def verify(
    model: ModelLike,
    *,
    token: str | None = None,
    renamed_from: PathLike | None = None,
    strict: bool = False,
    rules: RulesLike = None,
) -> VerifiedModel:
    """Prove that every KV buffer of a model is retained; write nothing.

    Args:
        model: The model's path, its bytes or a ``ModelProto``.
        token: Also prove that every KV name carries this token, and no other name does.
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
    request = build_request(
        VerifyRequest,
        arguments,
        checks=(check_cache_state,),
    )
    if token is not None:
        check_token_change(TokenChange(token))
    found = find_rules(arguments["profile"], arguments["rules"], [source])
    (verified,) = verify_window_sets([verify_model(source, found, request)], found, request)
    if verified.report.error is not None:
        raise verified.report.error
    return verified


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
