"""Groups whose pages differ in size and stand side by side in a block.

After vLLM 0.24.0, ``v1/core/kv_cache_utils.py`` (``group_and_unify_kv_cache_specs``,
``_get_kv_cache_groups_uniform_groups``), and 0.33.0, ``v1/core/kv_cache_planning.py``
(``_get_packed_kv_cache_groups``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import Refused, Spec
from onnxkvrename.vllm.uniform_specs import Group, repeats, uniform


def share(counts: Sequence[int], least: int) -> int:
    """The size of shares, at least ``least``, that pads ``counts`` least; the larger of two."""
    most = max(counts)
    sizes = range(max(1, least), max(most, least, 1) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def uniform_groups(specs: Sequence[Spec]) -> tuple[Group, ...]:
    """The groups of a model with windowed MLA in 0.24: MLA whole, each window in parts.

    Raises :class:`~onnxkvrename.pages.Refused` where an assertion of vLLM fails.
    """
    whole = [spec for spec in specs if spec.kind == "mla_attention"]
    windows: dict[tuple[object, ...], list[Spec]] = {}
    for spec in specs:
        if spec.kind == "sliding_window_mla":
            windows.setdefault((spec.block_size, spec.window), []).append(spec)
    others = [s.layer for s in specs if s.kind not in ("mla_attention", "sliding_window_mla")]
    if others or not whole:
        raise Refused(
            others or [spec.layer for spec in specs],
            "vLLM 0.24 takes windowed MLA beside whole MLA, and beside nothing else",
            "a block-outermost layout of vLLM 0.33 may take it",
        )
    counts = [repeats(group) for group in (whole, *windows.values())]
    size = share(counts, counts[0])
    groups = [Group(tuple(whole), mixed=True)]
    for found in windows.values():
        groups += _parts(_widened(found, {spec.page for spec in whole}), size)
    return tuple(groups)


def packed_groups(specs: Sequence[Spec]) -> tuple[Group, ...] | None:
    """The groups of a block-outermost layout in 0.33; ``None`` where all pages are of one size."""
    if len({spec.page for spec in specs}) <= 1:
        return None
    buckets = _buckets(specs)
    least = max(
        (repeats(bucket.specs) for bucket in buckets if bucket.balanced and len(bucket.pages) > 1),
        default=0,
    )
    counts = [repeats(bucket.specs) for bucket in buckets if bucket.balanced]
    size = share(counts, least) if least else None
    anchor = max(_widest(bucket, size) for bucket in buckets)
    groups = list[Group]()
    for bucket in buckets:
        number = _number(bucket, size)
        if _is_state(bucket, size):
            room = anchor // bucket.specs[0].page
            number = max(number, -(-len(bucket.specs) // room))
        groups += _split(bucket.specs, number)
    return tuple(groups)


class _Bucket(NamedTuple):
    """Layers of one type; ``pages`` counts the layers of each size."""

    specs: tuple[Spec, ...]
    pages: dict[int, int]

    @property
    def balanced(self) -> bool:
        """Whether there are as many layers of each size."""
        return len(set(self.pages.values())) == 1


def _buckets(specs: Iterable[Spec]) -> list[_Bucket]:
    """Each layer in the first bucket that it is of one type with; its first layer says which."""
    found: list[list[Spec]] = []
    for spec in specs:
        for bucket in found:
            if uniform([bucket[0], spec], "0.33"):
                bucket.append(spec)
                break
        else:
            found.append([spec])
    return [_Bucket(tuple(bucket), _counted(bucket)) for bucket in found]


def _counted(specs: Iterable[Spec]) -> dict[int, int]:
    return {page: len(found) for page, found in _by_page(specs).items()}


def _by_page(specs: Iterable[Spec]) -> dict[int, list[Spec]]:
    found: dict[int, list[Spec]] = {}
    for spec in specs:
        found.setdefault(spec.page, []).append(spec)
    return found


def _number(bucket: _Bucket, size: int | None) -> int:
    """How many groups a bucket makes by the pattern of its pages."""
    if size is None or not bucket.balanced:
        return 1
    return -(-repeats(bucket.specs) // size)


def _is_state(bucket: _Bucket, size: int | None) -> bool:
    """Whether a bucket may go down to one layer for a group: states, and unsplit windows."""
    kind = bucket.specs[0].kind
    windowed = kind in ("sliding_window", "sliding_window_mla")
    return kind == "mamba" or (size is None and windowed)


def _widest(bucket: _Bucket, size: int | None) -> int:
    """Bytes of the widest group that a bucket cannot do without: of states, one layer's."""
    number = len(bucket.specs) if _is_state(bucket, size) else _number(bucket, size)
    return sum(-(-count // number) * page for page, count in bucket.pages.items())


def _split(specs: Sequence[Spec], number: int) -> list[Group]:
    """``number`` groups with as many repeats of the pattern of pages, taken in turn."""
    if number == 1:
        return [Group(tuple(specs), mixed=True)]
    # Of an unbalanced bucket vLLM lets go what has no partner, and then refuses.
    patterns = list(zip(*_by_page(specs).values(), strict=False))
    if sum(map(len, patterns)) != len(specs):
        raise Refused(
            [spec.layer for spec in specs],
            "vLLM splits layers that have pages of several sizes, unevenly many of each",
            "choose a layout that is not block-outermost",
        )
    parts = (patterns[at::number] for at in range(number))
    return [Group(tuple(spec for pattern in part for spec in pattern), True) for part in parts]


def _widened(specs: Sequence[Spec], pages: set[int]) -> list[Spec]:
    """Windowed layers padded to the next larger page of whole MLA."""
    if max(spec.page for spec in specs) > max(pages):
        raise Refused(
            [spec.layer for spec in specs],
            "a page of windowed MLA is larger than any of whole MLA",
            "vLLM 0.24 pads windowed pages to whole ones only",
        )
    wider = [min(page for page in pages if page >= spec.page) for spec in specs]
    return [
        spec._replace(padded=page) if page > spec.page else spec
        for spec, page in zip(specs, wider, strict=True)
    ]


def _parts(specs: Sequence[Spec], size: int) -> list[Group]:
    by_page = _by_page(specs)
    counts = {len(found) for found in by_page.values()}
    if len(counts) > 1:
        raise Refused(
            [spec.layer for spec in specs],
            "windowed MLA has pages of several sizes, unevenly many of each",
            "vLLM 0.24 wants as many layers of each size",
        )
    return _split(specs, -(-counts.pop() // size))
