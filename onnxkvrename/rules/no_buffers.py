"""Say what is known of a model without KV buffers: another profile, or a model beside it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, format_list, quote_path
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.load import find_profiles, is_built_in
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import is_directory

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
    message = f"no KV buffer here: the outputs are {format_list(names)}"
    if not names:
        message = "no KV buffer: the model has no outputs"
    decoders = [] if path is None else _find_decoders(path, names, rules)
    if path is None or not decoders:
        pairs = "pairs" if path is None else f"`onnxkvrename pairs {quote_path(str(path))}`"
        hint = (
            f"export the model with its cache as inputs and outputs; {pairs} shows caches under "
            "names that no profile knows"
        )
        return build_finding("KV001", "", message, hint)
    is_beside = decoders[0].parent == path.parent
    shown = [each.name if is_beside else f"{each.parent.name}/{each.name}" for each in decoders]
    verbs = "reads them and has" if len(shown) == 1 else "read them and have"
    message += f"; {format_list(shown, limit=3)} beside it {verbs} KV buffers"
    return build_finding("KV001", "", message, f"pass {quote_path(str(decoders[0]))}")


def _find_decoders(path: Path, outputs: Collection[str], rules: Rules | None) -> list[Path]:
    """Return the models with KV buffers that read a model's outputs.

    They are beside it, or else in the directories beside it.
    """
    folder = path.parent
    beside = [each for each in _list_models(folder) if each.name != path.name]
    found = _select_decoders(beside, outputs, rules)
    if found:
        return found
    parent = folder / os.pardir if folder.name in ("", os.pardir) else folder.parent
    own_name = os.path.basename(os.path.abspath(folder))
    folders = [each for each in _list_directory(parent) if _is_directory(each)]
    if len(folders) > _MAX_FOLDERS:
        return []
    others = (each for each in folders if each.name != own_name)
    models = (model for each in others for model in _list_models(each))
    return _select_decoders(models, outputs, rules)


def _select_decoders(
    models: Iterable[Path], outputs: Collection[str], rules: Rules | None
) -> list[Path]:
    candidates = islice(models, _MAX_CANDIDATES)
    return [model for model in candidates if _is_decoder(model, outputs, rules)]


def _is_decoder(model: Path, outputs: Collection[str], rules: Rules | None) -> bool:
    """Return whether a model has KV buffers, and an input with the name of one of some outputs."""
    try:
        with open_model(model) as opened:
            names = [value.name for value in opened.signature.outputs]
            is_reader = any(value.name in outputs for value in opened.signature.inputs)
    except ModelError:
        return False
    if not is_reader:
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
            f"pass it alone, with `--profile {name}`",
        )
        is_picked = rules.choice is not None and rules.choice.is_picked
        yield finding if is_picked else finding._replace(severity="warning")
        return
