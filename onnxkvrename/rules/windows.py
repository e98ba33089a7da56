"""Which models are parts of one, and whether they fit together.

Large models are exported window by window, and merged afterwards. A file is a
part if it is called like one; every other model stands alone. The work grows
with the number of parts, not with its square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.model.signature import (
    ExportInfo,
    Value,
    format_value_type,
    is_type_compatible,
)
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import MERGED, PREFIXED, WINDOW, PartName, Rules, SetRule
from onnxkvrename.rules.window_diff import (
    BufferIndex,
    collect_traits,
    describe_differences,
    find_outliers,
    format_layer_runs,
    format_layers,
    index_buffers,
    most_common,
)

_MERGE_HINT = "give all windows that were merged, or merge them again"
_EXPORT_AGAIN_HINT = "export all of them again, together"


class PartGroup(NamedTuple):
    """Parts of one stage and one model, by index, in the order of their layers.

    ``root`` is the directory they have in common, empty for the working directory.
    ``model`` is empty where the files' names do not say it.
    """

    stage: str
    root: str
    model_name: str
    part_indexes: tuple[int, ...]


class _PartFile(NamedTuple):
    """A part with the layers of its name; where that does not say the end, its buffers do."""

    part_index: int
    part: KvModel
    part_name: PartName
    layers: range

    @property
    def path(self) -> str:
        return self.part.path

    def build_finding(
        self, code: str, message: str, hint: str, name: str = ""
    ) -> tuple[int, Finding]:
        return self.part_index, build_finding(code, name, message, hint)


_FilesByGroup = Mapping[PartGroup, Sequence[_PartFile]]


def group_parts(parts: Sequence[KvModel]) -> tuple[PartGroup, ...]:
    """The sets, stage by stage; a model that is no part of one is in no group."""
    return tuple(_group_files(parts))


def check_parts(
    parts: Sequence[KvModel], rules: Rules, wish: TokenChange, *, judge: bool
) -> Iterator[tuple[int, Finding]]:
    """What keeps parts from fitting together, each with the index of the part it is about.

    Tokens are judged as they stand, to ``judge``, and as they would be otherwise.
    """
    groups = _group_files(parts)
    for one, files in groups.items():
        for file in files:
            yield from _check_name_range(file)
        if one.stage != MERGED and len(files) > 1:
            yield from _check_coverage(files)
            yield from _check_seams(files, rules.set_rule)
            yield from _check_shared_inputs(files, rules.set_rule)
            yield from _check_same_export(files, rules.set_rule)
    families: defaultdict[PartGroup | str, list[_PartFile]] = defaultdict(list)
    yield from _check_merged_files(groups, families, rules.set_rule)
    for family in families.values():
        yield from _check_same_token(family, wish, judge=judge)


def _group_files(parts: Sequence[KvModel]) -> _FilesByGroup:
    found: defaultdict[tuple[str, str, str], list[_PartFile]] = defaultdict(list)
    for index, part in enumerate(parts):
        if part.part is not None:
            root, name = part.part
            found[name.stage, root, name.model_name].append(
                _PartFile(index, part, name, _resolve_layers(part, name))
            )
    for files in found.values():
        files.sort(key=lambda file: (file.layers.start, file.layers.stop, file.part_index))
    return {
        PartGroup(*key, tuple(f.part_index for f in files)): files for key, files in found.items()
    }


def _export_of(file: _PartFile) -> ExportInfo:
    assert file.part.export is not None  # it is read for every part of a set
    return file.part.export


def _resolve_layers(part: KvModel, name: PartName) -> range:
    if name.end_layer is not None:
        return range(name.first_layer, name.end_layer)
    return range(
        name.first_layer, 1 + max((name.first_layer, *(pair.layer for pair in part.pairs)))
    )


def _check_name_range(file: _PartFile) -> Iterator[tuple[int, Finding]]:
    """A window's name says which layers it has, one made ready to be merged where they begin."""
    first, layers = file.part_name.first_layer, file.layers
    if not layers:
        message = f"is called like layers from {first} up to {layers.stop}, which are none"
        yield file.build_finding(
            "KV304", message, "give it back the name that it was exported with"
        )
        return
    inputs = sorted({pair.layer for pair in file.part.pairs if pair.input is not None})
    outputs = sorted({pair.layer for pair in file.part.pairs if pair.output is not None})
    called, fine = (
        format_layer_runs([layers]),
        all(_has_all_layers(side, layers) for side in (inputs, outputs)),
    )
    if file.part_name.end_layer is None:
        called, fine = f"layers from {first} on", inputs[:1] == outputs[:1] == [first]
    if not fine:
        yield file.build_finding(
            "KV304",
            f"is called like {called}, but has inputs of {format_layers(inputs)} "
            f"and outputs of {format_layers(outputs)}",
            "export these layers again; --no-set if some of them keep no cache",
        )


