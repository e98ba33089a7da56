"""Which models are parts of one, and whether they fit together.

Large models are exported window by window, and merged afterwards. A file is a
part if it is called like one; every other model stands alone. The work grows
with the number of parts, not with its square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.model.signature import Export, Signature, Value, same, type_text
from onnxkvrename.rules.checks import no_buffers
from onnxkvrename.rules.plan import Pair, Wish
from onnxkvrename.rules.profile import MERGED, PREFIXED, WINDOW, PartName, Rules, SetRule
from onnxkvrename.rules.window_diff import (
    Buffers,
    buffers,
    differences,
    layers_text,
    odd,
    spans_text,
    traits,
    usual,
)

_MERGE = "give all windows that were merged, or merge them again"
_AGAIN = "export all of them again, together"


class Part(NamedTuple):
    """A model as it was read, and what is planned for its buffers; ``path`` has ``/`` in it."""

    path: str
    signature: Signature
    pairs: tuple[Pair, ...]
    export: Export


class Group(NamedTuple):
    """Parts of one stage and one model, by index, in the order of their layers.

    ``root`` is the directory they have in common, empty for the working directory.
    ``model`` is empty where the files' names do not say it.
    """

    stage: str
    root: str
    model: str
    parts: tuple[int, ...]


class _File(NamedTuple):
    """A part with the layers of its name; where that does not say the end, its buffers do."""

    at: int
    part: Part
    name: PartName
    layers: range

    @property
    def path(self) -> str:
        return self.part.path

    def fault(self, code: str, message: str, hint: str, name: str = "") -> tuple[int, Finding]:
        return self.at, finding(code, name, message, hint)


_Groups = Mapping[Group, Sequence[_File]]


def located(path: str, rules: Rules) -> tuple[str, PartName] | None:
    """The root of the set that a model is a part of, and what its name says; or ``None``."""
    *directories, file = path.split("/")
    kept = [name for name in directories if name not in ("", ".")]
    for rule in rules.sets.parts:
        name = rule.match(file)
        if name is not None:
            if rule.folder is not None and kept and rule.folder.fits(kept[-1]):
                kept.pop()
            return "/" * path.startswith("/") + "/".join(kept), name
    return None


def is_window(path: str, rules: Rules) -> bool:
    """Whether a model is called like a window of one, merged or not yet; ``path`` has ``/``."""
    found = located(path, rules)
    return found is not None and found[1].stage != MERGED


def group(parts: Sequence[Part], rules: Rules) -> tuple[Group, ...]:
    """The sets, stage by stage; a model that is no part of one is in no group."""
    return tuple(_grouped(parts, rules))


def check(
    parts: Sequence[Part], rules: Rules, wish: Wish, *, judge: bool
) -> Iterator[tuple[int, Finding]]:
    """What keeps parts from fitting together, each with the index of the part it is about.

    Tokens are judged as they stand, to ``judge``, and as they would be otherwise.
    """
    groups = _grouped(parts, rules)
    for one, files in groups.items():
        for file in files:
            yield from _range(file)
        if one.stage != MERGED and len(files) > 1:
            yield from _tiling(files)
            yield from _seams(files, rules.sets)
            yield from _shared(files, rules.sets)
            yield from _mixture(files, rules.sets)
    families: defaultdict[Group | str, list[_File]] = defaultdict(list)
    yield from _merges(groups, families, rules.sets)
    for family in families.values():
        yield from _tokens(family, wish, judge=judge)


class Seen(NamedTuple):
    """What a model shows beside others; ``part`` if it is called like a part of a set."""

    outputs: tuple[str, ...]
    pairs: tuple[Pair, ...]
    part: Part | None


def together(
    models: Sequence[Seen], rules: Rules, wish: Wish, *, judge: bool
) -> list[list[Finding]]:
    """What models show together, for each of them: no buffer anywhere, parts that do not fit."""
    findings: list[list[Finding]] = [[] for _ in models]
    if not any(model.pairs for model in models):
        findings = [[no_buffers(model.outputs)] for model in models]
    numbers = [number for number, model in enumerate(models) if model.part is not None]
    parts = [model.part for model in models if model.part is not None]
    for at, found in check(parts, rules, wish, judge=judge):
        findings[numbers[at]].append(found)
    return findings


def part(
    path: str,
    signature: Signature,
    pairs: tuple[Pair, ...],
    rules: Rules,
    export: Callable[[], Export],
) -> Part | None:
    """A model that is called like a part; ``export`` is asked only for such a one."""
    if located(path, rules) is None:
        return None
    return Part(path, signature, pairs, export())


def _grouped(parts: Sequence[Part], rules: Rules) -> _Groups:
    found: defaultdict[tuple[str, str, str], list[_File]] = defaultdict(list)
    for index, part in enumerate(parts):
        place = located(part.path, rules)
        if place is not None:
            root, name = place
            found[name.stage, root, name.model].append(
                _File(index, part, name, _layers(part, name))
            )
    for files in found.values():
        files.sort(key=lambda file: (file.layers.start, file.layers.stop, file.at))
    return {Group(*key, tuple(f.at for f in files)): files for key, files in found.items()}


def _layers(part: Part, name: PartName) -> range:
    if name.end is not None:
        return range(name.first, name.end)
    return range(name.first, 1 + max((name.first, *(pair.layer for pair in part.pairs))))


def _range(file: _File) -> Iterator[tuple[int, Finding]]:
    """A window's name says which layers it has, one made ready to be merged where they begin."""
    first, layers = file.name.first, file.layers
    if not layers:
        message = f"is called like layers from {first} up to {layers.stop}, which are none"
        yield file.fault("KV304", message, "give it back the name that it was exported with")
        return
    inputs = sorted({pair.layer for pair in file.part.pairs if pair.input is not None})
    outputs = sorted({pair.layer for pair in file.part.pairs if pair.output is not None})
    called, fine = spans_text([layers]), all(_fills(side, layers) for side in (inputs, outputs))
    if file.name.end is None:
        called, fine = f"layers from {first} on", inputs[:1] == outputs[:1] == [first]
    if not fine:
        yield file.fault(
            "KV304",
            f"is called like {called}, but has inputs of {layers_text(inputs)} "
            f"and outputs of {layers_text(outputs)}",
            "export these layers again; --no-set if some of them keep no cache",
        )


