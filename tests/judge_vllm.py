"""Compare projections of drawn architectures with vLLM's own code, and count agreement.

python tests/judge_vllm.py [-n COUNT] [--first SEED] [-j JOBS] [-v VERSION] [--json]

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from architectures import (  # noqa: E402
    Architecture,
    Deployment,
    build_layout,
    draw_architecture,
    draw_deployments,
    draw_pair,
    draw_uneven,
)
from vllmwheel import HAS_TORCH, find_wheel  # noqa: E402
from witness import BLOCK_COUNT, REFUSALS, Witness  # noqa: E402

from onnxkvrename.api.arguments import find_rules  # noqa: E402
from onnxkvrename.errors import KvRenameError  # noqa: E402
from onnxkvrename.findings import UNKNOWN_WORKERS  # noqa: E402
from onnxkvrename.handoff.compare import Basis, compare_sides  # noqa: E402
from onnxkvrename.handoff.find_consumers import load_consumer  # noqa: E402
from onnxkvrename.handoff.tensor_parallel import (  # noqa: E402
    TensorParallelSizes,
    check_tensor_parallelism,
)
from onnxkvrename.handoff.worker import build_handoff_side  # noqa: E402
from onnxkvrename.vllm.capacity import measure_capacity  # noqa: E402
from onnxkvrename.vllm.compatibility import Worker, compare_factors  # noqa: E402
from onnxkvrename.vllm.groups import Grouping  # noqa: E402
from onnxkvrename.vllm.handshake import check_handshake  # noqa: E402
from onnxkvrename.vllm.memory import Allocation  # noqa: E402
from onnxkvrename.vllm.memory_v033 import KV_CACHE_LAYOUTS  # noqa: E402
from onnxkvrename.vllm.projection import Projection, project_layout  # noqa: E402
from onnxkvrename.vllm.reads import PromptReads  # noqa: E402
from onnxkvrename.vllm.specs import VLLM_RELEASES, ProjectionRequest  # noqa: E402
from onnxkvrename.vllm.workers import judge_workers  # noqa: E402

if TYPE_CHECKING:
    from witness_memory import Pair

VERSIONS = ("0.24.0", "0.33.0")
_LENGTHS = (1, 127, 128, 129, 600, 1024, 1500)

Verdict = tuple[str, bool, str]
"""What is compared, whether both agree, and what each says."""


def compare(witness: Witness, seed: int) -> Iterator[Verdict]:
    """Yield what comes of one drawn architecture; only its planning if nothing can be allocated."""
    architecture = draw_architecture(seed)
    length = random.Random(seed).choice(_LENGTHS)
    version = _name_release(witness)
    request = ProjectionRequest(architecture.block_size, architecture.tp, version, (length,))
    projection = project_layout(build_layout(architecture), request)
    if projection.refusals:
        return
    if not projection.groupings:
        yield "groups, not known here", True, ""
    elif witness.is_v024:
        yield from _compare_v024(witness, architecture, projection)
    else:
        yield from _compare_v033(witness, architecture, projection)


def _compare_v024(
    witness: Witness, architecture: Architecture, projection: Projection
) -> Iterator[Verdict]:
    (grouping,) = projection.groupings
    plan = witness.make_plan(architecture)
    yield _judge("refusals of groups", plan is None, not grouping.groups)
    if plan is None or not grouping.groups:
        return
    yield _judge("groups and pages", _list_vllm_pages(plan.kv_cache_groups), _list_pages(grouping))
    is_refused = witness.make_groups(architecture, indexed=False) is None
    needs_indexing = "block stride indexing" in {c.name for c in grouping.conditions}
    yield _judge("what needs block stride indexing", is_refused, needs_indexing)
    for name in ("unpacked", "packed"):
        allocation = _find_allocation(projection, name)
        if allocation is not None and allocation.is_possible:
            settings = {"cross_layers": name == "packed"}
            plan = witness.make_plan(architecture, **settings)
            # Tensors that are not packed have no block stride in 0.24.
            stride = allocation.bytes_per_block if name == "packed" else 0
            slots = [
                (
                    [int(name) for name in t.shared_by],
                    getattr(t, "offset", 0),  # 0.23 has neither
                    getattr(t, "block_stride", 0),
                    t.size,
                )
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
            yield from _compare_capacity(witness, architecture, plan, projection, grouping)
            yield from _compare_memory(
                witness, architecture, allocation, projection.request, settings
            )
    allocation = _find_allocation(projection, "cross_layers")
    if allocation is not None and allocation.is_possible:
        yield from _compare_cross_layers(witness, architecture, allocation)


def _compare_v033(
    witness: Witness, architecture: Architecture, projection: Projection
) -> Iterator[Verdict]:
    for name in KV_CACHE_LAYOUTS:
        with witness.modules.importable():
            layout = witness.interface.KVCacheLayout[name]
        allocation = _find_allocation(projection, name)
        if name in VLLM_RELEASES[projection.request.release].other_memory:
            yield "layouts, not known here", True, ""
            continue
        grouping = projection.groupings[int(layout.is_block_outermost)]
        groups = witness.make_groups(architecture, layout=layout)
        yield _judge("refusals of groups", groups is None, not grouping.groups)
        if groups is None or not grouping.groups:
            continue
        yield _judge("groups and pages", _list_vllm_pages(groups), _list_pages(grouping))
        plan = witness.make_plan(architecture, layout=layout)
        if witness.count_page_shapes(architecture) > 1 and not layout.is_block_compact:
            plan = None
        is_possible = allocation is not None and allocation.is_possible
        yield _judge("refusals of layouts", plan is None, not is_possible)
        if plan is None or allocation is None or not allocation.is_possible:
            continue
        strides = [
            ([int(name) for name in t.layers], t.offset, t.layer_stride, t.block_stride, t.size)
            for t in plan.kv_cache_tensors
        ]
        yield _judge("places, strides and sizes", strides, _list_strides(allocation))
        yield from _compare_capacity(witness, architecture, plan, projection, grouping)
        yield from _compare_memory(
            witness, architecture, allocation, projection.request, {"layout": layout}
        )


def compare_few_blocks(witness: Witness, seed: int) -> Iterator[Verdict]:
    """Yield what 0.33 registers of layers of very different sizes, with few blocks."""
    if not witness.can_allocate or _name_release(witness) != "0.33":
        return
    from witness_memory import Memory

    architecture, block_count = draw_uneven(seed)
    projection = project_layout(build_layout(architecture), ProjectionRequest(16))
    for name in ("LBNHC", "LBHNC"):
        allocation = _find_allocation(projection, name)
        with witness.modules.importable():
            settings = {"layout": witness.interface.KVCacheLayout[name]}
        if allocation is None or not allocation.is_possible:
            continue
        allocation = _count_blocks(architecture, allocation, projection.request, block_count)
        memory = Memory(
            witness,
            architecture,
            witness.make_plan(architecture, block_count, **settings),
            **settings,
        )
        registration = allocation.registration
        assert registration is not None
        try:
            worker = memory.register()
            memory.connect(memory)
        except (*REFUSALS, AttributeError) as error:
            yield _judge(
                "few blocks: refusals of NIXL", True, bool(registration.refused), str(error)
            )
            continue
        blocks = tuple([0, block_count - 1] for _ in memory.plan.kv_cache_groups)
        posted = memory.post(worker, blocks)
        yield _judge("few blocks: refusals of NIXL", False, bool(registration.refused))
        yield _judge("few blocks: regions", worker.num_regions, registration.regions)
        cost = sum(2 * cost.bytes for cost in registration.costs)
        yield _judge("few blocks: bytes", posted.size, cost)
        is_complete = registration.incomplete is None
        yield _judge("few blocks: descriptors cover", posted.covers_pages, is_complete)


def _compare_capacity(
    witness: Witness,
    architecture: Architecture,
    plan: Any,
    projection: Projection,
    grouping: Grouping,
) -> Iterator[Verdict]:
    rng = random.Random(architecture.block_size + len(architecture.layers))
    length, in_flight = rng.choice([100, 1000, 8192]), rng.choice([64, 512, 4096])
    request = projection.request._replace(max_model_len=length, in_flight_tokens=in_flight)
    capacity = measure_capacity(grouping.groups, request, BLOCK_COUNT)
    if capacity is None or capacity.requests is None:
        yield "requests that fit, not known here", True, ""
        return
    fitting = witness.measure_concurrency(plan, length, in_flight)
    yield _judge("requests that fit", (fitting, fitting), capacity.requests)
    most, fewest = measure_capacity(
        grouping.groups, request._replace(in_flight_tokens=None), BLOCK_COUNT
    ).requests
    yield _judge("requests that fit, as a range", True, fewest <= fitting <= most)


def _compare_memory(
    witness: Witness,
    architecture: Architecture,
    allocation: Allocation,
    request: ProjectionRequest,
    settings: dict[str, Any],
) -> Iterator[Verdict]:
    if not witness.can_allocate:
        return
    from witness_memory import Memory

    (transfer,) = allocation.transfers
    extra = random.Random(allocation.bytes_per_block).choice([0, 0, 4, 30])
    if None in transfer.blocks:
        block_count, length = BLOCK_COUNT + extra, 1
    else:
        length = transfer.tokens
        offered = -(-length // architecture.block_size)
        block_count = 3 + extra + offered * len(transfer.blocks)
    allocation = _count_blocks(architecture, allocation, request, block_count)
    (transfer,) = allocation.transfers
    plan = witness.make_plan(architecture, block_count, **settings)
    memory = Memory(witness, architecture, plan, **settings)
    canonical = memory.build_canonical_view()
    if allocation.canonical is not None:
        tensors, references = allocation.canonical
        projected = ([*tensors], [[tuple(ref) for ref in refs] for refs in references])
        yield _judge("canonical view", canonical, projected)
    elif not isinstance(canonical, str):
        yield "canonical view, not known here", True, ""
    if allocation.registration is None:
        yield "registration, not known here", True, ""
        return
    try:
        worker = memory.register()
        memory.connect(memory)
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
    _, offered_ids, read = memory.list_blocks(length)
    yield _judge("blocks that prefill offers", [*map(len, offered_ids)], [*transfer.blocks])
    yield _judge("blocks that decode reads", [*map(len, read)], [*transfer.read_blocks])
    posted = memory.post(worker, read)
    covers_pages = memory.post(worker, offered_ids).covers_pages
    yield _judge("descriptors", posted.descriptors, transfer.descriptors)
    posted_share = 2 if allocation.name == "packed" and transfer.incomplete else 1
    yield _judge("bytes", posted.size * posted_share, transfer.bytes)
    if covers_pages is not None:
        projected_complete = transfer.incomplete is None
        yield _judge("whether descriptors cover the blocks", covers_pages, projected_complete)


def _count_blocks(
    architecture: Architecture, allocation: Allocation, request: ProjectionRequest, block_count: int
) -> Allocation:
    """Return an allocation as it is where the GPU's memory has a number of blocks."""
    memory = block_count * (allocation.bytes_per_block or 0)
    projection = project_layout(build_layout(architecture), request._replace(gpu_memory=memory))
    counted = _find_allocation(projection, allocation.name)
    assert counted is not None
    return counted


