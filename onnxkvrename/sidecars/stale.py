"""Find sidecars that still have the old names from before a rename."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import read_status
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.checks import find_appended_word
from onnxkvrename.rules.plan import KvPair, TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.rules.sidecar_files import find_candidates, find_compiles
from onnxkvrename.sidecars.bindings import BoundModels
from onnxkvrename.sidecars.formats import load_sidecar_formats
from onnxkvrename.sidecars.model_names import ModelNames, OneModel, SameBufferError
from onnxkvrename.sidecars.rewrite import (
    STALE_CODE,
    RewrittenSidecar,
    rewrite_sidecar,
)
from onnxkvrename.sidecars.search import (
    FoundSidecar,
    Neighbours,
    detect_sidecars,
    read_neighbours,
    read_sidecar_head,
)
from onnxkvrename.text import format_count, quote_path


def find_stale_sidecars(
    model: Path,
    pairs: Sequence[KvPair],
    rules: Rules,
    *,
    is_error: bool = False,
    replaced_paths: Collection[str] = (),
    others: Iterable[Path] = (),
    is_left: bool = False,
    is_replaced: bool = False,
) -> Iterator[Finding]:
    """Yield KV406 for each sidecar that names a buffer of a model as it is not called now.

    Only files of built-in formats beside the model, and in directories of its compiles, are
    looked at. Names that other models in the directory have are right. A compile without a
    readable name counts if it is from before the rename, or older than a model with a token.

    Args:
        model: The model.
        pairs: Its KV buffers.
        rules: The rules that recognise KV names.
        is_error: Whether a stale sidecar beside the model is an error. One of a compile never
            is, as that was made before the rename.
        replaced_paths: Sidecars that do not matter, by their absolute paths.
        others: Other models in the directory, whose buffers are among those given.
        is_left: Whether the run leaves sidecars as they are, unless they are named.
        is_replaced: Whether the run replaces the model, so that each compile is from before.

    Raises:
        ModelError: The directory cannot be listed.
        RulesError: A template of the rules makes names that could not be undone.
    """
    candidates = find_candidates([model.parent], rules) if pairs else ()
    if find_appended_word(pairs):
        return  # another tool appended a word, so the files are not older than a rename
    named = set[Path]()
    neighbours: Neighbours | None = None
    models = (model, *others)
    paths = {os.path.abspath(path) for path in models}
    for found in _detect_sidecars(candidates, rules, replaced_paths):
        path = str(found.path)
        try:
            data = read_sidecar_head(found.path)
            result, change = _bring_up_to_date(data, found, pairs, paths, rules)
            if result.matched_names:
                named.add(found.path.parent)
        except ModelError as error:
            if found.has_known_name and not isinstance(error.__cause__, SameBufferError):
                named.add(found.path.parent)
                yield _build_unreadable_finding(path, error)
            continue
        stale, old_names = result.renamed, result.shared_names
        if stale and not found.format.names_models(data):
            neighbours = neighbours or read_neighbours(model.parent, models)
            stale = tuple(pair for pair in stale if pair[0] not in neighbours.names)
            if stale and neighbours.unread:
                yield build_unknown_finding(path, neighbours.unread[0])
                continue
            if old_names <= neighbours.names:
                continue
        if stale:
            is_beside = found.directory == found.path.parent
            hint = "compile the model again"
            if is_beside:
                sidecar = (found.path,) if is_left else ()
                rename = Request((model,), change.token, strip=change.strip, sidecar=sidecar)
                replace = change.replace and not change.strip
                hint = f"`{format_rename(rename._replace(replace=replace), rules)}`"
            finding = _build_stale_finding(path, stale, found.format.effect, hint)
            severity = "error" if is_error and is_beside else finding.severity
            yield finding._replace(severity=severity)
    if is_replaced or any(side.token for pair in pairs for side in pair.sides):
        yield from _find_old_compiles(model, named, is_replaced=is_replaced)


def _find_old_compiles(
    model: Path, named: Collection[Path], *, is_replaced: bool
) -> Iterator[Finding]:
    """Yield KV406 for the compiles of a model from before a rename, except those of known names."""
    status = read_status(model)
    for path, time in find_compiles(model.parent):
        is_older = status is not None and time < status.st_mtime_ns
        if path in named or not (is_replaced or is_older):
            continue
        again = f"compile the model again, and delete {quote_path(str(path))}"
        since = "was compiled before this rename" if is_replaced else f"is older than {model.name}"
        hint = again if is_replaced else f"if its names have changed since, {again}"
        yield build_finding(STALE_CODE, str(path), f"{since}, and has the names of that time", hint)


def _bring_up_to_date(
    data: bytes,
    found: FoundSidecar,
    pairs: Sequence[KvPair],
    paths: Collection[str],
    rules: Rules,
    *,
    replace: bool = False,
) -> tuple[RewrittenSidecar, TokenChange]:
    """Return a sidecar with the names that models have now, and the change that gives it these.

    The buffers are those of the models at some absolute paths.
    """
    sides = [side for pair in pairs for side in pair.sides]
    tokens = {side.token for side in sides}
    model = OneModel(tuple(pairs), tuple(side.old_name for side in sides))
    directory = os.path.abspath(found.path.parent)
    is_beside = any(os.path.dirname(path) == directory for path in paths)

    def find(location: str) -> OneModel | None:
        is_one = os.path.abspath(os.path.join(directory, location)) in paths
        return model if is_one else None

    token = max(tokens)
    change = TokenChange(token or None, strip=not token, replace=replace, normalize=True)

    def collect_names(models: Iterable[OneModel]) -> ModelNames:
        return ModelNames.from_models(models, change, rules)

    bound = BoundModels(find, (model,) if is_beside else (), collect_names)
    names = collect_names([model])
    result = rewrite_sidecar(data, str(found.path), found.format, names, bound, plans_only=True)
    if result.problem == "of another token" and not replace:
        return _bring_up_to_date(data, found, pairs, paths, rules, replace=True)
    return result, change._replace(replace=replace or not tokens <= {"", token})


def _detect_sidecars(
    candidates: Sequence[tuple[Path, Path]], rules: Rules, replaced_paths: Collection[str]
) -> list[FoundSidecar]:
    sidecars: list[FoundSidecar] = []
    with suppress(ModelError):  # more than a rename accepts: the first ones are checked
        for found in detect_sidecars(candidates, load_sidecar_formats(rules)):
            if os.path.abspath(found.path) not in replaced_paths:
                sidecars.append(found)
    return sidecars


def _build_stale_finding(
    path: str, stale: Sequence[tuple[str, str]], effect: str, hint: str
) -> Finding:
    old, new = stale[0]
    return build_finding(
        STALE_CODE,
        path,
        f"has {format_count(len(stale), 'name')} that the model no longer has (first: "
        f"{shorten_text(old)}, now {shorten_text(new)}); {effect}",
        hint,
    )


def build_unknown_finding(path: str, model: Path) -> Finding:
    """Return KV406 as a warning: a model that cannot be read may have the names of a sidecar."""
    return build_finding(
        STALE_CODE,
        path,
        f"cannot be checked for old names: {model} cannot be read, and may have them",
        f"replace or remove {quote_path(str(model))}",
    )


def _build_unreadable_finding(path: str, error: ModelError) -> Finding:
    hint = error.hint or f"correct or remove {quote_path(path)}"
    return build_finding(
        STALE_CODE, path, f"cannot be checked for old names: {error.message}", hint
    )
