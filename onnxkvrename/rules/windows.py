"""Group models that are parts of one, and check that they fit together.

Large models are exported window by window, and merged afterwards. A file is a
part if the profile's ``[[set.parts]]`` match its name; every other model is
checked alone. The cost is linear in the number of parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import (
    Finding,
    build_finding,
    format_layer_runs,
    format_layers,
    format_list,
    quote_word,
)
from onnxkvrename.limits import MAX_SHOWN_CHARS
from onnxkvrename.model.signature import (
    ExportInfo,
    Value,
    format_shape,
    format_value_type,
    is_type_compatible,
)
from onnxkvrename.rules.checks import WINDOW_SIZE_HINT
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, PREFIXED, WINDOW, PartName, SetRule

_MERGE_HINT = "give all windows that were merged, or merge them again"
_EXPORT_AGAIN_HINT = "export all of them again, together"

Traits = Mapping[tuple[str, ...], frozenset[str]]
"""Properties that all parts of one export should share, with their values in one part."""


class PartGroup(NamedTuple):
    """Parts of one stage and one model.

    Attributes:
        stage: ``window``, ``prefixed`` or ``merged``.
        root: The directory that they have in common, empty for the working directory.
        model_name: The model's name, empty where the names of the files do not say it.
        part_indexes: The parts, in the order of their layers.
    """

    stage: str
    root: str
    model_name: str
    part_indexes: tuple[int, ...]


class _PartFile(NamedTuple):
    """A part with the layers in its name; its buffers give the end if its name does not."""

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
    """Return the sets of some models, stage by stage; other models are in no group."""
    return tuple(_group_files(parts))


def check_parts(
    parts: Sequence[KvModel], rules: Rules, change: TokenChange, *, check_current_tokens: bool
) -> Iterator[tuple[int, Finding]]:
    """Check that the parts of each set fit together (KV301 to KV307).

    Args:
        parts: The models; those outside of sets are skipped.
        rules: The profile.
        change: What a rename does to the tokens.
        check_current_tokens: Check tokens as they are in the files, not as they will be.

    Yields:
        Findings, each with the index of the part that it is about.
    """
    groups = _group_files(parts)
    for group, files in groups.items():
        for file in files:
            yield from _check_name_range(file)
        if group.stage != MERGED and len(files) > 1:
            yield from _check_coverage(files)
            yield from _check_seams(files, rules.set_rule)
            yield from _check_shared_inputs(files, rules.set_rule)
            yield from _check_same_export(files, rules.set_rule)
    families: defaultdict[PartGroup | str, list[_PartFile]] = defaultdict(list)
    yield from _check_merged_files(groups, families, rules.set_rule)
    for family in families.values():
        yield from _check_same_token(family, change, check_current_tokens=check_current_tokens)


def _group_files(parts: Sequence[KvModel]) -> _FilesByGroup:
    files_by_key: defaultdict[tuple[str, str, str], list[_PartFile]] = defaultdict(list)
    for index, part in enumerate(parts):
        if part.part is not None:
            root, name = part.part
            files_by_key[name.stage, root, name.model_name].append(
                _PartFile(index, part, name, _resolve_layers(part, name))
            )
    for files in files_by_key.values():
        files.sort(key=lambda file: (file.layers.start, file.layers.stop, file.part_index))
    return {
        PartGroup(*key, tuple(file.part_index for file in files)): files
        for key, files in files_by_key.items()
    }


def _get_export_info(file: _PartFile) -> ExportInfo:
    assert file.part.export is not None  # it is read for every part of a set
    return file.part.export


def _resolve_layers(part: KvModel, name: PartName) -> range:
    if name.end_layer is not None:
        return range(name.first_layer, name.end_layer)
    return range(
        name.first_layer, 1 + max((name.first_layer, *(pair.layer for pair in part.pairs)))
    )


def _check_name_range(file: _PartFile) -> Iterator[tuple[int, Finding]]:
    """Check the layers against the file name, which may say only the first of them."""
    first, layers = file.part_name.first_layer, file.layers
    if not layers:
        message = f"file name gives layers from {first} up to {layers.stop}, which are none"
        yield file.build_finding("KV304", message, "restore the name that it was exported with")
        return
    inputs = sorted({pair.layer for pair in file.part.pairs if pair.input is not None})
    outputs = sorted({pair.layer for pair in file.part.pairs if pair.output is not None})
    if file.part_name.end_layer is None:
        expected, matches = f"layers from {first} on", inputs[:1] == outputs[:1] == [first]
    else:
        expected = format_layer_runs([layers])
        matches = all(_has_all_layers(side, layers) for side in (inputs, outputs))
    if not matches:
        yield file.build_finding(
            "KV304",
            f"file name says {expected}, but the graph has inputs of {format_layers(inputs)} "
            f"and outputs of {format_layers(outputs)}",
            WINDOW_SIZE_HINT
            if inputs[:1] == [first] and set(inputs) < set(outputs)
            else "export these layers again; --no-set if some of them have no cache",
        )


def _has_all_layers(present: Sequence[int], layers: range) -> bool:
    return len(present) == len(layers) and (present[0], present[-1]) == (layers[0], layers[-1])


def _check_coverage(files: Sequence[_PartFile]) -> Iterator[tuple[int, Finding]]:
    """Check that each layer is in one window, neither in two nor in none."""
    last: _PartFile | None = None
    for file in files:
        if not file.layers:
            continue
        begin, stop = file.layers.start, last.layers.stop if last is not None else 0
        if last is not None and begin < stop:
            shared = format_layer_runs([range(begin, min(stop, file.layers.stop))])
            yield file.build_finding(
                "KV301", f"has {shared}, which {last.path} has, too", "remove one of the two"
            )
        elif begin > stop:
            missing = format_layer_runs([range(stop, begin)])
            before = f"{last.path} ends before" if last is not None else "it is the first file"
            yield file.build_finding(
                "KV302",
                f"comes after {missing}, which no file has: {before}",
                "give all windows of the model, or --no-set for some of them",
            )
        if last is None or file.layers.stop > stop:
            last = file


def _check_seams(files: Sequence[_PartFile], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Check that the output at the end of a window has the type of the next window's input."""
    files_by_end = {file.layers.stop: file for file in reversed(files) if file.layers}
    for right in files:
        left = files_by_end.get(right.layers.start)
        if rule.seam is None or left is None or not right.layers:
            continue
        output_name, input_name = rule.seam
        out = _find_value(left.part.signature.outputs, output_name)
        into = _find_value(right.part.signature.inputs, input_name)
        if out is None:
            yield left.build_finding(
                "KV305",
                f"has no output {output_name}, which {right.path} needs as input {input_name}",
                _EXPORT_AGAIN_HINT,
            )
        if into is None:
            yield right.build_finding(
                "KV305",
                f"has no input {input_name} for the output {output_name} of {left.path}",
                _EXPORT_AGAIN_HINT,
            )
        elif out is not None and not is_type_compatible(into, out):
            left_type = f"{out.name} of {left.path} is {format_value_type(out)}"
            message = f"is {format_value_type(into)}, but {left_type}"
            yield right.build_finding("KV305", message, _EXPORT_AGAIN_HINT, into.name)


