"""Describe onnxruntime-genai, which composes names from the templates of genai_config.json.

Source: microsoft/onnxruntime-genai at a0c04eb, files ``src/config.h`` (the default templates),
``src/models/kv_cache.cpp`` (``DefaultKeyValueCache``, ``CombinedKeyValueCache``, ``LFM2Cache``,
``CrossCache``, ``ComposeKeyValueName``) and ``src/models/recurrent_state.cpp`` (names of linear
states, derived from the template of keys). It finds the layers by the template of keys among the
inputs, composes the other names of each layer, and runs prefill and decode with one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.documents import ObjectReader, UnreadableTextError, parse_json
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import (
    Finding,
    build_finding,
    format_count,
    format_list,
    quote_word,
    report_names,
)
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import ConsumerView
from onnxkvrename.layout.layout import Layout
from onnxkvrename.storage.read import is_in_memory, read_status, read_text_file

CONFIG_NAME = "genai_config.json"
_NUMBER = "%d"
_MAX_NAME_BYTES = 63
_KEYS, _VALUES = "past_key_names", "past_value_names"
_DEFAULTS = {
    _KEYS: "past_key_values.%d.key",
    _VALUES: "past_key_values.%d.value",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
    "past_conv_names": "past_conv.%d",
    "present_conv_names": "present_conv.%d",
}
_HAVE = ("has", "have")
_STATES = ("conv_state", "recurrent_state")
_PARTS = ("key", "value", "conv", "recurrent", "key_scale", "value_scale")
_SETTINGS = frozenset(
    f"{side}_{part}names"
    for side in ("past", "present", "cross_past", "cross_present")
    for part in ("", *(f"{part}_" for part in _PARTS))
)
"""The settings that are templates; no other setting of the configuration is read."""


class NameTemplates(NamedTuple):
    """The names of one part of a cache, with ``%d`` for the layer.

    Attributes:
        setting: The key of the template in the configuration.
        past: The name of an input.
        present: The name of an output; empty for a cache that another model writes.
    """

    setting: str
    past: str
    present: str


def read_layer(template: str, name: str) -> str | None:
    """Return the text in a name where its template has the layer, `None` without a match."""
    start, _, end = template.partition(_NUMBER)
    is_longer = len(name) > len(start) + len(end)
    if not (template and is_longer and name.startswith(start) and name.endswith(end)):
        return None
    return name[len(start) : len(name) - len(end)]


def compose_name(template: str, layer: str) -> str:
    """Return the name of a layer's part."""
    return template.replace(_NUMBER, layer, 1)


def list_templates(settings: Mapping[str, str]) -> tuple[NameTemplates, ...]:
    """Return the templates of all parts; those of linear states follow from the template of keys.

    The settings, by their names in the configuration, replace the defaults.
    """
    merged = {**_DEFAULTS, **settings}
    if settings.get("past_names"):
        merged = {key: name for key, name in merged.items() if key not in _DEFAULTS}
    templates = [
        NameTemplates(key, past, merged.get(key.replace("past_", "present_", 1), ""))
        for key, past in merged.items()
        if "past_" in key and past.count(_NUMBER) == 1
    ]
    past, present = merged.get(_KEYS, ""), merged.get("present_key_names", "")
    if "." in past and "." in present:
        starts = past.rpartition(".")[0], present.rpartition(".")[0]
        derived = (
            NameTemplates(_KEYS, *(f"{start}.{state}" for start in starts)) for state in _STATES
        )
        templates += [each for each in derived if _NUMBER in each.past and _NUMBER in each.present]
    return tuple(templates)


def build_consumer(templates: tuple[NameTemplates, ...], path: Path | None) -> Consumer:
    """Return the consumer with its templates; without a path these are the defaults."""

    def derive_input_name(name: str) -> str:
        for each in templates:
            layer = read_layer(each.present, name)
            if layer is not None:
                return compose_name(each.past, layer)
        return name

    where = CONFIG_NAME if path is None else str(path)
    settings = ", ".join(dict.fromkeys(each.setting for each in templates))
    return CONSUMER._replace(
        selects_input=lambda name: any(read_layer(each.past, name) for each in templates),
        selects_output=lambda name: any(read_layer(each.present, name) for each in templates),
        input_name_of=derive_input_name,
        is_written_elsewhere=lambda name: any(
            read_layer(each.past, name) for each in templates if "cross_" in each.setting
        ),
        selected_inputs=_join(each.past for each in templates),
        selected_outputs=_join(each.present for each in templates if each.present),
        unselected_hint=f"write the names of the model into {quote_word(where)}: {settings}",
        checks=(
            partial(_check_config, path),
            partial(_check_composed_names, templates),
            _check_dtypes,
            partial(_check_ranks, templates),
        ),
    )


def configure(layout: Layout) -> Consumer:
    """Return the consumer with the templates of the configuration beside a model.

    Raises:
        KvRenameError: The configuration cannot be read, or does not have the right form.
    """
    files = [Path(model) for model in layout.models[:1] if not is_in_memory(model)]
    for folder in (folder for model in files for folder in (model.parent, model.parent.parent)):
        path = folder / CONFIG_NAME
        if read_status(path) is not None:
            settings = _read_settings(path)
            return build_consumer(list_templates(settings), path)
    return build_consumer(list_templates({}), None)


