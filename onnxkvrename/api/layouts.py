"""Functions that show a model, its KV buffers as a consumer sees them, and prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.api.unnamed_caches import explain_layout, explain_summaries
from onnxkvrename.files.find import list_models
from onnxkvrename.files.read import MemoryFile, ModelSource
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER, load_consumer
from onnxkvrename.handoff.worker import build_loaded_side
from onnxkvrename.layout.inspect import ModelSummary, fold_windows, inspect_model, inspect_models
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    LoadedLayout,
)
from onnxkvrename.layout.load import load_layout as load_layouts
from onnxkvrename.options import SIDES
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification import trace_buffer_updates

Sides = tuple[LoadedLayout, LoadedLayout]
"""The buffers of prefill and of decode."""


@speak_python
def inspect(model: ModelLike, *, rules: RulesLike = None) -> ModelSummary:
    """Return what is in a model: its KV buffers, tokens and findings.

    Args:
        model: The model's path, its bytes or a ``ModelProto``.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The summary; what is wrong with the model is in its ``findings``.

    Raises:
        ModelError: The model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> summary = onnxkvrename.inspect("model.onnx")
        >>> len(summary.buffers), summary.layers
        (4, (0, 1))
    """
    arguments = read_arguments(inspect, locals())
    source = arguments["model"]
    found = find_rules(arguments["profile"], arguments["rules"], [source])
    summary = inspect_model(source, found, trace_buffer_updates)
    if summary.error is not None:
        raise summary.error
    (explained,) = explain_summaries([summary], [source], found)
    return explained


@speak_python
def inspect_page(models: ModelLike | Iterable[PathLike], *, rules: RulesLike = None) -> str:
    """Return a page with the KV map of models: their buffers, tokens and findings.

    Args:
        models: The path of a model or of a directory, a model in memory, or several paths.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The HTML, with its style and script in it.

    Raises:
        ModelError: A model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.
        ValueError: A path is empty.

    Examples:
        >>> onnxkvrename.inspect_page("model.onnx")[:15]
        '<!DOCTYPE html>'
    """
    from onnxkvrename.report.pages.inspect import render_inspect_page  # jinja2, only for a page

    arguments = read_arguments(inspect_page, locals())
    sources = arguments["models"]
    found = find_rules(arguments["profile"], arguments["rules"], sources)
    listed = list_models(sources)
    summaries = inspect_models(listed, found, trace_buffer_updates).summaries
    for summary in summaries:
        if summary.error is not None:
            raise summary.error
    return render_inspect_page(fold_windows(explain_summaries(summaries, listed, found)))


@speak_python
def load_layout(
    paths: ModelLike | Iterable[PathLike],
    *,
    sizes: Mapping[str, int] | None = None,
    rules: RulesLike = None,
) -> LoadedLayout:
    """Return the KV buffers of a model, of the windows of one, or of a layout file.

    Args:
        paths: A model, a layout file, a directory with the windows of one model, or several
            such windows; for a model in memory its bytes or a ``ModelProto``.
        sizes: Sizes of symbolic dimensions, such as ``{"ctx_len": 4096}``.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The layout, and what is wrong with the models.

    Raises:
        ModelError: A model cannot be read, or several paths are not one model.
        KvRenameError: The model has no such symbol.
        ValueError: A size is less than 1, or no path is given.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> loaded = onnxkvrename.load_layout("windows", sizes={"ctx_len": 4096})
        >>> [buffer.input for buffer in loaded.layout.buffers if buffer.layer == 2]
        ['past_key.2', 'past_value.2']
    """
    arguments = read_arguments(load_layout, locals())
    models = arguments["paths"]
    found = find_rules(arguments["profile"], arguments["rules"], models)
    return load_traced(models, found, arguments["sizes"] or {})


def load_traced(
    paths: Sequence[ModelSource],
    rules: Rules,
    sizes: Mapping[str, int] = MappingProxyType({}),
    *,
    strict: bool = False,
    command: str = "",
) -> LoadedLayout:
    """Return the layout of models or of a layout file, with how the buffers are updated.

    Args:
        paths: As for :func:`load_layout`.
        rules: The rules that recognize KV names.
        sizes: Sizes of symbolic dimensions.
        strict: Whether every warning is an error.
        command: The command that was typed, with the file of rules that hints suggest; empty for
            one that shows the model.
    """
    loaded = load_layouts(paths, rules, sizes, strict=strict, trace=trace_buffer_updates)
    return explain_layout(loaded, list_models(paths), rules, command, strict=strict)


@speak_python
def compare(
    prefill: LoadedLayout | Layout | ModelLike,
    decode: LoadedLayout | Layout | ModelLike,
    target: str = DEFAULT_CONSUMER,
    *,
    full_transfer: bool = False,
    rules: RulesLike = None,
) -> Handoff:
    """Predict whether decode finds prefill's KV buffers where it looks for them.

    Args:
        prefill: The buffers of the prefill worker, its model in memory, or the path of its
            model or layout file.
        decode: The same for the decode worker.
        target: The consumer's name.
        full_transfer: Whether the consumer transfers all of each buffer, not only the prompt.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The verdict, for every length of a prompt, with the differences that cause it. It is that
        after a rename where the names are wrong; ``failed`` says whether it works as it is. An
        error of a model itself is in the verdict if the side is a path or a loaded layout.

    Raises:
        KvRenameError: The consumer does not exist.
        ModelError: A model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> handoff = onnxkvrename.compare("prefill.onnx", "decode.onnx", "vllm-qaic")
        >>> handoff.failed, handoff.verdict.outcome, handoff.findings
        (False, 'works', ())
    """
    handoff, _, _ = _compare(read_arguments(compare, locals()))
    return handoff


@speak_python
def compare_page(
    prefill: LoadedLayout | Layout | ModelLike,
    decode: LoadedLayout | Layout | ModelLike,
    target: str = DEFAULT_CONSUMER,
    *,
    full_transfer: bool = False,
    rules: RulesLike = None,
) -> str:
    """Return a page with the verdict of `compare`, and the memory of both sides for any prompt.

    ``full_transfer`` and ``rules`` are as for `compare`.

    Args:
        prefill: As for `compare`.
        decode: The same for the decode worker.
        target: The consumer's name.

    Returns:
        The HTML, with its style and script in it.

    Raises:
        KvRenameError: As for `compare`.
        TypeError: An argument has the wrong type.

    Examples:
        >>> onnxkvrename.compare_page("prefill.onnx", "decode.onnx")[:15]
        '<!DOCTYPE html>'
    """
    from onnxkvrename.report.documents.compare_json import describe_handoff
    from onnxkvrename.report.pages.compare import render_compare_page  # jinja2, only for a page

    arguments = read_arguments(compare_page, locals())
    handoff, (first, second), found = _compare(arguments)
    reports = (first.reports, second.reports)
    return render_compare_page(describe_handoff(handoff, reports, found.profile_choice))


def compare_loaded(
    paths: tuple[Path | None, Path | None],
    sides: Sides,
    consumer: Consumer,
    rules: Rules,
    *,
    full_transfer: bool = False,
) -> Handoff:
    """Compare two sides.

    Args:
        paths: The path that was read for prefill, and for decode; ``None`` for what is in memory.
        sides: Their buffers.
        consumer: The consumer.
        rules: The rules that recognize KV names.
        full_transfer: Whether all of each buffer is moved.
    """
    writer, reader = (
        build_loaded_side(label, path, loaded, consumer, rules)
        for label, path, loaded in zip(SIDES, paths, sides, strict=True)
    )
    return compare_sides(writer, reader, consumer, full_transfer=full_transfer)


def _compare(arguments: Mapping[str, Any]) -> tuple[Handoff, Sides, Rules]:
    """Compare two sides, as the arguments of :func:`compare` say; also return their buffers."""
    consumer = load_consumer(arguments["target"])
    given = (arguments["prefill"], arguments["decode"])
    models = [side for side in given if isinstance(side, (Path, MemoryFile))]
    found = find_rules(arguments["profile"], arguments["rules"], models)
    prefill, decode = (side if isinstance(side, Path) else None for side in given)
    first, second = (_load(side, found) for side in given)
    if consumer.token:  # KV616 is about the same names, with the command for this consumer
        first, second = (side.remove_findings("KV303") for side in (first, second))
    handoff = compare_loaded(
        (prefill, decode),
        (first, second),
        consumer,
        found,
        full_transfer=arguments["full_transfer"],
    )
    return handoff, (first, second), found


def _load(layout: LoadedLayout | Layout | ModelSource, rules: Rules | None = None) -> LoadedLayout:
    if isinstance(layout, Layout):
        return LoadedLayout(layout, ())
    if isinstance(layout, LoadedLayout):
        return layout
    return load_traced((layout,), rules or find_rules(None, None, (layout,)))
