"""The command that writes down what the KV buffers are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_compile_options,
    add_format_option,
    add_models_argument,
    add_no_set_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_strict_option,
    parse_dim_sizes,
)
from onnxkvrename.cli.output import is_color_enabled, is_terminal, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.findings import format_list
from onnxkvrename.layout.digest import compute_layout_digest
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import CompileInfo, LoadedLayout, load_layout
from onnxkvrename.layout.manifest import manifest_to_json
from onnxkvrename.renaming.run import stamp_models
from onnxkvrename.report.manifest_text import (
    COLUMN_HEADS,
    build_buffer_rows,
    format_layout_summary,
    format_layout_title,
    list_layout_facts,
    render_layout,
)
from onnxkvrename.report.rename_text import escape_unprintable, render_findings
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, Options
from onnxkvrename.storage.transaction import check_output_path, write_file
from onnxkvrename.vllm.projection import (
    Projection,
    check_projection,
    project_layout,
    projection_to_json,
)
from onnxkvrename.vllm.specs import VLLM_VERSIONS, ProjectionRequest

_COMPILE_OPTIONS = {
    "--dim": "dims",
    "--specializations": "specializations",
    "--custom-io": "custom_io",
}


if TYPE_CHECKING:
    from rich.console import RenderableType


class _ManifestResult(NamedTuple):
    """What was gathered, what vLLM makes of it, and the exit code."""

    loaded: LoadedLayout
    projection: Projection | None
    exit_code: int


@click.command(
    "onnxkvrename manifest",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error, with the manifest all the "
    "same; 2 the job could not be done; 130 interrupted.",
)
@add_models_argument()
@add_compile_options()
@click.option(
    "--block-size",
    metavar="N",
    type=click.IntRange(1),
    help="Also: what vLLM makes of it, with blocks of N tokens.",
)
@click.option(
    "--tp",
    metavar="N",
    type=click.IntRange(1),
    help="With --block-size: over how many ranks the heads are divided.  [default: 1]",
)
@click.option(
    "--vllm",
    "era",
    type=click.Choice(VLLM_VERSIONS),
    help=f"With --block-size: the vLLM that is meant, by default the newest known, {VLLM_VERSIONS[-1]}.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(1),
    multiple=True,
    help="With --block-size: the length of a prompt that is handed over. May be repeated.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=NonEmptyPath(path_type=Path),
    help="Write it here, whole or not at all; - is stdout.",
)
@click.option(
    "--stamp",
    is_flag=True,
    help="Also write kv_layout_sha256 into the metadata of the models, in place; "
    "onnxkvrename --strip takes it out.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace a file that is there; stamp through symbolic links and the like.",
)
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_format_option("json", "text", default="json")
@add_quiet_option()
@click.option("-v", "--verbose", is_flag=True, help="Show every finding.")
def command(**given: Any) -> int:
    """Write down what the KV buffers of a model are: layers, kinds, dtypes, shapes, bytes.

    MODEL is one model, or the windows of one. The manifest can stand for it where
    the model itself is not at hand. Its kv_layout_sha256 is equal for workers whose
    buffers are alike.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename manifest MODEL...")
    _check_projection_options(given)
    sizes, sets = parse_dim_sizes(given["dims"]), not given["no_set"]
    known = CompileInfo(sizes, given["specializations"], given["custom_io"], sets)
    if given["stamp"] and known != CompileInfo(group_windows=sets):
        told = format_list([option for option, name in _COMPILE_OPTIONS.items() if given[name]])
        raise click.UsageError(f"--stamp is of the graph alone: leave out {told}")
    rules = load_rules(given["profile"], given["rules"])
    found = load_layout(given["models"], rules, known, strict=given["strict"])
    output = None if str(given["output"]) == "-" else given["output"]
    if output is not None:
        _check_output_path(output, given)
    if given["stamp"]:
        found = _stamp_models(found, rules, force=given["force"], quiet=given["quiet"])
    vllm = _build_projection(found.layout, given)
    if vllm is not None:
        found = found.add_findings(check_projection(vllm))
    made = _ManifestResult(found, vllm, int(found.failed))
    text = _render_manifest(made, given["form"])
    if output is not None:
        write_file(output, f"{text}\n".encode(), force=given["force"])
    _print_manifest(made, text, output, given)
    return made.exit_code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return manifest_to_json(Layout((), (), (), (), ()), (), code, fault)


def _check_projection_options(given: Mapping[str, Any]) -> None:
    for name, option in (("tp", "--tp"), ("era", "--vllm"), ("tokens", "--tokens")):
        if given[name] and given["block_size"] is None:
            raise click.UsageError(f"{option} is for a projection: say --block-size N, too")


