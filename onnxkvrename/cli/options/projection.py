"""The options of a projection onto vLLM."""

from __future__ import annotations

from pathlib import Path

import click

from onnxkvrename.cli.options import Decorator, NonEmptyPath, add_single_option, combine_options
from onnxkvrename.vllm.specs import KV_CACHE_DTYPES, VLLM_VERSIONS


def add_projection_options() -> Decorator:
    """Add ``--block-size`` and what else a projection onto vLLM depends on."""
    return combine_options(
        add_single_option(
            "--block-size",
            metavar="N",
            type=click.IntRange(1),
            help="Also: what vLLM makes of it, with blocks of N tokens.",
        ),
        add_single_option(
            "--tp",
            metavar="N",
            type=click.IntRange(1),
            help="With --block-size: over how many ranks the heads are divided.  [default: 1]",
        ),
        add_single_option(
            "--pp",
            metavar="N",
            type=click.IntRange(1),
            help="With --block-size: over how many pipeline stages the layers are divided.  "
            "[default: 1]",
        ),
        add_single_option(
            "--kv-cache-dtype",
            metavar="DTYPE",
            type=click.Choice(tuple(KV_CACHE_DTYPES)),
            help=f"With --block-size: vLLM's --kv-cache-dtype ({', '.join(KV_CACHE_DTYPES)}), "
            "by default the graph's own.",
        ),
        add_single_option(
            "--gpu-memory",
            metavar="SIZE",
            help="With --block-size: the memory that each GPU has left for KV caches, e.g. 20G; "
            "says how many blocks fit.",
        ),
        add_single_option(
            "--draft",
            metavar="MODEL",
            type=NonEmptyPath(path_type=Path),
            help="With --block-size: a draft model, or its manifest, whose layers vLLM groups "
            "with these.",
        ),
        add_single_option(
            "--vllm",
            "vllm_version",
            type=click.Choice(VLLM_VERSIONS),
            help="With --block-size: the vLLM that is meant, by default the newest known, "
            f"{VLLM_VERSIONS[-1]}.",
        ),
        click.option(
            "--tokens",
            metavar="N",
            type=click.IntRange(1),
            multiple=True,
            help="With --block-size: the length of a prompt that is handed over. May be repeated.",
        ),
    )
