"""A projection onto vLLM for a person: groups, ways of allocation, what a prompt moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnxkvrename.report.manifest_text import columns, readable
from onnxkvrename.report.rename_text import show
from onnxkvrename.rules.window_diff import layers_text, runs_text
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.projection import Projection
from onnxkvrename.vllm.uniform_specs import Group
from onnxkvrename.vllm.v024 import Arrangement

_GROUPS = ("GROUP", "KIND", "LAYERS", "BLOCK", "PAGE")
_WAYS = ("ALLOCATION", "POSSIBLE", "A BLOCK OF ALL", "PADDING")
_MOVES = ("ALLOCATION", "PROMPT", "REGIONS", "DESCRIPTORS", "BYTES")
_SAID = {"met": "yes", "not met": "no", "requires": "depends"}


def lines(projection: Projection | None) -> Iterator[str]:
    """All of it as lines, in columns; then what stands against it, and what it depends on."""
    if projection is not None:
        yield from map(show, _lines(projection))


def _lines(projection: Projection) -> Iterator[str]:
    asked = projection.asked
    yield f"vLLM {asked.era}, blocks of {asked.block_size}, tensor parallelism {asked.tp}"
    for refusal in projection.refusals:
        yield f"  refused  {layers_text(refusal.layers)}: {refusal.reason} ({refusal.hint})"
    several = len(set(projection.groupings)) > 1
    for at, grouping in enumerate(projection.groupings if several else projection.groupings[:1]):
        if several:
            yield "  block outermost" if at else "  layer outermost"
        yield from _grouped(grouping)
    ways = projection.arrangements
    if ways:
        yield from columns([_WAYS, *_folded((_name(way), _way(way)) for way in ways)])
    moves = [(_name(way), move) for way in ways for move in _moves(way)]
    if moves:
        yield from columns([_MOVES, *_folded(moves)])
    yield from columns(_folded((_name(way), said) for way in ways for said in _open(way)))
    for condition in projection.conditions:
        if condition.state != "met":
            yield f"  {condition.state}  {condition.name}: {condition.why}"


def _folded(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows that differ in their names only become one, which begins with all these."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows:
        found.setdefault(row, []).append(name)
    return [(", ".join(names), *row) for row, names in found.items()]


def _grouped(grouping: Grouping) -> Iterator[str]:
    if grouping.refusal is not None:
        refusal = grouping.refusal
        yield f"  refused  {layers_text(refusal.layers)}: {refusal.reason} ({refusal.hint})"
    if grouping.groups:
        rows = [_group(at, group) for at, group in enumerate(grouping.groups)]
        yield from columns([_GROUPS, *rows])


def _group(at: int, group: Group) -> tuple[str, ...]:
    pages = dict.fromkeys(spec.page for spec in group.specs)
    windows = {spec.window for spec in group.specs}
    sizes = sorted(str(size) for size in windows if isinstance(size, int))
    unsized = ["of unknown size"] if any(isinstance(size, str) for size in windows) else []
    block = group.first.block_size
    return (
        str(at),
        " ".join((group.kind, *sizes, *unsized)),
        runs_text(sorted(set(group.layers))),
        "-" if block is None else f"{block:,}",
        ", ".join(map(readable, pages)),
    )


def _name(way: Arrangement) -> str:
    return f"{way.name} (default)" if way.default else way.name


def _way(way: Arrangement) -> tuple[str, ...]:
    share = way.padding_share
    return (
        _SAID[way.state],
        "-" if way.bytes_per_block is None else readable(way.bytes_per_block),
        "-" if share is None else f"{share:.1%}",
    )


def _moves(way: Arrangement) -> Iterator[tuple[str, ...]]:
    for move in way.transfers:
        counts = (move.regions, move.descriptors)
        said = ("not known" if count is None else f"{count:,}" for count in counts)
        yield (f"{move.tokens:,}", *said, readable(move.bytes))


def _open(way: Arrangement) -> Iterator[tuple[str, str]]:
    """What is not met; if it is nothing, what must be seen to, and why something is not known."""
    for condition in way.conditions:
        if condition.state == way.state != "met":
            yield condition.state, f"{condition.name}: {condition.why}"
    for reason in dict.fromkeys(move.unknown for move in way.transfers):
        if reason is not None:
            yield "not known", reason
