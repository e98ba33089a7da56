"""Rename the names in a sidecar, in any format, and check them against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import shorten_text
from onnxkvrename.sidecars.bindings import BindingPlan, BoundModels, plan_bindings
from onnxkvrename.sidecars.formats import SidecarFormat
from onnxkvrename.sidecars.model_names import ModelNames, check_distinct
from onnxkvrename.sidecars.tree import Node, ScalarNode, read_content, splice_values
from onnxkvrename.text import format_list

STALE_CODE = "KV406"
"""The code of a sidecar with names from before a rename, or that cannot get the new ones."""

_NewNames = Mapping[str, "str | None"]
"""The new name of each name in a sidecar; ``None`` if it matches nothing in the model."""


Problem = Literal["refused", "of another token", "foreign"]


class RewrittenSidecar(NamedTuple):
    """The result of rewriting a sidecar.

    Attributes:
        data: The new content; the old content if no name changes.
        renamed: Old and new name of every name that changes, in the order of the file.
        findings: Problems with the names in the sidecar.
        matched_names: The names in the sidecar that the models have or had.
        shared_names: Old names that other models beside the sidecar may have, too.
        problem: That it cannot get the new names, because of their tokens or for another reason,
            or that it names buffers of other models only; the findings say which.
    """

    data: bytes
    renamed: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    matched_names: frozenset[str] = frozenset()
    shared_names: frozenset[str] = frozenset()
    problem: Problem | None = None


def rewrite_sidecar(
    data: bytes,
    path: str,
    sidecar_format: SidecarFormat,
    names: ModelNames,
    models: BoundModels | None = None,
    *,
    plans_only: bool = False,
) -> RewrittenSidecar:
    """Replace the names in a sidecar and keep all other bytes.

    Rewriting twice has no further effect, and rewriting back restores the original bytes.

    The names are those of the models that it belongs to; `models` has the same one by one, for a
    format that binds names. Messages name the path. With `plans_only` the content stays, also where
    a name is written so that it cannot be replaced.

    Raises:
        ModelError: The content cannot be read in this format, or a name in it cannot be
            replaced.
    """
    try:
        tree = sidecar_format.parse(_decode_text(data))
        if tree is None:
            return RewrittenSidecar(data)
        if sidecar_format.find_names is None:
            assert models is not None
            plan = plan_bindings(tree, sidecar_format, models)
            encoded = _splice_names(data, tree, {} if plans_only else plan.changes, sidecar_format)
            renamed = tuple(dict.fromkeys((s.value, new) for s, new in plan.changes.items()))
            problem, findings = _check_binding(path, plan)
            matched, shared = plan.matched_names, plan.shared_names
            return RewrittenSidecar(encoded, renamed, findings, matched, shared, problem)
        scalars = tuple(sidecar_format.find_names(tree))
        new_names, conflicting = names.find_new_names(
            (scalar.value for scalar in scalars), is_graph_value=sidecar_format.only_graph_values
        )
        check_distinct(new_names)
        changes = {old: new for old, new in new_names.items() if new is not None and new != old}
        changed = () if plans_only else (s for s in scalars if s.value in changes)
        scalar_changes = {scalar: changes[scalar.value] for scalar in changed}
        encoded = _splice_names(data, tree, scalar_changes, sidecar_format)
    except UnreadableTextError as error:
        hint = error.hint or f"expected: {sidecar_format.expected_form}"
        message = f"cannot be read as {sidecar_format.caption}: it {error}"
        raise ModelError(message, path=path, hint=hint) from error
    if conflicting:
        tokens, hint = names.describe_conflict(conflicting)
        message = f"has {tokens}; {sidecar_format.effect}"
        problem, findings = "of another token", (build_finding(STALE_CODE, path, message, hint),)
    else:
        problem, findings = _check_names(path, new_names, sidecar_format, names)
    matched = frozenset(old for old, new in new_names.items() if new is not None)
    return RewrittenSidecar(
        encoded, tuple(changes.items()), findings, matched, frozenset(changes), problem
    )


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableTextError("is not UTF-8 text", "write it in UTF-8") from None


def _encode_text(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnreadableTextError(
            "cannot hold a new name that is not UTF-8", "rename that value first"
        ) from None


def _splice_names(
    data: bytes, tree: Node, changes: Mapping[ScalarNode, str], sidecar_format: SidecarFormat
) -> bytes:
    """Replace the names, and parse the result again to prove that nothing else changed."""
    if not changes:
        return data
    result = splice_values(_decode_text(data), changes)
    try:
        result_tree = sidecar_format.parse(result)
        is_proved = read_content(result_tree, {}) == read_content(tree, changes)
    except UnreadableTextError:
        is_proved = False
    if not is_proved:
        raise UnreadableTextError(
            "cannot hold the new names as the old ones are written", "put the old ones in quotes"
        )
    return _encode_text(result)


def _check_names(
    path: str, new_names: _NewNames, sidecar_format: SidecarFormat, names: ModelNames
) -> tuple[Problem | None, tuple[Finding, ...]]:
    """Return what is wrong with the names in a file whose names are all of the models."""
    if not sidecar_format.only_graph_values:
        return None, ()
    problem: Problem | None = None
    findings: list[Finding] = []
    present = {new for new in new_names.values() if new is not None}
    unmatched = [
        shorten_text(old)
        for old, new in new_names.items()
        if new is None and old not in names.neighbour_names
    ]
    if unmatched and names.kv_names and not present & names.kv_names:
        problem = "foreign"
        findings.append(_build_foreign_finding(path, f", but {format_list(unmatched)}"))
    elif unmatched:
        message = f"names {format_list(unmatched)}, which match nothing in the model"
        hint = "remove these entries, or correct their names"
        findings.append(build_finding("KV404", path, message, hint))
    if sidecar_format.requires_pairs:
        findings += _check_both_sides(path, new_names, names)
    return problem, tuple(findings)


def _check_binding(path: str, plan: BindingPlan) -> tuple[Problem | None, tuple[Finding, ...]]:
    """Return why a configuration cannot get the new names of the models, if so."""
    if plan.refusals:
        findings = (
            build_finding(STALE_CODE, path, f"cannot be updated: {problem}", hint)
            for problem, hint in plan.refusals
        )
        return "of another token" if plan.has_other_token else "refused", tuple(findings)
    if not plan.matched_names:
        return "foreign", (_build_foreign_finding(path),)
    return None, ()


def _build_foreign_finding(path: str, names: str = "") -> Finding:
    """Return KV404: the file would not change, and the compile would be wrong."""
    message = f"belongs to another model: it names no KV buffer of this one{names}"
    return build_finding("KV404", path, message, "use the file that belongs to this model")


def _check_both_sides(path: str, new_names: _NewNames, names: ModelNames) -> Iterator[Finding]:
    """Yield KV405 for buffers with only one side in the sidecar.

    It is a warning because the sidecar had this problem before, and a compiler's default may be
    correct.
    """
    old_in_sidecar = {new: old for old, new in new_names.items() if new is not None}
    old_in_model = {new: old for old, new in names.name_map.items()}
    halves = [
        f"{shorten_text(old_in_sidecar[side])} "
        f"without {shorten_text(old_in_model.get(other_side, other_side))}"
        for pair in names.pairs
        for side, other_side in (pair, pair[::-1])
        if side in old_in_sidecar and other_side not in old_in_sidecar
    ]
    if halves:
        yield build_finding(
            "KV405",
            path,
            f"names {format_list(halves)}",
            "both sides of a buffer need the same precision: add the other one",
        )