def _fills(found: Sequence[int], layers: range) -> bool:
    return len(found) == len(layers) and (found[0], found[-1]) == (layers[0], layers[-1])


def _tiling(files: Sequence[_File]) -> Iterator[tuple[int, Finding]]:
    """Layers in two windows, and layers in none."""
    last: _File | None = None
    for file in files:
        if not file.layers:
            continue
        begin, stop = file.layers.start, last.layers.stop if last is not None else 0
        if last is not None and begin < stop:
            both = spans_text([range(begin, min(stop, file.layers.stop))])
            yield file.fault("KV301", f"has {both}, like {last.path}", "leave one of the two out")
        elif begin > stop:
            missing = spans_text([range(stop, begin)])
            before = f"{last.path} ends before" if last is not None else "no file stands before it"
            yield file.fault(
                "KV302",
                f"comes after {missing}, which no file has: {before}",
                "give all windows of the model, or --no-set for some of them",
            )
        if last is None or file.layers.stop > stop:
            last = file


def _seams(files: Sequence[_File], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """What one window hands on has to be what the next one takes over."""
    ending = {file.layers.stop: file for file in reversed(files) if file.layers}
    for right in files:
        left = ending.get(right.layers.start)
        if rule.seam is None or left is None or not right.layers:
            continue
        handed, taken = rule.seam
        out = _named(left.part.signature.outputs, handed)
        into = _named(right.part.signature.inputs, taken)
        if out is None:
            yield left.fault("KV305", f"has no output {handed} for {right.path}", _AGAIN)
        if into is None:
            yield right.fault("KV305", f"has no input {taken} for {left.path}", _AGAIN)
        elif out is not None and not same(into, out):
            message = f"is {type_text(into)}, but {out.name} of {left.path} is {type_text(out)}"
            yield right.fault("KV305", message, _AGAIN, into.name)


def _shared(files: Sequence[_File], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Inputs that all windows share are of one kind; a window without use for one may lack it."""
    for name in rule.shared:
        inputs = [(file, _named(file.part.signature.inputs, name)) for file in files]
        found = [(file, value) for file, value in inputs if value is not None]
        if not found:
            continue
        model = usual([value for _, value in found])
        path = next(file.path for file, value in found if value is model)
        for file, value in found:
            if not same(value, model):
                message = f"is {type_text(value)}, but {type_text(model)} in {path}"
                yield file.fault("KV305", message, _AGAIN, value.name)


def _named(values: Iterable[Value], name: str) -> Value | None:
    """An input or output by its name, whatever its scope."""
    return next((value for value in values if value.name.rpartition("/")[2] == name), None)


def _mixture(files: Sequence[_File], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Files that most of the others do not look like; of merges the buffers are seen elsewhere."""
    looks = [
        traits(file.part.export, file.part.pairs if file.name.stage != MERGED else (), rule.apart)
        for file in files
    ]
    paths = [file.path for file in files]
    for index, found in odd(list(zip(paths, looks, strict=True))):
        yield files[index].fault(
            "KV306",
            f"is of another model or export: {listed(found, '; ')}",
            f"{_AGAIN}; --no-set if the model really varies by layer",
        )


def _merges(
    groups: _Groups, families: defaultdict[Group | str, list[_File]], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Hold merges against the windows below them; where there are none, against the largest.

    Where windows of several models lie below, a merge belongs to the first that
    it agrees with. Fills in the families, files that are to carry one token: by
    their windows, or by their directory where they have none.
    """
    windows = {one: _buffers(files) for one, files in groups.items() if one.stage == WINDOW}
    families.update((one, list(groups[one])) for one in windows)
    below = _below(groups)
    for one, files in groups.items():
        if one.stage == WINDOW:
            continue
        homes = [home for home in below[one.stage, one.root] if one.model in ("", home.model)]
        if one.stage != MERGED:
            families[homes[0] if len(homes) == 1 else one.root] += files
            continue
        if len(homes) < 2:
            yield from _mixture(files, rule)
        largest = max(files, key=lambda file: len(file.layers))
        against = [windows[home] for home in homes] or [_buffers([largest])]
        for file in files:
            layers = file.layers if homes else _common(file.layers, largest.layers)
            faults = [differences(_buffers([file]), other, layers) for other in against]
            if all(faults):
                yield file.fault("KV307", _disagreement(faults, against), _MERGE)
            fitting = [home for home, found in zip(homes, faults, strict=False) if not found]
            own = homes if len(homes) == 1 else fitting
            families[own[0] if own else one.root].append(file)


def _below(groups: _Groups) -> defaultdict[tuple[str, str], list[Group]]:
    """By stage and directory of parts the windows below, but for those with a nearer one."""
    tops = {(one.stage, one.root) for one in groups if one.stage != WINDOW}
    below: defaultdict[tuple[str, str], list[Group]] = defaultdict(list)
    for one in groups:
        if one.stage == WINDOW:
            for stage in (PREFIXED, MERGED):
                top = next((root for root in _upward(one.root) if (stage, root) in tops), None)
                if top is not None:
                    below[stage, top].append(one)
    return below


def _upward(directory: str) -> Iterator[str]:
    """A directory, and those around it as far as its path tells."""
    yield directory
    while directory.strip("/") and directory.rpartition("/")[2] != "..":
        head, slash, _ = directory.rpartition("/")
        directory = head or slash
        yield directory


def _buffers(files: Sequence[_File]) -> Buffers:
    return buffers((file.path, file.part.pairs) for file in files)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _disagreement(faults: Sequence[Sequence[str]], against: Sequence[Buffers]) -> str:
    if len(against) == 1:
        return f"has {listed(faults[0], '; ')}"
    sets = listed([other.paths[0] for other in against])
    return f"agrees with none of the sets below it, those of {sets}: it has {faults[0][0]}"


def _tokens(files: Sequence[_File], wish: Wish, *, judge: bool) -> Iterator[tuple[int, Finding]]:
    """All files of one model carry one token, or all none."""
    states: defaultdict[frozenset[str], list[_File]] = defaultdict(list)
    for file in files:
        tokens = {end.token for pair in file.part.pairs for end in pair.ends}
        if not judge:
            tokens = {wish.target if wish.yields(token) else token for token in tokens}
        if tokens:
            states[frozenset(tokens)].append(file)
    if len(frozenset().union(*states)) < 2 or sum(map(len, states.values())) < 2:
        return
    most = max(states, key=lambda tokens: len(states[tokens]))
    rest = [found[0] for tokens, found in states.items() if tokens != most] or states[most]
    said = [
        f"{' and '.join(sorted(token or 'no token' for token in tokens))} in "
        + listed([file.path for file in states[tokens]])
        for tokens in sorted(states, key=lambda tokens: -len(states[tokens]))
    ]
    verb, hint = (
        "carry",
        "rename all of them, together; a run that was stopped is ended by the same command",
    )
    if not judge:
        verb, hint = "would carry", "--replace puts the new token into all of them"
    yield rest[0].fault(
        "KV303", f"the files of this set {verb} different tokens: {listed(said, '; ')}", hint
    )
