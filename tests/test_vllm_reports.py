"""Configurations that people reported to vLLM and its connectors, and what is predicted of them.

docs/vllm.md has a row for each. The models are the ones of the reports in what matters: kinds of
layers, heads, sizes and blocks.
"""

from __future__ import annotations

import re
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

from onnxkvrename.handoff.tensor_parallel import TensorParallelSizes, check_tensor_parallelism
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.handshake import check_handshake
from onnxkvrename.vllm.specs import ProjectionRequest

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "vllm.md").read_text("utf-8")
DENSE = build_layers(*(build_attention(layer, 8, 128) for layer in range(4)))
QWEN_HYBRID = build_layers(
    *(build_linear(layer) for layer in range(3)), build_attention(3, heads=2, size=256)
)
MIXED_PAGES = build_layers(
    *(
        build_attention(layer, 2, 64) if layer % 2 else build_sliding(layer, 2, 96, 128)
        for layer in range(4)
    )
)


GEMMA_4 = build_layers(
    *(
        build_attention(layer, 2, 512) if layer % 6 == 5 else build_sliding(layer, 8, 256, 1024)
        for layer in range(6)
    )
)


class Case(NamedTuple):
    """A reported pair of workers, and what is predicted of it.

    Attributes:
        report: The thread.
        layout: The model.
        blocks: Tokens in a block of prefill and of decode.
        ranks: Tensor parallel sizes of both.
        version: The version of vLLM.
        kernel_block: Tokens in a kernel block, if the attention backend divides blocks.
        refused: A part of the reason why it is refused, or of what is not known; ``None`` if it is
            accepted.
    """

    report: str
    layout: Layout
    blocks: tuple[int, int]
    ranks: tuple[int, int]
    version: str
    kernel_block: int | None
    refused: str | None


CASES = [
    Case("vllm#52234", DENSE, (128, 64), (1, 1), "0.33", None, "multiple of prefill's"),
    Case("vllm#52234", DENSE, (128, 64), (1, 1), "0.24", None, "multiple of prefill's"),
    Case("vllm#52234", DENSE, (64, 64), (1, 1), "0.33", None, None),
    Case("vllm#42895", QWEN_HYBRID, (32, 16), (4, 1), "0.24", None, "blocks of"),
    Case("vllm#42895", QWEN_HYBRID, (16, 16), (1, 1), "0.24", None, None),
    Case("vllm#42895", QWEN_HYBRID, (16, 16), (1, 1), "0.33", None, None),
    Case("vllm#42895", QWEN_HYBRID, (32, 16), (4, 1), "0.33", None, "blocks of"),
    Case("vllm#50765", GEMMA_4, (16, 16), (2, 4), "0.33", None, "blocks of 32 tokens in prefill"),
    Case("vllm#50765", GEMMA_4, (16, 16), (4, 4), "0.33", None, None),
    Case("vllm#43523", DENSE, (16, 16), (4, 1), "0.23", None, "the handshake of 0.23"),
    Case("vllm#43523", DENSE, (16, 16), (4, 1), "0.24", None, None),
    Case("vllm#43523", DENSE, (16, 16), (4, 1), "0.33", None, None),
    Case("vllm#54756", MIXED_PAGES, (16, 16), (1, 1), "0.33", None, "cannot be partitioned"),
    Case("vllm#54756", build_gpt_oss(), (16, 16), (1, 1), "0.33", None, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.report}-{case.version}")
def test_a_reported_pair_is_refused_or_accepted_as_predicted(case: Case) -> None:
    requests = [
        ProjectionRequest(block, ranks, case.version)
        for block, ranks in zip(case.blocks, case.ranks, strict=True)
    ]
    layouts = (case.layout, case.layout)
    handshake = check_handshake(layouts, (requests[0], requests[1]), case.kernel_block)
    findings = [
        *check_tensor_parallelism(*layouts, TensorParallelSizes(*case.ranks)),
        *handshake.findings,
    ]
    answers = [*(finding.message for finding in findings), *handshake.unknown]
    if case.refused is None:
        assert answers == []
    else:
        assert any(case.refused in answer for answer in answers), answers


def test_the_page_has_a_row_for_every_report() -> None:
    section = TEXT.partition("## Reported cases")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*?\[([\w/-]+#\d+)\]", section, re.MULTILINE)
    assert {case.report for case in CASES} <= {row.split("/")[-1] for row in rows}
    assert len(rows) == 9
