"""Group models that are parts of one, and check that they fit together.

Large models are exported window by window, and merged afterwards. A file is a
part if it has the name of one (`qefficient.SetRule`); every other model is
checked alone.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.findings import Finding, begin_message, build_finding
from onnxkvrename.model.signature import (
    Value,
    format_shape,
    format_value_type,
    is_type_compatible,
)
from onnxkvrename.rules.checks import WINDOW_SIZE_HINT
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, WINDOW, PartName, SetRule
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.text import format_layer_runs, format_layers

_EXPORT_AGAIN_HINT = "export all of them again, together"

_BufferIndex = Mapping[tuple[int, str, str], tuple[str, KvPair]]
"""Buffers by layer, kind and part, each with the path of its model."""


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
    parts: Sequence[KvModel], rules: Rules, request: Request
) -> Iterator[tuple[int, Finding]]:
    """Check that the parts of each set fit together (KV301 to KV307).

    Args:
        parts: The models; those outside of sets are skipped.
        rules: The profile.
        request: The rename that is asked for, or that would help. Where it is to be checked only,
            or is not asked for, the tokens in the files count.

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
    families: dict[PartGroup | str, list[_PartFile]] = defaultdict(list)
    yield from _check_merged_files(groups, families, rules.set_rule)
    for family in families.values() if request.check else ():
        yield from _check_same_token(family, rules, request)


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
        message = f"file name says layers from {first} to {layers.stop}, which is an empty range"
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
            else "export these layers again; if some of them have no cache, pass the file under a "
            "name without layer numbers",
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
                "pass all windows of the model, or one of them alone",
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
        found = [(file, _find_value(file.part.signature.inputs, name)) for file in files]
        present = [(file, value) for file, value in found if value is not None]
        if not present:
            continue
        types = [format_value_type(value) for _, value in present]
        usual = Counter(types).most_common(1)[0][0]
        owner, first = present[types.index(usual)]
        for file, value in present:
            if not is_type_compatible(value, first):
                message = f"is {format_value_type(value)}, but {usual} in {owner.path}"
                yield file.build_finding("KV305", message, _EXPORT_AGAIN_HINT, value.name)


def _find_value(values: Iterable[Value], name: str) -> Value | None:
    """Return the input or output with a name, in any scope."""
    return next((value for value in values if value.name.rpartition("/")[2] == name), None)


def _check_same_export(files: Sequence[_PartFile], rule: SetRule) -> Iterator[tuple[int, Finding]]:
    """Check that each file has the traits of most others, in a tie of the first.

    A trait with two values within one file varies by layer, so it is not compared.
    """
    traits: dict[tuple[str, ...], list[tuple[int, set[str]]]] = {}
    for index, file in enumerate(files):
        for key, values in _collect_traits(file, rule).items():
            traits.setdefault(key, []).append((index, values))
    differences: dict[int, str] = {}
    for key, found in traits.items():
        if any(len(values) > 1 for _, values in found):
            continue
        usual = Counter(min(values) for _, values in found).most_common(1)[0][0]
        example = next(files[index].path for index, values in found if usual in values)
        for index, values in found:
            if usual not in values:
                differences.setdefault(index, f"{key[0]} {min(values)} ({usual} in {example})")
    for index, difference in sorted(differences.items()):
        yield files[index].build_finding(
            "KV306",
            f"comes from a different model or export: {difference}",
            f"{_EXPORT_AGAIN_HINT}; if the layers of this model really differ, rename each window "
            "by itself",
        )


def _collect_traits(file: _PartFile, rule: SetRule) -> dict[tuple[str, ...], set[str]]:
    """Return what all files of one export share: properties, each with its values in the file.

    Shapes are compared only where their symbols are the same: layers with a sliding window may have
    a different number of heads. Merges are compared with the windows.
    """
    export = file.part.export
    assert export is not None  # it is read for every part of a set
    producer = f"{export.producer} {export.producer_version}".strip()
    traits: dict[tuple[str, ...], set[str]] = {
        ("IR version",): {str(export.ir_version)},
        ("producer",): {producer or "unknown"},
    }
    for domain, version in export.opsets:
        traits.setdefault((f"opset {domain or 'ai.onnx'}",), set()).add(str(version))
    if file.part_name.stage == MERGED:
        return traits
    for pair in file.part.pairs:
        shape = pair.sides[0].value.shape
        if pair.kind in rule.exclusive_kinds:
            traits.setdefault(("buffers of kind",), set()).add(pair.kind)
        if shape is not None:
            symbols = ("" if isinstance(dim, int) else str(dim) for dim in shape)
            traits.setdefault((pair.buffer, *symbols), set()).add(format_shape(shape))
    return traits


