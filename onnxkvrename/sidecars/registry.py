"""Load the sidecar formats: the modules of `formats`, and the plug-ins that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError
from onnxkvrename.rules.plugins import Plugin, find_plugins
from onnxkvrename.rules.profile import Rules, SidecarRule
from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.format import FindNames, SidecarFormat, SidecarFormats
from onnxkvrename.sidecars.json_tree import parse_json_tree
from onnxkvrename.sidecars.sections import find_texts
from onnxkvrename.sidecars.tree import Node, ScalarNode
from onnxkvrename.sidecars.yaml_tree import parse_yaml_tree

PLUGIN_GROUP = "onnxkvrename.sidecars"
"""The group in which a plug-in's package names its `SidecarFormat` objects."""

T = TypeVar("T")


def load_sidecar_formats(rules: Rules | None = None, *, plug_ins: bool = True) -> SidecarFormats:
    """Return all formats, sorted by priority and then by name.

    Args:
        rules: Rules that may name further files; they are tried after the built-in formats.
        plug_ins: Whether formats of plug-ins are among them; those are slow to look for.

    Raises:
        KvRenameError: A plug-in cannot be imported, offers something else than a
            `SidecarFormat`, or has the name of another plug-in.
    """
    built_in: dict[str, SidecarFormat] = {
        module.name: import_module(f"{formats.__name__}.{module.name}").FORMAT
        for module in iter_modules(formats.__path__)
    }
    ordered = _sort_formats(built_in.items())
    ordered += tuple(map(_build_rule_format, rules.sidecar_rules if rules is not None else ()))
    if not plug_ins:
        return SidecarFormats(ordered)
    plugins = {
        name: _load_plugin(plugin) for name, plugin in find_plugins(PLUGIN_GROUP, built_in).items()
    }
    return SidecarFormats(ordered, _sort_formats(plugins.items()))


def _build_rule_format(rule: SidecarRule) -> SidecarFormat:
    return SidecarFormat(
        caption="a file that the rules name",
        priority=0,
        expected_form="JSON or YAML with names of inputs and outputs, or templates with %d",
        parse=_parse_json_or_yaml,
        find_names=find_texts,
        file_name_pattern=rule.file_pattern,
        effect=f"{rule.reader} does not find these inputs and outputs",
        is_binding=True,
        reader=rule.reader,
    )


def _parse_json_or_yaml(text: str) -> Node | None:
    """Return the tree of a text; one that begins like JSON, but is YAML, is parsed as that."""
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        with suppress(UnreadableTextError):
            return parse_json_tree(text)
    return parse_yaml_tree(text)


def _sort_formats(named: Iterable[tuple[str, SidecarFormat]]) -> tuple[SidecarFormat, ...]:
    ordered = sorted(named, key=lambda item: (item[1].priority, item[0]))
    return tuple(sidecar_format for _, sidecar_format in ordered)


def _load_plugin(plugin: Plugin) -> SidecarFormat:
    loaded = plugin.load(SidecarFormat)
    for field, expected, is_valid in (
        ("caption", "str", isinstance(loaded.caption, str)),
        ("priority", "int", isinstance(loaded.priority, int)),
        ("expected_form", "str", isinstance(loaded.expected_form, str)),
        ("markers", "tuple of bytes", _is_tuple_of_bytes(loaded.markers)),
    ):
        if not is_valid:
            raise plugin.build_error(f"its {field} has another type than {expected}")
    return _guard_functions(loaded, plugin)


def _is_tuple_of_bytes(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, bytes) for item in value)


def _guard_functions(sidecar_format: SidecarFormat, plugin: Plugin) -> SidecarFormat:
    """Return the same format, whose functions report their own errors as the plug-in's."""

    def guard(function: Callable[[], T]) -> T:
        return plugin.call(function, (UnreadableTextError, KvRenameError))

    def parse(text: str) -> Node | None:
        return guard(lambda: sidecar_format.parse(text))

    def find_names_with(find_names: FindNames) -> FindNames:
        def find_all_names(tree: Node) -> Iterator[ScalarNode]:
            return iter(guard(lambda: tuple(find_names(tree))))

        return find_all_names

    find_names = (
        None if sidecar_format.find_names is None else find_names_with(sidecar_format.find_names)
    )
    return replace(sidecar_format, parse=parse, find_names=find_names)