def _compare_cross_layers(
    witness: Witness, architecture: Architecture, allocation: Allocation
) -> Iterator[Verdict]:
    if not witness.can_allocate:
        return
    from witness_memory import Memory

    memory = Memory(witness, architecture, witness.make_plan(architecture), is_cross_layers=True)
    canonical = memory.build_canonical_view()
    if allocation.canonical is not None and not isinstance(canonical, str):
        tensors, references = allocation.canonical
        projected = ([*tensors], [[tuple(ref) for ref in refs] for refs in references])
        yield _judge("canonical view", canonical, projected)
    if allocation.registration is not None:
        (transfer,) = allocation.transfers
        try:
            worker = memory.register()
            memory.connect(memory)
        except REFUSALS as error:
            yield _judge("refusals of NIXL", True, transfer.refused is not None, str(error))
            return
        posted = memory.post(worker, tuple([1, 2] for _ in transfer.blocks))
        yield _judge("regions", worker.num_regions, transfer.regions)
        expected = (2 * len(transfer.blocks), 2 * (allocation.bytes_per_block or 0))
        yield _judge("descriptors", (posted.descriptors, posted.size), expected)


def _name_release(witness: Witness) -> str:
    return witness.version.rpartition(".")[0]


def _judge(subject: str, vllm: Any, projected: Any, detail: str = "") -> Verdict:
    return subject, vllm == projected, f"vLLM: {vllm}; here: {projected} {detail}".strip()