def _check_shared_inputs(
    files: Sequence[_PartFile], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Check that shared inputs have one type; a window may lack those that it does not use."""
    for name in rule.shared_inputs:
        inputs = [(file, _find_value(file.part.signature.inputs, name)) for file in files]
        present = [(file, value) for file, value in inputs if value is not None]
        if not present:
            continue
        usual = most_common([value for _, value in present])
        path = next(file.path for file, value in present if value is usual)
        for file, value in present:
            if not is_type_compatible(value, usual):
                message = f"is {format_value_type(value)}, but {format_value_type(usual)} in {path}"
                yield file.build_finding("KV305", message, _EXPORT_AGAIN_HINT, value.name)


def _find_value(values: Iterable[Value], name: str) -> Value | None:
    """Return the input or output with a name, in any scope."""
    return next((value for value in values if value.name.rpartition("/")[2] == name), None)


def _check_same_export(files: Sequence[_PartFile], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Check that files are of one export; the buffers of merges are compared with the windows."""
    traits = [
        collect_traits(
            _get_export_info(file),
            file.part.pairs if file.part_name.stage != MERGED else (),
            rule.exclusive_kinds,
        )
        for file in files
    ]
    paths = [file.path for file in files]
    for index, differences in find_outliers(list(zip(paths, traits, strict=True))):
        yield files[index].build_finding(
            "KV306",
            f"comes from a different model or export: {format_list(differences, '; ')}",
            f"{_EXPORT_AGAIN_HINT}; --no-set if the layers of this model really differ",
        )


def _check_merged_files(
    groups: _FilesByGroup, families: defaultdict[PartGroup | str, list[_PartFile]], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Compare merges with the windows below them, or with the largest merge if there are none.

    Where windows of several models lie below, a merge belongs to the first
    that has the same buffers. Fills in the families, files that must carry one token: by
    their windows, or by their directory where they have none.
    """
    windows = {
        group: _index_file_buffers(files)
        for group, files in groups.items()
        if group.stage == WINDOW
    }
    families.update((group, list(groups[group])) for group in windows)
    below = _find_windows_below(groups)
    for group, files in groups.items():
        if group.stage == WINDOW:
            continue
        homes = [
            home
            for home in below[group.stage, group.root]
            if group.model_name in ("", home.model_name)
        ]
        if group.stage != MERGED:
            families[homes[0] if len(homes) == 1 else group.root] += files
            continue
        if len(homes) < 2:
            yield from _check_same_export(files, rule)
        largest = max(files, key=lambda file: len(file.layers))
        references = [windows[home] for home in homes] or [_index_file_buffers([largest])]
        for file in files:
            layers = file.layers if homes else _intersect_ranges(file.layers, largest.layers)
            own_buffers = _index_file_buffers([file])
            differences = [
                describe_differences(own_buffers, reference, layers) for reference in references
            ]
            if all(differences):
                message = _format_disagreement(differences, references)
                yield file.build_finding("KV307", message, _MERGE_HINT)
            agreeing = [home for home, texts in zip(homes, differences, strict=False) if not texts]
            own_homes = homes if len(homes) == 1 else agreeing
            families[own_homes[0] if own_homes else group.root].append(file)


def _find_windows_below(groups: _FilesByGroup) -> defaultdict[tuple[str, str], list[PartGroup]]:
    """Return, by stage and directory of other parts, the windows to which they are the nearest."""
    stages_and_roots = {(group.stage, group.root) for group in groups if group.stage != WINDOW}
    below: defaultdict[tuple[str, str], list[PartGroup]] = defaultdict(list)
    for group in groups:
        if group.stage == WINDOW:
            for stage in (PREFIXED, MERGED):
                parents = _walk_up(group.root)
                nearest = next(
                    (root for root in parents if (stage, root) in stages_and_roots), None
                )
                if nearest is not None:
                    below[stage, nearest].append(group)
    return below


def _walk_up(directory: str) -> Iterator[str]:
    """Yield a directory and its parents, as far as its path names them."""
    yield directory
    while directory.strip("/") and directory.rpartition("/")[2] != "..":
        head, slash, _ = directory.rpartition("/")
        directory = head or slash
        yield directory


def _index_file_buffers(files: Sequence[_PartFile]) -> BufferIndex:
    return index_buffers((file.path, file.part.pairs) for file in files)


def _intersect_ranges(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))


def _format_disagreement(
    differences: Sequence[Sequence[str]], references: Sequence[BufferIndex]
) -> str:
    if len(references) == 1:
        return f"has {format_list(differences[0], '; ')}"
    sets = format_list([reference.paths[0] for reference in references])
    return f"matches none of the sets below it ({sets}): it has {differences[0][0]}"


def suggest_one_token(expected: str, tokens: Sequence[str]) -> str:
    """Return what to do about models with different tokens, of which none is empty.

    They get the `expected` one, which was asked for; if that is empty, the first that they carry.
    """
    token = expected or tokens[0]
    option = " --replace" if set(tokens) - {token} else ""
    return f"rename all of them together, with `--prefix {quote_word(token)}{option}`"


def _check_same_token(
    files: Sequence[_PartFile], change: TokenChange, *, check_current_tokens: bool
) -> Iterator[tuple[int, Finding]]:
    """Check that all files of one model carry one token, or all of them none."""
    files_by_tokens: defaultdict[frozenset[str], list[_PartFile]] = defaultdict(list)
    for file in files:
        tokens = {side.token for pair in file.part.pairs for side in pair.sides}
        if not check_current_tokens:
            tokens = {
                change.final_token if change.can_replace(token) else token for token in tokens
            }
        if tokens:
            files_by_tokens[frozenset(tokens)].append(file)
    if len(frozenset().union(*files_by_tokens)) < 2 or sum(map(len, files_by_tokens.values())) < 2:
        return
    by_count = sorted(files_by_tokens, key=lambda tokens: -len(files_by_tokens[tokens]))
    # If all files have the same mixture of tokens, none deviates: the first is named.
    deviating = next(
        (files[0] for tokens, files in files_by_tokens.items() if tokens != by_count[0]),
        files_by_tokens[by_count[0]][0],
    )
    labels = [" and ".join(sorted(token or "no token" for token in each)) for each in by_count]
    groups = [[file.path for file in files_by_tokens[tokens]] for tokens in by_count]
    places = [
        f"{label} in {format_list(paths)}" for label, paths in zip(labels, groups, strict=True)
    ]
    listed = format_list(places, "; ")
    if len(listed) > 2 * MAX_SHOWN_CHARS:  # what is printed is shortened after the tokens
        counts = [
            f"{label} in {len(paths):,} file{'s' * (len(paths) != 1)}"
            for label, paths in zip(labels, groups, strict=True)
        ]
        listed = f"{format_list(counts, '; ')} ({listed})"
    verb, hint = "would carry", "`--replace` gives all of them the new token"
    if check_current_tokens:
        verb = "carry"
        carried = [token for each in by_count for token in sorted(each) if token]
        hint = suggest_one_token(change.final_token, carried)
    message = f"the files of this set {verb} different tokens: {listed}"
    yield deviating.build_finding("KV303", message, hint)


class BufferIndex(NamedTuple):
    """The buffers of some models.

    Attributes:
        paths: The paths of all the models.
        layers: The layers that have buffers, sorted.
        by_layer: For each layer the buffers by kind and name, each with its model's path.
    """

    paths: tuple[str, ...]
    layers: tuple[int, ...]
    by_layer: Mapping[int, Mapping[tuple[str, str], tuple[str, KvPair]]]


def most_common(values: Sequence[Value]) -> Value:
    """Return the first of the values whose type occurs most often, whatever its symbols are."""
    types = [
        (value.dtype, None if value.shape is None else _list_static_sizes(value))
        for value in values
    ]
    counts = Counter(types)
    return values[types.index(max(counts, key=lambda key: counts[key]))]


def _list_static_sizes(value: Value) -> tuple[int | None, ...]:
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape or ())


def index_buffers(models: Iterable[tuple[str, Sequence[KvPair]]]) -> BufferIndex:
    """Index the buffers of models; if several have the same buffer, the first counts."""
    paths, by_layer = [], defaultdict[int, dict[tuple[str, str], tuple[str, KvPair]]](dict)
    for path, pairs in models:
        paths.append(path)
        for pair in pairs:
            by_layer[pair.layer].setdefault((pair.kind, pair.buffer), (path, pair))
    return BufferIndex(tuple(paths), tuple(sorted(by_layer)), dict(by_layer))


def describe_differences(
    described: BufferIndex, reference: BufferIndex, layers: range
) -> list[str]:
    """Describe how buffers of one model differ between files, for some layers.

    Scopes and tokens do not matter: they differ between the stages of an export.

    Returns:
        Buffers that are missing, then buffers that only `described` has, then those with
        another type. All can follow "has".
    """
    missing, extra = (defaultdict[str, list[int]](list) for _ in range(2))
    missing_from, type_differences = "", list[str]()
    for layer in _slice_layers(layers, reference.layers):
        own = described.by_layer.get(layer, {})
        for key, (path, pair) in reference.by_layer[layer].items():
            if key in own:
                type_differences += _describe_type_differences(own[key][1], pair, path)
            else:
                missing_from = missing_from or path
                missing[key[1]].append(layer)
    for layer in _slice_layers(layers, described.layers):
        for key in described.by_layer[layer]:
            if key not in reference.by_layer.get(layer, {}):
                extra[key[1]].append(layer)
    compared = " to ".join(dict.fromkeys((reference.paths[0], reference.paths[-1])))
    return [
        *(
            f"no {buffer} of {format_layers(numbers)}, which {missing_from} has"
            for buffer, numbers in missing.items()
        ),
        *(
            f"{buffer} of {format_layers(numbers)}, which {compared} does not have"
            for buffer, numbers in extra.items()
        ),
        *type_differences,
    ]


def _slice_layers(layer_range: range, layers: Sequence[int]) -> Sequence[int]:
    return layers[bisect_left(layers, layer_range.start) : bisect_left(layers, layer_range.stop)]


def _describe_type_differences(own: KvPair, other: KvPair, path: str) -> Iterator[str]:
    for own_side, other_side in ((own.input, other.input), (own.output, other.output)):
        if (
            own_side is not None
            and other_side is not None
            and not is_type_compatible(own_side.value, other_side.value)
        ):
            own_type, other_type = map(format_value_type, (own_side.value, other_side.value))
            yield f"{own_side.old_name} as {own_type}, but {other_type} in {path}"


def collect_traits(
    export: ExportInfo, pairs: Iterable[KvPair], exclusive_kinds: Collection[str]
) -> Traits:
    """Collect the traits of one part that all parts of its export should share.

    Shapes are compared only where their symbols are the same: layers with a sliding window may have
    a different number of heads. No model mixes the `exclusive_kinds`.
    """
    traits, kinds = defaultdict[tuple[str, ...], set[str]](set), set()
    producer = f"{export.producer} {export.producer_version}".strip()
    traits["IR version",].add(str(export.ir_version))
    traits["producer",].add(producer or "unknown")
    for domain, version in export.opsets:
        traits["opset " + (domain or "ai.onnx"),].add(str(version))
    for pair in pairs:
        shape = pair.sides[0].value.shape
        if pair.kind in exclusive_kinds:
            kinds.add(pair.kind)
        if shape is not None:
            key = pair.buffer, *("" if isinstance(dim, int) else str(dim) for dim in shape)
            traits[key].add(format_shape(shape))
    if kinds:
        traits["buffers of kind",].add(" and ".join(sorted(kinds)))
    return {key: frozenset(values) for key, values in traits.items()}


def find_outliers(models: Sequence[tuple[str, Traits]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the models that differ from most others, by index, with their differences.

    In a tie the first counts as right. A trait with two values within one model varies by
    layer, so it is not compared.
    """
    counts = defaultdict[tuple[str, ...], Counter[frozenset[str]]](Counter)
    examples: dict[tuple[tuple[str, ...], frozenset[str]], str] = {}
    for path, traits in models:
        for key, values in traits.items():
            counts[key][values] += 1
            examples.setdefault((key, values), path)
    usual = {
        key: max(values_counts, key=lambda values: values_counts[values])
        for key, values_counts in counts.items()
        if all(len(values) == 1 for values in values_counts)
    }
    for index, (_, traits) in enumerate(models):
        differences = [
            f"{key[0]} {''.join(values)} ({''.join(usual[key])} in {examples[key, usual[key]]})"
            for key, values in traits.items()
            if key in usual and values != usual[key]
        ]
        if differences:
            yield index, differences
