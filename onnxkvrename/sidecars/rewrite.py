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
from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules.plan import Pair, Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars import json_text as jsontext
from onnxkvrename.sidecars import yaml_text as yamltext
from onnxkvrename.sidecars.formats import batch_io as batchio
from onnxkvrename.sidecars.formats import compile_params as compileparams
from onnxkvrename.sidecars.formats import custom_io as customio
from onnxkvrename.sidecars.formats import node_precision as nodeprecision
from onnxkvrename.sidecars.text_edit import Node, Scalar, Unreadable, leaves, short, splice

LIMIT = jsontext.LIMIT
"""Bytes that a sidecar may have: a caller need not read more."""


class Kind(NamedTuple):
    """A kind of sidecar.

    It is told by what the file is called (``file_name``, the whole of it), or by one
    of the ``marks`` in its text. ``names`` gives where names stand in the tree that
    ``parse`` makes; without it a file of this kind names no values, and never changes.
    ``ends`` tells that all of its names are inputs and outputs of the graph, and
    ``paired`` that it must name both sides of a buffer.
    """

    caption: str
    file_name: re.Pattern[str]
    marks: tuple[bytes, ...]
    form: str
    parse: Callable[[str], Node | None]
    names: Callable[[Node], Iterator[Scalar]] | None
    ends: bool = False
    paired: bool = False


KINDS = (
    Kind(
        "custom I/O",
        re.compile(r"custom_io.*\.ya?ml"),
        (b"IOName",),
        customio.FORM,
        yamltext.parse,
        customio.names,
        ends=True,
        paired=True,
    ),
    Kind(
        "compile parameters",
        re.compile(r"hashed_compile_params\.json"),
        (),
        compileparams.FORM,
        jsontext.parse,
        compileparams.names,
        ends=True,
        paired=True,
    ),
    Kind(
        "batch I/O",
        re.compile(r"aic_batch_io.*\.json"),
        (b'"IO-files"',),
        batchio.FORM,
        jsontext.parse,
        batchio.names,
        ends=True,
    ),
    Kind(
        "node precision",
        re.compile(r"(?!)"),
        (b"NodeInstanceNames",),
        nodeprecision.FORM,
        yamltext.parse,
        nodeprecision.names,
    ),
    Kind(
        "partitions, settings and symbols",
        re.compile(r"qconfig\.json|specializations\.json|mdp_.*\.json"),
        (b'"nodeList"', b'"partitions"'),
        "names of nodes and symbols",
        jsontext.parse,
        None,
    ),
)
"""The files that are known, in the order in which they are told."""

_CANDIDATE = re.compile(r"[^.].*\.ya?ml|hashed_compile_params\.json|aic_batch_io.*\.json")


class Names(NamedTuple):
    """The names of a model, or of all models that a sidecar is for.

    ``changes`` leads from old to new. ``known`` are all graph inputs and outputs, and
    ``tokens`` those that the buffers carry, as they stand; ``buffers`` are the KV names,
    and ``pairs`` the two sides of each buffer, as they will be.
    """

    changes: Mapping[str, str]
    known: frozenset[str]
    tokens: frozenset[str]
    buffers: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    wish: Wish
    rules: Rules

    @classmethod
    def of(
        cls, models: Iterable[tuple[Iterable[Pair], Iterable[str]]], wish: Wish, rules: Rules
    ) -> Names:
        """Of the pairs, and all inputs and outputs, of models; they may be renamed already."""
        pairs: list[Pair] = []
        known: set[str] = set()
        for found, values in models:
            pairs += found
            known |= set(values)
        return cls(
            planning.changes(pairs),
            frozenset(known),
            frozenset(end.token for pair in pairs for end in pair.ends),
            frozenset(end.new for pair in pairs for end in pair.ends),
            tuple((p.input.new, p.output.new) for p in pairs if p.input and p.output),
            wish,
            rules,
        )

    def become(self, name: str, *, ends: bool) -> str | None:
        """What a name in a sidecar becomes, ``None`` if it matches nothing.

        A model renamed earlier has other names than a sidecar that was not; then
        the rules tell what it became. ``ends`` says that the name must be an input or
        output, so that the suffix of a function's value may change, too.
        """
        if any("\ud800" <= char <= "\udfff" for char in name):
            return None  # an escape of a file, and no character of a name
        if name in self.changes:
            return self.changes[name]
        if name in self.known:
            return name
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and self._was(match.token):
                normalize = self.wish.normalize and ends
                new = self.rules.rewrite(match, self.wish.target, normalize=normalize)
                if new in self.buffers:
                    return new
        return None

    def _was(self, token: str) -> bool:
        """Whether the model may have carried this token before; of one that changes we know."""
        if not self.wish.yields(token):
            return False
        return not self.changes or token in {"", self.wish.target, *self.tokens}