def _find_allocation(projection: Projection, name: str) -> Allocation | None:
    """Return an allocation; ``None`` if it is not known for the release."""
    return next((a for a in projection.allocations if a.name == name), None)


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


def compare_pair(witness: Witness, seed: int) -> Iterator[Verdict]:
    """Yield whether two drawn workers hand over, as findings say it and as vLLM's workers do."""
    if not witness.can_allocate:
        return
    from witness_memory import MemoryWitness, PairRefusal

    assert isinstance(witness, MemoryWitness)
    prefill, decode = draw_pair(seed)
    layout, version = build_layout(decode), _name_release(witness)
    requests = tuple(ProjectionRequest(s.block_size, s.tp, version) for s in (prefill, decode))
    projections = [project_layout(layout, request) for request in requests]
    if any(projection.refusals for projection in projections):
        return  # refused by the model's classes, which are no part of this
    if not all(projection.groupings for projection in projections):
        yield "pairs of workers, not known here", True, ""
        return
    longest, rng = _find_longest_prompt(projections), random.Random(seed)
    drawn = (rng.choice(_LENGTHS), rng.choice([15, 16, 17, 33, 48]), rng.randint(1, 1500))
    lengths = tuple(min(length, longest) for length in drawn)
    requests = tuple(request._replace(prompt_lengths=lengths) for request in requests)
    ranks = TensorParallelSizes(prefill.tp, decode.tp)
    kernel_block = random.Random(seed).choice([None, None, None, 16])
    try:
        handshake = check_handshake((layout, layout), (requests[0], requests[1]), kernel_block)
    except KvRenameError:
        return  # the kernel's block does not divide vLLM's
    findings = [*check_tensor_parallelism(layout, layout, ranks), *handshake.findings]
    if not findings and handshake.unknown:
        yield "pairs of workers, not known here", True, ""
        return
    met = witness.meet(prefill, decode, kernel_block)
    if isinstance(met, PairRefusal):
        yield _judge("pairs of workers that vLLM refuses", True, bool(findings), str(met))
    else:
        yield _judge("pairs of workers that vLLM accepts", [], findings)
        fault = handshake.fault
        has_room = fault is not None and fault.tokens <= longest
        yield from _compare_reads(
            met, (*handshake.reads, *((fault,) if fault and has_room else ()))
        )
        if fault is None:
            # Other lengths than those that were tried have no fault, either.
            yield _judge("pairs without a fault", [], [r.fault for r in handshake.reads if r.fault])


