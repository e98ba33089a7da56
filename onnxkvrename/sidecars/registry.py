"""Load the sidecar formats: the modules of `formats`, and the plug-ins that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import TypeVar

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError
from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.format import FindNames, SidecarFormat, SidecarFormats
from onnxkvrename.sidecars.tree import Node, ScalarNode

ENTRY_POINT_GROUP = "onnxkvrename.sidecars"
"""The group in which a plug-in's package names its `SidecarFormat` objects."""

T = TypeVar("T")


def load_sidecar_formats() -> SidecarFormats:
    """Return all formats, sorted by priority and then by name.

    Raises:
        KvRenameError: A plug-in cannot be imported, offers something else than a
            `SidecarFormat`, or has the name of another format.
    """
    built_in: dict[str, SidecarFormat] = {
        module.name: import_module(f"{formats.__name__}.{module.name}").FORMAT
        for module in iter_modules(formats.__path__)
    }
    plug_ins: dict[str, SidecarFormat] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        name = entry_point.name.replace("-", "_")
        if name in built_in:
            raise _build_plug_in_error(entry_point, f"{entry_point.name} is a built-in format")
        if name in plug_ins:
            raise _build_plug_in_error(entry_point, "another plug-in has the same name")
        plug_ins[name] = _load_plug_in(entry_point)
    return SidecarFormats(_sort_formats(built_in.items()), _sort_formats(plug_ins.items()))


def _sort_formats(named: Iterable[tuple[str, SidecarFormat]]) -> tuple[SidecarFormat, ...]:
    ordered = sorted(named, key=lambda item: (item[1].priority, item[0]))
    return tuple(sidecar_format for _, sidecar_format in ordered)


def _load_plug_in(entry_point: EntryPoint) -> SidecarFormat:
    try:
        loaded = entry_point.load()
    except Exception as error:  # a plug-in's module can raise anything
        raise _build_plug_in_error(entry_point, _describe_error(error)) from None
    if not isinstance(loaded, SidecarFormat):
        problem = f"{entry_point.value} is not a SidecarFormat"
        raise _build_plug_in_error(entry_point, problem)
    for field, expected, is_valid in (
        ("caption", "str", isinstance(loaded.caption, str)),
        ("priority", "int", isinstance(loaded.priority, int)),
        ("expected_form", "str", isinstance(loaded.expected_form, str)),
        ("markers", "bytes", all(isinstance(marker, bytes) for marker in loaded.markers)),
    ):
        if not is_valid:
            problem = f"its {field} has another type than {expected}"
            raise _build_plug_in_error(entry_point, problem)
    return _guard_functions(loaded, entry_point)


def _guard_functions(plug_in: SidecarFormat, entry_point: EntryPoint) -> SidecarFormat:
    """Return the same format, whose functions report their own errors as the plug-in's."""

    def guard(function: Callable[[], T]) -> T:
        try:
            return function()
        except (UnreadableTextError, KvRenameError):
            raise
        except Exception as error:  # a plug-in's functions can raise anything
            raise _build_plug_in_error(entry_point, _describe_error(error)) from None

    def parse(text: str) -> Node | None:
        return guard(lambda: plug_in.parse(text))

    def find_names_with(find_names: FindNames) -> FindNames:
        def find_all_names(tree: Node) -> Iterator[ScalarNode]:
            return iter(guard(lambda: tuple(find_names(tree))))

        return find_all_names

    find_names = None if plug_in.find_names is None else find_names_with(plug_in.find_names)
    return replace(plug_in, parse=parse, find_names=find_names)


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _build_plug_in_error(entry_point: EntryPoint, problem: str) -> KvRenameError:
    package = entry_point.dist.name if entry_point.dist is not None else "its package"
    return KvRenameError(
        f"the sidecar plug-in {entry_point.name} of {package} cannot be used: {problem}",
        hint=f"fix or uninstall {package}",
    )
