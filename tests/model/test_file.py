from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from pathlib import Path

import models
import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.model.file import (
    build_spliced_source,
    check_written_model,
    open_model,
    read_pieces,
    write_pieces,
)
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import Span, splice_payloads
from onnxkvrename.storage.read import MAX_MODEL_SIZE, open_file
from onnxkvrename.storage.temp_file import TempFile


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.onnx", b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
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
        (b'{\n  "schema": "onnxkvrename.manifest/1",', "is a manifest.*compare takes it"),
        (zipped(), "a zip archive"),
        (gzip.compress(b"x"), "a gzip file"),
        (pickle.dumps([1], protocol=4), "a pickle"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"\x20\0\0\0ORTM", "an ONNX Runtime model"),
        (b'\x10\0\0\0\0\0\0\0{"a":{"dtype"', "a safetensors file"),
        (models.tensor("w", 1.0).SerializeToString(), "not an ONNX model|ends past|in the middle"),
        (models.decoder().SerializeToString()[:-1], "ends past what holds it"),
        (models.decoder().SerializeToString() + b"\1", "wire type|field|number|in the middle"),
        (models.decoder().SerializeToString() * 2, "a second graph"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(content: bytes, said: str, tmp_path: Path) -> None:
    path = models.saved(content, tmp_path / "x.onnx")
    with pytest.raises(ModelError, match=said) as caught, open_model(path):
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
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with pytest.raises(ModelError) as caught, open_model(path):
        raise ModelError("too deep")
    assert caught.value.path == str(path)


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
    with open_model(path) as opened, TempFile(tmp_path / "y.onnx") as draft:
        assert b"".join(read_pieces(opened.file, pieces)) == expected
        write_pieces(opened.file, pieces, draft)
        assert draft.read(0, len(expected) + 1) == expected


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
        whole = b"".join(read_pieces(file, pieces))
        result = build_spliced_source(file, pieces)
        assert result.size == len(whole)
        for offset in range(len(whole) + 2):
            for size in range(len(whole) + 2):
                assert result.read(offset, size) == whole[offset : offset + size]


def test_a_result_that_is_not_written_yet_shows_its_new_names(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        survey = find_occurrences(model.source, {models.KEY, "past_key.0_VLLM"})
        edits = survey.build_edits({models.KEY: "past_key.0_VLLM"}, {})
        result = build_spliced_source(model.file, splice_payloads(model.source, edits))
        renamed = model.signature.apply_name_map({models.KEY: "past_key.0_VLLM"}, {})
        assert read_signature(result) == renamed != model.signature


def test_a_source_that_becomes_shorter_is_not_read_as_a_result(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        result = build_spliced_source(model.file, (Span(0, model.file.size),))
        os.truncate(path, model.file.size // 2)
        with pytest.raises(ModelError, match="became shorter while it was read"):
            read_signature(result)


def test_what_was_written_must_read_back_as_planned(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    whole = path.read_bytes()
    size = len(whole)
    other = whole.replace(b"past_key", b"past_kex")
    for written, said in [
        (whole, None),
        (whole[:-1], f"{size - 1:,} of {size:,} bytes"),
        (other, "names, dtypes or shapes differ"),
        (b"\xff" * size, "field number|wire type|a number of more"),
    ]:
        with open_model(path) as model, TempFile(tmp_path / "y.onnx") as draft:
            draft.write(written)
            if said is None:
                check_written_model(draft, size, model.signature)
            else:
                with pytest.raises(WriteError, match=f"(?:{said}).*nothing was changed.*bug"):
                    check_written_model(draft, size, model.signature)


def test_a_model_is_read_through_its_file(tmp_path: Path) -> None:
    path = models.saved(models.decoder(), tmp_path / "x.onnx")
    with open_model(path) as model:
        assert [value.name for value in model.signature.outputs] == [
            "logits",
            models.KEY_OUT,
            models.VALUE_OUT,
        ]
        assert model.file.size == path.stat().st_size <= MAX_MODEL_SIZE