def _find_longest_prompt(projections: Sequence[Projection]) -> int:
    """Return the tokens that the blocks of both sides have room for."""
    from witness_memory import PAIR_BLOCK_COUNT

    groups = max(len(each.groups) for projection in projections for each in projection.groupings)
    block_size = min(projection.request.block_size for projection in projections)
    return max(1, (PAIR_BLOCK_COUNT - 3) // max(1, groups) - 1) * block_size


def _compare_reads(pair: Pair, reads: Sequence[PromptReads]) -> Iterator[Verdict]:
    """Yield whether each rank of decode posts what was predicted."""
    from witness_memory import PairRefusal

    if not reads or reads[0].unknown is not None:
        yield "reads, not known here", True, ""
        return
    for predicted in reads:
        posted = pair.read(predicted.tokens)
        detail = f"{predicted.tokens} tokens: {predicted.fault}"
        if isinstance(posted, PairRefusal):
            is_refused = predicted.refused is not None
            yield _judge("reads that fail", True, is_refused, f"{detail}: {posted}")
            continue
        expected = [(len(rank.sources), rank.descriptors, rank.bytes) for rank in predicted.ranks]
        figures = [(rank.transfers, rank.descriptors, rank.size) for rank in posted]
        yield _judge("transfers, descriptors, bytes of reads", figures, expected, detail)
        is_in_place = all(rank.is_in_place for rank in posted)
        yield _judge("places of what is read", is_in_place, predicted.incomplete is None, detail)


_FACTORS = {
    "vLLM version": "vllm_version",
    "model": "model",
    "dtype": "dtype",
    "KV heads": "num_kv_heads",
    "head size": "head_size",
    "number of layers": "num_hidden_layers",
    "KV cache dtype": "cache_dtype",
    "attention backend": "attn_backend_name",
    "hybrid KV cache manager": "is_hma_enabled",
    "cross-layer blocks": "cross_layers_blocks",
    "speculative config": "speculative_config",
    "transfer mode": "transfer_mode",
}
"""The factors of the compatibility hash by their names here."""


def compare_deployments(witness: Witness, seed: int) -> Iterator[Verdict]:
    """Yield whether two drawn workers with lines hand over, and each factor of their hashes."""
    if not witness.can_allocate:
        return
    from witness_memory import MemoryWitness

    assert isinstance(witness, MemoryWitness)
    prefill, decode = draw_deployments(seed, witness.version)
    workers = [_build_worker(each) for each in (prefill, decode)]
    if any(project_layout(each.layout, each.request).refusals for each in workers):
        return  # refused by the model's classes, which are no part of this
    kernel_block = random.Random(seed).choice([None, None, None, 16])
    consumer, rules = load_consumer("vllm-nixl"), find_rules(None, None, (), None, "")
    ranks = TensorParallelSizes(prefill.architecture.tp, decode.architecture.tp)
    try:
        judgement = judge_workers(workers[0], workers[1], kernel_block)
    except KvRenameError:
        return  # the kernel's block does not divide vLLM's
    sides = [
        build_handoff_side(label, each.layout, consumer, rules)
        for label, each in zip(("prefill", "decode"), workers, strict=True)
    ]
    handoff = compare_sides(
        *sides,
        consumer,
        ranks=ranks,
        more_findings=judgement.findings,
        more_notes=judgement.notes,
        more_basis=Basis(judgement.facts, judgement.conditions),
    )
    refusal = witness.refuse_deployments(prefill, decode, kernel_block)
    unknown = set[str]()
    if len(witness.hashed) == 2 and prefill.version == decode.version:
        for factor in compare_factors(*workers).factors:
            values = [hashed.get(_FACTORS[factor.name]) for hashed in witness.hashed]
            state = "equal" if values[0] == values[1] else "differs"
            if factor.state == "not known":
                unknown |= {factor.name} if state == "differs" else set()
            else:
                detail = f"{factor.name}: {values}"
                yield _judge("factors of the hash", state, factor.state, detail)
    met = [each for each in handoff.findings if "when it has read them" not in each.message]
    codes = [finding.code for finding in met]  # what fails after the handshake, pairs compare
    is_unknown = any("not known" in note for note in handoff.notes) or (
        unknown and refusal is not None and "hash mismatch" in refusal.reason
    )
    if codes == [UNKNOWN_WORKERS] or (not codes and is_unknown):
        yield "workers with lines, not known here", True, ""
    elif refusal is None:
        detail = str([finding.message for finding in handoff.findings])
        yield _judge("workers with lines that vLLM accepts", [], codes, detail)
    else:
        yield _judge("workers with lines that vLLM refuses", True, bool(codes), str(refusal))


def _build_worker(deployment: Deployment) -> Worker:
    request = ProjectionRequest(
        deployment.architecture.block_size,
        deployment.architecture.tp,
        deployment.version,
        serve=deployment.settings,
    )
    return Worker(build_layout(deployment.architecture), request)


def _list_pages(grouping: Grouping) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(s.layer, s.block_size or 0, s.page_size, s.unpadded_page_size) for s in group.specs]
        for group in grouping.groups
    ]


