"""Rename models in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxkvrename.api.arguments import (
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.files.read import MemoryFile
from onnxkvrename.findings import CheckError
from onnxkvrename.renaming.run import rename_in_memory
from onnxkvrename.rules.request import Request

if TYPE_CHECKING:
    from onnx import ModelProto


@speak_python
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
    ``strip``, ``replace``, ``normalize`` and ``rules`` are as for `rename`.

    Args:
        data: A serialized ``ModelProto``.
        token: As for `rename`.

    Returns:
        The renamed model; ``data`` itself if no name changes.

    Raises:
        CheckError: A check refuses the model; ``findings`` of the error say why.
        ModelError: The bytes are not a readable model.
        RulesError: The token or the rules cannot be used.
        TypeError: An argument has the wrong type.
        ValueError: Both ``strip`` and ``replace`` are given.

    Examples:
        >>> from pathlib import Path
        >>> data = Path("model.onnx").read_bytes()
        >>> renamed = onnxkvrename.rename_bytes(data, "VLLM")
        >>> onnxkvrename.rename_bytes(renamed, strip=True) == data
        True
    """
    arguments = read_arguments(rename_bytes, locals())
    return _rename(bytes(data), arguments)


@speak_python
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

    ``strip``, ``replace``, ``normalize`` and ``rules`` are as for `rename`.

    Args:
        model: The model; it stays as it is.
        token: As for `rename`.

    Returns:
        A renamed copy.

    Raises:
        CheckError: A check refuses the model; ``findings`` of the error say why.
        ModelError: The model cannot be read.
        RulesError: The token or the rules cannot be used.
        TypeError: An argument has the wrong type.
        ValueError: Both ``strip`` and ``replace`` are given.

    Examples:
        >>> import onnx
        >>> model = onnx.load("model.onnx")
        >>> onnxkvrename.rename_model(model, "VLLM").graph.input[2].name
        'past_key.0_VLLM'
    """
    arguments = read_arguments(rename_model, locals())
    renamed = type(model)()
    renamed.ParseFromString(_rename(model.SerializeToString(), arguments))
    return renamed


def _rename(data: bytes, arguments: Mapping[str, Any]) -> bytes:
    """Rename a serialized model; if no profile matches its names, the error says what it has."""
    change = build_request(Request, arguments).change
    profile, rules = arguments["profile"], arguments["rules"]
    model = MemoryFile("model", data)
    try:
        found = find_rules(profile, rules, [model])
        return rename_in_memory(data, change, found)
    except CheckError as error:
        is_default = profile is None and rules is None
        if not is_default or all(finding.code != "KV001" for finding in error.findings):
            raise
        from onnxkvrename.api.unnamed_caches import explain_unknown_model  # nothing is renamed

        raise explain_unknown_model(error, model, change.token or "") from None
