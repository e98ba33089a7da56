"""Consumers of KV buffers, and prefill against decode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    as_lengths,
    as_path,
    as_text,
    check_flags,
    load_rules_for,
)
from onnxkvrename.api.layouts import load_layout
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
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import LoadedLayout, apply_found_compiles
from onnxkvrename.rules.profile import Rules

_LAYOUT_TYPES = "a LoadedLayout, a Layout or a path (str or os.PathLike)"


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
    check_flags(full_transfer=full_transfer)
    as_text(target, "target")
    buffers = _as_loaded(layout, "layout").layout
    configured = configure_consumer(_load_consumer(target), buffers)
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
    check_flags(full_transfer=full_transfer)
    tokens = as_lengths(prompts, "prompts")
    sides = {"prefill": prefill, "decode": decode}
    paths = [
        as_path(side, name, expected=_LAYOUT_TYPES)
        for name, side in sides.items()
        if not isinstance(side, (Layout, LoadedLayout))
    ]
    loaded_consumer = _load_consumer(target)
    loaded_rules = load_rules_for(rules, paths)
    first, second = (_load_side(name, side, loaded_rules) for name, side in sides.items())
    loaded_consumer = configure_consumer(loaded_consumer, first.layout)
    return compare_sides(
        _build_side("prefill", first, loaded_consumer, loaded_rules),
        _build_side("decode", second, loaded_consumer, loaded_rules),
        loaded_consumer,
        ranks=None,
        full_transfer=full_transfer,
        tokens=tokens,
    )


def _load_side(label: str, value: LoadedLayout | Layout | PathLike, rules: Rules) -> LoadedLayout:
    """Return a side; for a path with what the compiles beside its models say."""
    loaded = _as_loaded(value, label, rules)
    is_path = not isinstance(value, (Layout, LoadedLayout))
    return apply_found_compiles(loaded)[0] if is_path else loaded


def _build_side(label: str, loaded: LoadedLayout, consumer: Consumer, rules: Rules) -> HandoffSide:
    return build_loaded_side(label, Path(*loaded.layout.models[:1]), loaded, consumer, rules)


def _load_consumer(target: str) -> Consumer:
    return load_consumer(as_text(target, "target"))


def _as_loaded(
    value: LoadedLayout | Layout | PathLike, name: str, rules: RulesLike = None
) -> LoadedLayout:
    if isinstance(value, LoadedLayout):
        return value
    if isinstance(value, Layout):
        return LoadedLayout(value, ())
    return load_layout(as_path(value, name, expected=_LAYOUT_TYPES), rules=rules)