def _build_projection(layout: Layout, given: Mapping[str, Any]) -> Projection | None:
    """What vLLM makes of the layout, if that is asked for."""
    if given["block_size"] is None:
        return None
    era, tp = given["era"] or VLLM_VERSIONS[-1], given["tp"] or 1
    return project_layout(layout, ProjectionRequest(given["block_size"], tp, era, given["tokens"]))


def _stamp_models(found: LoadedLayout, rules: Rules, *, force: bool, quiet: bool) -> LoadedLayout:
    """The same with the digest in its models, unless something else is wrong with them.

    Raises the first :class:`KvRenameError` of a model that cannot be written; then none is.
    """
    found = found.remove_findings("KV621")
    if found.failed:
        return found
    digest = compute_layout_digest(found.layout)
    _check_set_stamp(found, digest, rules)
    reports = [report for report in found.reports if report.path in found.layout.models]
    jobs = [build_job(Path(report.path)) for report in reports]
    try:
        done = stamp_models(jobs, reports, digest, rules, Options(force=force))
    except KvRenameError as error:
        raise _drop_elsewhere_hint(error) from None
    for report in done.models:
        if report.error is not None:
            raise _drop_elsewhere_hint(report.error)
    if not quiet:
        with stdout_guard():
            print_lines(map(_format_stamp_line, done.models), err=True)
    return found._replace(stamp=digest)


def _check_set_stamp(found: LoadedLayout, digest: str, rules: Rules) -> None:
    """Raise :class:`ModelError` for a window alone that carries the stamp of its set."""
    (path, *others) = found.layout.models
    if not others and found.stamp not in (None, digest) and rules.set_rule.is_window_path(path):
        raise ModelError(
            "carries another stamp, that of its set",
            path=path,
            hint="give all windows of it, or take the stamp out first: --strip",
        )


def _drop_elsewhere_hint(error: KvRenameError) -> KvRenameError:
    """The error, without the hint to write elsewhere: a stamp is for the file as it stands."""
    hint = error.hint or ""
    if "elsewhere" not in hint:
        return error
    parts = (part.removeprefix("or ") for part in re.split("; |, ", hint))
    kept = [part for part in parts if "elsewhere" not in part]
    return WriteError(error.message, path=error.path, hint="; ".join(kept) or None)


def _format_stamp_line(report: ModelReport) -> str:
    said = "stamped" if report.status == "renamed" else "stamped already"
    return f"{escape_unprintable(report.path)}: {said}"


def _render_manifest(made: _ManifestResult, form: str) -> str:
    found = made.loaded
    if form == "json":
        vllm = None if made.projection is None else projection_to_json(made.projection)
        return manifest_to_json(
            found.layout, found.reports, made.exit_code, stamp=found.stamp, vllm=vllm
        )
    return "\n".join((*render_layout(made.loaded.layout), *render_projection(made.projection)))


def _print_manifest(
    made: _ManifestResult, text: str, output: Path | None, given: Mapping[str, Any]
) -> None:
    plain = given["form"] == "text"
    with stdout_guard():
        color = is_color_enabled(sys.stderr)
        for report in made.loaded.reports:
            said = render_findings(report, color=color, verbose=given["verbose"])
            print_lines(said, err=True)
        if given["quiet"] and (plain or output is not None):
            return
        if output is not None:
            line = f"{escape_unprintable(str(output))}: {format_layout_summary(made.loaded.layout)}"
            print_lines([line], err=True)
        elif plain and is_terminal(sys.stdout):
            print_lines(_render_table(made.loaded.layout))
            print_lines(render_projection(made.projection))
        else:
            print_lines([text])


def _render_table(layout: Layout) -> Iterator[str]:
    """The table for a terminal."""
    from rich.text import Text

    from onnxkvrename.report.rename_rich import build_table, render_lines

    facts = list(list_layout_facts(layout))
    width = max((len(label) for label, _ in facts), default=0) + 2
    parts: list[RenderableType] = [Text(format_layout_title(layout), style="bold")]
    if layout.buffers:
        parts += (
            build_table(COLUMN_HEADS, build_buffer_rows(layout)),
            Text(),
        )
    parts += (Text.assemble((label.ljust(width), "dim"), text) for label, text in facts)
    yield from render_lines(parts, color=is_color_enabled(sys.stdout))


def _check_output_path(output: Path, given: Mapping[str, Any]) -> None:
    """Raise :class:`WriteError` for a bad place, before any model gets its stamp."""
    read = [job.model for job in find_jobs(given["models"])]
    read += [given[name] for name in ("specializations", "custom_io", "rules") if given[name]]
    if os.path.realpath(output) in {os.path.realpath(path) for path in read}:
        raise WriteError("is what the manifest is made from", path=str(output))
    check_output_path(output, force=given["force"])
