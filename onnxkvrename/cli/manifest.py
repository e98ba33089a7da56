"""The command ``manifest``: describes the KV buffers of a model or a set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    OutputFile,
    add_compile_options,
    add_format_option,
    add_models_argument,
    add_no_set_option,
    add_pairs_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_single_option,
    add_strict_option,
    add_verbose_option,
)
from onnxkvrename.cli.options.projection import add_projection_options
from onnxkvrename.cli.options.sizes import parse_dim_sizes, parse_memory_size
from onnxkvrename.cli.output import print_answer, print_lines
from onnxkvrename.cli.requested_rules import (
    add_pairs_token_option,
    check_pairs_token,
    pick_requested_rules,
)
from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.findings import decide_exit_code, format_list, quote_path
from onnxkvrename.layout.digest import compute_layout_digest
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    CompileInfo,
    LoadedLayout,
    apply_compile_info,
    load_layout,
    load_model_or_manifest,
)
from onnxkvrename.layout.manifest import manifest_to_json
from onnxkvrename.renaming.run import remove_links_of_killed_runs, stamp_models
from onnxkvrename.report.formats import Answer, Line, Screen, build_file_result, load_format
from onnxkvrename.report.formats.text import render_finding_lines
from onnxkvrename.report.manifest_text import (
    COLUMN_HEADS,
    build_buffer_rows,
    format_layout_summary,
    format_layout_title,
    list_layout_facts,
    render_layout,
)
from onnxkvrename.report.tables import build_table, render_lines
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.profile import ProfileChoice, Rules
from onnxkvrename.rules.results import ModelReport, Options
from onnxkvrename.storage.run_files import RunFiles
from onnxkvrename.storage.write_file import needs_write, write_files
from onnxkvrename.verification import trace_buffer_scales, trace_buffer_updates
from onnxkvrename.vllm.projection import (
    Projection,
    check_nixl,
    check_projection,
    project_layout,
    projection_to_json,
)
from onnxkvrename.vllm.specs import (
    MAX_GPU_MEMORY,
    VLLM_VERSIONS,
    ProjectionRequest,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    models: tuple[Path, ...]
    dims: tuple[str, ...]
    specializations: Path | None
    custom_io: Path | None
    block_size: int | None
    tp: int | None
    pp: int | None
    kv_cache_dtype: str | None
    gpu_memory: str | None
    draft: Path | None
    vllm_version: str | None
    tokens: tuple[int, ...]
    output: Path | None
    stamp: bool
    force: bool
    no_set: bool
    strict: bool
    profile: str | None
    rules: Path | None
    pairs: str | None
    prefix: str | None
    output_format: str
    quiet: bool
    verbose: bool

    @property
    def output_path(self) -> Path | None:
        """The file to write, ``None`` for stdout."""
        return None if str(self.output) == "-" else self.output


class _ManifestResult(NamedTuple):
    """The buffers that were loaded, what vLLM makes of them if asked for, and the profile."""

    loaded: LoadedLayout
    projection: Projection | None
    profile: ProfileChoice


@click.command(
    "manifest",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error (the manifest is written "
    "anyway); 2 the job could not be done; 130 interrupted.",
)
@add_models_argument()
@add_compile_options()
@add_projection_options()
@add_single_option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputFile(takes_stdout=True),
    help="Write the manifest to this file, completely or not at all; - is stdout.",
)
@click.option(
    "--stamp",
    is_flag=True,
    help="Also write kv_layout_sha256 into the metadata of the models, in place; "
    "onnxkvrename --strip removes it.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite an existing file; stamp read-only models, and through symbolic and hard links.",
)
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_pairs_option()
@add_pairs_token_option()
@add_format_option(default="json")
@add_quiet_option()
@add_verbose_option("Show every finding.")
def command(**values: Any) -> int:
    """Describe the KV buffers of a model: layers, kinds, dtypes, shapes, bytes, vLLM's view.

    MODEL is one model, the windows of one, or a manifest, which is printed again. compare
    and check-consumer accept a manifest instead of its model. Workers with equal
    buffers have the same kv_layout_sha256.
    """
    arguments = _Arguments(**values)
    _check_projection_options(arguments)
    compile_info = _build_compile_info(arguments)
    check_pairs_token(arguments.prefix, arguments.pairs)
    rules = pick_requested_rules(arguments.models, arguments, arguments.prefix)
    if arguments.stamp:
        remove_links_of_killed_runs(find_jobs(arguments.models))
    loaded = _load_layout(arguments, rules, compile_info)
    if arguments.stamp:
        loaded = _plan_stamp(loaded, rules)
    stamped = loaded if arguments.stamp and not loaded.failed else None
    loaded = _apply_cache_dtype(loaded, arguments.kv_cache_dtype)
    projection = _build_projection(loaded.layout, arguments, rules)
    if projection is not None:
        loaded = loaded.add_findings(chain(check_projection(projection), check_nixl(projection)))
    answer = _build_answer(_ManifestResult(loaded, projection, rules.profile_choice))
    files = {} if arguments.output_path is None else _render_file(answer, arguments)
    inputs = _check_outputs(loaded, arguments, files)
    if stamped is not None:
        _write_stamps(stamped, rules, force=arguments.force, quiet=arguments.quiet)
    write_files(files, force=arguments.force, inputs=inputs)
    return _print_answer(answer, loaded, arguments)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    return manifest_to_json(Layout((), (), (), (), ()), (), code, error)


def _check_projection_options(arguments: _Arguments) -> None:
    if arguments.block_size is not None:
        return
    options = {
        "--tp": arguments.tp,
        "--pp": arguments.pp,
        "--kv-cache-dtype": arguments.kv_cache_dtype,
        "--gpu-memory": arguments.gpu_memory is not None,
        "--draft": arguments.draft is not None,
        "--vllm": arguments.vllm_version,
        "--tokens": arguments.tokens,
    }
    for option, value in options.items():
        if value:
            raise click.UsageError(f"{option} requires --block-size N")


def _build_compile_info(arguments: _Arguments) -> CompileInfo:
    """Return the settings of a compile; none for a stamp, which is of the graph alone."""
    options = {
        "--dim": arguments.dims,
        "--specializations": arguments.specializations,
        "--custom-io": arguments.custom_io,
    }
    used = [option for option, value in options.items() if value]
    sizes = parse_dim_sizes(arguments.dims)
    if arguments.stamp and used:
        raise click.UsageError(f"--stamp describes the graph alone: leave out {format_list(used)}")
    return CompileInfo(
        sizes, arguments.specializations, arguments.custom_io, group_windows=not arguments.no_set
    )


def _load_layout(arguments: _Arguments, rules: Rules, compile_info: CompileInfo) -> LoadedLayout:
    """Load one model, the windows of one, or a manifest, which is written again.

    Raises:
        KvRenameError: A manifest cannot get a stamp, or nothing can be loaded.
    """
    first, *others = arguments.models
    load = (
        partial(load_layout, arguments.models) if others else partial(load_model_or_manifest, first)
    )
    loaded = load(
        rules,
        compile_info,
        strict=arguments.strict,
        trace_updates=trace_buffer_updates,
        trace_scales=trace_buffer_scales,
        with_weights=True,
    )
    if arguments.stamp and not loaded.identities:
        raise ModelError(
            "is a manifest: --stamp writes into models",
            path=str(first),
            hint="pass the models that it describes",
        )
    return loaded


def _apply_cache_dtype(loaded: LoadedLayout, dtype: str | None) -> LoadedLayout:
    """Return the layout with the dtype that vLLM is started with; that of a manifest stays.

    Raises:
        KvRenameError: A manifest has another one.
    """
    layout = loaded.layout
    recorded = layout.kv_cache_dtype
    if dtype is not None and recorded not in (None, dtype):
        raise KvRenameError(
            f"a manifest says {recorded}, and --kv-cache-dtype says {dtype}",
            hint="leave it out, or write the manifest again",
        )
    return loaded._replace(layout=layout._replace(kv_cache_dtype=dtype or recorded))


def _check_outputs(
    loaded: LoadedLayout, arguments: _Arguments, contents: Mapping[Path, bytes]
) -> list[Path]:
    """Return the files that are read; raise :class:`WriteError` if an output cannot be written."""
    if not contents and not arguments.stamp:
        return []
    files = RunFiles()
    models = {
        report.path: files.add_input(
            Path(report.path),
            f"the model {report.path}" if loaded.identities else "the manifest that is read",
        )
        for report in loaded.reports
    }
    for path in loaded.data_paths:
        files.add_input(path, "external data of a model of this run")
    for given in (arguments.specializations, arguments.custom_io, arguments.rules):
        if given is not None:
            files.add_input(given, "what the manifest is made from")
    results = [files.add_output(output, "the manifest") for output in contents]
    for model in loaded.layout.models if arguments.stamp else ():
        role = f"the model {model}, which gets a stamp"
        results.append(files.add_output(Path(model), role, replaces=models[model]))
    for result in results:
        files.check_output(result)
    for output, content in contents.items():
        needs_write(output, content, force=arguments.force)
    return files.list_inputs()


def _build_projection(layout: Layout, arguments: _Arguments, rules: Rules) -> Projection | None:
    """Project the layout onto vLLM, if that was asked for."""
    if arguments.block_size is None:
        return None
    memory = arguments.gpu_memory
    request = ProjectionRequest(
        arguments.block_size,
        arguments.tp or 1,
        arguments.vllm_version or VLLM_VERSIONS[-1],
        arguments.tokens,
        layout.kv_cache_dtype,
        arguments.pp or 1,
        None if memory is None else parse_memory_size("--gpu-memory", memory, MAX_GPU_MEMORY),
    )
    return project_layout(layout, request, _load_draft(arguments, rules))


def _load_draft(arguments: _Arguments, rules: Rules) -> Layout | None:
    """Return the buffers of the draft model, with those of the sizes given that it has.

    Raises:
        KvRenameError: It cannot be read, or has an error or no KV buffers.
    """
    if arguments.draft is None:
        return None
    loaded = load_model_or_manifest(arguments.draft, rules)
    if loaded.failed or not loaded.layout.buffers:
        raise KvRenameError(
            "the draft model has errors or no KV buffers",
            path=str(arguments.draft),
            hint=f"`onnxkvrename verify {quote_path(str(arguments.draft))}` says what is wrong",
        )
    sizes = parse_dim_sizes(arguments.dims)
    known = {symbol: size for symbol, size in sizes.items() if symbol in loaded.layout.symbols}
    return apply_compile_info(loaded.layout, CompileInfo(known))


def _plan_stamp(loaded: LoadedLayout, rules: Rules) -> LoadedLayout:
    """Return the layout as it will be with its stamp; it gets none where there are findings."""
    loaded = loaded.remove_findings("KV621")
    if loaded.failed:
        return loaded
    digest = compute_layout_digest(loaded.layout)
    _check_set_stamp(loaded, digest, rules)
    return loaded._replace(stamp=digest)


def _write_stamps(loaded: LoadedLayout, rules: Rules, *, force: bool, quiet: bool) -> None:
    """Write the stamp of the layout into its models.

    Raises:
        KvRenameError: A model cannot be written; then none has changed.
    """
    assert loaded.stamp is not None
    reports = [report for report in loaded.reports if report.path in loaded.layout.models]
    jobs = [build_job(Path(report.path)) for report in reports]
    identities = [loaded.identities[report.path] for report in reports]
    options = Options(force=force, read_files=loaded.data_paths)
    try:
        results = stamp_models(jobs, reports, identities, loaded.stamp, rules, options).models
    except KvRenameError as error:
        raise _drop_elsewhere_hint(error) from None
    for result in results:
        if result.error is not None:
            raise _drop_elsewhere_hint(result.error)
    if not quiet:
        print_lines(map(_build_stamp_line, results))


def _check_set_stamp(loaded: LoadedLayout, digest: str, rules: Rules) -> None:
    """Raise :class:`ModelError` for a window alone that carries the stamp of its set."""
    (path, *further_models) = loaded.layout.models
    if (
        not further_models
        and loaded.stamp not in (None, digest)
        and rules.set_rule.is_window_path(path)
    ):
        raise ModelError(
            "has the stamp of its whole set, which a window alone cannot replace",
            path=path,
            hint="pass all windows of the set, or remove the stamp first: "
            f"`onnxkvrename {quote_path(path)} --strip`",
        )


def _drop_elsewhere_hint(error: KvRenameError) -> KvRenameError:
    """Return the error without the hint to write elsewhere: a stamp changes the model itself."""
    if not isinstance(error, WriteError) or error.in_place_hint == error.hint:
        return error
    return WriteError(error.message, path=error.path, hint=error.in_place_hint)


def _build_stamp_line(report: ModelReport) -> Line:
    state = "stamped" if report.status == "renamed" else "stamped already"
    return Line(f"{report.path}: {state}", err=True)


def _build_answer(result: _ManifestResult) -> Answer:
    code = decide_exit_code(failed=result.loaded.failed)
    return Answer(
        code,
        render_json=partial(_render_json, result, code),
        render_text=partial(_render_text, result),
        files=tuple(map(build_file_result, result.loaded.reports)),
    )


def _render_file(answer: Answer, arguments: _Arguments) -> dict[Path, bytes]:
    """Return the file that was asked for, with its content."""
    assert arguments.output_path is not None
    lines = load_format(arguments.output_format).render(answer, Screen())
    return {arguments.output_path: "".join(f"{line.text}\n" for line in lines).encode()}


def _print_answer(answer: Answer, loaded: LoadedLayout, arguments: _Arguments) -> int:
    """Print the findings on stderr, and the manifest unless it went into a file."""
    output, output_format = arguments.output_path, arguments.output_format
    print_lines(render_finding_lines(loaded.reports, verbose=arguments.verbose))
    if output is not None and not arguments.quiet:
        print_lines([Line(f"{output}: {format_layout_summary(loaded.layout)}", err=True)])
    if output is not None or (arguments.quiet and output_format == "text"):
        return answer.exit_code
    return print_answer(answer, output_format)


def _render_json(result: _ManifestResult, code: int) -> str:
    loaded, projection, profile = result
    vllm = None if projection is None else projection_to_json(projection)
    return manifest_to_json(
        loaded.layout, loaded.reports, code, stamp=loaded.stamp, vllm=vllm, profile=profile
    )


def _render_text(result: _ManifestResult, screen: Screen) -> Iterator[Line]:
    layout = result.loaded.layout
    if screen.is_terminal:
        yield from _draw_layout(layout, screen)
    else:
        yield from map(Line, render_layout(layout))
    yield from map(Line, render_projection(result.projection))


def _draw_layout(layout: Layout, screen: Screen) -> Iterator[Line]:
    """Draw the table for a terminal."""
    from rich.text import Text  # only for terminals

    facts = list(list_layout_facts(layout))
    width = max((len(label) for label, _ in facts), default=0) + 2
    parts: list[RenderableType] = [Text(format_layout_title(layout), style="bold")]
    if layout.buffers:
        parts += (build_table(COLUMN_HEADS, build_buffer_rows(layout)), Text())
    parts += (Text.assemble((label.ljust(width), "dim"), text) for label, text in facts)
    yield from render_lines(parts, color=screen.color)
