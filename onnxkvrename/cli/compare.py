"""The command that says whether a hand-off from prefill to decode will work."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_compile_options,
    add_format_option,
    add_full_transfer_option,
    add_no_set_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    parse_dim_sizes,
)
from onnxkvrename.cli.output import is_color_enabled, is_terminal, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.find_consumers import (
    DEFAULT_CONSUMER,
    list_consumers,
    load_consumer,
)
from onnxkvrename.handoff.tensor_parallel import TensorParallelSizes
from onnxkvrename.handoff.worker import build_handoff_side
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    CompileInfo,
    LoadedLayout,
    apply_compile_info,
    check_size_symbols,
    load_model_or_manifest,
)
from onnxkvrename.report.compare_json import handoff_to_json
from onnxkvrename.report.compare_text import (
    build_handoff_report,
    build_table_rows,
    choose_state_color,
    format_handoff_verdict,
    list_table_headings,
    render_handoff_notes,
    render_handoff_table,
    render_prompt_lines,
)
from onnxkvrename.report.rename_text import (
    format_workflow_command,
    render_findings,
    render_workflow_commands,
)
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport


@click.command(
    "onnxkvrename compare",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 the hand-off works; 1 it would corrupt, lose or fail; 2 the job could "
    "not be done; 130 interrupted.",
)
@click.argument("prefill", metavar="PREFILL", type=NonEmptyPath(path_type=Path))
@click.argument("decode", metavar="DECODE", type=NonEmptyPath(path_type=Path))
@click.option(
    "--target",
    metavar="NAME",
    default=DEFAULT_CONSUMER,
    show_default=True,
    help=f"The consumer, one of: {', '.join(list_consumers())}.",
)
@add_compile_options()
@click.option(
    "--prefill-dim", metavar="SYMBOL=SIZE", multiple=True, help="Like --dim, for PREFILL."
)
@click.option("--decode-dim", metavar="SYMBOL=SIZE", multiple=True, help="Like --dim, for DECODE.")
@add_full_transfer_option()
@click.option(
    "--tp", metavar="P:D", help="Also: heads divide among P ranks of prefill and D of decode."
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(1),
    multiple=True,
    help="Also simulate a prompt of N tokens. May be repeated.",
)
@add_no_set_option()
@add_profile_option()
@add_rules_option()
@add_format_option()
@add_quiet_option()
@click.option("-v", "--verbose", is_flag=True, help="Show every finding.")
def command(**given: Any) -> int:
    """Say whether decode will find prefill's KV buffers where it looks for them.

    PREFILL and DECODE are each a model, a directory with the windows of one, or a
    manifest. Buffers are paired by layer and part, and, as the consumer does it, by
    position and byte offset: for every length of a prompt.
    """
    target = load_consumer(given["target"])
    rules = load_rules(given["profile"], given["rules"])
    ranks = _parse_ranks(given["tp"])
    prefill, decode = _load_sides(given, rules)
    mine, theirs = (
        build_handoff_side(label, one.layout, target, rules)._replace(
            path=str(given[label]), model_finding=_find_model_error(one)
        )
        for label, one in (("prefill", prefill), ("decode", decode))
    )
    found = compare_sides(
        mine,
        theirs,
        target,
        ranks=ranks,
        full_transfer=given["full_transfer"],
        tokens=given["tokens"],
    )
    code = int(found.failed or prefill.failed or decode.failed)
    _print_comparison(found, (prefill, decode), given, code)
    return code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return handoff_to_json(None, code, fault)


def _find_model_error(side: LoadedLayout) -> Finding | None:
    """What is wrong with the models of a side themselves: what is missing is told otherwise."""
    found = (one for report in side.reports for one in report.findings)
    return next(
        (one for one in found if one.severity == "error" and "KV001" < one.code < "KV600"), None
    )


def _parse_ranks(text: str | None) -> TensorParallelSizes | None:
    if text is None:
        return None
    numbers = re.fullmatch("([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text)
    if numbers is None:
        raise click.UsageError(f"--tp {text!r}: say P:D, for example 2:4")
    return TensorParallelSizes(int(numbers[1]), int(numbers[2]))


def _load_sides(given: Mapping[str, Any], rules: Rules) -> tuple[LoadedLayout, LoadedLayout]:
    """Both sides with what is known of them; a size that neither has was given in vain."""
    known = CompileInfo(group_windows=not given["no_set"])
    found = [load_model_or_manifest(given[label], rules, known) for label in ("prefill", "decode")]
    shared = parse_dim_sizes(given["dims"])
    symbols = {symbol for one in found for symbol in one.layout.symbols}
    check_size_symbols(shared, sorted(symbols))
    sized = []
    for label, one in zip(("prefill", "decode"), found, strict=True):
        own = parse_dim_sizes(given[f"{label}_dim"])
        layout = _apply_compile_info(one.layout, {**shared, **own}, own, given, label)
        sized.append(one._replace(layout=layout))
    return sized[0], sized[1]


def _apply_compile_info(
    layout: Layout,
    sizes: Mapping[str, int],
    own: Mapping[str, int],
    given: Mapping[str, Any],
    label: str,
) -> Layout:
    check_size_symbols(own, layout.symbols, f"--{label}-dim")
    there = {symbol: size for symbol, size in sizes.items() if symbol in layout.symbols}
    return apply_compile_info(
        layout, CompileInfo(there, given["specializations"], given["custom_io"])
    )


def _print_comparison(
    found: Handoff, both: tuple[LoadedLayout, LoadedLayout], given: Mapping[str, Any], code: int
) -> None:
    with stdout_guard():
        if given["form"] == "json":
            reports = (both[0].reports, both[1].reports)
            print_lines([handoff_to_json(found, code, reports=reports)])
            return
        models = _list_failed_models(both)
        if given["form"] == "github":
            decode = build_handoff_report(found, both=False)
            for one in (*models, decode):
                print_lines(render_workflow_commands(one))
            if not given["quiet"]:
                title = {"file": decode.path, "title": "compare"}
                print_lines(
                    [format_workflow_command("notice", title, format_handoff_verdict(found))]
                )
            return
        if not given["quiet"]:
            print_lines([_format_verdict(found)])
            if all(side.layout.buffers for side in both):
                print_lines(_render_table(found))
                print_lines(render_prompt_lines(found))
            print_lines(render_handoff_notes(found))
        color = is_color_enabled(sys.stderr)
        for one in (*models, build_handoff_report(found, both=True)):
            print_lines(render_findings(one, color=color, verbose=given["verbose"]), err=True)


def _list_failed_models(both: tuple[LoadedLayout, LoadedLayout]) -> list[ModelReport]:
    """Each model that is broken, once; a side without buffers is told as such."""
    told = (side if side.layout.buffers else side.remove_findings("KV001") for side in both)
    reports = (one for side in told for one in side.reports if one.failed)
    return [*{(one.path, one.findings): one for one in reports}.values()]


def _format_verdict(found: Handoff) -> str:
    text = format_handoff_verdict(found)
    if not is_color_enabled(sys.stdout):
        return text
    return click.style(text, fg="red" if found.failed else "green", bold=True)


def _render_table(found: Handoff) -> Iterator[str]:
    """The table: plain lines where it is piped, drawn on a terminal."""
    if not is_terminal(sys.stdout):
        yield from render_handoff_table(found, color=is_color_enabled(sys.stdout))
        return
    from rich.text import Text

    from onnxkvrename.report.rename_rich import build_table, render_lines

    rows = (
        (*cells, Text(state, style=choose_state_color(state)))
        for *cells, state in build_table_rows(found)
    )
    drawn = build_table(list_table_headings(found), rows)
    yield from render_lines([drawn], color=is_color_enabled(sys.stdout))
