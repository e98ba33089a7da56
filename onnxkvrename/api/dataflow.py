"""Functions that find a model's buffers by its dataflow, with any names."""

from __future__ import annotations

from collections.abc import Iterable

from onnxkvrename.api.arguments import PathLike, as_path, as_paths, as_text
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model


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
