"""Explain why a model has no KV buffer: an encoder, another exporter's names, or no cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, format_list, quote_path
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.load import find_profiles, is_built_in
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import is_directory

_EMBEDDING_NAME = re.compile("embed|hidden|feature|pooler", re.IGNORECASE)
"""Words in the names of outputs that hold embeddings or hidden states."""
_MAX_FOLDERS = 16
"""Directories beside that of a model; with more, they are not those of one export."""
_MAX_CANDIDATES = 32
"""Models that are opened in the search for a decoder."""


def build_no_buffers_finding(
    outputs: Iterable[str], rules: Rules | None = None, path: Path | None = None
) -> Finding:
    """Return finding KV001 for a model without buffers.

    Args:
        outputs: The names of its outputs.
        rules: The rules that match none of them; the hint does not name them.
        path: The model, beside which its decoder may be; ``None`` for a model in memory.
    """
    names = list(outputs)
    own_profile = "" if rules is None else rules.name
    others = [name for name in find_profiles(names) if name != own_profile]
    if others:
        message = f"no KV buffer matches these rules: the outputs are {format_list(names)}"
        return build_finding("KV001", "", message, f"`--profile {others[0]}` knows these names")
    if not names:
        return _build_neutral_finding("no KV buffer: the model has no outputs")
    if _are_embeddings(names):
        return _build_encoder_finding(names, rules, path)
    return _build_neutral_finding(f"no KV buffer here: the outputs are {format_list(names)}")


def _build_neutral_finding(message: str) -> Finding:
    hint = (
        "export the model with its cache as inputs and outputs; `onnxkvrename pairs MODEL` shows "
        "caches under names that no profile knows"
    )
    return build_finding("KV001", "", message, hint)


def _are_embeddings(outputs: Iterable[str]) -> bool:
    """Return whether an encoder or an embedding model has these outputs: no logits among them."""
    names = list(outputs)
    return any(map(_EMBEDDING_NAME.search, names)) and not any("logits" in name for name in names)


def _build_encoder_finding(names: list[str], rules: Rules | None, path: Path | None) -> Finding:
    message = f"this model has no KV cache: it computes embeddings ({format_list(names)})"
    decoders = [] if path is None else _find_decoders(path, rules)
    if not decoders:
        return build_finding("KV001", "", message, "pass the decoder's file")
    is_beside = path is not None and decoders[0].parent == path.parent
    shown = [each.name if is_beside else f"{each.parent.name}/{each.name}" for each in decoders]
    have = "has" if len(shown) == 1 else "have"
    message += f"; {format_list(shown, limit=3)} beside it {have} one"
    such_as = "" if len(decoders) == 1 else "the decoder, such as "
    return build_finding("KV001", "", message, f"pass {such_as}{quote_path(str(decoders[0]))}")


def _find_decoders(path: Path, rules: Rules | None) -> list[Path]:
    """Return the models with KV buffers beside a model, or else in the directories beside it."""
    folder = path.parent
    beside = [each for each in _list_models(folder) if each.name != path.name]
    found = _select_decoders(beside, rules)
    if found:
        return found
    parent = folder / os.pardir if folder.name in ("", os.pardir) else folder.parent
    own_name = os.path.basename(os.path.abspath(folder))
    folders = [each for each in _list_directory(parent) if _is_directory(each)]
    if len(folders) > _MAX_FOLDERS:
        return []
    others = (each for each in folders if each.name != own_name)
    return _select_decoders((model for each in others for model in _list_models(each)), rules)


def _select_decoders(models: Iterable[Path], rules: Rules | None) -> list[Path]:
    return [model for model in islice(models, _MAX_CANDIDATES) if _has_buffers(model, rules)]


def _has_buffers(model: Path, rules: Rules | None) -> bool:
    try:
        with open_model(model) as opened:
            names = [value.name for value in opened.signature.outputs]
    except ModelError:
        return False
    if rules is not None and any(rules.match("output", name) is not None for name in names):
        return True
    return next(find_profiles(names), None) is not None


def _list_models(folder: Path) -> list[Path]:
    return [path for path in _list_directory(folder) if path.suffix == ".onnx"]


def _is_directory(path: Path) -> bool:
    try:
        return is_directory(path)
    except ModelError:
        return False


def _list_directory(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def check_other_profiles(outputs: Iterable[str], rules: Rules) -> Iterator[Finding]:
    """Yield KV001 for a model without buffers, beside others, that another profile knows.

    It is an error where the rules were picked for the user, who may not know that they leave
    a model out, else a warning.

    Args:
        outputs: The names of its outputs.
        rules: The rules; only a built-in profile is compared with the others.
    """
    if not is_built_in(rules.name):
        return
    for name in find_profiles(list(outputs)):
        finding = build_finding(
            "KV001",
            "",
            f"profile {rules.name} matches no KV buffer of this model, but profile {name} does",
            f"use a command of its own: `MODEL --profile {name}`",
        )
        is_picked = rules.choice is not None and rules.choice.is_picked
        yield finding if is_picked else finding._replace(severity="warning")
        return
