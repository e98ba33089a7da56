"""Find sidecars that still have the old names from before a rename."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, quote_path, quote_word
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.find_models import find_candidates
from onnxkvrename.rules.load import format_rules_option
from onnxkvrename.rules.plan import KvPair, TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.rewrite import rewrite_name
from onnxkvrename.sidecars.formats import MODEL_SUFFIX, load_sidecar_formats
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.rewrite import STALE_CODE, list_names
from onnxkvrename.sidecars.search import (
    FoundSidecar,
    Neighbours,
    detect_sidecars,
    read_neighbours,
    read_sidecar_head,
)


def find_stale_sidecars(
    model: Path,
    pairs: Sequence[KvPair],
    rules: Rules,
    *,
    is_error: bool = False,
    replaced_paths: Collection[str] = (),
    others: Iterable[Path] = (),
    is_left: bool = False,
) -> Iterator[Finding]:
    """Yield KV406 for each sidecar that names a buffer of a model as it is not called now.

    Only files of built-in formats beside the model, and in directories of its compiles, are
    looked at. Names that other models in the directory have are right.

    Args:
        model: The model.
        pairs: Its KV buffers.
        rules: The rules that recognise KV names.
        is_error: Whether a stale sidecar beside the model is an error. One of a compile never
            is, as that was made before the rename.
        replaced_paths: Sidecars that do not matter, by their absolute paths.
        others: Other models in the directory, whose buffers are among those given.
        is_left: Whether the run leaves sidecars as they are, unless they are named.

    Raises:
        ModelError: The directory cannot be listed.
        RulesError: A template of the rules makes names that could not be undone.
    """
    candidates = find_candidates([model.parent], rules) if pairs else ()
    if not candidates:
        return
    neighbours: Neighbours | None = None
    own_names = ModelNames.from_models([OneModel(tuple(pairs))], TokenChange(None), rules)
    for found in _detect_sidecars(candidates, rules, replaced_paths):
        path = str(found.path)
        locations = _locate_from(found.path.parent, (model, *others))
        try:
            data = read_sidecar_head(found.path)
            names = list_names(data, path, found.format, locations, own_names)
        except ModelError as error:
            if found.has_known_name:
                yield _build_unreadable_finding(path, error)
            continue
        stale = _find_stale_names(names, pairs, rules)
        names_model = found.format.is_binding and MODEL_SUFFIX.encode() in data
        if stale and not names_model:
            neighbours = neighbours or read_neighbours(model.parent, [model])
            stale = [(old, new) for old, new in stale if old not in neighbours.names]
            if stale and neighbours.unread:
                yield build_unknown_finding(path, neighbours.unread[0])
                continue
        if stale:
            command = _format_command(model, pairs, stale, rules, path if is_left else None)
            finding = _build_stale_finding(path, stale, found.format.effect, command)
            is_beside = found.directory == found.path.parent
            severity = "error" if is_error and is_beside else finding.severity
            yield finding._replace(severity=severity)


def _detect_sidecars(
    candidates: Sequence[tuple[Path, Path]], rules: Rules, replaced_paths: Collection[str]
) -> list[FoundSidecar]:
    sidecars: list[FoundSidecar] = []
    with suppress(ModelError):  # more than a rename accepts: the first ones are checked
        for found in detect_sidecars(candidates, load_sidecar_formats(rules)):
            if os.path.abspath(found.path) not in replaced_paths:
                sidecars.append(found)
    return sidecars


def _locate_from(directory: Path, models: Iterable[Path]) -> frozenset[str]:
    """Return the paths of models relative to a directory, with ``/`` between names."""
    start = os.path.abspath(directory)
    paths = (os.path.relpath(os.path.abspath(model), start) for model in models)
    return frozenset(Path(path).as_posix() for path in paths)


def _find_stale_names(
    names: Iterable[str], pairs: Sequence[KvPair], rules: Rules
) -> list[tuple[str, str]]:
    """Return the names that a buffer had with another token or suffix, each with its own now."""
    sides = [side for pair in pairs for side in pair.sides]
    current = {side.old_name for side in sides}
    tokens = sorted({side.token for side in sides} | {""})
    stale = []
    names = tuple(names)
    for name in names:
        for side in () if name in current else ("input", "output"):
            match = rules.match(side, name)
            if match is None:
                continue
            possible = (
                rewrite_name(rules, match, token, normalize=normalize)
                for token in tokens
                for normalize in (False, True)
            )
            new_name = next((new for new in possible if new in current), None)
            if new_name is not None and new_name not in names:
                stale.append((name, new_name))
                break
    return stale


def _build_stale_finding(
    path: str, stale: Sequence[tuple[str, str]], effect: str, command: str
) -> Finding:
    old, new = stale[0]
    return build_finding(
        STALE_CODE,
        path,
        f"has {len(stale)} old names from before a rename (first: {shorten_text(old)}, now "
        f"{shorten_text(new)}); {effect}",
        command,
    )


def _format_command(
    model: Path,
    pairs: Sequence[KvPair],
    stale: Sequence[tuple[str, str]],
    rules: Rules,
    sidecar: str | None,
) -> str:
    """Return the command that renames in the sidecars of a model, or in one by its path."""
    tokens = {side.token for pair in pairs for side in pair.sides}
    token = max(tokens)
    change = ["--prefix", token] if token else ["--strip"]
    matches = [rules.match(side, old) for old, _ in stale for side in ("input", "output")]
    olds = {match.token for match in matches if match} | tokens
    if token and not olds <= {"", token}:
        change.append("--replace")
    if sidecar is not None:
        change += ["--sidecar", sidecar]
    words = " ".join(map(quote_word, change))
    return f"`onnxkvrename {quote_path(str(model))} {words}{format_rules_option(rules)}`"


def build_unknown_finding(path: str, model: Path) -> Finding:
    """Return KV406 as a warning: a model that cannot be read may have the names of a sidecar."""
    return build_finding(
        STALE_CODE,
        path,
        f"cannot be checked for old names: {model} cannot be read, and may have them",
        f"replace or remove {quote_path(str(model))}",
    )


def _build_unreadable_finding(path: str, error: ModelError) -> Finding:
    hint = error.hint or "`onnxkvrename custom-io --help` shows how to write a new one"
    return build_finding(
        STALE_CODE, path, f"cannot be checked for old names: {error.message}", hint
    )
