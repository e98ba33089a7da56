"""A layout for a person: what is in it, what it weighs, and what is not known; strings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from onnxkvrename.findings import listed
from onnxkvrename.layout import manifest
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import shape_text
from onnxkvrename.report.rename_text import ranges, show
from onnxkvrename.rules.window_diff import runs_text

HEADS = ("KIND", "PARTS", "LAYERS", "DTYPE", "SHAPE", "BYTES EACH")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class Row(NamedTuple):
    """Buffers that are alike in the same layers; each field is a text under its head."""

    kind: str
    parts: str
    layers: str
    dtype: str
    shape: str
    each: str


def title(layout: Layout) -> str:
    """The model, or all models of a set, and how much is in them."""
    if not layout.buffers:
        return called(layout.models) if layout.models else "no KV buffer in any model given"
    return f"{called(layout.models)}: {summary(layout)}"


def called(models: Sequence[str]) -> str:
    """What to call a model, or several: by their directory, and how many they are."""
    if len(models) == 1:
        return show(models[0])
    folders = [model.split("/")[:-1] for model in models]
    shared = [names[0] for names in takewhile(_same, zip(*folders, strict=False))]
    if not shared and any(model.startswith("/") for model in models):
        return f"{len(models)} models"
    directory = "/".join(shared) or ("/" if shared else ".")
    return f"{show(directory)} ({len(models)} models)"


def _same(names: Sequence[str]) -> bool:
    return len({*names}) == 1


def summary(layout: Layout) -> str:
    """How many buffers there are, and in which layers."""
    if not layout.buffers:
        return "no KV buffer"
    count = len(layout.buffers)
    return f"{count} {_plural('buffer', count)}, {ranges(layout.layers)}"


def rows(layout: Layout) -> tuple[Row, ...]:
    """The buffers, those alike in one row, in the order of their layers."""
    found: dict[tuple[str, str, str, str, str], list[int]] = {}
    for buffer in layout.buffers:
        shape = "rank unknown" if buffer.shape is None else shape_text(_shown(layout, buffer.shape))
        key = (buffer.kind, buffer.part, buffer.dtype, shape, _each(layout, buffer))
        found.setdefault(key, []).append(buffer.layer)
    alike: dict[tuple[str, tuple[int, ...], str, str, str], list[str]] = {}
    for (kind, part, dtype, shape, each), layers in found.items():
        alike.setdefault((kind, tuple(layers), dtype, shape, each), []).append(part)
    return tuple(
        Row(*map(show, (kind, ", ".join(parts), runs_text(sorted(layers)), dtype, shape, each)))
        for (kind, layers, dtype, shape, each), parts in alike.items()
    )


def facts(layout: Layout) -> Iterator[tuple[str, str]]:
    """The totals, what is missing, and the digest, each with a label."""
    if not layout.buffers:
        return
    found = manifest.totals(layout)
    kinds = {buffer.kind for buffer in layout.buffers}
    grows = {manifest.growth(buffer) for buffer in layout.buffers}
    if "context" in grows:
        yield "a token", readable(found.context)
    if "window" in grows:
        yield "more within a window", readable(found.window)
    if "encoder" in grows:
        yield "a token of the encoder's", readable(found.encoder)
    if "mamba" in kinds:
        yield "states of a sequence", readable(found.states)
    yield "a sequence", readable(found.sequence)
    batch = layout.buffers[0].shape
    if found.batch is not None and found.batch != found.sequence and batch:
        yield f"a batch of {layout.sized(batch)[0]}", readable(found.batch)
    if layout.missing:
        asked = " ".join(f"--dim {show(symbol)}=SIZE" for symbol in layout.missing)
        yield "missing", f"{listed([show(symbol) for symbol in layout.missing])}: {asked}"
    if layout.sizes:
        known = (f"{show(symbol)}={size}" for symbol, size in layout.sizes.items())
        yield "with", ", ".join(known)
    yield "kv_layout_sha256", manifest.layout_digest(layout) or ""


def lines(layout: Layout) -> Iterator[str]:
    """All of it as lines, in columns."""
    yield title(layout)
    table = [HEADS, *rows(layout)] if layout.buffers else []
    yield from columns(table)
    yield from columns(list(facts(layout)))


def columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of texts, each column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()


def readable(size: int | None) -> str:
    """Bytes in a unit that fits, and exactly."""
    if size is None:
        return "not known"
    exact = f"{size:,} {_plural('byte', size)}"
    power = min((size.bit_length() - 1) // 10, len(_UNITS) - 1) if size else 0
    if not power:
        return exact
    return f"{size / (1 << 10 * power):.4g} {_UNITS[power]} ({exact})"


def _each(layout: Layout, buffer: Buffer) -> str:
    """What one buffer of a row takes."""
    if buffer.sequence is not None:
        size, per = layout.token_bytes(buffer), "a token"
    else:
        size, per = layout.sequence_bytes(buffer), "a sequence"
    return "not known" if size is None else f"{size:,} {per}"


def _shown(layout: Layout, shape: Shape) -> Shape:
    """A shape with each size beside its symbol."""
    return tuple(
        f"{dim}={layout.sizes[dim]}" if isinstance(dim, str) and dim in layout.sizes else dim
        for dim in shape
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