class Followed(NamedTuple):
    """A sidecar under the new names: its bytes, what changed in it, what is odd about it."""

    data: bytes
    changes: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]


def candidates(file_names: Iterable[str]) -> tuple[str, ...]:
    """What among the files beside a model may be a sidecar, for :func:`kind_of` to tell."""
    return tuple(sorted(name for name in file_names if _CANDIDATE.fullmatch(name)))


def kind_of(file_name: str, data: bytes) -> Kind | None:
    """What kind of sidecar a file is, ``None`` for anything else."""
    for kind in KINDS:
        if kind.file_name.fullmatch(file_name):
            return kind
    for kind in KINDS:
        if any(mark in data for mark in kind.marks):
            return kind
    return None


def follow(data: bytes, path: str, kind: Kind, names: Names) -> Followed:
    """A sidecar under the new names; bytes that are no part of a changed name stay.

    ``path`` is what messages call it. Following what has been followed changes
    nothing, and the way back gives the same bytes. Raises :class:`ModelError` for
    what cannot be read as a file of its kind, or not be changed in its place.
    """
    if kind.names is None:
        return Followed(data, (), ())
    try:
        text = _decoded(data)
        tree = kind.parse(text)
        scalars = tuple(kind.names(tree)) if tree is not None else ()
        became = {s.value: names.become(s.value, ends=kind.ends) for s in scalars}
        changes = {old: new for old, new in became.items() if new is not None and new != old}
        _refuse_merging(became)
        result = _spliced(text, tree, scalars, changes, kind) if changes else text
        encoded = _encoded(result) if changes else data
    except Unreadable as error:
        hint = error.hint or f"its form: {kind.form}"
        raise ModelError(
            f"cannot be taken as {kind.caption}: it {error}", path=path, hint=hint
        ) from None
    found = tuple(_findings(path, became, kind, names))
    return Followed(encoded, tuple(changes.items()), found)


def _decoded(data: bytes) -> str:
    if len(data) > LIMIT:
        raise Unreadable(f"is {len(data):,} bytes, more than {LIMIT:,}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable("is no UTF-8 text", "write it in UTF-8") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise Unreadable(
            "cannot hold a new name that is not UTF-8", "rename that value first"
        ) from None


def _refuse_merging(became: Mapping[str, str | None]) -> None:
    """Two names that become one could not be told apart again."""
    sources: dict[str, str] = {}
    for old, new in became.items():
        if new is not None and sources.setdefault(new, old) != old:
            raise Unreadable(
                f"names both {short(sources[new])} and {short(old)}, which are one buffer",
                "leave one of the two",
            )


def _spliced(
    text: str,
    tree: Node | None,
    scalars: tuple[Scalar, ...],
    changes: Mapping[str, str],
    kind: Kind,
) -> str:
    """The text under its new names, which must say just what it said but for them."""
    result = splice(text, scalars, changes)
    expected = {scalar: changes.get(scalar.value, scalar.value) for scalar in scalars}
    try:
        holds = list(leaves(kind.parse(result), {})) == list(leaves(tree, expected))
    except Unreadable:
        holds = False
    if not holds:
        raise Unreadable(
            "cannot hold the new names where the old ones stand", "put the old ones in quotes"
        )
    return result


def _findings(
    path: str, became: Mapping[str, str | None], kind: Kind, names: Names
) -> Iterator[Finding]:
    if not kind.ends:
        return
    present = {new for new in became.values() if new is not None}
    strange = [short(old) for old, new in became.items() if new is None]
    if strange and names.buffers and not present & names.buffers:
        yield _of_another(path, strange)
    elif strange:
        yield finding(
            "KV404",
            path,
            f"names {listed(strange)}, which match nothing in the model",
            "take these entries out, or mend their names",
        )
    if kind.paired:
        yield from _halves(path, became, names)


def _of_another(path: str, strange: list[str]) -> Finding:
    """KV404 as an error: following such a file would leave it as it is, and the compile wrong."""
    told = f"is of another model: it names no KV buffer of this one, but {listed(strange)}"
    hint = "give the file that belongs to this model"
    return finding("KV404", path, told, hint)._replace(severity="error")


def _halves(path: str, became: Mapping[str, str | None], names: Names) -> Iterator[Finding]:
    """KV405, a warning: it was so before, and a compiler's default may well fill it in."""
    written = {new: old for old, new in became.items() if new is not None}
    before = {new: old for old, new in names.changes.items()}
    halves = [
        f"{short(written[one])} without {short(before.get(other, other))}"
        for pair in names.pairs
        for one, other in (pair, pair[::-1])
        if one in written and other not in written
    ]
    if halves:
        yield finding(
            "KV405",
            path,
            f"names {listed(halves)}",
            "both sides of a buffer need the same precision: add the other one",
        )
