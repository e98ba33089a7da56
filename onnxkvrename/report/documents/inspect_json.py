"""What is in models as JSON, with their layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.layout.inspect import (
    ExternalFile,
    InspectedBuffer,
    Inspection,
    ModelSummary,
)
from onnxkvrename.layout.json import SCHEMA, LayoutContent, describe_layout
from onnxkvrename.layout.layout import ByteTotals
from onnxkvrename.model.signature import ExportInfo
from onnxkvrename.records import Document, fill_record
from onnxkvrename.report.documents.projection_json import ProjectionContent, describe_projection
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.vllm.projection import Projection


class TokenCount(NamedTuple):
    """A token in the names.

    Attributes:
        token: The token.
        names: How many names carry it.
    """

    token: str
    names: int


class Model(NamedTuple):
    """What is in one model. If it cannot be read, only `path` and `error` have a value.

    Attributes:
        path: The path, as given.
        size: Bytes of the model file itself.
        export: What the file says about its export; `None` if it cannot be read.
        nodes: Nodes of the main graph.
        functions: The names of local functions.
        files: The files with external data.
        layers: The layers that have buffers.
        tokens: The tokens found, the most frequent first.
        names: How many names could carry a token: the inputs and outputs of all buffers.
        totals: The bytes of all buffers at the sizes of --dim; `None` if one is there twice.
        buffers: The KV buffers.
        kept: Inputs and outputs of the model whose names stay, each with the reason.
        findings: What is, or may be, wrong.
        error: Why this model could not be read; `None` otherwise.
    """

    path: str
    size: int
    export: ExportInfo | None
    nodes: int
    functions: tuple[str, ...]
    files: tuple[ExternalFile, ...]
    layers: tuple[int, ...]
    tokens: tuple[TokenCount, ...]
    names: int
    totals: ByteTotals | None
    buffers: tuple[InspectedBuffer, ...]
    kept: tuple[UnchangedName, ...]
    findings: tuple[Finding, ...]
    error: KvRenameError | None


class InspectContent(NamedTuple):
    """What is in the models.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        models: One entry for each model.
        layouts: The layout of each model with KV buffers, or of the windows of one together.
            compare accepts a file with one layout in place of the model.
        vllm: What vLLM makes of each layout, in their order; `None` without --vllm.
    """

    profile: ProfileChoice | None
    models: tuple[Model, ...]
    layouts: tuple[LayoutContent, ...]
    vllm: tuple[ProjectionContent, ...] | None


DOCUMENT = Document(SCHEMA, "inspect", InspectContent(None, (), (), None))


def describe_inspection(
    inspection: Inspection,
    profile: ProfileChoice,
    projections: Sequence[Projection] | None = None,
) -> InspectContent:
    """Return what is in models, whose KV names a profile recognizes.

    Args:
        inspection: What is in the models.
        profile: The profile.
        projections: What vLLM makes of each layout; ``None`` if that is not asked for.
    """
    return InspectContent(
        profile,
        tuple(map(_describe_model, inspection.summaries)),
        tuple(describe_layout(each.layout, each.reports) for each in inspection.layouts),
        None if projections is None else tuple(map(describe_projection, projections)),
    )


def _describe_model(summary: ModelSummary) -> Model:
    return fill_record(
        Model,
        summary,
        nodes=summary.node_count,
        functions=summary.function_names,
        tokens=tuple(TokenCount(*each) for each in summary.token_counts),
        names=summary.name_count,
    )
