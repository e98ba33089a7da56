"""A model summary on a terminal: facts, the KV map and findings; loads rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import ConsoleOptions, Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxkvrename.findings import Finding, format_list
from onnxkvrename.layout.inspect import ModelSummary, group_buffers
from onnxkvrename.layout.kinds import get_kind_traits
from onnxkvrename.model.signature import format_shape
from onnxkvrename.report.kv_map import (
    DeferredRenderable,
    escape_for_console,
    render_kv_map,
)
from onnxkvrename.rules.layer_ranges import format_layer_run, group_layer_runs
from onnxkvrename.rules.plan import REASON_NOT_RETAINED

_STAMP_TEXTS = {
    True: "holds for this graph",
    False: "does not hold: this graph has another layout",
    None: "is of a set: onnxkvrename manifest judges all its windows",
}
_FEW, _SOME = 3, 6
"""Things of a sort that are listed: long ones, and short ones."""


def render_model_summary(summary: ModelSummary, *, fold: bool = False) -> RenderableType:
    """Return the facts, the KV map and the findings of a model.

    Args:
        summary: The model.
        fold: Fold a long path into lines; otherwise it stays whole, so that it can be copied.
    """
    return DeferredRenderable(lambda options: Group(*_render_parts(summary, options, fold=fold)))


def _render_parts(
    summary: ModelSummary, options: ConsoleOptions, *, fold: bool
) -> Iterator[RenderableType]:
    head = Text(escape_for_console(summary.path, options), style="bold", no_wrap=not fold)
    head.overflow = "fold" if fold else "ignore"
    if summary.error is not None:
        hint = "" if summary.error.hint is None else f" ({summary.error.hint})"
        message = escape_for_console(f"{summary.error.message}{hint}", options)
        yield head.append(f"  {message}", style="not bold red")
        return
    yield head.append(f"  {decimal(summary.size)}", style="not bold dim")
    yield Padding(_render_facts(summary, options), (0, 0, 0, 2))
    if summary.buffers:
        yield Padding(render_kv_map(summary), (1, 0, 0, 2))
    if summary.findings:
        yield Padding(Group(*_render_findings(summary.findings, options)), (1, 0, 0, 2))


def _render_facts(summary: ModelSummary, options: ConsoleOptions) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, *lines in _list_facts(summary):
        grid.add_row(
            Text(label), Text("\n".join(escape_for_console(line, options) for line in lines))
        )
    return grid


def _list_facts(summary: ModelSummary) -> Iterator[tuple[str, ...]]:
    """Yield a label and the lines beside it for each fact."""
    if summary.export is not None:
        export = summary.export
        opsets = ", ".join(f"{domain or 'opset'} {version}" for domain, version in export.opsets)
        producer = f"{export.producer_name} {export.producer_version}".strip()
        origin = f"{producer or 'an unnamed producer'}; IR {export.ir_version}"
        yield "made by", f"{origin}, {opsets or 'no opset'}"
    functions = format_list(summary.weight.function_names, limit=_FEW)
    nodes = f"{summary.weight.node_count:,} nodes"
    yield "graph", nodes + (f", local functions {functions}" if functions else "")
    yield "weights", "; ".join(_describe_weights(summary)) or "not there"
    yield from _list_buffer_facts(summary)
    if summary.stamp is not None:
        yield "stamp", f"{summary.stamp.digest[:12]}… {_STAMP_TEXTS[summary.stamp.matches_graph]}"
    for reason in dict.fromkeys(item.reason for item in summary.kept):
        names = [item.name for item in summary.kept if item.reason == reason]
        text = format_list(names, limit=_SOME)
        yield ("outputs", text) if reason == REASON_NOT_RETAINED else ("kept", f"{reason}: {text}")


def _list_buffer_facts(summary: ModelSummary) -> Iterator[tuple[str, ...]]:
    """Yield each group of alike buffers under its kind, and the tokens."""
    if not summary.buffers:
        yield "buffers", "no KV buffer in it"
        return
    previous_kind = ""
    for group in group_buffers(summary.buffers):
        kind = get_kind_traits(group.kind).label + " (a guess)" * group.is_kind_guessed
        shape = "of unknown rank" if group.shape is None else format_shape(group.shape)
        buffers = f"{', '.join(group.buffers)} of {_format_layers(group.layers)}"
        update = f", {group.update.label}" if group.update.label else ""
        yield "" if kind == previous_kind else kind, buffers, f"{group.dtype} {shape}{update}"
        previous_kind = kind
    yield "token", ", ".join(_describe_tokens(summary)) or "none"


def _describe_weights(summary: ModelSummary) -> Iterator[str]:
    weight = summary.weight
    if not weight.inline_tensor_count and not weight.external_tensor_count:
        yield "none"
    if weight.inline_tensor_count:
        yield f"{decimal(weight.inline_bytes)} inline in {weight.inline_tensor_count:,} tensors"
    usable = [file.location for file in summary.files if file.size is not None]
    if usable:
        files = "1 file" if len(usable) == 1 else f"{len(usable):,} files"
        names = format_list(usable, limit=_FEW)
        yield f"{decimal(summary.external_bytes)} external in {files}: {names}"
    unusable = [file.location for file in summary.files if file.size is None]
    if unusable:
        yield f"not usable: {format_list(unusable, limit=_FEW)}"


def _describe_tokens(summary: ModelSummary) -> Iterator[str]:
    for token, count in summary.token_counts:
        share = "all" if count == summary.name_count else f"{count:,} of"
        yield f"{token} on {share} {summary.name_count:,} names"


def _format_layers(layers: Sequence[int]) -> str:
    """Return ``layers 0-5``, or the number of layers and the first few runs."""
    count = len(set(layers))
    runs = list(map(format_layer_run, group_layer_runs(sorted(set(layers)))))
    if len(runs) == 1:
        return f"layer {runs[0]}" if count == 1 else f"layers {runs[0]}"
    if len(runs) > _FEW + 1:
        runs[_FEW:] = [f"... {runs[-1]}"]
    return f"{count} layers ({', '.join(runs)})"


def _render_findings(findings: Sequence[Finding], options: ConsoleOptions) -> Iterator[Text]:
    """Yield a line for each finding, of each code only the first few."""
    counts = Counter(finding.code for finding in findings)
    seen: Counter[str] = Counter()
    for finding in findings:
        code = finding.code
        seen[code] += 1
        if seen[code] > _FEW + 1:
            continue
        text = Text(f"{finding.severity} {code}  ", overflow="fold")
        text.stylize("red" if finding.severity == "error" else "yellow")
        message = f"{finding.name} {finding.message} ({finding.hint})".lstrip()
        if seen[code] > _FEW:
            message = f"and {counts[code] - _FEW:,} more like this"
        yield text.append(escape_for_console(message, options), style="default")
