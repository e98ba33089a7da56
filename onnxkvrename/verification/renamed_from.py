"""Prove that a model is the rename of another one: the same bytes except for names of buffers.

The source is renamed once more, without writing it, and the result compared with the given model,
at the speed of reading both and without holding either, whatever tool has made it. Only where
bytes differ are the two walked field by field, to name the first difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from onnx import ModelProto

from onnxkvrename.display import show_briefly
from onnxkvrename.files.read import ModelSource, is_content_of
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import shorten_text
from onnxkvrename.model.file import (
    OpenModel,
    build_spliced_source,
    open_model,
    read_pieces,
    sum_piece_sizes,
)
from onnxkvrename.model.protobuf import BLOCK_SIZE, LENGTH, ByteSource, Record, read_fields
from onnxkvrename.rules.kv_model import KvModel, ScannedModel, scan_model, splice_model
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules

_HINT = (
    "check that SOURCE is what this model was made from; then rename SOURCE again: the tool that "
    "wrote this file changed more than names"
)
_MAX_VALUE_BYTES = 1 << 16
"""Bytes of a field whose value a message shows; of a longer one, its size."""


@show_briefly
class RenameProof(NamedTuple):
    """The comparison of a model with the source that it is renamed from.

    Attributes:
        source: The path of the source.
        token: The token of the model; empty for none.
        names: The names that changed, new by old.
        equal: Whether the model has the bytes of the renamed source.
        data_files: The files of external data, which were not read: the model refers to the same
            ones as the source.
    """

    source: str
    token: str
    names: Mapping[str, str]
    equal: bool
    data_files: tuple[str, ...]


def prove_renamed(
    path: ModelSource, source_path: Path, rules: Rules
) -> tuple[RenameProof, tuple[Finding, ...]]:
    """Prove that a model is the renamed source, to the byte, or name the first difference.

    Args:
        path: The model.
        source_path: The model before its names were changed.
        rules: The rules that recognize KV names and how a token goes into them.

    Returns:
        The proof, and KV121 if something else differs.

    Raises:
        ModelError: One of the files cannot be read, or is not a model.
        RulesError: A rule makes names that could not be undone.
    """
    with open_model(path) as result, open_model(source_path) as source:
        signature, own_path = result.signature, result.file.path
        model = scan_model(result.source, signature, own_path, rules, data_beside=None).model
        scanned = _plan_source(model, source, rules)
        pieces, _ = splice_model(source.source, scanned)
        findings = list(_find_refusals(scanned.model))
        expected = read_pieces(source.file, pieces)
        is_equal = is_content_of(result.file, sum_piece_sizes(pieces), expected)
        if not is_equal:
            renamed = build_spliced_source(source.source, pieces)
            place, text = _find_difference(result.source, renamed, str(source_path))
            findings.append(build_finding("KV121", place, text, _HINT))
    plan = scanned.model.plan
    names = {**plan.name_map, **plan.function_name_map, **plan.name_map}
    locations = scanned.model.data_locations
    token = plan.token_change.final_token
    proof = RenameProof(str(source_path), token, names, not findings, tuple(locations))
    return proof, tuple(findings)


def _plan_source(model: KvModel, source: OpenModel, rules: Rules) -> ScannedModel:
    """Plan the rename of the source to the token of a model, with `--normalize` if that fits."""
    token, scans = model.plan.token_change.token, list[ScannedModel]()
    for normalize in (False, True):
        change = TokenChange(token, strip=not token, replace=True, normalize=normalize)
        path, signature = source.file.path, source.signature
        scanned = scan_model(source.source, signature, path, rules, change, data_beside=None)
        new_names = scanned.model.plan.name_map
        if signature.apply_name_map(new_names, scanned.symbols) == model.signature:
            return scanned
        scans.append(scanned)
    return scans[0]


def _find_refusals(source: KvModel) -> Iterator[Finding]:
    """Yield a finding for each reason why the source cannot have these names."""
    for finding in source.findings:
        if finding.code == "KV201" and finding.severity == "error":
            yield build_finding(
                "KV121", finding.name, f"cannot be renamed: {finding.message}", finding.hint
            )


def _find_difference(actual: ByteSource, renamed: ByteSource, source: str) -> tuple[str, str]:
    """Return where two models first differ, in the words of the schema, and what each has there."""
    there = f"the renamed {source}"
    own, other = actual.root, renamed.root
    descriptor, place = ModelProto.DESCRIPTOR, ""
    while True:
        count: Counter[int] = Counter()
        for own_field, like in zip_longest(read_fields(actual, own), read_fields(renamed, other)):
            if own_field is None or like is None or own_field[:2] != like[:2]:
                here, instead = (
                    "nothing more" if each is None else _name_field(each, descriptor, count)
                    for each in (own_field, like)
                )
                return place, f"has {here} where {there} has {instead}"
            if not _has_same_payload(actual, own_field, renamed, like):
                break
            count[own_field.number] += 1
        else:
            return place, f"has the fields of {there}, encoded in other bytes"
        own, other, holder = own_field, like, place
        place = _name_field(own, descriptor, count, holder)
        field = descriptor.fields_by_number.get(own.number)
        if field is None or field.message_type is None or own.wire_type != LENGTH:
            break
        descriptor = field.message_type
    values = _show_values(actual, own, field), _show_values(renamed, other, field)
    for index, (value, instead) in enumerate(zip_longest(*values, fillvalue="nothing")):
        if value != instead:
            shown, other_shown = shorten_text(value), shorten_text(instead)
            if shown == other_shown:  # they differ only behind what a message shows
                break
            place = _name_field(own, descriptor, count, holder, index)
            return place, f"is {shown}, but {other_shown} in {there}"
    byte = _find_first_byte(actual, own, renamed, other)
    if byte is None:
        return place, f"has other bytes than {there}"
    return place, f"has byte {byte[0]:,} as 0x{byte[1]:02x}, but 0x{byte[2]:02x} in {there}"


def _find_first_byte(
    source: ByteSource, record: Record, other_source: ByteSource, other: Record
) -> tuple[int, int, int] | None:
    """Return where two fields of one size first differ, and both bytes; `None` for two sizes."""
    size = record.end - record.start
    if size != other.end - other.start:
        return None
    for offset in range(0, size, BLOCK_SIZE):
        count = min(BLOCK_SIZE, size - offset)
        block = source.read_slice(record.start + offset, count)
        like = other_source.read_slice(other.start + offset, count)
        for index, pair in enumerate(zip(block, like, strict=True) if block != like else ()):
            if pair[0] != pair[1]:
                return offset + index, *pair
    return None


def _has_same_payload(
    source: ByteSource, record: Record, other_source: ByteSource, other: Record
) -> bool:
    """Return whether two fields hold the same bytes; no more than a block of them is in memory."""
    size = record.end - record.start
    if size != other.end - other.start:
        return False
    return all(
        source.read_slice(record.start + offset, min(BLOCK_SIZE, size - offset))
        == other_source.read_slice(other.start + offset, min(BLOCK_SIZE, size - offset))
        for offset in range(0, size, BLOCK_SIZE)
    )


def _name_field(
    record: Record,
    descriptor: Descriptor,
    count: Mapping[int, int],
    holder: str = "",
    index: int = 0,
) -> str:
    """Return the place of a field: its name in its holder, with its position if it has one.

    Args:
        record: The field.
        descriptor: The schema of the message that holds it.
        count: How many fields of each number come before it there.
        holder: The place of that message.
        index: The position in a field of packed numbers.
    """
    field = descriptor.fields_by_number.get(record.number)
    name = f"field {record.number}" if field is None else str(field.name)
    if field is not None and _is_repeated(field):
        name += f"[{count[record.number] + index}]"
    return f"{holder}.{name}" if holder else name


def _is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field may occur several times."""
    # protobuf has `is_repeated` from 6.31 on, and warns of `label` since then.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def _show_values(
    source: ByteSource, record: Record, field: FieldDescriptor | None
) -> Sequence[str]:
    """Return what a field holds as texts, several for numbers that are packed."""
    size = record.end - record.start
    if field is None or size > _MAX_VALUE_BYTES:
        return [f"{size:,} bytes"]
    message: Any = GetMessageClass(field.containing_type)()
    try:
        message.ParseFromString(source.read(record.tag_start, record.end - record.tag_start))
    except DecodeError:
        return [f"{size:,} bytes"]
    value = getattr(message, field.name)
    return [repr(each) for each in (value if _is_repeated(field) else [value])]
