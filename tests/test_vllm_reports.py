"""Configurations that people reported to vLLM and its connectors, and what is predicted of them.

docs/vllm.md names each. The models are the ones of the reports in what matters: kinds of
layers, heads, sizes and blocks. Each is judged as a user does it: two exports, two lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from build_layouts import (
    build_attention,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_sliding,
)
from cache_models import build_layout_model
from models import saved

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "vllm.md").read_text("utf-8")
MODELS = {
    "dense": build_layers(*(build_attention(layer, 8, 128) for layer in range(4))),
    "with-draft": build_layers(*(build_attention(layer, 8, 128) for layer in range(5))),
    "qwen-hybrid": build_layers(
        *(build_linear(layer) for layer in range(3)), build_attention(3, heads=2, size=256)
    ),
    "mixed-pages": build_layers(
        *(
            build_attention(layer, 2, 64) if layer % 2 else build_sliding(layer, 2, 96)
            for layer in range(4)
        )
    ),
    "gemma-4": build_layers(
        *(
            build_attention(layer, 2, 512) if layer % 6 == 5 else build_sliding(layer, 8, 256)
            for layer in range(6)
        )
    ),
    "gpt-oss": build_gpt_oss(),
}
WINDOWS = {"mixed-pages": 128, "gemma-4": 1024, "gpt-oss": 128}
HYBRID = "VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve M"
BACKEND = (
    "VLLM_USE_V2_MODEL_RUNNER=0 VLLM_KV_CACHE_LAYOUT=HND vllm serve M "
    "--attention-backend FLASH_ATTN"
)
DRAFT = """vllm serve M --speculative-config '{"method": "eagle3", "model": "D"}'"""
NO_MANAGER = "vllm serve M --disable-hybrid-kv-cache-manager"


def name_connector(name: str, **extra_config: object) -> str:
    """Return the flag that selects a connector, with its extra config."""
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra_config}
    return f"--kv-transfer-config '{json.dumps(config)}'"


CROSS_LAYERS = f"{BACKEND} {name_connector('NixlConnector', enable_cross_layers_blocks=True)}"
LMCACHE = f"vllm serve M {name_connector('LMCacheConnectorV1')}"
PLAIN = "vllm serve M"


class Case(NamedTuple):
    """A reported pair of workers, and what is predicted of it.

    Attributes:
        report: The thread.
        versions: The versions of vLLM for which this is predicted.
        models: The models of both sides, of `MODELS`.
        lines: How prefill and decode are started.
        codes: The findings, KV630 if it is not known; none if it is accepted.
        said: A part of the reason; empty if it is accepted.
    """

    report: str
    versions: str
    models: tuple[str, str]
    lines: tuple[str, str]
    codes: tuple[str, ...] = ()
    said: str = ""


DENSE = ("dense", "dense")
QWEN = ("qwen-hybrid", "qwen-hybrid")
GEMMA = ("gemma-4", "gemma-4")
BOTH = "0.24 0.33"
CASES = [
    Case(
        "vllm#52234",
        BOTH,
        DENSE,
        ("vllm serve M --block-size 128", "vllm serve M --block-size 64"),
        ("KV622",),
        "multiple of prefill's",
    ),
    Case("vllm#52234", BOTH, DENSE, ("vllm serve M --block-size 64",) * 2),
    Case(
        "vllm#42895",
        BOTH,
        QWEN,
        (f"{HYBRID} -tp 4 --block-size 32", f"{HYBRID} --block-size 16"),
        ("KV622",),
        "blocks of 288 tokens in prefill and 544 in decode",
    ),
    Case("vllm#42895", BOTH, QWEN, (HYBRID, HYBRID)),
    Case(
        "vllm#49230",
        "0.33",
        DENSE,
        (PLAIN, DRAFT),
        ("KV628", "KV630"),
        "speculative config: none (prefill) and {",
    ),
    Case("vllm#49230", "0.24", DENSE, (PLAIN, DRAFT), ("KV630",), "not known: decode: parallelism"),
    Case(
        "vllm#49230",
        "0.24",
        ("dense", "with-draft"),
        (PLAIN, DRAFT),
        ("KV620", "KV630"),
        "on decode",
    ),
    Case("vllm#49230", BOTH, ("with-draft", "with-draft"), (DRAFT, DRAFT)),
    Case(
        "vllm#50765",
        "0.33",
        GEMMA,
        (f"{PLAIN} -tp 2", f"{PLAIN} -tp 4"),
        ("KV622",),
        "blocks of 32 tokens in prefill",
    ),
    Case("vllm#50765", "0.33", GEMMA, (f"{PLAIN} -tp 4", f"{PLAIN} -tp 4")),
    Case(
        "vllm#43523",
        "0.23",
        DENSE,
        (f"{PLAIN} -tp 4", PLAIN),
        ("KV630",),
        "the compatibility hash of 0.23",
    ),
    Case("vllm#43523", BOTH, DENSE, (f"{PLAIN} -tp 4", PLAIN)),
    Case(
        "vllm#54756",
        "0.33",
        ("mixed-pages", "mixed-pages"),
        (PLAIN, PLAIN),
        ("KV622",),
        "cannot be partitioned",
    ),
    Case("vllm#54756", "0.33", ("gpt-oss", "gpt-oss"), (PLAIN, PLAIN)),
    Case(
        "dynamo#10027",
        "0.24",
        DENSE,
        (f"{BACKEND} {name_connector('PdConnector')}", CROSS_LAYERS),
        ("KV628",),
        "cross-layer blocks: off (prefill) and on (decode)",
    ),
    Case(
        "dynamo#10027",
        "0.24",
        DENSE,
        (PLAIN, CROSS_LAYERS.replace("--attention-backend FLASH_ATTN", "")),
        ("KV630",),
        "whether cross-layer blocks is equal is not known",
    ),
    Case(
        "dynamo#10027",
        "0.24",
        DENSE,
        (CROSS_LAYERS, CROSS_LAYERS),
        ("KV630",),
        "not known: enable_cross_layers_blocks",
    ),
    Case("dynamo#10027", BOTH, DENSE, (BACKEND, BACKEND)),
    Case("dynamo#10027", "0.33", DENSE, (BACKEND, CROSS_LAYERS)),
    Case(
        "dynamo#12821",
        BOTH,
        DENSE,
        (NO_MANAGER, PLAIN),
        ("KV628",),
        "hybrid KV cache manager: off (prefill) and on (decode)",
    ),
    Case("dynamo#12821", BOTH, DENSE, (NO_MANAGER, NO_MANAGER)),
    Case(
        "LMCache#4463", BOTH, DENSE, (LMCACHE, LMCACHE), ("KV630",), "not known: the connector LMC"
    ),
]


@pytest.mark.parametrize(
    ("case", "version"),
    [(case, version) for case in CASES for version in case.versions.split()],
    ids=lambda value: value if isinstance(value, str) else value.report,
)
def test_a_reported_pair_is_refused_or_accepted_as_predicted(
    case: Case, version: str, run: Callable, tmp_path: Path
) -> None:
    paths = [
        saved(build_layout_model(MODELS[name]), tmp_path / f"{side}.onnx")
        for side, name in zip(("prefill", "decode"), case.models, strict=True)
    ]
    options = ["--serve", f"prefill:{case.lines[0]}", "--serve", f"decode:{case.lines[1]}"]
    if case.models[0] in WINDOWS:
        options += ["--dim", f"sliding_window={WINDOWS[case.models[0]]}"]
    outcome = run("compare", *paths, "--target", "vllm-nixl", "--vllm", version, *options)
    text = outcome.out + outcome.err
    assert outcome.code == bool(case.codes)
    assert set(re.findall(r"error (KV\d+)", text)) == set(case.codes)
    assert case.said in text
    assert (f"the code of vLLM {version}'s NIXL connector" in text) == (not case.codes)


def test_the_page_names_every_report() -> None:
    section = TEXT.partition("## Reported cases")[2].partition("\n## ")[0]
    rows = re.findall(r"\[[\w-]+/([\w-]+#\d+)\]", section)
    assert len(rows) == 9
    assert {case.report for case in CASES} == set(rows)
