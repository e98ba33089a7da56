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


def check_feed_names(models: Sequence[KvModel]) -> Iterator[tuple[int, Finding]]:
    """Check that outputs have the very names of the KV inputs that they fill (KV308).

    Names connect them: with a token on one side only, the buffer keeps what was in it before.

    Args:
        models: All models of a command, whose names are checked as they are.

    Yields:
        Findings, each with the index of the model that has the outputs.
    """
    for index, model in enumerate(models):
        inputs: dict[tuple[str, int], list[str]] = {}
        for other in (*models[:index], *models[index + 1 :]):
            for pair in other.pairs:
                if pair.input is not None:
                    key = (pair.buffer, pair.layer)
                    inputs.setdefault(key, []).append(pair.input.old_name)
        broken = [
            (name, names[0])
            for name, names in (
                (feed.side.old_name, inputs.get((feed.buffer, feed.layer), []))
                for feed in model.plan.feeds
            )
            if names and name not in names
        ]
        if broken:
            name, expected = broken[0]
            message = (
                f"does not reach the decoder's input, which is {expected}"
                f"{_count_more([name for name, _ in broken])}"
            )
            hint = "rename the encoder and the decoder in one command, with the same token"
            yield index, build_finding("KV308", name, message, hint)


def _count_more(names: Sequence[str]) -> str:
    return f" (like {len(names) - 1} more)" if len(names) > 1 else ""
