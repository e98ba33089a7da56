"""Rename models in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxkvrename.api.arguments import (
    RulesLike,
    as_optional_text,
    check_flags,
    describe_type,
    load_rules,
    suggest_for_file,
    suggest_other_form,
)
from onnxkvrename.findings import CheckError
from onnxkvrename.renaming.run import rename_in_memory
from onnxkvrename.rules.load import AUTO_PROFILE
from onnxkvrename.rules.pick import pick_rules_for_bytes
from onnxkvrename.rules.plan import TokenChange

if TYPE_CHECKING:
    from onnx import ModelProto


def rename_bytes(
    data: bytes,
    token: str | None = None,
    *,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
) -> bytes:
    """Rename the KV buffers of a serialized model in memory.

    Nothing but the names changes, to the byte. External data is neither read nor checked.

    Args:
        data: A serialized ``ModelProto``.
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        strip: Remove the token.
        replace: Replace a different token.
        normalize: Give outputs the suffix that consumers pair with an input.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The renamed model; ``data`` itself if no name changes.

    Raises:
        CheckError: A check refuses the model; ``findings`` of the error say why.
        ModelError: The bytes are not a readable model.
        RulesError: The token or the rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> from pathlib import Path
        >>> data = Path("model.onnx").read_bytes()
        >>> renamed = onnxkvrename.rename_bytes(data, "VLLM")
        >>> onnxkvrename.rename_bytes(renamed, strip=True) == data
        True
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        hint = suggest_other_form(data) or suggest_for_file(data)
        raise TypeError(f"data must be bytes, not {describe_type(data)}{hint}")
    check_flags(strip=strip, replace=replace, normalize=normalize)
    change = TokenChange(as_optional_text(token, "token"), strip, replace, normalize)
    data = bytes(data)
    if rules == AUTO_PROFILE:
        return rename_in_memory(data, change, pick_rules_for_bytes(data))
    try:
        return rename_in_memory(data, change, load_rules(rules))
    except CheckError as error:
        if rules is not None or all(finding.code != "KV001" for finding in error.findings):
            raise
        picked = pick_rules_for_bytes(data)
        if picked.choice is None:
            raise
    return rename_in_memory(data, change, picked)


def rename_model(
    model: ModelProto,
    token: str | None = None,
    *,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
) -> ModelProto:
    """Rename the KV buffers of a ``ModelProto`` in memory.

    Args:
        model: The model; it stays as it is.
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        strip: Remove the token.
        replace: Replace a different token.
        normalize: Give outputs the suffix that consumers pair with an input.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        A renamed copy.

    Raises:
        CheckError: A check refuses the model; ``findings`` of the error say why.
        ModelError: The model cannot be read.
        RulesError: The token or the rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> import onnx
        >>> model = onnx.load("model.onnx")
        >>> onnxkvrename.rename_model(model, "VLLM").graph.input[2].name
        'past_key.0_VLLM'
    """
    is_model = hasattr(model, "SerializeToString") and hasattr(model, "graph")
    if isinstance(model, type) or not is_model:
        is_bytes = isinstance(model, (bytes, bytearray, memoryview))
        hint = suggest_other_form(model) if is_bytes else suggest_for_file(model)
        raise TypeError(f"model must be an onnx.ModelProto, not {describe_type(model)}{hint}")
    data = rename_bytes(
        model.SerializeToString(),
        token,
        strip=strip,
        replace=replace,
        normalize=normalize,
        rules=rules,
    )
    renamed = type(model)()
    renamed.ParseFromString(data)
    return renamed