def _read_settings(path: Path) -> dict[str, str]:
    """Return the templates of decoder and encoder by their settings."""
    try:
        document = parse_json(read_text_file(path))
        if not isinstance(document, dict):
            raise UnreadableTextError("is not an object")
        model = ObjectReader(document).read_object("model")
        sides = [
            model.read_object("decoder").read_object("inputs", default={}),
            model.read_object("decoder").read_object("outputs", default={}),
            model.read_object("encoder", default={}).read_object("outputs", default={}),
        ]
        return {
            key: side.read_string(key) for side in sides for key in side.values if key in _SETTINGS
        }
    except UnreadableTextError as error:
        raise KvRenameError(str(error), path=str(path)) from None


def _join(names: Iterable[str]) -> str:
    """Return the first two names, those of keys and values, and the number of others."""
    unique = list(dict.fromkeys(names))
    others = len(unique) - 2
    return ", ".join(unique[:2]) + (f" or one of {others} other templates" if others > 0 else "")


def _check_config(path: Path | None, view: ConsumerView) -> Iterator[Finding]:
    """Yield KV625 where no configuration is beside the model."""
    if path is None:
        yield build_finding(
            "KV625",
            "",
            f"no {CONFIG_NAME} beside the model: {view.consumer.name} cannot load the folder "
            "without it; the default names are assumed",
            f"put the model beside its {CONFIG_NAME}",
        )


def _check_composed_names(
    templates: tuple[NameTemplates, ...], view: ConsumerView
) -> Iterator[Finding]:
    """Yield KV603 for layers that are not a number, KV609 for missing parts of a layer."""
    consumer = view.consumer
    names = dict.fromkeys(sorted(value.name for value in view.layout.inputs))
    for template in templates:
        layers = {name: read_layer(template.past, name) for name in names}
        yield from report_names(
            "KV603",
            [name for name, layer in layers.items() if layer and not _is_number(layer)],
            _HAVE,
            f"no number where {consumer.name} reads the layer ({template.past}); it cannot start",
            "set the place of the layer in your --rules FILE",
            "inputs",
        )
    for first, second in _list_siblings(templates):
        layers = {name: read_layer(first.past, name) for name in names}
        siblings = {
            name: compose_name(second.past, layer) for name, layer in layers.items() if layer
        }
        alone = [name for name, sibling in siblings.items() if sibling not in names]
        missing = siblings[alone[0]] if alone else ""
        yield from report_names(
            "KV609",
            alone,
            _HAVE,
            f"no counterpart: {consumer.name} needs {missing} in the same layer ({second.setting})",
            "export the model again: a layer needs both",
            "inputs",
        )
    sizes = {name: len(name.encode()) for name in names}
    long = [n for n, size in sizes.items() if size > _MAX_NAME_BYTES and consumer.selects_input(n)]
    if long:
        size = f"{format_count(sizes[long[0]], 'byte')}{'' if len(long) == 1 else ' and more'}"
        yield from report_names(
            "KV601",
            long,
            _HAVE,
            f"{size}; {consumer.name} composes names of at most {_MAX_NAME_BYTES} bytes",
            "use a shorter token",
        )


def _is_number(text: str) -> bool:
    """Return whether a text is a number as `compose_name` gets it, without leading zeros."""
    return text.isascii() and text.isdigit() and str(int(text[:20])) == text


def _list_siblings(
    templates: tuple[NameTemplates, ...],
) -> Iterator[tuple[NameTemplates, NameTemplates]]:
    """Yield keys and values, and the two states of a linear layer, each with the other."""
    by_setting = {each.setting: each for each in reversed(templates)}
    if _KEYS in by_setting and _VALUES in by_setting:
        yield by_setting[_KEYS], by_setting[_VALUES]
    states = [each for each in templates if each.past.endswith(_STATES)]
    if len(states) == len(_STATES):
        yield states[0], states[1]
        yield states[1], states[0]


def _check_dtypes(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for keys and values of another dtype than the first ones."""
    buffers = [b for b in view.buffers if b.part in ("key", "value") and not b.is_state]
    others = [buffer for buffer in buffers if buffer.dtype != buffers[0].dtype]
    if others:
        dtypes = format_list(sorted({buffer.dtype for buffer in others}))
        yield from report_names(
            "KV610",
            [buffer.names[0] for buffer in others],
            ("is", "are"),
            f"{dtypes}; {view.consumer.name} uses the dtype of the first buffer, "
            f"{buffers[0].dtype}, for all keys and values",
            "export all of them with the same precision",
            "buffers",
        )


def _check_ranks(templates: tuple[NameTemplates, ...], view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for keys and values that do not have four axes."""
    keys = [each.past for each in templates if each.setting in (_KEYS, _VALUES)][:2]
    names = [
        buffer.names[0]
        for buffer in view.buffers
        if buffer.shape and len(buffer.shape) != 4
        if any(read_layer(template, buffer.names[0]) for template in keys)
    ]
    return report_names(
        "KV610",
        names,
        ("does", "do"),
        f"not have four axes; {view.consumer.name} creates keys and values as [batch, heads, "
        "tokens, head size]",
        "export the model with a cache of this form",
        "buffers",
    )


CONSUMER = Consumer(
    name="onnxruntime-genai",
    token="",
    source="microsoft/onnxruntime-genai at a0c04eb",
    selects_input=lambda name: False,
    selects_output=lambda name: False,
    input_name_of=lambda name: name,
    needs_in_place=False,
    memory="none",
    configure=configure,
)
