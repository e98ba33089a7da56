"""Sidecar formats, and the detection of a file's format.

A format is one module of :mod:`onnxkvrename.sidecars.formats` with a ``FORMAT``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onnxkvrename.rules.patterns import Pattern
from onnxkvrename.sidecars.tree import Node, ScalarNode

FindNames = Callable[[Node], Iterator[ScalarNode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFormat:
    """A format of text files that repeat the names of a model.

    A file has this format if its name matches `file_name_pattern`; otherwise if its content
    has one of the `markers`.

    Attributes:
        caption: The format's name in messages, for example ``custom I/O``.
        priority: Formats with a lower number are tried first.
        expected_form: A short description of the expected content, for messages.
        parse: Returns the tree of a text, ``None`` for an empty document. It raises
            `UnreadableTextError` for text that it cannot parse.
        find_names: Yields the scalars of a tree that are names of values. It raises
            `UnreadableTextError` for a tree of another form. ``None`` for a format without
            such names: its files are recognised, and never change.
        file_name_pattern: Matches the complete names of files that have this format.
        markers: Bytes that only files of this format contain.
        search_pattern: Matches the complete names of files beside a model whose content
            is worth a look. By default `file_name_pattern`.
        only_graph_values: True if every name is an input or output of the graph.
        requires_pairs: True if both sides of each buffer must be named.
        effect: What happens with names from before a rename, for messages.
        is_binding: True for a configuration by which a runtime binds inputs and outputs: any
            text in it may be a name or, with ``%d``, a template (:mod:`.bindings`).
        is_package: True if the runtime loads the whole folder that the file is in.
        reader: What reads the file, for messages.
        default_names: Keys that may be left out, each with the object that has it, such as
            ``model.decoder.inputs``, and the template that counts then.
        reads_template: Whether the reader reads a template, by the keys that lead to it; those
            that it does not read are ignored. ``None`` if it may read all.
        max_name_bytes: The longest name that a template may make; ``None`` for any.
    """

    caption: str
    priority: int
    expected_form: str
    parse: Callable[[str], Node | None]
    find_names: FindNames | None
    file_name_pattern: re.Pattern[str] | Pattern | None = None
    markers: tuple[bytes, ...] = ()
    search_pattern: re.Pattern[str] | None = None
    only_graph_values: bool = False
    requires_pairs: bool = False
    effect: str = "a compile ignores these entries"
    is_binding: bool = False
    is_package: bool = False
    reader: str = "its reader"
    default_names: tuple[tuple[str, str, str], ...] = ()
    reads_template: Callable[[tuple[str, ...]], bool] | None = None
    max_name_bytes: int | None = None

    def matches_file_name(self, file_name: str) -> bool:
        """Return whether a file of this name has this format, for any content."""
        return _matches(self.file_name_pattern, file_name)

    def may_have_format(self, file_name: str) -> bool:
        """Return whether the content of a file beside a model is worth a look."""
        pattern = self.search_pattern or self.file_name_pattern
        return self.find_names is not None and _matches(pattern, file_name)

    def has_marker(self, data: bytes) -> bool:
        """Return whether the content of a file shows this format."""
        return any(marker in data for marker in self.markers)


@dataclass(frozen=True, slots=True)
class SidecarFormats:
    """All known formats.

    Attributes:
        formats: The formats, in the order in which they are tried.
    """

    formats: tuple[SidecarFormat, ...]

    def detect(self, file_name: str, data: bytes) -> SidecarFormat | None:
        """Return the format of a file.

        Args:
            file_name: The name of the file, without its directory.
            data: The content, or the beginning of it.

        Returns:
            The first format that the name shows, or else the first that the content shows;
            ``None`` for a file that is not a sidecar.
        """
        by_name = (each for each in self.formats if each.matches_file_name(file_name))
        by_content = (each for each in self.formats if each.has_marker(data))
        return next(by_name, None) or next(by_content, None)

    def may_be_sidecar(self, file_name: str) -> bool:
        """Return whether the content of a file beside a model is worth a look."""
        return any(each.may_have_format(file_name) for each in self.formats)

    def describe_formats(self) -> str:
        """Return the captions of all formats that have names, for a message."""
        return "known formats: " + ", ".join(f.caption for f in self.formats if f.find_names)


def _matches(pattern: re.Pattern[str] | Pattern | None, file_name: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(file_name) is not None
    return pattern is not None and pattern.matches(file_name)
