"""Text files that repeat the names: text and names to text.

Each kind of file has a small module that says where names stand in it: a function
``names``, from the tree of a text to its scalars. What becomes of them is decided
here, for all kinds in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.rules.plan import KvPair, TokenChange, build_name_map
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars.formats.batch_io import BATCH_IO_FORM, find_batch_io_names
from onnxkvrename.sidecars.formats.compile_params import (
    COMPILE_PARAMS_FORM,
    find_compile_params_names,
)
from onnxkvrename.sidecars.formats.custom_io import CUSTOM_IO_FORM, find_custom_io_names
from onnxkvrename.sidecars.formats.node_precision import (
    NODE_PRECISION_FORM,
    find_node_precision_names,
)
from onnxkvrename.sidecars.json_text import MAX_JSON_CHARS, parse_json_tree
from onnxkvrename.sidecars.text_edit import (
    Node,
    ScalarNode,
    UnreadableTextError,
    flatten_tree,
    shorten_name,
    splice_values,
)
from onnxkvrename.sidecars.yaml_text import parse_yaml_tree

MAX_SIDECAR_BYTES = MAX_JSON_CHARS
"""Bytes that a sidecar may have: a caller need not read more."""


class SidecarKind(NamedTuple):
    """A kind of sidecar.

    It is told by what the file is called (``file_name``, the whole of it), or by one
    of the ``marks`` in its text. ``names`` gives where names stand in the tree that
    ``parse`` makes; without it a file of this kind names no values, and never changes.
    ``ends`` tells that all of its names are inputs and outputs of the graph, and
    ``paired`` that it must name both sides of a buffer.
    """

    caption: str
    file_name_pattern: re.Pattern[str]
    markers: tuple[bytes, ...]
    expected_form: str
    parse: Callable[[str], Node | None]
    find_names: Callable[[Node], Iterator[ScalarNode]] | None
    only_graph_values: bool = False
    requires_pairs: bool = False


SIDECAR_KINDS = (
    SidecarKind(
        "custom I/O",
        re.compile(r"custom_io.*\.ya?ml"),
        (b"IOName",),
        CUSTOM_IO_FORM,
        parse_yaml_tree,
        find_custom_io_names,
        only_graph_values=True,
        requires_pairs=True,
    ),
    SidecarKind(
        "compile parameters",
        re.compile(r"hashed_compile_params\.json"),
        (),
        COMPILE_PARAMS_FORM,
        parse_json_tree,
        find_compile_params_names,
        only_graph_values=True,
        requires_pairs=True,
    ),
    SidecarKind(
        "batch I/O",
        re.compile(r"aic_batch_io.*\.json"),
        (b'"IO-files"',),
        BATCH_IO_FORM,
        parse_json_tree,
        find_batch_io_names,
        only_graph_values=True,
    ),
    SidecarKind(
        "node precision",
        re.compile(r"(?!)"),
        (b"NodeInstanceNames",),
        NODE_PRECISION_FORM,
        parse_yaml_tree,
        find_node_precision_names,
    ),
    SidecarKind(
        "partitions, settings and symbols",
        re.compile(r"qconfig\.json|specializations\.json|mdp_.*\.json"),
        (b'"nodeList"', b'"partitions"'),
        "names of nodes and symbols",
        parse_json_tree,
        None,
    ),
)
"""The files that are known, in the order in which they are told."""

_CANDIDATE_NAME = re.compile(r"[^.].*\.ya?ml|hashed_compile_params\.json|aic_batch_io.*\.json")


class ModelNames(NamedTuple):
    """The names of a model, or of all models that a sidecar is for.

    ``changes`` leads from old to new. ``known`` are all graph inputs and outputs, and
    ``tokens`` those that the buffers carry, as they stand; ``buffers`` are the KV names,
    and ``pairs`` the two sides of each buffer, as they will be.
    """

    name_map: Mapping[str, str]
    graph_values: frozenset[str]
    tokens: frozenset[str]
    kv_names: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    token_change: TokenChange
    rules: Rules

    @classmethod
    def from_models(
        cls,
        models: Iterable[tuple[Iterable[KvPair], Iterable[str]]],
        wish: TokenChange,
        rules: Rules,
    ) -> ModelNames:
        """Of the pairs, and all inputs and outputs, of models; they may be renamed already."""
        pairs: list[KvPair] = []
        known: set[str] = set()
        for found, values in models:
            pairs += found
            known |= set(values)
        return cls(
            build_name_map(pairs),
            frozenset(known),
            frozenset(end.token for pair in pairs for end in pair.sides),
            frozenset(end.new_name for pair in pairs for end in pair.sides),
            tuple((p.input.new_name, p.output.new_name) for p in pairs if p.input and p.output),
            wish,
            rules,
        )

    def find_new_name(self, name: str, *, ends: bool) -> str | None:
        """What a name in a sidecar becomes, ``None`` if it matches nothing.

        A model renamed earlier has other names than a sidecar that was not; then
        the rules tell what it became. ``ends`` says that the name must be an input or
        output, so that the suffix of a function's value may change, too.
        """
        if any("\ud800" <= char <= "\udfff" for char in name):
            return None  # an escape of a file, and no character of a name
        if name in self.name_map:
            return self.name_map[name]
        if name in self.graph_values:
            return name
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and self._can_have_carried(match.token):
                normalize = self.token_change.normalize and ends
                new = self.rules.rewrite_name(
                    match, self.token_change.final_token, normalize=normalize
                )
                if new in self.kv_names:
                    return new
        return None

    def _can_have_carried(self, token: str) -> bool:
        """Whether the model may have carried this token before; of one that changes we know."""
        if not self.token_change.can_replace(token):
            return False
        return not self.name_map or token in {"", self.token_change.final_token, *self.tokens}


class RewrittenSidecar(NamedTuple):
    """A sidecar under the new names: its bytes, what changed in it, what is odd about it."""

    data: bytes
    renamed: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]


def select_sidecar_candidates(file_names: Iterable[str]) -> tuple[str, ...]:
    """What among the files beside a model may be a sidecar, for :func:`kind_of` to tell."""
    return tuple(sorted(name for name in file_names if _CANDIDATE_NAME.fullmatch(name)))


def detect_sidecar_kind(file_name: str, data: bytes) -> SidecarKind | None:
    """What kind of sidecar a file is, ``None`` for anything else."""
    for kind in SIDECAR_KINDS:
        if kind.file_name_pattern.fullmatch(file_name):
            return kind
    for kind in SIDECAR_KINDS:
        if any(mark in data for mark in kind.markers):
            return kind
    return None


def rewrite_sidecar(
    data: bytes, path: str, kind: SidecarKind, names: ModelNames
) -> RewrittenSidecar:
    """A sidecar under the new names; bytes that are no part of a changed name stay.

    ``path`` is what messages call it. Following what has been followed changes
    nothing, and the way back gives the same bytes. Raises :class:`ModelError` for
    what cannot be read as a file of its kind, or not be changed in its place.
    """
    if kind.find_names is None:
        return RewrittenSidecar(data, (), ())
    try:
        text = _decode_text(data)
        tree = kind.parse(text)
        scalars = tuple(kind.find_names(tree)) if tree is not None else ()
        became = {
            s.value: names.find_new_name(s.value, ends=kind.only_graph_values) for s in scalars
        }
        changes = {old: new for old, new in became.items() if new is not None and new != old}
        _check_distinct(became)
        result = _splice_names(text, tree, scalars, changes, kind) if changes else text
        encoded = _encode_text(result) if changes else data
    except UnreadableTextError as error:
        hint = error.hint or f"its form: {kind.expected_form}"
        raise ModelError(
            f"cannot be taken as {kind.caption}: it {error}", path=path, hint=hint
        ) from None
    found = tuple(_check_names(path, became, kind, names))
    return RewrittenSidecar(encoded, tuple(changes.items()), found)


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


def _check_distinct(became: Mapping[str, str | None]) -> None:
    """Two names that become one could not be told apart again."""
    sources: dict[str, str] = {}
    for old, new in became.items():
        if new is not None and sources.setdefault(new, old) != old:
            raise UnreadableTextError(
                f"names both {shorten_name(sources[new])} and {shorten_name(old)}, which are one buffer",
                "leave one of the two",
            )


def _splice_names(
    text: str,
    tree: Node | None,
    scalars: tuple[ScalarNode, ...],
    changes: Mapping[str, str],
    kind: SidecarKind,
) -> str:
    """The text under its new names, which must say just what it said but for them."""
    result = splice_values(text, scalars, changes)
    expected = {scalar: changes.get(scalar.value, scalar.value) for scalar in scalars}
    try:
        holds = list(flatten_tree(kind.parse(result), {})) == list(flatten_tree(tree, expected))
    except UnreadableTextError:
        holds = False
    if not holds:
        raise UnreadableTextError(
            "cannot hold the new names where the old ones stand", "put the old ones in quotes"
        )
    return result


def _check_names(
    path: str, became: Mapping[str, str | None], kind: SidecarKind, names: ModelNames
) -> Iterator[Finding]:
    if not kind.only_graph_values:
        return
    present = {new for new in became.values() if new is not None}
    strange = [shorten_name(old) for old, new in became.items() if new is None]
    if strange and names.kv_names and not present & names.kv_names:
        yield _build_wrong_model_finding(path, strange)
    elif strange:
        yield build_finding(
            "KV404",
            path,
            f"names {format_list(strange)}, which match nothing in the model",
            "take these entries out, or mend their names",
        )
    if kind.requires_pairs:
        yield from _check_both_sides(path, became, names)


def _build_wrong_model_finding(path: str, strange: list[str]) -> Finding:
    """KV404 as an error: following such a file would leave it as it is, and the compile wrong."""
    told = f"is of another model: it names no KV buffer of this one, but {format_list(strange)}"
    hint = "give the file that belongs to this model"
    return build_finding("KV404", path, told, hint)._replace(severity="error")


def _check_both_sides(
    path: str, became: Mapping[str, str | None], names: ModelNames
) -> Iterator[Finding]:
    """KV405, a warning: it was so before, and a compiler's default may well fill it in."""
    written = {new: old for old, new in became.items() if new is not None}
    before = {new: old for old, new in names.name_map.items()}
    halves = [
        f"{shorten_name(written[one])} without {shorten_name(before.get(other, other))}"
        for pair in names.pairs
        for one, other in (pair, pair[::-1])
        if one in written and other not in written
    ]
    if halves:
        yield build_finding(
            "KV405",
            path,
            f"names {format_list(halves)}",
            "both sides of a buffer need the same precision: add the other one",
        )
