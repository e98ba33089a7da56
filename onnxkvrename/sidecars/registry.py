"""Load the sidecar formats: the modules of `formats`, and the plug-ins that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError
from onnxkvrename.rules.plugins import Plugin, find_plugins
from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.format import FindNames, SidecarFormat, SidecarFormats
from onnxkvrename.sidecars.tree import Node, ScalarNode

PLUGIN_GROUP = "onnxkvrename.sidecars"
"""The group in which a plug-in's package names its `SidecarFormat` objects."""

T = TypeVar("T")


def load_sidecar_formats(*, plug_ins: bool = True) -> SidecarFormats:
    """Return all formats, sorted by priority and then by name.

    Args:
        plug_ins: Whether formats of plug-ins are among them; those are slow to look for.

    Raises:
        KvRenameError: A plug-in cannot be imported, offers something else than a
            `SidecarFormat`, or has the name of another plug-in.
    """
    built_in: dict[str, SidecarFormat] = {
        module.name: import_module(f"{formats.__name__}.{module.name}").FORMAT
        for module in iter_modules(formats.__path__)
    }
    if not plug_ins:
        return SidecarFormats(_sort_formats(built_in.items()))
    plugins = {
        name: _load_plugin(plugin) for name, plugin in find_plugins(PLUGIN_GROUP, built_in).items()
    }
    return SidecarFormats(_sort_formats(built_in.items()), _sort_formats(plugins.items()))


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