def _has_all_layers(found: Sequence[int], layers: range) -> bool:
    return len(found) == len(layers) and (found[0], found[-1]) == (layers[0], layers[-1])


def _check_coverage(files: Sequence[_PartFile]) -> Iterator[tuple[int, Finding]]:
    """Layers in two windows, and layers in none."""
    last: _PartFile | None = None
    for file in files:
        if not file.layers:
            continue
        begin, stop = file.layers.start, last.layers.stop if last is not None else 0
        if last is not None and begin < stop:
            both = format_layer_runs([range(begin, min(stop, file.layers.stop))])
            yield file.build_finding(
                "KV301", f"has {both}, like {last.path}", "leave one of the two out"
            )
        elif begin > stop:
            missing = format_layer_runs([range(stop, begin)])
            before = f"{last.path} ends before" if last is not None else "no file stands before it"
            yield file.build_finding(
                "KV302",
                f"comes after {missing}, which no file has: {before}",
                "give all windows of the model, or --no-set for some of them",
            )
        if last is None or file.layers.stop > stop:
            last = file


def _check_seams(files: Sequence[_PartFile], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """What one window hands on has to be what the next one takes over."""
    ending = {file.layers.stop: file for file in reversed(files) if file.layers}
    for right in files:
        left = ending.get(right.layers.start)
        if rule.seam is None or left is None or not right.layers:
            continue
        handed, taken = rule.seam
        out = _find_value(left.part.signature.outputs, handed)
        into = _find_value(right.part.signature.inputs, taken)
        if out is None:
            yield left.build_finding(
                "KV305", f"has no output {handed} for {right.path}", _EXPORT_AGAIN_HINT
            )
        if into is None:
            yield right.build_finding(
                "KV305", f"has no input {taken} for {left.path}", _EXPORT_AGAIN_HINT
            )
        elif out is not None and not is_type_compatible(into, out):
            message = f"is {format_value_type(into)}, but {out.name} of {left.path} is {format_value_type(out)}"
            yield right.build_finding("KV305", message, _EXPORT_AGAIN_HINT, into.name)


def _check_shared_inputs(
    files: Sequence[_PartFile], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Inputs that all windows share are of one kind; a window without use for one may lack it."""
    for name in rule.shared_inputs:
        inputs = [(file, _find_value(file.part.signature.inputs, name)) for file in files]
        found = [(file, value) for file, value in inputs if value is not None]
        if not found:
            continue
        model = most_common([value for _, value in found])
        path = next(file.path for file, value in found if value is model)
        for file, value in found:
            if not is_type_compatible(value, model):
                message = f"is {format_value_type(value)}, but {format_value_type(model)} in {path}"
                yield file.build_finding("KV305", message, _EXPORT_AGAIN_HINT, value.name)


def _find_value(values: Iterable[Value], name: str) -> Value | None:
    """An input or output by its name, whatever its scope."""
    return next((value for value in values if value.name.rpartition("/")[2] == name), None)


def _check_same_export(files: Sequence[_PartFile], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Files that most of the others do not look like; of merges the buffers are seen elsewhere."""
    looks = [
        collect_traits(
            _export_of(file),
            file.part.pairs if file.part_name.stage != MERGED else (),
            rule.exclusive_kinds,
        )
        for file in files
    ]
    paths = [file.path for file in files]
    for index, found in find_outliers(list(zip(paths, looks, strict=True))):
        yield files[index].build_finding(
            "KV306",
            f"is of another model or export: {format_list(found, '; ')}",
            f"{_EXPORT_AGAIN_HINT}; --no-set if the model really varies by layer",
        )


def _check_merged_files(
    groups: _FilesByGroup, families: defaultdict[PartGroup | str, list[_PartFile]], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Hold merges against the windows below them; where there are none, against the largest.

    Where windows of several models lie below, a merge belongs to the first that
    it agrees with. Fills in the families, files that are to carry one token: by
    their windows, or by their directory where they have none.
    """
    windows = {
        one: _index_file_buffers(files) for one, files in groups.items() if one.stage == WINDOW
    }
    families.update((one, list(groups[one])) for one in windows)
    below = _find_windows_below(groups)
    for one, files in groups.items():
        if one.stage == WINDOW:
            continue
        homes = [
            home for home in below[one.stage, one.root] if one.model_name in ("", home.model_name)
        ]
        if one.stage != MERGED:
            families[homes[0] if len(homes) == 1 else one.root] += files
            continue
        if len(homes) < 2:
            yield from _check_same_export(files, rule)
        largest = max(files, key=lambda file: len(file.layers))
        against = [windows[home] for home in homes] or [_index_file_buffers([largest])]
        for file in files:
            layers = file.layers if homes else _intersect_ranges(file.layers, largest.layers)
            faults = [
                describe_differences(_index_file_buffers([file]), other, layers)
                for other in against
            ]
            if all(faults):
                yield file.build_finding(
                    "KV307", _format_disagreement(faults, against), _MERGE_HINT
                )
            fitting = [home for home, found in zip(homes, faults, strict=False) if not found]
            own = homes if len(homes) == 1 else fitting
            families[own[0] if own else one.root].append(file)


def _find_windows_below(groups: _FilesByGroup) -> defaultdict[tuple[str, str], list[PartGroup]]:
    """By stage and directory of parts the windows below, but for those with a nearer one."""
    tops = {(one.stage, one.root) for one in groups if one.stage != WINDOW}
    below: defaultdict[tuple[str, str], list[PartGroup]] = defaultdict(list)
    for one in groups:
        if one.stage == WINDOW:
            for stage in (PREFIXED, MERGED):
                top = next((root for root in _walk_up(one.root) if (stage, root) in tops), None)
                if top is not None:
                    below[stage, top].append(one)
    return below


def _walk_up(directory: str) -> Iterator[str]:
    """A directory, and those around it as far as its path tells."""
    yield directory
    while directory.strip("/") and directory.rpartition("/")[2] != "..":
        head, slash, _ = directory.rpartition("/")
        directory = head or slash
        yield directory


def _index_file_buffers(files: Sequence[_PartFile]) -> BufferIndex:
    return index_buffers((file.path, file.part.pairs) for file in files)


def _intersect_ranges(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _format_disagreement(faults: Sequence[Sequence[str]], against: Sequence[BufferIndex]) -> str:
    if len(against) == 1:
        return f"has {format_list(faults[0], '; ')}"
    sets = format_list([other.paths[0] for other in against])
    return f"agrees with none of the sets below it, those of {sets}: it has {faults[0][0]}"


def _check_same_token(
    files: Sequence[_PartFile], wish: TokenChange, *, judge: bool
) -> Iterator[tuple[int, Finding]]:
    """All files of one model carry one token, or all none."""
    states: defaultdict[frozenset[str], list[_PartFile]] = defaultdict(list)
    for file in files:
        tokens = {end.token for pair in file.part.pairs for end in pair.sides}
        if not judge:
            tokens = {wish.final_token if wish.can_replace(token) else token for token in tokens}
        if tokens:
            states[frozenset(tokens)].append(file)
    if len(frozenset().union(*states)) < 2 or sum(map(len, states.values())) < 2:
        return
    most = max(states, key=lambda tokens: len(states[tokens]))
    rest = [found[0] for tokens, found in states.items() if tokens != most] or states[most]
    said = [
        f"{' and '.join(sorted(token or 'no token' for token in tokens))} in "
        + format_list([file.path for file in states[tokens]])
        for tokens in sorted(states, key=lambda tokens: -len(states[tokens]))
    ]
    verb, hint = (
        "carry",
        "rename all of them, together; a run that was stopped is ended by the same command",
    )
    if not judge:
        verb, hint = "would carry", "--replace puts the new token into all of them"
    yield rest[0].build_finding(
        "KV303", f"the files of this set {verb} different tokens: {format_list(said, '; ')}", hint
    )
