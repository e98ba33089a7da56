"""Workloads: the models of the published table and of the growth series, made from a seed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import decoder
from decoder import Decoder

MB = 1_000_000
GB = 1_000 * MB


@dataclass(frozen=True)
class Workload:
    key: str
    title: str
    sources: tuple[Path, ...] = ()
    root: Path = Path()  # the directory that holds the sources
    out: Path = Path()  # where results go
    many: bool = False

    def inputs(self) -> list[Path]:
        """Every file that a run may read: all below `root` that is not a result."""
        if not self.sources:
            return []
        results = {target for _, target in self.pairs}
        return sorted(p for p in self.root.rglob("*") if p.is_file() and p not in results)

    @property
    def pairs(self) -> tuple[tuple[Path, Path], ...]:
        """Source and target; one command over a directory may nest its targets deeper."""
        if not self.many:
            return ((self.sources[0], self.out / "renamed.onnx"),)
        return tuple((source, self.out / source.name) for source in self.sources)

    def found(self) -> tuple[tuple[Path, Path | None], ...]:
        """Source and what now stands for it below `out`."""
        if not self.sources:
            return ()
        if not self.many:
            source, target = self.pairs[0]
            return ((source, target if target.exists() else None),)
        results = {path.name: path for path in self.out.rglob("*.onnx")}
        return tuple((source, results.get(source.name)) for source in self.sources)

    def clear(self) -> None:
        """No result of an earlier run is left."""
        if not self.sources:
            return
        if self.many:
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir(parents=True)
        else:
            self.pairs[0][1].unlink(missing_ok=True)


@dataclass(frozen=True)
class Sizes:
    """The sizes of all workloads; `QUICK` is for trying the benchmark itself."""

    inline: int = 1_500 * MB
    inline_layers: int = 64
    external: int = 4 * GB
    external_layers: int = 16
    nodes: int = 100_000
    node_layers: int = 128
    windows: int = 48
    window_nodes: int = 12_500  # 2 MB
    grow_bytes: tuple[int, ...] = tuple(n * 100 * MB for n in (1, 2, 5, 10, 15, 19))
    grow_nodes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
    grow_layers: tuple[int, ...] = (8, 32, 64, 128, 256, 512)
    grow_files: tuple[int, ...] = (1, 5, 20, 100, 250, 500)


FULL = Sizes()
QUICK = Sizes(
    inline=30 * MB,
    inline_layers=8,
    external=40 * MB,
    external_layers=4,
    nodes=2_000,
    node_layers=16,
    windows=6,
    window_nodes=600,
    grow_bytes=(5 * MB, 10 * MB, 20 * MB),
    grow_nodes=(500, 1_000, 2_000),
    grow_layers=(4, 8, 16),
    grow_files=(1, 4, 8),
)

Maker = Callable[[Path, Sizes, int], Workload]


def inline_weights(at: Path, sizes: Sizes, seed: int) -> Workload:
    model = Decoder(layers=sizes.inline_layers, weights=sizes.inline)
    return _single("a", f"{_size(sizes.inline)} of inline weights", model, at, seed)


def external_data(at: Path, sizes: Sizes, seed: int) -> Workload:
    model = Decoder(sizes.external_layers, sizes.external, external="weights.data")
    title = f"{_size(sizes.external)} of external data, same directory"
    return _single("b", title, model, at, seed)


def many_nodes(at: Path, sizes: Sizes, seed: int) -> Workload:
    model = Decoder(layers=sizes.node_layers, nodes=sizes.nodes)
    return _single("c", f"{sizes.nodes:,} nodes, no weights", model, at, seed)


def windows(at: Path, sizes: Sizes, seed: int) -> Workload:
    made = _windows("d", "", at, sizes.windows, sizes.window_nodes, seed)
    size = round(made.sources[0].stat().st_size / MB, 1)
    return replace(made, title=f"{sizes.windows} window files of {size:g} MB, all of it graph")


def no_model(at: Path, sizes: Sizes, seed: int) -> Workload:
    return Workload("f", "--help and --version")


def tiny(at: Path, sizes: Sizes, seed: int) -> Workload:
    at.mkdir(parents=True, exist_ok=True)
    decoder.write_tiny(at / "model.onnx")
    return Workload("e", "five nodes", (at / "model.onnx",), at, at)


MAKERS: dict[str, Maker] = {
    "a": inline_weights,
    "b": external_data,
    "c": many_nodes,
    "d": windows,
    "e": tiny,
    "f": no_model,
}

Point = tuple[int, Callable[[Path, int], Workload]]


def growth(sizes: Sizes) -> dict[str, list[Point]]:
    """For each series its points: how much, and how to make it."""

    def single(model: Decoder) -> Callable[[Path, int], Workload]:
        return lambda at, seed: _single("growth", "growth", model, at, seed)

    def several(count: int) -> Callable[[Path, int], Workload]:
        return lambda at, seed: _windows("growth", "growth", at, count, 600, seed)

    layers = sizes.grow_layers[-1] * 16
    return {
        "size": [(n, single(Decoder(32, weights=n))) for n in sizes.grow_bytes],
        "nodes": [(n, single(Decoder(16, nodes=n))) for n in sizes.grow_nodes],
        "layers": [(n, single(Decoder(n, nodes=layers))) for n in sizes.grow_layers],
        "files": [(n, several(n)) for n in sizes.grow_files],
    }


def _single(key: str, title: str, model: Decoder, at: Path, seed: int) -> Workload:
    at.mkdir(parents=True, exist_ok=True)
    decoder.write(at / "model.onnx", model, seed)
    return Workload(key, title, (at / "model.onnx",), at, at)


def _windows(key: str, title: str, at: Path, count: int, nodes: int, seed: int) -> Workload:
    return Workload(
        key, title, tuple(_window_files(at, count, nodes, seed)), at / "in", at / "out", many=True
    )


def _window_files(at: Path, count: int, nodes: int, seed: int) -> Iterator[Path]:
    """Laid out as QEfficient's layerwise export does it; one layer each, all graph, no weights."""
    for layer in range(count):
        name = f"layer_{layer}_{layer + 1}"
        path = at / "in" / name / f"Decoder_layer_tmp_{layer}_{layer + 1}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        decoder.write(path, Decoder(1, nodes=nodes, first=layer), seed)
        yield path


def _size(size: int) -> str:
    return f"{size / GB:g} GB" if size >= GB // 10 else f"{size / MB:g} MB"
