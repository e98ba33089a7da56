"""Prove that buffers are retained."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxkvrename.api.arguments import PathLike, RulesLike, as_optional_path, as_path, load_rules
from onnxkvrename.rules.patterns import compile_pattern
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
        strict: Treat every warning as an error.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The report, and for each buffer how its output is computed from its input.

    Raises:
        RulesError: The rules or the expression cannot be used.
        ModelError: The model cannot be read.
        TypeError: An argument has the wrong type.
    """
    request = VerifyRequest(
        token=token,
        select_pattern=None if select is None else compile_pattern(select),
        run_in_onnxruntime=run,
        reference=as_optional_path(reference, "reference"),
        dims=MappingProxyType(dict(dims or {})),
        strict=strict,
    )
    loaded_rules = load_rules(rules)
    verified = verify_model(as_path(model, "model"), loaded_rules, request)
    (verified,) = verify_window_sets([verified], loaded_rules, request)
    if verified.report.error is not None:
        raise verified.report.error
    return verified
