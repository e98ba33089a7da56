"""Functions that show a model, its KV buffers as a consumer sees them, and prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
)
from onnxkvrename.findings import Finding
from onnxkvrename.handoff import consumer_checks
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import (
    DEFAULT_CONSUMER,
    configure_consumer,
    load_consumer,
)
from onnxkvrename.handoff.worker import HandoffSide, build_loaded_side
from onnxkvrename.layout.inspect import ModelSummary, inspect_model
from onnxkvrename.layout.layout import GraphTrace, Layout
from onnxkvrename.layout.load import (
    UNKNOWN_COMPILE,
    CompileInfo,
    LoadedLayout,
    apply_found_compiles,
)
from onnxkvrename.layout.load import load_layout as load_layouts
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.weights import describe_weights
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification import trace_buffer_scales, trace_buffer_updates


def inspect(model: PathLike, *, rules: RulesLike = None) -> ModelSummary:
    """Return what is in a model file: its KV buffers, tokens, weights and findings.

    Args:
        model: The model's path.
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
    path = arguments["model"]
    found = find_rules(arguments["profile"], arguments["rules"], [path])
    summary = inspect_model(path, found, trace_buffer_updates)
    if summary.error is not None:
        raise summary.error
    return summary


def load_layout(
    paths: PathLike | Iterable[PathLike],
    *,
    sizes: Mapping[str, int] | None = None,
    specializations: PathLike | None = None,
    custom_io: PathLike | None = None,
    rules: RulesLike = None,
) -> LoadedLayout:
    """Return the KV buffers of a model, of the windows of one, or of a manifest.

    Args:
        paths: A model, a manifest, a directory with the windows of one model, or several
            such windows.
        sizes: Sizes of symbolic dimensions, such as ``{"ctx_len": 4096}``.
        specializations: A specializations.json with further sizes.
        custom_io: A custom_io.yaml with the dtypes of a compile.
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
    return load_traced(models, found, build_request(CompileInfo, arguments))


def load_traced(
    paths: Sequence[Path],
    rules: Rules,
    compile_info: CompileInfo = UNKNOWN_COMPILE,
    *,
    strict: bool = False,
) -> LoadedLayout:
    """Return the layout of models or of a manifest, with what their graphs do with the buffers.

    Args:
        paths: As for :func:`load_layout`.
        rules: The rules that recognize KV names.
        compile_info: What is known of a compile.
        strict: Whether every warning is an error.
    """
    return load_layouts(paths, rules, compile_info, strict=strict, trace=trace_graph)


def trace_graph(source: ByteSource, pairs: Sequence[KvPair], directory: Path) -> GraphTrace:
    """Return what the nodes of a model show of its buffers; its external data are in a directory.

    Raises:
        ReadError: A file of the model cannot be read.
    """
    return GraphTrace(
        trace_buffer_updates(source, pairs),
        trace_buffer_scales(source, pairs, directory),
        describe_weights(source, directory),
    )


def check_consumer(
    layout: LoadedLayout | Layout | PathLike,
    target: str = DEFAULT_CONSUMER,
    *,
    full_transfer: bool = False,
) -> tuple[Finding, ...]:
    """Return why a consumer cannot use the KV buffers, or how it would damage them.

    Args:
        layout: The buffers, or the path of a model or manifest.
        target: The consumer's name.
        full_transfer: Whether the consumer transfers all of each buffer, not only the prompt.

    Returns:
        Findings KV601 to KV610; none if the consumer can use all buffers.

    Raises:
        KvRenameError: The consumer does not exist, or its configuration beside the
            model cannot be used.
        ModelError: The model cannot be read.
        TypeError: An argument has the wrong type.

    Examples:
        >>> [finding.code for finding in onnxkvrename.check_consumer("model.onnx", "vllm-qaic")]
        ['KV601']
    """
    arguments = read_arguments(check_consumer, locals())
    buffers = _load(arguments["layout"]).layout
    configured = configure_consumer(load_consumer(target), buffers)
    return tuple(consumer_checks.check_consumer(buffers, configured, full_transfer=full_transfer))


def compare(
    prefill: LoadedLayout | Layout | PathLike,
    decode: LoadedLayout | Layout | PathLike,
    target: str = DEFAULT_CONSUMER,
    *,
    full_transfer: bool = False,
    prompts: Sequence[int] = (),
    rules: RulesLike = None,
) -> Handoff:
    """Predict whether decode finds prefill's KV buffers where it looks for them.

    Args:
        prefill: The buffers of the prefill worker, or the path of its model or manifest. Beside
            the model, a compile's ``qpc-HASH`` directory is read for dtypes and sizes.
        decode: The same for the decode worker.
        target: The consumer's name.
        full_transfer: Whether the consumer transfers all of each buffer, not only the prompt.
        prompts: Also simulate prompts of these lengths, in tokens.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The verdict, for every length of a prompt, with the differences that cause it. An
        error of a model itself is in the verdict if the side is a path or a loaded layout.

    Raises:
        KvRenameError: The consumer does not exist, or it hands over nothing from one model
            to another.
        ModelError: A model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.

    Examples:
        >>> handoff = onnxkvrename.compare("prefill.onnx", "decode.onnx", "vllm-qaic")
        >>> handoff.verdict.outcome, handoff.findings
        ('works', ())
    """
    arguments = read_arguments(compare, locals())
    sides = (arguments["prefill"], arguments["decode"])
    consumer = load_consumer(target)
    paths = [side for side in sides if isinstance(side, Path)]
    found = find_rules(arguments["profile"], arguments["rules"], paths)
    first, second = (_load_side(side, found) for side in sides)
    consumer = configure_consumer(consumer, first.layout)
    return compare_sides(
        _build_side("prefill", first, consumer, found),
        _build_side("decode", second, consumer, found),
        consumer,
        ranks=None,
        full_transfer=full_transfer,
        tokens=arguments["prompts"],
    )


def _load_side(side: LoadedLayout | Layout | Path, rules: Rules) -> LoadedLayout:
    """Return a side; for a path with what the compiles beside its models say."""
    loaded = _load(side, rules)
    return apply_found_compiles(loaded)[0] if isinstance(side, Path) else loaded


def _build_side(label: str, loaded: LoadedLayout, consumer: Consumer, rules: Rules) -> HandoffSide:
    return build_loaded_side(label, Path(*loaded.layout.models[:1]), loaded, consumer, rules)


def _load(layout: LoadedLayout | Layout | Path, rules: RulesLike = None) -> LoadedLayout:
    if isinstance(layout, Layout):
        return LoadedLayout(layout, ())
    return layout if isinstance(layout, LoadedLayout) else load_layout(layout, rules=rules)
