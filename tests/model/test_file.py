"""Models opened, spliced in memory and on disk, and written."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

import models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import field, varint
from onnx import ModelProto
from tiers import thin

from onnxkvrename import ModelError, WriteError, rename
from onnxkvrename.files.read import open_file
from onnxkvrename.files.temp_file import TempFile
from onnxkvrename.limits import MAX_MODEL_BYTES
from onnxkvrename.model.file import (
    build_spliced_source,
    check_written_model,
    join_pieces,
    open_model,
    read_model_signature,
    read_pieces,
    splice_payloads,
    sum_piece_sizes,
    write_pieces,
)
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import (
    PREFIX_SIZE,
    ByteSource,
    Record,
    Span,
    read_fields,
)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.onnx", b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "not an ONNX model|is a text file"),
        (bytes(64), "nothing but zeros"),
        (b"past_key.0\n", "is a text file"),
        ("Schlüssel €".encode()[:-1], "is a text file"),
        (b"<!DOCTYPE html><html>", "an HTML or XML page"),
        (b"\xef\xbb\xbf\r\n <html>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b'<ir_version: 8, opset_import: ["": 17]> g () => () {}', "is ONNX text"),
        (
            b'{\n  "schema": "onnxkvrename.inspect/2",',
            "is a layout file.*compare accepts it instead of its model",
        ),
        (zipped(), "a zip archive"),
        (gzip.compress(b"x", mtime=0), "a gzip file"),
        (pickle.dumps([1], protocol=4), "a pickle"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"\x20\0\0\0ORTM", "an ONNX Runtime model"),
        (b'\x10\0\0\0\0\0\0\0{"a":{"dtype"', "a safetensors file"),
        (models.tensor("w", 1.0).SerializeToString(), "not an ONNX model|ends past|in the middle"),
        (models.decoder().SerializeToString()[:-1], "runs past the end of its message"),
        (models.decoder().SerializeToString() + b"\1", "wire type|field|number|in the middle"),
        (models.decoder().SerializeToString() * 2, "a second graph"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = models.saved(content, tmp_path / "x.onnx")
    with pytest.raises(ModelError, match=message) as caught, open_model(path):
        pass
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_no_reader_takes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with (
        pytest.raises(ModelError, match="2,147,483,648 bytes, more than"),
        open_model(path),
    ):
        pass


def test_a_fault_further_in_names_the_file_too(tmp_path: Path) -> None:
    raw = models.decoder().SerializeToString() + field(20, b"\x0a\x7f")
    path = models.saved(raw, tmp_path / "x.onnx")
    message = "runs past the end of its message"
    with pytest.raises(ModelError, match=message) as caught, open_model(path) as model:
        find_occurrences(model.source, [models.KEY])
    assert caught.value.path == str(path)


def test_so_does_one_in_a_result_that_is_not_written(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model, pytest.raises(ModelError) as caught:
        read_signature(build_spliced_source(model.source, (b"\x3a\x7f",)))
    assert caught.value.path == str(path)


def test_each_of_two_open_models_is_named_for_its_own_faults(tmp_path: Path) -> None:
    raw = models.decoder().SerializeToString() + field(20, b"\x0a\x7f")
    damaged = models.saved(raw, tmp_path / "damaged.onnx")
    fine = models.saved(models.decoder(), tmp_path / "fine.onnx")
    with open_model(damaged) as outer, open_model(fine), pytest.raises(ModelError) as caught:
        find_occurrences(outer.source, [models.KEY])
    assert caught.value.path == str(damaged)


def test_errors_of_the_block_itself_pass_untouched(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    cause = ValueError("the cause")
    error = ModelError("about something else")
    with pytest.raises(ModelError) as caught, open_model(path):
        raise error from cause
    assert caught.value is error
    assert (error.path, error.__cause__) == (None, cause)


# In memory


def test_a_model_in_memory_is_read_and_renamed_without_a_file() -> None:
    source = ByteSource.from_bytes(models.decoder().SerializeToString())
    names = {models.KEY: "past_key.0_VLLM"}
    signature = read_model_signature(source)
    occurrences = find_occurrences(source, {*names, *names.values()})
    renamed = join_pieces(source, splice_payloads(source, occurrences.build_edits(names, {})))
    assert [value.name for value in ModelProto.FromString(renamed).graph.input] == [
        *("x", "past_key.0_VLLM", models.VALUE, "flag")
    ]
    result = read_model_signature(ByteSource.from_bytes(renamed))
    assert result == signature.apply_name_map(names, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"^is empty \(export or copy it again\)$"),
        (b"GGUF\3\0\0\0", "is a GGUF file, not an ONNX model"),
        (models.decoder().SerializeToString()[:-1], "runs past the end of its message"),
    ],
)
def test_bytes_in_memory_that_are_no_model_have_no_path(content: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_model_signature(ByteSource.from_bytes(content))
    assert caught.value.path is None


@pytest.mark.parametrize("sizes", [(3, 70_000, 5), (1 << 16, 0, 1), (40_000, 40_000, 2_000_000)])
def test_pieces_are_written_in_order_whatever_their_size(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    model = models.decoder()
    model.doc_string = "".join(map(chr, range(32, 127))) * 40_000
    path = models.saved(model, tmp_path / "x.onnx")
    content, at, pieces, expected = path.read_bytes(), 0, [], b""
    for size in sizes:
        pieces += [Span(at, size), b"between" * size]
        expected += content[at : at + size] + b"between" * size
        at += size
    with (
        open_model(path) as opened,
        TempFile(tmp_path / "y.temp", tmp_path / "y.onnx") as temp_file,
    ):
        assert b"".join(read_pieces(opened.file, pieces)) == expected
        write_pieces(opened.file, pieces, temp_file)
        assert temp_file.read(0, len(expected) + 1) == expected


@pytest.mark.parametrize(
    "pieces",
    [
        (Span(0, 30),),
        (Span(0, 10), b"new", Span(12, 18)),
        (b"before", Span(5, 5), Span(20, 10), b"after"),
        (Span(3, 4), b"", b"", Span(9, 0), b"x", Span(3, 4)),
        (b"", b"all new", b""),
        (),
    ],
    ids=["as it is", "a name exchanged", "parts", "empty pieces", "no source", "nothing"],
)
def test_a_result_is_read_before_it_is_written(
    pieces: tuple[bytes | Span, ...], tmp_path: Path
) -> None:
    """From every byte on, at every size."""
    path = models.saved(bytes(range(30)), tmp_path / "x")
    with open_file(path) as file:
        source = ByteSource(file.read, file.size)
        whole = b"".join(read_pieces(file, pieces))
        assert join_pieces(source, pieces) == whole
        result = build_spliced_source(source, pieces)
        assert result.size == len(whole)
        for offset in range(len(whole) + 2):
            for size in range(len(whole) + 2):
                assert result.read(offset, size) == whole[offset : offset + size]


def test_a_result_that_is_not_written_yet_shows_its_new_names(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        occurrences = find_occurrences(model.source, {models.KEY, "past_key.0_VLLM"})
        edits = occurrences.build_edits({models.KEY: "past_key.0_VLLM"}, {})
        result = build_spliced_source(model.source, splice_payloads(model.source, edits))
        renamed = model.signature.apply_name_map({models.KEY: "past_key.0_VLLM"}, {})
        assert read_signature(result) == renamed != model.signature


def test_a_source_that_becomes_shorter_is_not_read_as_a_result(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        result = build_spliced_source(model.source, (Span(0, model.file.size),))
        os.truncate(path, model.file.size // 2)
        with pytest.raises(ModelError, match="became shorter while it was read"):
            read_signature(result)


def test_what_was_written_must_read_back_as_planned(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    whole = path.read_bytes()
    size = len(whole)
    other = whole.replace(b"past_key", b"past_kex")
    for content, message in [
        (whole, None),
        (whole[:-1], f"{size - 1:,} of {size:,} bytes"),
        (other, "names, dtypes or shapes differ"),
        (b"\xff" * size, "field number|wire type|a number of more"),
    ]:
        with (
            open_model(path) as model,
            TempFile(tmp_path / "y.temp", tmp_path / "y.onnx") as temp_file,
        ):
            temp_file.write(content)
            if message is None:
                check_written_model(temp_file, size, model.signature)
            else:
                with pytest.raises(
                    WriteError, match=f"(?:{message}).*nothing was changed"
                ) as caught:
                    check_written_model(temp_file, size, model.signature)
                assert caught.value.hint == "this is a bug in onnxkvrename: please report it"


def test_a_model_is_read_through_its_file(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        assert [value.name for value in model.signature.outputs] == [
            "logits",
            models.KEY_OUT,
            models.VALUE_OUT,
        ]
        assert model.file.size == path.stat().st_size <= MAX_MODEL_BYTES


# Splicing


def only_field(source: ByteSource, parent: Record) -> Record:
    (record,) = read_fields(source, parent)
    return record


def exchange(data: bytes, depth: int, payload: bytes) -> bytes:
    """Give the one field ``depth`` messages down another payload."""
    source = ByteSource.from_bytes(data)
    record = only_field(source, source.root)
    for _ in range(depth):
        record = only_field(source, record)
    pieces = splice_payloads(source, [(record, payload)])
    result = join_pieces(source, pieces)
    assert sum_piece_sizes(pieces) == len(result)
    return result


def nested(depth: int, payload: bytes) -> bytes:
    """A payload in a field in ``depth`` messages, as protobuf writes it."""
    for number in range(1, depth + 2):
        payload = field(number, payload)
    return payload


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("edge", [1 << 7, 1 << 14])
def test_every_prefix_grows_and_shrinks_by_itself(depth: int, edge: int):
    for size in range(edge - 4 * depth - 8, edge + 2):
        for change in (-5, 0, 1, 5):
            new = b"b" * (size + change)
            assert exchange(nested(depth, b"a" * size), depth, new) == nested(depth, new)


def test_an_empty_name_can_be_filled_and_a_name_emptied():
    empty, full = nested(2, b""), nested(2, b"a" * 200)
    assert exchange(empty, 2, b"a" * 200) == full
    assert exchange(full, 2, b"") == empty


@pytest.mark.parametrize(("width", "expected"), [(1, 2), (2, 3), (4, 4), (5, 5)])
def test_a_prefix_keeps_its_spare_byte_or_its_width(width: int, expected: int):
    data = field(1, field(2, "a" * 100, width), width)
    result = exchange(data, 1, b"a" * 200)
    assert result == field(1, field(2, "a" * 200, expected), expected)
    assert exchange(result, 1, b"a" * 100) == data


def long_tag(number: int, payload: bytes, *, tag: int = 1, length: int = 1) -> bytes:
    """A field with a tag and a length of so many bytes, or more."""
    return varint(number << 3 | 2, tag) + varint(len(payload), length) + payload


def test_a_length_that_could_not_be_taken_back_is_not_changed():
    data = long_tag(2, b"a" * 100, length=3)
    message = "the length at byte 1 is 2 bytes longer than needed.*save it again"
    with pytest.raises(ModelError, match=message):
        exchange(data, 0, b"a" * 200)
    assert exchange(data, 0, b"b" * 100) == long_tag(2, b"b" * 100, length=3)


def test_results_are_read_by_every_protobuf_as_tags_stay_as_they_are():
    """Pure-Python protobuf takes a field with a padded tag for an unknown one."""
    for width in (1, 2, 4, 5):
        result = exchange(long_tag(2, b"a" * 100, length=width), 0, b"a" * 200)
        assert result[0] == 2 << 3 | 2


widths = st.integers(1, PREFIX_SIZE)
edge_sizes = st.one_of(st.integers(0, 40), st.integers(90, 150), st.integers(16_340, 16_400))


def exchange_there_and_back(prefixes: list[tuple[int, int]], sizes: list[int]) -> None:
    """Give a name one size after the other, and then the first again, directly and by all.

    ``prefixes`` are the bytes of tag and length of the name and of each message around it.
    The way there may be refused for a long length, the way back may not.
    """
    data = b"a" * sizes[0]
    for tag, length in prefixes:
        data = long_tag(2, data, tag=tag, length=length)
    depth, result = len(prefixes) - 1, data
    for size in sizes[1:]:
        try:
            result = exchange(result, depth, b"a" * size)
        except ModelError:
            if all(length <= 2 for _, length in prefixes):
                raise
            return
    assert exchange(result, depth, b"a" * sizes[0]) == data
    for size in reversed(sizes[:-1]):
        result = exchange(result, depth, b"a" * size)
    assert result == data


@given(st.lists(widths, min_size=1, max_size=5), st.lists(edge_sizes, min_size=2, max_size=4))
def test_the_way_back_gives_the_same_bytes_unless_the_way_there_is_refused(
    lengths: list[int], sizes: list[int]
):
    exchange_there_and_back([(1, length) for length in lengths], sizes)


@given(
    st.lists(st.tuples(widths, widths), min_size=1, max_size=3),
    st.lists(edge_sizes, min_size=2, max_size=4),
)
def test_so_it_does_behind_long_tags(prefixes: list[tuple[int, int]], sizes: list[int]):
    exchange_there_and_back(prefixes, sizes)


@pytest.mark.parametrize(("edge", "width"), thin(product([0, 100, 16_000], range(1, 6)), 1))
def test_a_renamed_model_is_stripped_to_the_bytes_from_before(
    width: int, edge: int, tmp_path: Path
):
    """In the graph, its nodes and inputs and a subgraph, at sizes where lengths grow."""
    path = tmp_path / "x.onnx"
    inner = models.graph(models.node("Add", [models.KEY_OUT, "x"], ["sum"]))
    for filling in range(edge, edge + 130, 5):
        model = models.decoder(models.branch(inner))
        model.graph.node[0].doc_string = model.graph.input[1].doc_string = "d" * filling
        model.graph.node[-1].attribute[0].g.node[0].doc_string = "d" * filling
        raw = models.written(model, width=width)
        models.saved(raw, path)
        try:
            assert rename(path, "VLLM").status == "renamed"
        except ModelError:
            assert width > 2
            assert path.read_bytes() == raw
            continue
        assert ModelProto.FromString(path.read_bytes()) == models.patched(model)
        assert rename(path, strip=True).status == "renamed"
        assert path.read_bytes() == raw


def test_two_names_change_places():
    data = field(1, "past_key.0") + field(2, "weights") + field(1, "past_value.10")
    source = ByteSource.from_bytes(data)
    key, _, value = read_fields(source, source.root)
    pieces = splice_payloads(
        source, [(value, source.read_payload(key)), (key, source.read_payload(value))]
    )
    assert join_pieces(source, pieces) == (
        field(1, "past_value.10") + field(2, "weights") + field(1, "past_key.0")
    )


def test_what_does_not_change_is_not_held_in_memory():
    data = field(1, field(9, "w" * 1000) + field(8, "past_key.0")) + field(2, "end")
    source = ByteSource.from_bytes(data)
    holder = next(read_fields(source, source.root))
    _, name = read_fields(source, holder)
    assert splice_payloads(source, []) == (Span(0, len(data)),)
    pieces = splice_payloads(source, [(name, b"past_key.0_VLLM")])
    assert [piece for piece in pieces if isinstance(piece, Span)] == [
        Span(0, 1),
        Span(holder.start, name.length_start - holder.start),
        Span(holder.end, len(data) - holder.end),
    ]


class Leaf(NamedTuple):
    """A payload before and after; one that stays is not edited."""

    old: bytes
    new: bytes


class Part(NamedTuple):
    """A field of a tree; ``width`` is the least number of bytes of its length."""

    number: int
    width: int
    inside: Leaf | list[Part]


sizes = st.one_of(st.integers(0, 40), st.integers(110, 130), st.integers(16_360, 16_390))
payloads = sizes.map(lambda size: b"x" * size)
leaves = st.builds(Leaf, payloads, payloads) | payloads.map(lambda same: Leaf(same, same))
least_widths = st.sampled_from([1, 1, 5])
trees = st.recursive(
    st.lists(st.builds(Part, st.integers(1, 40), least_widths, leaves)),
    lambda inner: st.lists(
        st.builds(Part, st.integers(1, 40), least_widths, inner | leaves),
        min_size=1,
        max_size=4,
    ),
    max_leaves=12,
)


def written(parts: list[Part], *, after: bool) -> bytes:
    """A tree as bytes, before or after all edits."""
    return b"".join(
        field(
            part.number,
            part.inside[after]
            if isinstance(part.inside, Leaf)
            else written(part.inside, after=after),
            part.width,
        )
        for part in parts
    )


def edits(source: ByteSource, holder: Record, parts: list[Part]) -> list[tuple[Record, bytes]]:
    changes: list[tuple[Record, bytes]] = []
    for record, part in zip(read_fields(source, holder), parts, strict=True):
        if isinstance(part.inside, Leaf):
            if part.inside.old != part.inside.new:
                changes.append((record, part.inside.new))
        else:
            changes += edits(source, record, part.inside)
    return changes


@given(trees, st.randoms(use_true_random=False))
def test_a_splice_is_what_writing_it_all_again_would_give(tree: list[Part], random):
    data, expected = written(tree, after=False), written(tree, after=True)
    source = ByteSource.from_bytes(data)
    changes = edits(source, source.root, tree)
    random.shuffle(changes)
    pieces = splice_payloads(source, changes)
    assert join_pieces(source, pieces) == expected
    assert sum_piece_sizes(pieces) == len(expected)
