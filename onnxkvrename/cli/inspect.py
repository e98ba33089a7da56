"""The command ``inspect``: shows what is in a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.api.unnamed_caches import explain_summaries
from onnxkvrename.cli.files import check_page, collect_inputs, write_page
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice
from onnxkvrename.files.find import find_jobs
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.layout.inspect import Inspection, ModelSummary, fold_windows, inspect_models
from onnxkvrename.options import (
    DIM,
    PAGE,
    Example,
    Format,
    Models,
    Option,
    Profile,
    ReplacedByPage,
    RulesFile,
    Verbose,
)
from onnxkvrename.records import fill_record
from onnxkvrename.report.documents.inspect_json import describe_inspection
from onnxkvrename.report.formats import Answer, FileResult, Line, Span, build_line
from onnxkvrename.report.formats.text import BOLD
from onnxkvrename.report.inspection.summary_text import render_model_summary
from onnxkvrename.report.layout_text import format_layout_title
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.rules.kv_model import locate_data
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.verification import trace_buffer_updates
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import KV_CACHE_DTYPES, ProjectionRequest

_VLLM = ("vllm",)


class InspectArguments(NamedTuple):
    """What a user asks for with ``inspect``."""

    models: Models = ()
    sizes: Annotated[Mapping[str, int], DIM] = MappingProxyType({})
    html: Annotated[Path | None, PAGE] = None
    force: ReplacedByPage = False
    profile: Profile = None
    rules: RulesFile = None
    output_format: Format = "text"
    verbose: Verbose = False
    vllm: Annotated[
        bool,
        Option("--vllm", "Also show what vLLM makes of the KV buffers.", section="vLLM"),
    ] = False
    block_size: Annotated[
        int,
        Option(
            "--block-size", "With --vllm: tokens in a block.", "N", needs=_VLLM, shows_default=True
        ),
    ] = 16
    tensor_parallel_size: Annotated[
        int,
        Option(
            "--tensor-parallel-size",
            "With --vllm: the number of ranks.",
            "N",
            needs=_VLLM,
            shows_default=True,
        ),
    ] = 1
    kv_cache_dtype: Annotated[
        str | None,
        Option(
            "--kv-cache-dtype",
            "With --vllm: the dtype of the cache, instead of the graph's.",
            choices=tuple(KV_CACHE_DTYPES),
            needs=_VLLM,
        ),
    ] = None
    enable_cross_layers_blocks: Annotated[
        bool,
        Option(
            "--enable-cross-layers-blocks",
            "With --vllm: the connector's flag that selects the packed allocation.",
            needs=_VLLM,
        ),
    ] = False
    tokens: Annotated[
        tuple[int, ...],
        Option(
            "--tokens",
            "With --vllm: what a prompt of N tokens moves. May be repeated.",
            "N",
            needs=_VLLM,
        ),
    ] = ()


@declare_command(
    "inspect",
    InspectArguments,
    "Exit codes: 0 nothing wrong; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
    Example("onnxkvrename inspect model.onnx", "Show buffers and what is wrong."),
    Example("onnxkvrename inspect exports/ --html page.html", "Show all models, also as a page."),
    Example(
        "onnxkvrename inspect model.onnx --format json > layout.json",
        "Write the layout, which compare accepts in place of the model.",
    ),
    Example(
        "onnxkvrename inspect model.onnx --vllm --block-size 64 --tokens 300",
        "Show vLLM's groups, pages and allocations, and what a prompt of 300 tokens moves.",
    ),
)
def command(arguments: InspectArguments) -> int:
    """Show what is in a model: its KV buffers by layer, their kinds, token and findings.

    Windows of one model that are alike are shown as one. The kind of a buffer is what the
    profile says, else what its shape suggests. How it is updated is traced through the graph.
    Weights are not read.
    """
    jobs = find_jobs(arguments.models)
    rules = find_rules(arguments.profile, arguments.rules, arguments.models)
    print_choice(rules.choice, arguments.output_format)
    models = [job.model for job in jobs]
    inspection = inspect_models(models, rules, trace_buffer_updates, arguments.sizes)
    summaries = explain_summaries(inspection.summaries, models, rules)
    inspection = inspection._replace(summaries=summaries)
    written = _write_page(summaries, arguments)
    projections = _project_layouts(inspection, arguments)
    answer = _build_answer(inspection, rules.profile_choice, written, projections)
    answer = answer._replace(is_verbose=arguments.verbose)
    return print_answer(answer, arguments.output_format)


def _project_layouts(
    inspection: Inspection, arguments: InspectArguments
) -> tuple[Projection, ...] | None:
    """Return what vLLM makes of each layout; ``None`` if that was not asked for."""
    if not arguments.vllm:
        return None
    request = fill_record(ProjectionRequest, arguments, prompt_lengths=arguments.tokens)
    return tuple(project_layout(each.layout, request) for each in inspection.layouts)


def _build_answer(
    inspection: Inspection,
    profile: ProfileChoice,
    written: Sequence[str],
    projections: Sequence[Projection] | None,
) -> Answer:
    summaries = inspection.summaries
    code = decide_exit_code(
        failed=any(summary.failed for summary in summaries),
        not_done=any(summary.error is not None for summary in summaries),
    )
    return Answer(
        "inspect",
        code,
        build_content=partial(describe_inspection, inspection, profile, projections),
        render_text=partial(_render_text, inspection, projections or (), written),
        files=tuple(
            FileResult(summary.path, summary.findings, summary.error) for summary in summaries
        ),
    )


def _render_text(
    inspection: Inspection,
    projections: Sequence[Projection],
    written: Sequence[str],
    width: int | None,
) -> Iterator[Line]:
    for summary in fold_windows(inspection.summaries):
        if summary.error is None:
            yield from render_model_summary(summary, width)
    for loaded, projection in zip(inspection.layouts, projections, strict=False):
        yield Line("")
        if len(projections) > 1:
            yield build_line(Span(format_layout_title(loaded.layout), BOLD))
        yield from render_projection(projection, width)
    yield from (Line(line, err=True) for line in written)


def _write_page(summaries: Sequence[ModelSummary], arguments: InspectArguments) -> list[str]:
    """Write the page that was asked for; none where a model cannot be read.

    Returns:
        What is said of it.

    Raises:
        WriteError: The page would replace a file that the run reads or that is not an earlier
            page, or it cannot be written. Nothing is written then.
    """
    if arguments.html is None:
        return []
    from onnxkvrename.report.pages.inspect import render_inspect_page  # jinja2, only for a page

    files = collect_inputs(_list_inputs(summaries, arguments))
    check_page(arguments.html, "inspect", files, force=arguments.force)
    if any(summary.error is not None for summary in summaries):
        return []
    page = render_inspect_page(fold_windows(summaries))
    write_page(arguments.html, page, files)
    return [f"{arguments.html}: page written"]


def _list_inputs(
    summaries: Sequence[ModelSummary], arguments: InspectArguments
) -> Iterator[tuple[Path | None, str]]:
    """Yield each file that is read, and what it is."""
    for summary in summaries:
        path = Path(summary.path)
        yield path, f"the model {path}"
        for data_path in locate_data(path, (file.location for file in summary.files)):
            yield data_path, f"external data of {path}"
    yield arguments.rules, "the file of rules"
