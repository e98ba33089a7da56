"""Check the models of which one fills buffers of the other: a vision encoder and its decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.rules.kv_model import KvModel

_HINT = "give the encoder and the decoder together; --no-set takes one alone"


def check_feeds(models: Sequence[KvModel]) -> Iterator[tuple[int, Finding]]:
    """Check that the models that connect by the names of KV buffers are all there (KV308).

    Renamed alone, one no longer meets the other: the buffer keeps what was in it before.

    Args:
        models: All models of a command.

    Yields:
        Findings, each with the index of the model that it is about.
    """
    fed = {(feed.buffer, feed.layer) for model in models for feed in model.plan.feeds}
    for index, model in enumerate(models):
        taken = {
            (pair.buffer, pair.layer)
            for other, other_model in enumerate(models)
            if other != index
            for pair in other_model.pairs
            if pair.input is not None
        }
        lost = [
            feed.side.old_name
            for feed in model.plan.feeds
            if (feed.buffer, feed.layer) not in taken
        ]
        if lost:
            yield (
                index,
                build_finding(
                    "KV308",
                    lost[0],
                    f"fills the input of that name of a decoder, which is not there"
                    f"{_count_more(lost)}",
                    _HINT,
                ),
            )
        keys = {
            pair.input.old_name: (pair.buffer, pair.layer)
            for pair in model.pairs
            if pair.input is not None
        }
        empty = [name for name in model.needs if keys[name] not in fed]
        if empty:
            yield (
                index,
                build_finding(
                    "KV308",
                    empty[0],
                    "is only passed through here, so another model fills it, such as a vision "
                    f"encoder with an output of that name, which is not there{_count_more(empty)}",
                    _HINT,
                ),
            )


def _count_more(names: Sequence[str]) -> str:
    return f" (like {len(names) - 1} more)" if len(names) > 1 else ""
