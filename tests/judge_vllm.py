"""Compare projections of drawn architectures with vLLM's own code, and count agreement.

python tests/judge_vllm.py [-n COUNT] [--first SEED] [-j JOBS] [--json]

`make witness` installs what this needs, and runs it. Each architecture is planned, allocated and
registered by vLLM, and projected by this program. A line for each thing that is compared says how
often both agree. The exit code is 1 if they do not always.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from architectures import Architecture, build_layout, draw_architecture  # noqa: E402
from vllmwheel import HAS_TORCH, VERSION, find_wheel  # noqa: E402
from witness import BLOCK_COUNT, REFUSALS, Witness  # noqa: E402

from onnxkvrename.layout.layout import Layout  # noqa: E402
from onnxkvrename.vllm.groups import Grouping  # noqa: E402
from onnxkvrename.vllm.layer_specs import align_blocks, build_specs  # noqa: E402
from onnxkvrename.vllm.memory import Allocation  # noqa: E402
from onnxkvrename.vllm.projection import Projection, project_layout  # noqa: E402
from onnxkvrename.vllm.specs import ProjectionRequest, RefusalError  # noqa: E402

_LENGTHS = (1, 127, 128, 129, 600, 1024, 1500)

Verdict = tuple[str, bool, str]
"""What is compared, whether both agree, and what each says."""


def compare(witness: Witness, seed: int) -> Iterator[Verdict]:
    """Yield what comes of one drawn architecture; only its planning if nothing can be allocated."""
    architecture = draw_architecture(seed)
    length = random.Random(seed).choice(_LENGTHS)
    request = ProjectionRequest(architecture.block_size, architecture.tp, prompt_lengths=(length,))
    layout = build_layout(architecture)
    if _is_refused_by_layers(layout, request):
        return  # refused by the model's classes, which are no part of this
    projection = project_layout(layout, request)
    plan = witness.make_plan(architecture)
    grouping = projection.grouping
    yield _judge("refusals of groups", plan is None, grouping is None)
    if plan is None or grouping is None:
        return
    yield _judge("groups and pages", _list_vllm_pages(plan.kv_cache_groups), _list_pages(grouping))
    is_refused = witness.make_groups(architecture, indexed=False) is None
    needs_indexing = "block stride indexing" in {c.name for c in grouping.conditions}
    yield _judge("what needs block stride indexing", is_refused, needs_indexing)
    for name in ("unpacked", "packed"):
        allocation = _find_allocation(projection, name)
        if allocation.is_possible:
            yield from _compare_allocation(witness, architecture, allocation)
    allocation = _find_allocation(projection, "cross_layers")
    if allocation.is_possible:
        yield from _compare_cross_layers(witness, architecture, allocation)


def _is_refused_by_layers(layout: Layout, request: ProjectionRequest) -> bool:
    """Return whether a layer cannot have a spec, or its block no size."""
    model = build_specs(layout, request)
    try:
        align_blocks(model.specs, request)
    except RefusalError:
        return True
    return bool(model.refusals)


def _compare_allocation(
    witness: Witness, architecture: Architecture, allocation: Allocation
) -> Iterator[Verdict]:
    is_packed = allocation.name == "packed"
    plan = witness.make_plan(architecture, cross_layers=is_packed)
    # Tensors that are not packed have no block stride.
    stride = allocation.bytes_per_block if is_packed else 0
    slots = [
        ([int(name) for name in t.shared_by], t.offset, t.block_stride, t.size)
        for t in plan.kv_cache_tensors
    ]
    projected = [
        (
            [member.layer for member in p.members],
            p.offset,
            stride,
            (stride or p.page_size) * BLOCK_COUNT,
        )
        for p in allocation.placements
    ]
    yield _judge("places, strides and sizes", slots, projected)
    if witness.can_allocate:
        yield from _compare_memory(witness, architecture, allocation)


def _compare_memory(
    witness: Witness, architecture: Architecture, allocation: Allocation
) -> Iterator[Verdict]:
    from witness_memory import Memory

    (transfer,) = allocation.transfers
    block_count, length = BLOCK_COUNT, 1
    if None not in transfer.blocks:
        length = transfer.tokens
        block_count = 3 + -(-length // architecture.block_size) * len(transfer.blocks)
    is_packed = allocation.name == "packed"
    plan = witness.make_plan(architecture, block_count, cross_layers=is_packed)
    memory = Memory(witness, architecture, plan, cross_layers=is_packed)
    yield _judge("canonical view", memory.build_canonical_view(), _list_canonical(allocation))
    try:
        worker = memory.register()
        memory.connect()
    except (*REFUSALS, AttributeError) as error:
        yield _judge("refusals of NIXL", True, transfer.refused is not None, str(error))
        return
    yield _judge("refusals of NIXL", False, transfer.refused is not None, str(transfer.refused))
    if transfer.refused is not None:
        return
    yield _judge("regions", worker.num_regions, transfer.regions)
    if transfer.descriptors is None:
        yield "descriptors and bytes, not known here", True, ""
        return
    offered, read = memory.list_blocks(length)
    yield _judge("blocks that prefill offers", [*map(len, offered)], [*transfer.blocks])
    yield _judge("blocks that decode reads", [*map(len, read)], [*transfer.read_blocks])
    posted = memory.post(worker, read)
    covers_pages = memory.post(worker, offered).covers_pages
    yield _judge("descriptors", posted.descriptors, transfer.descriptors)
    posted_share = 2 if is_packed and transfer.incomplete else 1
    yield _judge("bytes", posted.size * posted_share, transfer.bytes)
    if covers_pages is not None:
        projected_complete = transfer.incomplete is None
        yield _judge("whether descriptors cover the blocks", covers_pages, projected_complete)


def _compare_cross_layers(
    witness: Witness, architecture: Architecture, allocation: Allocation
) -> Iterator[Verdict]:
    if not witness.can_allocate:
        return
    from witness_memory import Memory

    memory = Memory(witness, architecture, witness.make_plan(architecture), is_cross_layers=True)
    canonical = memory.build_canonical_view()
    if not isinstance(canonical, str):
        yield _judge("canonical view", canonical, _list_canonical(allocation))
    if allocation.registration is not None:
        (transfer,) = allocation.transfers
        try:
            worker = memory.register()
            memory.connect()
        except REFUSALS as error:
            yield _judge("refusals of NIXL", True, transfer.refused is not None, str(error))
            return
        posted = memory.post(worker, tuple([1, 2] for _ in transfer.blocks))
        yield _judge("regions", worker.num_regions, transfer.regions)
        expected = (2 * len(transfer.blocks), 2 * (allocation.bytes_per_block or 0))
        yield _judge("descriptors", (posted.descriptors, posted.size), expected)


def _judge(subject: str, vllm: Any, projected: Any, detail: str = "") -> Verdict:
    return subject, vllm == projected, f"vLLM: {vllm}; here: {projected} {detail}".strip()


def _find_allocation(projection: Projection, name: str) -> Allocation:
    return next(each for each in projection.allocations if each.name == name)


def _list_canonical(
    allocation: Allocation,
) -> tuple[list[int], list[list[tuple[int, int]]]]:
    assert allocation.canonical is not None
    tensors, references = allocation.canonical
    return [*tensors], [[(ref.tensor, ref.page_size) for ref in refs] for refs in references]


def _list_vllm_pages(groups: Any) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(int(name), *_measure_vllm_page(group, name)) for name in group.layer_names]
        for group in groups
    ]


def _measure_vllm_page(group: Any, layer_name: str) -> tuple[int, int, int]:
    """Return the block size, the page and the page without padding of a layer."""
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer_name, group.kv_cache_spec)
    if hasattr(spec, "shapes"):
        states = zip(spec.shapes, spec.dtypes, strict=True)
        unpadded = sum(math.prod(shape) * dtype.itemsize for shape, dtype in states)
        return 0, spec.page_size_bytes, unpadded
    return spec.block_size, spec.page_size_bytes, spec.real_page_size_bytes


def _list_pages(grouping: Grouping) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(s.layer, s.block_size or 0, s.page_size, s.unpadded_page_size) for s in group.specs]
        for group in grouping.groups
    ]


@functools.cache
def _load_witness() -> Witness:
    import torch
    from witness_memory import MemoryWitness

    torch.set_num_threads(1)
    return MemoryWitness()


def judge_memory(seeds: range) -> tuple[Counter[Any], list[str]]:
    """Return how often (subject, agreement) came out of vLLM's memory, and the disagreements."""
    return judge_seeds(_load_witness(), seeds)


