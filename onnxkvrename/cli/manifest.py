"""The command ``manifest``: describes the KV buffers of a model or a set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.api.layouts import load_traced
from onnxkvrename.api.manifests import (
    check_manifest_outputs,
)
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice, print_lines
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.layout.load import CompileInfo, LoadedLayout
from onnxkvrename.layout.manifest import ManifestContent, describe_layout
from onnxkvrename.options import (
    CUSTOM_IO,
    DIM,
    FORMAT,
    SPECIALIZATIONS,
    Example,
    Models,
    Option,
    Profile,
    Quiet,
    RulesFile,
    Strict,
    Verbose,
)
from onnxkvrename.records import fill_record, serialize
from onnxkvrename.report.documents.projection_json import describe_projection
from onnxkvrename.report.formats import Answer, Line, build_file_result, load_format
from onnxkvrename.report.formats.text import render_finding_lines
from onnxkvrename.report.manifest_text import (
    format_layout_summary,
    render_layout,
)
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.storage.write_file import write_files
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest


class ManifestArguments(NamedTuple):
    """What a user asks for with ``manifest``."""

    models: Models = ()
    sizes: Annotated[Mapping[str, int], DIM] = MappingProxyType({})
    specializations: Annotated[Path | None, SPECIALIZATIONS] = None
    custom_io: Annotated[Path | None, CUSTOM_IO] = None
    block_size: Annotated[
        int | None,
        Option(
            "--block-size",
            "Also: what vLLM makes of it, with blocks of N tokens.",
            "N",
        ),
    ] = None
    tokens: Annotated[
        tuple[int, ...],
        Option(
            "--tokens",
            "With --block-size: the length of a prompt that is handed over. May be repeated.",
            "N",
            needs=("block_size",),
        ),
    ] = ()
    output: Annotated[
        Path | None,
        Option(
            "-o --output",
            "Write the manifest to this file, completely or not at all; - is stdout.",
            "FILE",
            writes="file or stdout",
        ),
    ] = None
    force: Annotated[
        bool,
        Option(
            "--force",
            "Overwrite an existing file.",
        ),
    ] = False
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    output_format: Annotated[str, FORMAT] = "json"
    quiet: Quiet = False
    verbose: Verbose = False

    @property
    def output_path(self) -> Path | None:
        """The file to write, ``None`` for stdout."""
        return None if str(self.output) == "-" else self.output


class _ManifestResult(NamedTuple):
    """The buffers that were loaded, what vLLM makes of them if asked for, and the profile."""

    loaded: LoadedLayout
    projection: Projection | None
    profile: ProfileChoice


@declare_command(
    "manifest",
    ManifestArguments,
    "Exit codes: 0 nothing wrong; 1 a finding of severity error (the manifest is written "
    "anyway); 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename manifest renamed.onnx -o layout.json", "Write the layout."),
    Example(
        "onnxkvrename manifest renamed.onnx --block-size 16 --format text", "Show it for vLLM."
    ),
)
def command(arguments: ManifestArguments) -> int:
    """Describe the KV buffers of a model: layers, kinds, dtypes, shapes, bytes, vLLM's view.

    MODEL is one model, the windows of one, or a manifest, which is printed again. compare
    accepts a manifest instead of its model. Workers with equal
    buffers have the same kv_layout_sha256.
    """
    rules = find_rules(arguments.profile, arguments.rules, arguments.models)
    print_choice(rules.choice, arguments.output_format, arguments.quiet)
    compile_info = fill_record(CompileInfo, arguments)
    loaded = load_traced(arguments.models, rules, compile_info, strict=arguments.strict)
    projection = None
    if arguments.block_size is not None:
        request = ProjectionRequest(arguments.block_size, prompt_lengths=arguments.tokens)
        projection = project_layout(loaded.layout, request)
    result = _ManifestResult(loaded, projection, rules.profile_choice)
    answer = _build_answer(result, arguments)
    files = {} if arguments.output_path is None else _render_file(answer, arguments)
    inputs = check_manifest_outputs(
        loaded,
        files,
        (arguments.specializations, arguments.custom_io, arguments.rules),
        force=arguments.force,
    )
    write_files(files, force=arguments.force, inputs=inputs)
    return _print_answer(answer, loaded, arguments)


def _build_answer(result: _ManifestResult, arguments: ManifestArguments) -> Answer:
    code = decide_exit_code(failed=result.loaded.failed)
    return Answer(
        "manifest",
        code,
        build_content=partial(_describe, result),
        render_text=partial(_render_text, result, arguments),
        files=tuple(map(build_file_result, result.loaded.reports)),
        is_verbose=arguments.verbose,
    )


def _render_file(answer: Answer, arguments: ManifestArguments) -> dict[Path, bytes]:
    """Return the file that was asked for, with its content."""
    assert arguments.output_path is not None
    lines = load_format(arguments.output_format).render(answer, None)
    text = "".join(f"{line.text}\n" for line in lines if not line.err)
    return {arguments.output_path: text.encode()}


def _print_answer(answer: Answer, loaded: LoadedLayout, arguments: ManifestArguments) -> int:
    """Print the findings on stderr, and the manifest unless it went into a file."""
    output, output_format = arguments.output_path, arguments.output_format
    if output is None and output_format == "text":
        return print_answer(answer, output_format)
    print_lines(render_finding_lines(answer.files, verbose=arguments.verbose))
    if output is None:
        return print_answer(answer, output_format)
    if not arguments.quiet:
        print_lines([Line(f"{output}: {format_layout_summary(loaded.layout)}", err=True)])
    return answer.exit_code


def _describe(result: _ManifestResult) -> ManifestContent:
    loaded, projection, profile = result
    vllm = None if projection is None else serialize(describe_projection(projection))
    return describe_layout(loaded.layout, loaded.reports, vllm=vllm, profile=profile)


def _render_text(
    result: _ManifestResult, arguments: ManifestArguments, width: int | None
) -> Iterator[Line]:
    if arguments.quiet and arguments.output_path is None:
        return
    yield from render_layout(result.loaded.layout, width)
    if result.projection is not None:
        yield from render_projection(result.projection, width)