def _check_merged_files(
    groups: _FilesByGroup, families: dict[PartGroup | str, list[_PartFile]], rule: SetRule
) -> Iterator[tuple[int, Finding]]:
    """Compare merges with the windows below them, or with the largest merge if there are none.

    Above windows of several models, nothing tells which of them were merged. Fills in the
    families, files that must carry one token: by their windows, or else by their directory.
    """
    windows = {group: files for group, files in groups.items() if group.stage == WINDOW}
    families.update((group, list(files)) for group, files in windows.items())
    places = {group: os.path.join(os.path.abspath(group.root), "") for group in groups}
    for group, files in groups.items():
        if group.stage == WINDOW:
            continue
        homes = [home for home in windows if places[home].startswith(places[group])]
        families[homes[0] if len(homes) == 1 else group.root] += files
        if group.stage != MERGED or len(homes) > 1:
            continue
        yield from _check_same_export(files, rule)
        compared = windows[homes[0]] if homes else [max(files, key=lambda file: len(file.layers))]
        layers = compared[0].layers
        reference = _index_buffers(compared)
        for file in files:
            common = file.layers
            if not homes:
                start, stop = max(common.start, layers.start), min(common.stop, layers.stop)
                common = range(start, stop)
            difference = _find_difference(_index_buffers([file]), reference, common)
            if difference:
                hint = "pass all windows that were merged, or merge them again"
                yield file.build_finding("KV307", f"has {difference}", hint)


def _index_buffers(files: Iterable[_PartFile]) -> _BufferIndex:
    """Return the buffers of files; if several have the same buffer, the first counts."""
    buffers: dict[tuple[int, str, str], tuple[str, KvPair]] = {}
    for file in files:
        for pair in file.part.pairs:
            buffers.setdefault((pair.layer, pair.kind, pair.buffer), (file.path, pair))
    return buffers


def _find_difference(own: _BufferIndex, reference: _BufferIndex, layers: range) -> str:
    """Describe the first buffer of some layers in which a file differs from others; else empty.

    Scopes and tokens do not matter: they differ between the stages of an export.
    """
    for key, (path, pair) in reference.items():
        if key[0] not in layers:
            continue
        if key not in own:
            return f"no {pair.buffer} of layer {pair.layer}, which {path} has"
        _, own_pair = own[key]
        for side, other in ((own_pair.input, pair.input), (own_pair.output, pair.output)):
            if side and other and not is_type_compatible(side.value, other.value):
                own_type, other_type = map(format_value_type, (side.value, other.value))
                return f"{side.old_name} as {own_type}, but {other_type} in {path}"
    extra = next((key for key in own if key[0] in layers and key not in reference), None)
    if extra is None:
        return ""
    first = next(iter(reference.values()))[0] if reference else "without buffers"
    return f"{extra[2]} of layer {extra[0]}, which no file it is compared with has (first: {first})"


def _check_same_token(
    files: Sequence[_PartFile], rules: Rules, request: Request
) -> Iterator[tuple[int, Finding]]:
    carried = [(file.path, file.part.tokens) for file in files]
    root = next((file.part.part.root for file in files if file.part.part), "")
    split = find_token_split("the files of this set", carried, request, rules, root)
    if split is not None:
        index, finding = split
        yield files[index].part_index, finding


def find_token_split(
    subject: str,
    files: Sequence[tuple[str, Collection[str]]],
    request: Request,
    rules: Rules,
    root: str,
) -> tuple[int, Finding] | None:
    """Find files of one model that do not all carry one token.

    Args:
        subject: What the files are.
        files: The path of each file, and the tokens in it; an empty one for names without.
        request: The rename that is asked for, or that would help; without a token all get the one
            that most carry.
        rules: The rules that recognize the names.
        root: The directory with the files, which is renamed if the request has no models.

    Returns:
        The index of the first file with a different token, and KV303 with which token is where;
        ``None`` if there is only one token, or only one file with buffers.
    """
    by_tokens: dict[tuple[str, ...], list[int]] = {}
    for index, (_, tokens) in enumerate(files):
        if tokens:
            by_tokens.setdefault(tuple(sorted(tokens)), []).append(index)
    groups = sorted(by_tokens.items(), key=lambda group: -len(group[1]))
    all_tokens = list(dict.fromkeys(token for tokens, _ in groups for token in tokens))
    if len(all_tokens) < 2 or sum(len(indexes) for _, indexes in groups) < 2:
        return None
    places = []
    for tokens, indexes in groups:
        paths = [files[index][0] for index in indexes]
        where = paths[0] if len(paths) == 1 else begin_message(paths, "", "", "files").strip()
        places.append(f"{' and '.join(token or 'no token' for token in tokens)} in {where}")
    if not request.strip:
        token = request.token or next(filter(None, all_tokens))
        is_replaced = request.replace or not {"", token}.issuperset(all_tokens)
        request = request._replace(token=token, replace=is_replaced)
    right = (request.change.final_token,)
    first = min(index for tokens, indexes in groups if tokens != right for index in indexes)
    rename = request._replace(models=request.models or (Path(root or "."),))
    message = f"{subject} carry different tokens: {'; '.join(places)}"
    hint = f"`{format_rename(rename, rules)}` renames all of them"
    return first, build_finding("KV303", "", message, hint)
