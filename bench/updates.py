"""How caches are updated, told from the graph and seen in onnxruntime: `python bench/updates.py`.

For every buffer of the real exports (`../shared/exports` and `../shared/exports-other`, or the
directories given): the static answer, and the shapes of input and output in a run, with the
positions that changed. A buffer whose two answers disagree makes the exit code 1. A model that
onnxruntime cannot run is listed with the reason; nothing is said of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.verification import trace_buffer_updates
from onnxkvrename.verification.dataflow import trace_buffer_flows
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.running.ort_session import build_feed, load_session

SHARED = Path(__file__).resolve().parents[2] / "shared"
FOLDERS = (SHARED / "exports", SHARED / "exports-other")
PAST, NEW, WINDOW = 6, 2, 16
"""Lengths of a cache that grows, of the input, and of a static cache, which has room."""
SPELLINGS = (
    (r"(.*)_RetainedState", r"\1"),
    (r"present([._].*)", r"past_key_values\1"),
    (r"present([._].*)", r"past\1"),
    (r"(.*)_out", r"\1_in"),
    (r"updated_(.*)", r"\1"),
)
"""How exporters spell an output, and its input."""


class Observation(NamedTuple):
    """What a run shows of a buffer."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    changed: str

    def agrees_with(self, update: BufferUpdate) -> bool:
        """Tell if a run can show this of a buffer that is updated so; an unknown one agrees."""
        grown = [
            axis for axis, (a, b) in enumerate(zip(self.into, self.out, strict=False)) if b > a
        ]
        if update.kind == "append":
            return grown == [update.axis]
        if update.kind == "delta":
            return self.out[update.axis or 0] < self.into[update.axis or 0]
        if update.kind == "once" and 0 in self.out:
            return True  # a placeholder, for which there is KV110
        return update.kind == "unknown" or self.into == self.out


def pair_values(signature: Signature) -> Iterator[KvPair]:
    """Yield the buffers by the names of their outputs, each output with one input at most."""
    inputs = {value.name: value for value in signature.inputs}
    for output in signature.outputs:
        names = (re.sub(f"^{end}$", start, output.name) for end, start in SPELLINGS)
        name = next((name for name in names if name in inputs and name != output.name), None)
        if name is not None and re.search("past|cache|conv|recurrent|compressed|k_pe", name):
            yield build_pair(inputs[name], output)


def build_pair(into: Value, out: Value) -> KvPair:
    sides = PairSide(into, "", into.name), PairSide(out, "", out.name)
    return KvPair("attention", "", into.name, 0, *sides)


def pair_by_flow(source: Any, signature: Signature) -> Iterator[KvPair]:
    """Yield the buffers of an exporter whose names do not pair: what is an update of what."""
    graph = read_graph(source)
    caches = [value for value in signature.inputs if re.search("past|cache", value.name)]
    for output in signature.outputs:
        for cache in caches:
            (flow,) = trace_buffer_flows(graph, [build_pair(cache, output)])
            if flow.verdict == "updated":
                yield flow.pair


def choose_sizes(signature: Signature) -> dict[str, int]:
    """Return sizes with room for the new positions in a static cache, and none in a growing one."""
    sizes = {}
    for value in signature.inputs:
        for dim in value.shape or ():
            if isinstance(dim, str):
                sizes[dim] = choose_size(dim)
    return sizes


def choose_size(symbol: str) -> int:
    terms = [term.strip() for term in symbol.split("+")]
    if len(terms) > 1:
        return sum(map(choose_size, terms))
    if "total" in symbol:
        return PAST + NEW
    if "sliding" in symbol:
        return WINDOW
    if "past" in symbol:
        return PAST
    if "encoder" in symbol:
        return 12
    if "seq" in symbol:
        return NEW
    if "kv_cache_dim" in symbol:
        return 16
    if re.search("ctx|window", symbol):
        return WINDOW
    return 1