def _list_strides(allocation: Allocation) -> list[tuple[list[int], int, int, int, int]]:
    strides = []
    size = BLOCK_COUNT * (allocation.bytes_per_block or 0)
    for placement in allocation.placements:
        factor = BLOCK_COUNT if placement.per_block else 1
        layers = [member.layer for member in placement.members]
        offset, layer_stride = placement.offset * factor, placement.layer_stride * factor
        strides.append((layers, offset, layer_stride, placement.block_stride, size))
    return strides


@functools.cache
def _load_witness(version: str) -> Witness:
    import torch
    from witness_memory import MemoryWitness

    torch.set_num_threads(1)
    return MemoryWitness(version)


def judge_version(version: str, seeds: range) -> tuple[Counter[Any], list[str]]:
    """Return how often (subject, agreement) came out of vLLM's memory, and the disagreements."""
    return judge_seeds(_load_witness(version), seeds)


def judge_seeds(witness: Witness, seeds: range) -> tuple[Counter[Any], list[str]]:
    """Return how often (subject, agreement) came out, and the disagreements."""
    counts, disagreements = Counter[Any](), list[str]()
    with witness.modules.importable():
        for seed in seeds:
            for subject, agrees, detail in chain(
                compare(witness, seed),
                compare_few_blocks(witness, seed),
                compare_pair(witness, seed),
                compare_deployments(witness, seed),
            ):
                counts[subject, agrees] += 1
                if not agrees:
                    disagreements.append(f"{witness.version} seed {seed}: {subject}: {detail}")
    return counts, disagreements