def judge_seeds(witness: Witness, seeds: range) -> tuple[Counter[Any], list[str]]:
    """Return how often (subject, agreement) came out, and the disagreements."""
    counts, disagreements = Counter[Any](), list[str]()
    with witness.modules.importable():
        for seed in seeds:
            for subject, agrees, detail in compare(witness, seed):
                counts[subject, agrees] += 1
                if not agrees:
                    disagreements.append(f"seed {seed}: {subject}: {detail}")
    return counts, disagreements


def render_figures(figures: Mapping[str, list[int]], count: int) -> str:
    """Return a row for each subject: how often it was compared, and agreed if not always."""
    rows = [(f"{count:,} architectures, vLLM", VERSION)]
    for subject, (agreed, total) in figures.items():
        rows.append((subject, f"{agreed:,} of " * (agreed < total) + f"{total:,}"))
    return "".join(f"{subject:<38}{cell:>18}\n" for subject, cell in rows)


def main() -> int:
    """Print the figures; return 1 if anything disagrees, 2 if nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    obstacle = find_wheel()
    if not HAS_TORCH:
        obstacle = "no torch to allocate KV caches with: make witness"
    if isinstance(obstacle, str):
        print(obstacle, file=sys.stderr)
        return 2
    end = options.first + options.count
    chunks = [range(start, end, 25) for start in range(options.first, min(options.first + 25, end))]
    counts = Counter[Any]()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for chunk_counts, disagreements in pool.map(judge_memory, chunks):
            counts += chunk_counts
            for line in disagreements:
                print(line, file=sys.stderr)
    figures = {
        subject: [counts[subject, True], counts[subject, True] + counts[subject, False]]
        for subject in dict.fromkeys(subject for subject, _ in counts)
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print(render_figures(figures, options.count), end="")
    return int(any(not agrees for _, agrees in counts))


if __name__ == "__main__":
    sys.exit(main())