def observe(path: Path, pairs: Sequence[KvPair], sizes: dict[str, int]) -> dict[str, Observation]:
    """Run a model once, with random values in its caches."""
    session = load_session(path, {}, sizes)
    random = np.random.default_rng(0)
    values = {
        value.name: build_feed(session, value, 0, seed=0, cache_length=16)
        for value in session.inputs
    }
    feeds = {name: value.numpy().copy() for name, value in values.items()}
    for pair in pairs:
        assert pair.input is not None
        cache = feeds[pair.input.old_name]
        if cache.dtype.kind == "f":
            feeds[pair.input.old_name] = random.normal(size=cache.shape).astype(cache.dtype)
    for name, feed in feeds.items():
        if re.search("attention_mask", name) and feed.dtype.kind == "i":
            feeds[name] = np.ones_like(feed)
    names = [pair.output.old_name for pair in pairs if pair.output is not None]
    results = dict(zip(names, session.inference_session.run(names, feeds), strict=True))
    return {
        pair.output.old_name: compare_arrays(
            feeds[pair.input.old_name], results[pair.output.old_name]
        )
        for pair in pairs
        if pair.input is not None and pair.output is not None
    }


def compare_arrays(into: Any, out: Any) -> Observation:
    """Return shapes, and how many positions of the axis with new ones differ."""
    if into.shape != out.shape:
        shared = tuple(slice(0, min(a, b)) for a, b in zip(into.shape, out.shape, strict=False))
        kept = np.array_equal(into[shared], out[shared])
        return Observation(into.shape, out.shape, "past kept" if kept else "past differs")
    different = into != out
    if not different.any():
        return Observation(into.shape, out.shape, "nothing")
    counts = []
    for axis in range(into.ndim):
        others = tuple(each for each in range(into.ndim) if each != axis)
        count = int(different.any(axis=others).sum())
        if count < into.shape[axis]:
            counts.append(f"{count} of {into.shape[axis]} along axis {axis}")
    return Observation(into.shape, out.shape, ", ".join(counts) or "all")


def check_model(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each group of buffers that are alike."""
    with open_model(path) as opened:
        signature, source = opened.signature, opened.source
        pairs = list(pair_values(signature)) or list(pair_by_flow(source, signature))
        updates = trace_buffer_updates(source, pairs)
    if not pairs:
        return
    try:
        seen: dict[str, Observation] = observe(path, pairs, choose_sizes(signature))
        reason = ""
    except KvRenameError as error:
        seen, reason = {}, str(error)
    except Exception as error:
        seen, reason = {}, f"{type(error).__name__}: {error}"
    rows: Counter[tuple[str, ...]] = Counter()
    for pair in pairs:
        assert pair.output is not None
        update, one = updates[pair.output.old_name], seen.get(pair.output.old_name)
        if one is None:
            rows[str(update), "-", "not run: " + " ".join(reason.split())[-150:], "-"] += 1
        else:
            shapes = f"{list(one.into)} -> {list(one.out)}"
            agrees = "yes" if one.agrees_with(update) else "NO"
            rows[str(update), shapes, one.changed, agrees] += 1
    for row, count in rows.items():
        yield (str(count), *row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS)
    folders = [folder for folder in parser.parse_args().folders if folder.is_dir()]
    if not folders:
        print("skipped: no real exports in", ", ".join(map(str, FOLDERS)))
        return 0
    print("buffers, static answer, shapes in a run, what changed, do they agree")
    rows = []
    for folder in folders:
        for path in sorted(folder.rglob("*.onnx")):
            for row in check_model(path):
                rows.append(row)
                print(path.relative_to(folder), *row, sep=" | ", flush=True)
    totals = Counter(row[-1] for row in rows for _ in range(int(row[0])))
    print(f"agree {totals['yes']}, disagree {totals['NO']}, not run {totals['-']} buffers")
    return int(totals["NO"] > 0)


if __name__ == "__main__":
    sys.exit(main())
