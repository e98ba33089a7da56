"""Check the models of which one fills buffers of the other: a vision encoder and its decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.signature import Dim, Value, format_shape, is_type_compatible
from onnxkvrename.rules.kv_model import KvModel

_HINT = "give the encoder and the decoder together; `--no-set` takes one alone"


def check_feeds(models: Sequence[KvModel]) -> Iterator[tuple[int, Finding]]:
    """Check that the models that connect by the names of KV buffers are there, and fit (KV308).

    Renamed alone, one no longer meets the other: the buffer keeps what was in it before.

    Args:
        models: All models of a command.

    Yields:
        Findings, each with the index of the model that it is about.
    """
    fed = {(feed.buffer, feed.layer) for model in models for feed in model.plan.feeds}
    for index, model in enumerate(models):
        inputs = _find_inputs(models, index)
        lost, misfits = [], []
        for feed in model.plan.feeds:
            found = inputs.get((feed.buffer, feed.layer), [])
            if not found:
                lost.append(feed.side.old_name)
            elif not any(_can_fill(feed.side.value, *candidate) for candidate in found):
                misfits.append((feed.side.value, found[0][0]))
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
        if misfits:
            value, taker = misfits[0]
            message = (
                f"cannot fill the input of that name of any other model: it is "
                f"{_describe(value)}, and that is {_describe(taker)}{_count_more(misfits)}"
            )
            yield index, build_finding("KV308", value.name, message, _HINT)
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
        inputs = _find_inputs(models, index)
        broken = []
        for feed in model.plan.feeds:
            name = feed.side.old_name
            found = inputs.get((feed.buffer, feed.layer), [])
            names = [each[0].name for each in found if _can_fill(feed.side.value, *each)]
            if names and name not in names:
                broken.append((name, names[0]))
        if broken:
            name, expected = broken[0]
            message = (
                f"does not reach the decoder's input, which is {expected}{_count_more(broken)}"
            )
            hint = "rename the encoder and the decoder in one command, with the same token"
            yield index, build_finding("KV308", name, message, hint)


def _find_inputs(
    models: Sequence[KvModel], index: int
) -> dict[tuple[str, int], list[tuple[Value, frozenset[Dim]]]]:
    """Return the KV inputs of all models but one, by part and layer.

    Each comes with the contexts of its model: the sizes on axis 2 of the buffers that the one
    left out does not fill.
    """
    filled = {(feed.buffer, feed.layer) for feed in models[index].plan.feeds}
    inputs: dict[tuple[str, int], list[tuple[Value, frozenset[Dim]]]] = {}
    for other in (*models[:index], *models[index + 1 :]):
        taken = [(p, p.input.value) for p in other.pairs if p.input is not None]
        contexts = frozenset(
            value.shape[2]
            for pair, value in taken
            if (pair.buffer, pair.layer) not in filled and value.shape and len(value.shape) == 4
        )
        for pair, value in taken:
            inputs.setdefault((pair.buffer, pair.layer), []).append((value, contexts))
    return inputs


def _can_fill(value: Value, taker: Value, contexts: Collection[Dim]) -> bool:
    """Return whether an output can be what an input takes, as far as both are declared.

    A buffer whose size is the symbol of the text's context holds text: an encoder, which writes
    a number of tokens, fills none of those.
    """
    if not is_type_compatible(value, taker):
        return False
    if value.shape is None or taker.shape is None or len(taker.shape) != 4:
        return True
    return not (
        isinstance(value.shape[2], int)
        and isinstance(taker.shape[2], str)
        and taker.shape[2] in contexts
    )


def _describe(value: Value) -> str:
    return value.dtype if value.shape is None else f"{value.dtype} {format_shape(value.shape)}"


def _count_more(items: Sequence[object]) -> str:
    return f" (like {len(items) - 1} more)" if len(items) > 1 else ""
