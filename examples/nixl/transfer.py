"""Compare the manifests, start both workers, hand over prompts, and compare with one session."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import roles
from calling import call
from command import Refused
from device import Device
from kvlayout import LAYOUTS, Figure, KvLayout, read_figure, read_layout
from prompts import draw, format_tokens, generate_undivided
from records import Setup, Taken
from workers import Worker

BLOCKS = 64
"""Blocks of a pool, or more if two prompts need them."""
Call = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class Setting(NamedTuple):
    """Two models, and their settings.

    Attributes:
        prefill: The model that runs prompts.
        decode: The model that generates.
        sizes: Sizes of the symbolic dimensions.
        block_size: Tokens of a block.
        layout: vLLM's name of the memory layout.
        scattered: Whether the free blocks of both pools are in random order.
        forced: Whether to serve models whose KV layouts differ; both then use decode's manifest.
    """

    prefill: Path
    decode: Path
    sizes: dict[str, int]
    block_size: int = 4
    layout: str = LAYOUTS[0]
    scattered: bool = False
    forced: bool = False


class Served(NamedTuple):
    """The result of a prompt."""

    prompt: list[int]
    undivided: list[int]
    taken: Taken
    layout: KvLayout
    figure: Figure

    @property
    def has_same_tokens(self) -> bool:
        """True if the tokens are those of the undivided model."""
        return self.taken.tokens == self.undivided

    @property
    def is_as_counted(self) -> bool:
        """True if NIXL moved and merged what is expected; unknown figures count as right."""
        moved, figure = self.taken.moved, self.figure
        blocks = tuple(map(len, self.taken.blocks))
        counted = (len(self.layout.regions), blocks, moved.posted, moved.size)
        pairs = zip(counted, figure, strict=True)
        return moved.merged == self.taken.runs and all(says in (None, is_) for is_, says in pairs)


def serve(
    setting: Setting, lengths: Sequence[int], manifests: Sequence[dict[str, Any]]
) -> list[Served]:
    """Run prompts of these lengths on both workers.

    Args:
        setting: The models and their settings.
        lengths: The lengths of the prompts, in tokens.
        manifests: Prefill's manifest and decode's.

    Raises:
        command.Refused: The models cannot be served; no worker has started then.
        workers.WorkerError: A worker fails. Both workers have ended then.
    """
    if not setting.forced:
        _check_digests(setting, manifests)
    _, manifest = manifests
    try:
        layout = _size_pool(manifest, setting.layout, lengths)
    except ValueError as error:
        raise Refused(str(error)) from None
    seeds = (1, 2) if setting.scattered else (None, None)
    models = (setting.prefill, setting.decode)
    setups = [
        Setup(str(model), setting.sizes, layout, seed)
        for model, seed in zip(models, seeds, strict=True)
    ]
    with (
        Worker("prefill", roles.prefill, setups[0]) as first,
        Worker("decode", roles.decode, setups[1]) as second,
    ):
        second.ask(first.ask("who are you?"))
        undivided = Device(str(setting.decode), setting.sizes)
        served = []
        for length in lengths:
            prompt = draw(undivided, length)
            handed = first.ask(prompt)
            taken = second.ask(handed)
            expected = generate_undivided(undivided, prompt)
            figure = read_figure(manifest, setting.layout, length)
            served.append(Served(prompt.tokens, expected, taken, layout, figure))
        return served


def _size_pool(manifest: dict[str, Any], name: str, lengths: Sequence[int]) -> KvLayout:
    """Return the layout of a pool with enough blocks for two prompts."""
    layout = read_layout(manifest, name, BLOCKS)
    needed = max(
        sum(group.count_offered_blocks(length) for group in layout.groups) for length in lengths
    )
    return read_layout(manifest, name, max(BLOCKS, 1 + 2 * needed))


def serve_models(args: argparse.Namespace, sizes: dict[str, int]) -> int:
    """Hand over once between the models in the arguments; return the exit code."""
    setting = Setting(
        args.prefill, args.decode, sizes, args.block_size, args.layout, args.scattered, args.force
    )
    lengths = [args.prompt_length]
    with tempfile.TemporaryDirectory() as directory:
        file = str(write_specializations(sizes, Path(directory)))
        manifests = {
            model: describe(str(model.resolve()), file, args.block_size, lengths, call)
            for model in {setting.prefill, setting.decode}
        }
    pair = [manifests[model] for model in (setting.prefill, setting.decode)]
    (served,) = serve(setting, lengths, pair)
    say(served)
    return 0 if served.has_same_tokens and served.is_as_counted else 1


def write_specializations(sizes: dict[str, int], directory: Path) -> Path:
    """Write sizes to a file as QEfficient does for its compiler, and return the path."""
    path = directory / "specializations.json"
    values = {symbol: str(size) for symbol, size in sizes.items()}
    path.write_text(json.dumps({"specializations": [values]}), "utf-8")
    return path


def describe(
    model: str, specializations: str, block_size: int, lengths: Sequence[int], call: Call
) -> dict[str, Any]:
    """Return a model's manifest.

    Raises:
        command.Refused: onnxkvrename cannot write one.
    """
    words = ["manifest", model, "--vllm", "0.33", "--block-size", str(block_size)]
    words += ["--specializations", specializations]
    words += [word for length in lengths for word in ("--tokens", str(length))]
    done = call(words)
    if done.returncode:
        raise Refused(f"onnxkvrename cannot write a manifest of {model}: {done.stderr}")
    return dict(json.loads(done.stdout))


def say(served: Served) -> None:
    """Print what was handed over, what NIXL counted, and the tokens on both sides."""
    layout, figure, moved = served.layout, served.figure, served.taken.moved
    lines = [f"a prompt of {len(served.prompt)} tokens, in {layout.name}"]
    blocks = zip(layout.groups, served.taken.read, served.taken.blocks, strict=True)
    for group, far, near in blocks:
        layers = _format(layer.number for layer in group.layers)
        lines.append(f"  blocks    {_format(far)} to {_format(near)} ({group.kind}: {layers})")
    lines += [
        f"  posted    {_count(moved.posted, len(layout.regions), moved.size)}",
        f"  manifest  {_count(figure.descriptors, figure.regions, figure.size)}",
        f"  merged    to {moved.merged}, says NIXL's telemetry",
    ]
    lines += format_tokens(served.taken.tokens, served.undivided)
    print("\n".join(lines), flush=True)


def _format(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _count(descriptors: int | None, regions: int | None, size: int | None) -> str:
    if descriptors is None or size is None:
        return "not known"
    where = "1 region" if regions == 1 else f"{regions} regions"
    return f"{descriptors} descriptors in {where}, {size:,} bytes"


def _check_digests(setting: Setting, manifests: Sequence[dict[str, Any]]) -> None:
    """Refuse two models whose KV layouts differ, before any worker starts."""
    digests = [manifest["kv_layout_sha256"] for manifest in manifests]
    if digests[0] != digests[1]:
        short = [str(digest)[:12] for digest in digests]
        raise Refused(
            f"{setting.prefill} and {setting.decode} keep different KV buffers: kv_layout_sha256 "
            f"is {short[0]} in one manifest and {short[1]} in the other (onnxkvrename compare "
            "says what differs; --force serves them anyway)"
        )