def render_figures(figures: dict[str, dict[str, list[int]]], count: int) -> str:
    """Return a row for each subject: how often it was compared, and agreed if not always."""
    rows = [[f"{count:,} architectures, vLLM", *figures]]
    for subject in dict.fromkeys(subject for subjects in figures.values() for subject in subjects):
        cells = [subjects.get(subject, (0, 0)) for subjects in figures.values()]
        rows.append(
            [
                subject,
                *(f"{agreed:,} of " * (agreed < total) + f"{total:,}" for agreed, total in cells),
            ]
        )
    return "".join(f"{row[0]:<38}{''.join(f'{cell:>18}' for cell in row[1:])}\n" for row in rows)


def main() -> int:
    """Print the figures; return 1 if anything disagrees, 2 if nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument(
        "-v", "--version", action="append", help="a release of vLLM, such as 0.30.0"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    obstacles = [find_wheel(version) for version in options.version or VERSIONS]
    if not HAS_TORCH:
        obstacles.append("no torch to allocate KV caches with: make witness")
    for obstacle in obstacles:
        if isinstance(obstacle, str):
            print(obstacle, file=sys.stderr)
            return 2
    figures: dict[str, dict[str, list[int]]] = {}
    failed = False
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for version in options.version or VERSIONS:
            end = options.first + options.count
            chunks = [
                range(start, end, 25)
                for start in range(options.first, min(options.first + 25, end))
            ]
            results = pool.map(judge_version, [version] * len(chunks), chunks)
            counts = Counter[Any]()
            for chunk_counts, disagreements in results:
                counts += chunk_counts
                for line in disagreements:
                    print(line, file=sys.stderr)
            subjects = dict.fromkeys(subject for subject, _ in counts)
            failed = failed or any(not agrees for _, agrees in counts)
            figures[version] = {
                subject: [counts[subject, True], counts[subject, True] + counts[subject, False]]
                for subject in subjects
            }
    if options.json:
        print(json.dumps(figures))
    else:
        print(render_figures(figures, options.count), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
