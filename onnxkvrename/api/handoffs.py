"""Consumers of KV buffers, and prefill against decode."""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.api.arguments import PathLike, RulesLike, as_path, load_rules
from onnxkvrename.api.layouts import load_layout
from onnxkvrename.findings import Finding
from onnxkvrename.handoff import consumer_checks
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.worker import build_handoff_side
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import LoadedLayout


def check_consumer(
    layout: LoadedLayout | Layout | PathLike,
    consumer: str = "vllm-qaic",
    *,
    full_transfer: bool = False,
) -> tuple[Finding, ...]:
    """Return what keeps a consumer from taking the KV buffers, or spoils them.

    Args:
        layout: The buffers, or the path of a model or manifest.
        consumer: The consumer's name.
        full_transfer: Whether the consumer transfers all of each buffer, not only the prompt.

    Returns:
        Findings KV601 to KV610; none if the consumer can take all buffers.

    Raises:
        KvRenameError: There is no consumer of this name.
        ModelError: The model cannot be read.
    """
    return tuple(
        consumer_checks.check_consumer(
            _as_layout(layout), load_consumer(consumer), full_transfer=full_transfer
        )
    )


def compare(
    prefill: LoadedLayout | Layout | PathLike,
    decode: LoadedLayout | Layout | PathLike,
    consumer: str = "vllm-qaic",
    *,
    full_transfer: bool = False,
    prompts: Sequence[int] = (),
    rules: RulesLike = None,
) -> Handoff:
    """Predict whether decode finds prefill's KV buffers where it looks for them.

    Args:
        prefill: The buffers of the prefill worker, or the path of its model or manifest.
        decode: The same for the decode worker.
        consumer: The consumer's name.
        full_transfer: Whether the consumer transfers all of each buffer, not only the prompt.
        prompts: Also simulate prompts of these lengths, in tokens.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The verdict, for every length of a prompt, with the differences that cause it.

    Raises:
        KvRenameError: There is no consumer of this name.
        ModelError: A model cannot be read.
        RulesError: The rules cannot be used.
    """
    loaded_consumer, loaded_rules = load_consumer(consumer), load_rules(rules)
    return compare_sides(
        build_handoff_side(
            "prefill", _as_layout(prefill, loaded_rules), loaded_consumer, loaded_rules
        ),
        build_handoff_side(
            "decode", _as_layout(decode, loaded_rules), loaded_consumer, loaded_rules
        ),
        loaded_consumer,
        ranks=None,
        full_transfer=full_transfer,
        tokens=tuple(prompts),
    )


def _as_layout(value: LoadedLayout | Layout | PathLike, rules: RulesLike = None) -> Layout:
    if isinstance(value, LoadedLayout):
        return value.layout
    if isinstance(value, Layout):
        return value
    return load_layout(as_path(value, "layout"), rules=rules).layout
