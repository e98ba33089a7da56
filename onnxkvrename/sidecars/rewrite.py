"""Rename the names in a sidecar, in any format, and check them against the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError, shorten_name
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.rules.plan import KvPair, TokenChange, build_name_map
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.json_tree import MAX_JSON_CHARS
from onnxkvrename.sidecars.text_edit import splice_values
from onnxkvrename.sidecars.tree import Node, ScalarNode, flatten_tree

MAX_SIDECAR_BYTES = MAX_JSON_CHARS
"""The largest sidecar that is rewritten, in bytes. A caller may stop reading a file there."""

_NewNames = Mapping[str, "str | None"]
"""The new name of each name in a sidecar; ``None`` if it matches nothing in the model."""


class RewrittenSidecar(NamedTuple):
    """The result of rewriting a sidecar.

    Attributes:
        data: The new content; the old content if no name changes.
        renamed: Old and new name of every name that changes, in the order of the file.
        findings: Problems with the names in the sidecar.
        matched_names: The names in the sidecar that the models have or had.
        stays: True if the file is left where and as it is, whatever becomes of the models.
    """

    data: bytes
    renamed: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    matched_names: frozenset[str] = frozenset()
    stays: bool = False


class ModelNames(NamedTuple):
    """The names of a model, or of all models that a sidecar belongs to.

    Attributes:
        name_map: The new name of each name that changes.
        graph_values: The current names of all inputs and outputs of the graphs.
        tokens: The tokens that the buffers carry now.
        kv_names: The names of all KV inputs and outputs after the rename.
        pairs: The names of both sides of each buffer after the rename.
        token_change: The tokens to add and to remove.
        rules: The rules that recognise KV names.
        neighbour_names: Inputs and outputs of other models that the sidecar may be of.
    """

    name_map: Mapping[str, str]
    graph_values: frozenset[str]
    tokens: frozenset[str]
    kv_names: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    token_change: TokenChange
    rules: Rules
    neighbour_names: frozenset[str] = frozenset()

    @classmethod
    def from_models(
        cls,
        models: Iterable[tuple[Iterable[KvPair], Iterable[str]]],
        change: TokenChange,
        rules: Rules,
    ) -> ModelNames:
        """Collect the names of models, including models that were renamed before.

        Args:
            models: The pairs of each model, and the names of all its inputs and outputs.
            change: The tokens to add and to remove.
            rules: The rules that recognise KV names.
        """
        pairs: list[KvPair] = []
        graph_values: set[str] = set()
        for model_pairs, value_names in models:
            pairs += model_pairs
            graph_values |= set(value_names)
        return cls(
            build_name_map(pairs),
            frozenset(graph_values),
            frozenset(side.token for pair in pairs for side in pair.sides),
            frozenset(side.new_name for pair in pairs for side in pair.sides),
            tuple((p.input.new_name, p.output.new_name) for p in pairs if p.input and p.output),
            change,
            rules,
        )

    def find_new_name(self, name: str, *, is_graph_value: bool) -> str | None:
        """Return the new name of a name in a sidecar; ``None`` if it matches nothing.

        The sidecar of a model that was renamed before may still contain the old names; their
        new names follow from the rules.

        Args:
            name: The name in the sidecar.
            is_graph_value: Whether the name must be an input or output of the graph, so that its
                suffix may be normalised too.
        """
        if any("\ud800" <= char <= "\udfff" for char in name):
            return None  # only an escape in the file makes such a character
        if name in self.name_map:
            return self.name_map[name]
        if name in self.graph_values:
            return name
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and self._may_have_carried(match.token):
                normalize = self.token_change.normalize and is_graph_value
                new_name = self.rules.rewrite_name(
                    match, self.token_change.final_token, normalize=normalize
                )
                if new_name in self.kv_names:
                    return new_name
        return None

    def _may_have_carried(self, token: str) -> bool:
        """Return whether the model may have carried a token before.

        If the model changes in this run, only its current tokens are possible.
        """
        if not self.token_change.can_replace(token):
            return False
        return not self.name_map or token in {"", self.token_change.final_token, *self.tokens}


def rewrite_sidecar(
    data: bytes, path: str, sidecar_format: SidecarFormat, names: ModelNames
) -> RewrittenSidecar:
    """Replace the names in a sidecar and keep all other bytes.

    Rewriting twice has no further effect, and rewriting back restores the original bytes.

    Args:
        data: The content of the sidecar.
        path: Its path, for messages.
        sidecar_format: Its format.
        names: The names of the models that it belongs to.

    Raises:
        ModelError: The content cannot be read in this format, or a name in it cannot be
            replaced.
    """
    if sidecar_format.find_names is None:
        return RewrittenSidecar(data)
    try:
        text = _decode_text(data)
        tree, scalars = _parse_names(text, sidecar_format)
        is_graph_value = sidecar_format.only_graph_values
        new_names = {
            scalar.value: names.find_new_name(scalar.value, is_graph_value=is_graph_value)
            for scalar in scalars
        }
        changes = {old: new for old, new in new_names.items() if new is not None and new != old}
        _check_distinct(new_names)
        result = _splice_names(text, tree, scalars, changes, sidecar_format) if changes else text
        encoded = _encode_text(result) if changes else data
    except UnreadableTextError as error:
        raise _build_form_error(error, path, sidecar_format) from None
    findings = tuple(_check_names(path, new_names, sidecar_format, names))
    matched = frozenset(old for old, new in new_names.items() if new is not None)
    return RewrittenSidecar(encoded, tuple(changes.items()), findings, matched)


def list_names(data: bytes, path: str, sidecar_format: SidecarFormat) -> tuple[str, ...]:
    """Return the names in a sidecar, each once, in the order of the file.

    Args:
        data: The content of the sidecar.
        path: Its path, for messages.
        sidecar_format: Its format.

    Raises:
        ModelError: The content cannot be read in this format.
    """
    try:
        _, scalars = _parse_names(_decode_text(data), sidecar_format)
    except UnreadableTextError as error:
        raise _build_form_error(error, path, sidecar_format) from None
    return tuple(dict.fromkeys(scalar.value for scalar in scalars))


def _parse_names(
    text: str, sidecar_format: SidecarFormat
) -> tuple[Node | None, tuple[ScalarNode, ...]]:
    """Return the tree of a text, and the names in it; raises `UnreadableTextError`."""
    tree = sidecar_format.parse(text)
    if tree is None or sidecar_format.find_names is None:
        return tree, ()
    return tree, tuple(sidecar_format.find_names(tree))


def _build_form_error(
    error: UnreadableTextError, path: str, sidecar_format: SidecarFormat
) -> ModelError:
    hint = error.hint or f"its form: {sidecar_format.expected_form}"
    return ModelError(
        f"cannot be taken as {sidecar_format.caption}: it {error}", path=path, hint=hint
    )


def _decode_text(data: bytes) -> str:
    if len(data) > MAX_SIDECAR_BYTES:
        raise UnreadableTextError(f"is {len(data):,} bytes, more than {MAX_SIDECAR_BYTES:,}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableTextError("is no UTF-8 text", "write it in UTF-8") from None


def _encode_text(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnreadableTextError(
            "cannot hold a new name that is not UTF-8", "rename that value first"
        ) from None


def _check_distinct(new_names: _NewNames) -> None:
    """Raise if two names get the same new name, because the change could not be undone."""
    sources: dict[str, str] = {}
    for old, new in new_names.items():
        if new is not None and sources.setdefault(new, old) != old:
            raise UnreadableTextError(
                f"names both {shorten_name(sources[new])} and {shorten_name(old)}, "
                "which are one buffer",
                "leave one of the two",
            )


def _splice_names(
    text: str,
    tree: Node | None,
    scalars: tuple[ScalarNode, ...],
    changes: Mapping[str, str],
    sidecar_format: SidecarFormat,
) -> str:
    """Replace the names, and parse the result again to prove that nothing else changed."""
    result = splice_values(text, scalars, changes)
    expected = {scalar: changes.get(scalar.value, scalar.value) for scalar in scalars}
    try:
        result_tree = sidecar_format.parse(result)
        is_proved = list(flatten_tree(result_tree, {})) == list(flatten_tree(tree, expected))
    except UnreadableTextError:
        is_proved = False
    if not is_proved:
        raise UnreadableTextError(
            "cannot hold the new names where the old ones stand", "put the old ones in quotes"
        )
    return result


def _check_names(
    path: str, new_names: _NewNames, sidecar_format: SidecarFormat, names: ModelNames
) -> Iterator[Finding]:
    if not sidecar_format.only_graph_values:
        return
    present = {new for new in new_names.values() if new is not None}
    unmatched = [
        shorten_name(old)
        for old, new in new_names.items()
        if new is None and old not in names.neighbour_names
    ]
    if unmatched and names.kv_names and not present & names.kv_names:
        yield _build_wrong_model_finding(path, unmatched)
    elif unmatched:
        yield build_finding(
            "KV404",
            path,
            f"names {format_list(unmatched)}, which match nothing in the model",
            "take these entries out, or mend their names",
        )
    if sidecar_format.requires_pairs:
        yield from _check_both_sides(path, new_names, names)


def _build_wrong_model_finding(path: str, unmatched: list[str]) -> Finding:
    """Return KV404 as an error: the file would not change, and the compile would be wrong."""
    message = (
        f"is of another model: it names no KV buffer of this one, but {format_list(unmatched)}"
    )
    hint = "give the file that belongs to this model"
    return build_finding("KV404", path, message, hint)._replace(severity="error")


def _check_both_sides(path: str, new_names: _NewNames, names: ModelNames) -> Iterator[Finding]:
    """Yield KV405 for buffers with only one side in the sidecar.

    It is a warning because the sidecar had this problem before, and a compiler's default may be
    correct.
    """
    old_in_sidecar = {new: old for old, new in new_names.items() if new is not None}
    old_in_model = {new: old for old, new in names.name_map.items()}
    halves = [
        f"{shorten_name(old_in_sidecar[side])} "
        f"without {shorten_name(old_in_model.get(other_side, other_side))}"
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
