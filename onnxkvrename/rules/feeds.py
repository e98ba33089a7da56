"""Check models that fill buffers of other models: a vision encoder and its decoder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.signature import Dim, Value, format_value_type, is_type_compatible
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.windows import find_token_split

_HINT = "pass the encoder and the decoder together"


def check_feeds(models: Sequence[KvModel]) -> Iterator[tuple[int, Finding]]:
    """Check that models that connect by the names of KV buffers are all given, and fit (KV308).

    If only one of them is renamed, they no longer connect: the buffer keeps its old content.

    Yields:
        Findings, each with the index of the model that it is about.
    """
    fed = {(feed.kind, feed.buffer, feed.layer) for model in models for feed in model.plan.feeds}
    for index, model in enumerate(models):
        inputs = _find_inputs(models, index)
        lost, misfits = [], []
        for feed in model.plan.feeds:
            name = feed.side.old_name
            found = inputs.get((feed.kind, feed.buffer, feed.layer), [])
            if not found:
                lost.append((name, ""))
            elif not any(_can_fill(feed.side.value, *candidate) for candidate in found):
                types = (format_value_type(value) for value in (feed.side.value, found[0][0]))
                misfits.append((name, "the output is {}, the input {}".format(*types)))
        empty = [
            (pair.input.old_name, "")
            for pair in model.pairs
            if pair.input is not None
            and pair.input.old_name in model.needs
            and (pair.kind, pair.buffer, pair.layer) not in fed
        ]
        for message, names in (
            ("fills a decoder's input of the same name, but no such decoder was passed", lost),
            ("does not fit the input of the same name of any other model: ", misfits),
            (
                "is only passed through by this model, so another one must fill it, such as a "
                "vision encoder with an output of the same name; no such model was passed",
                empty,
            ),
        ):
            if names:
                yield index, _build_finding(names, message, _HINT)


def check_feed_names(models: Sequence[KvModel]) -> Iterator[tuple[int, Finding]]:
    """Check that outputs have the same names as the KV inputs that they fill (KV308).

    Names connect them: with a token on one side only, the buffer keeps its old content.

    Names are checked as they are.

    Yields:
        Findings, each with the index of the model that has the outputs.
    """
    for index, model in enumerate(models):
        inputs = _find_inputs(models, index)
        broken = []
        for feed in model.plan.feeds:
            found = inputs.get((feed.kind, feed.buffer, feed.layer), [])
            names = [each[0].name for each in found if _can_fill(feed.side.value, *each)]
            if names and feed.side.old_name not in names:
                broken.append((feed.side.old_name, names[0]))
        if broken:
            message = "does not fill the decoder's input, whose name is "
            hint = "rename the encoder and the decoder in one command, with the same token"
            yield index, _build_finding(broken, message, hint)


def _build_finding(names: Sequence[tuple[str, str]], message: str, hint: str) -> Finding:
    """Return KV308 about some names, each with what ends the message about it."""
    name, end = names[0]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return build_finding("KV308", name, f"{message}{end}{more}", hint)


def find_filled_outputs(models: Sequence[KvModel]) -> list[frozenset[str]]:
    """Return for each model the outputs of buffers that another of the models fills.

    These are the old and the new names of the outputs that only hand on what was filled in.
    """
    filled = []
    for index, model in enumerate(models):
        names: set[str] = set()
        for other in (*models[:index], *models[index + 1 :]):
            feeds = {(feed.kind, feed.buffer, feed.layer): feed.side for feed in other.plan.feeds}
            for pair in model.pairs:
                side = feeds.get((pair.kind, pair.buffer, pair.layer))
                if side is None or pair.input is None or pair.output is None:
                    continue
                if side.new_name == pair.input.new_name:
                    names.update((pair.output.old_name, pair.output.new_name))
        filled.append(frozenset(names))
    return filled


def is_filled(finding: Finding, filled: Collection[str]) -> bool:
    """Return whether a finding is about a buffer that is not written because it is filled."""
    return finding.code == "KV114" and finding.name in filled


def check_folder_tokens(
    models: Sequence[KvModel], rules: Rules, request: Request
) -> Iterator[tuple[int, Finding]]:
    """Check that the models of an encoder-decoder carry one token (KV303, a warning).

    One of them fills buffers of another, such as the keys of the encoder. Their names differ
    already without a token, so runtimes match them by order or by a template. A template fails
    if the tokens differ.

    Names are checked as they are.

    Yields:
        Findings, each with the index of the first model of its folder with a different token.
    """
    folders: dict[str, list[int]] = {}
    for index, model in enumerate(models):
        if model.pairs and model.part is None:
            folders.setdefault(os.path.dirname(model.path), []).append(index)
    for folder, indexes in folders.items():
        members = [models[index] for index in indexes]
        carried = [(os.path.basename(model.path), model.tokens) for model in members]
        subject = "the models of this encoder-decoder"
        split = find_token_split(subject, carried, request, rules, folder)
        if split and any(pair.may_be_alone for model in members for pair in model.pairs):
            index, finding = split
            yield indexes[index], finding._replace(severity="warning")


def _find_inputs(
    models: Sequence[KvModel], index: int
) -> dict[tuple[str, str, int], list[tuple[Value, frozenset[Dim]]]]:
    """Return the KV inputs of all models but one, by part and layer.

    Each comes with the contexts of its model: the sizes on axis 2 of the buffers that the model
    at `index` does not fill.
    """
    filled = {(feed.kind, feed.buffer, feed.layer) for feed in models[index].plan.feeds}
    inputs: dict[tuple[str, str, int], list[tuple[Value, frozenset[Dim]]]] = {}
    for other in (*models[:index], *models[index + 1 :]):
        taken = [(p, p.input.value) for p in other.pairs if p.input is not None]
        contexts = frozenset(
            value.shape[2]
            for pair, value in taken
            if (pair.kind, pair.buffer, pair.layer) not in filled
            and value.shape
            and len(value.shape) == 4
        )
        for pair, value in taken:
            inputs.setdefault((pair.kind, pair.buffer, pair.layer), []).append((value, contexts))
    return inputs


def _can_fill(value: Value, taker: Value, contexts: Collection[Dim]) -> bool:
    """Return whether an output fits an input, as far as both are declared.

    A buffer whose size is the symbol of the text's context holds text. An encoder, which writes
    a fixed number of tokens, fills no such buffer.
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
