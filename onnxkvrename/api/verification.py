"""Prove that buffers are retained, and find a model's buffers by its dataflow, with any names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    as_optional_path,
    as_optional_text,
    as_path,
    as_paths,
    as_sizes,
    as_text,
    check_flags,
    load_rules_for,
)
from onnxkvrename.errors import RulesError
from onnxkvrename.qefficient.export_cache import check_cache_state
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.patterns import Pattern, compile_pattern
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


def verify(
    model: PathLike,
    *,
    token: str | None = None,
    select: str | None = None,
    run: bool = False,
    reference: PathLike | None = None,
    dims: Mapping[str, int] | None = None,
    renamed_from: PathLike | None = None,
    compare_data: bool = False,
    strict: bool = False,
    rules: RulesLike = None,
) -> VerifiedModel:
    """Prove that every KV buffer of a model is retained; write nothing.

    Args:
        model: The model's path.
        token: Also prove that every KV name carries this token, and no other name does.
        select: Also prove that this regular expression matches all KV names, and no others.
        run: Also run the retention loop in onnxruntime.
        reference: With ``run``: a model that must give the same results.
        dims: With ``run``: sizes of symbolic dimensions.
        renamed_from: Also prove that this model is that one, except for the names of KV buffers.
        compare_data: With ``renamed_from``: compare the contents of external data as well.
        strict: Treat every warning as an error.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The report, and for each buffer how its output is computed from its input.

    Raises:
        RulesError: The rules, the token or the expression cannot be used.
        ValueError: ``reference`` or ``dims`` without ``run``; ``compare_data``
            without ``renamed_from``.
        ModelError: The model cannot be read.
        TypeError: An argument has the wrong type.

    Examples:
        >>> verified = onnxkvrename.verify("model.onnx")
        >>> verified.report.failed, {flow.verdict for flow in verified.flows}
        (False, {'updated'})
    """
    path = as_path(model, "model")
    check_flags(run=run, compare_data=compare_data, strict=strict)
    if not run and (reference is not None or dims):
        raise ValueError("reference and dims require run=True")
    if as_optional_text(token, "token") is not None:
        check_token_change(TokenChange(token))
    if renamed_from is None and compare_data:
        raise ValueError("compare_data requires renamed_from")
    request = VerifyRequest(
        models=(path,),
        token=token,
        select=None if select is None else _compile_select(as_text(select, "select")),
        run=run,
        reference=as_optional_path(reference, "reference"),
        dims=as_sizes(dims, "dims"),
        renamed_from=as_optional_path(renamed_from, "renamed_from"),
        compare_data=compare_data,
        strict=strict,
        checks=(check_cache_state,),
    )
    return _verify_model(path, load_rules_for(rules, [path]), request)


def _verify_model(path: Path, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    verified = verify_model(path, rules, request)
    (verified,) = verify_window_sets([verified], rules, request)
    if verified.report.error is not None:
        raise verified.report.error
    return verified


def _compile_select(pattern: str) -> Pattern:
    try:
        return compile_pattern(pattern)
    except ValueError as error:
        raise RulesError(f"select={pattern!r}: the expression {error}") from None


def find_pairs(model: PathLike) -> tuple[StatePair, ...]:
    """Return each input of a model that an output is a later state of, with that output.

    Args:
        model: The model's path.

    Returns:
        The pairs in the order of the inputs; what cannot be proved is in none.

    Raises:
        ModelError: The model cannot be read.
        TypeError: The argument has the wrong type.

    Examples:
        >>> [pair.input.name for pair in onnxkvrename.find_pairs("model.onnx")]
        ['past_key.0', 'past_value.0', 'past_key.1', 'past_value.1']
    """
    return trace_model(as_path(model, "model")).pairs


def suggest_rules(models: PathLike | Iterable[PathLike], *, token: str | None = None) -> Rules:
    """Return rules for exactly the pairs that the graphs of some models show, for ``rules=``.

    Args:
        models: The path of a model, or several.
        token: The token that names may carry already; the rules list them without it.

    Returns:
        The rules.

    Raises:
        RulesError: No model has states, no rules fit all of them, or the token cannot be used.
        ModelError: A model cannot be read.
        TypeError: An argument has the wrong type.

    Examples:
        >>> rules = onnxkvrename.suggest_rules("model.onnx")
        >>> onnxkvrename.rename("model.onnx", "VLLM", rules=rules, dry_run=True).status
        'would-rename'
    """
    if token is not None:
        check_token_change(TokenChange(as_text(token, "token")))
    return infer_rules(
        [trace_model(model) for model in as_paths(models)], [token] if token else []
    ).rules
