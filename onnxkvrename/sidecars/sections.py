"""Divide a configuration into sections: which of its names are of which model.

An object that names an ``.onnx`` file refers to that model: by a value
(``"filename": "decoder.onnx"``), by a list of values, or by the key above it. What is
below it refers to the same model, unless it names one itself. An object that names none, but has
some below it, refers to all of those, as the templates of a pipeline do.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.stale import MODEL_SUFFIX
from onnxkvrename.sidecars.templates import is_template
from onnxkvrename.sidecars.tree import MappingNode, Node, ScalarNode, SequenceNode

_MAX_FILES = 1 << 10
_ALL: frozenset[str] = frozenset()


class Section(NamedTuple):
    """The texts of a configuration that refer to the same models.

    Attributes:
        files: The locations of those models, without needless parts; empty where none are named.
        scalars: The texts, keys included, in the order of the file.
    """

    files: frozenset[str]
    scalars: tuple[ScalarNode, ...]


def find_texts(tree: Node) -> Iterator[ScalarNode]:
    """Yield every text of a tree, keys included: any may be a name."""
    if isinstance(tree, ScalarNode):
        yield tree
    for child in _list_children(tree):
        yield from find_texts(child)


def drop_unread_templates(
    node: Node, reads: Callable[[tuple[str, ...]], bool], keys: tuple[str, ...] = ()
) -> Node:
    """Return a tree without the templates that the reader of a configuration does not read.

    Args:
        node: The tree, or a part of it.
        reads: Whether it reads a template, by the keys that lead to it.
        keys: The keys that lead to the part.
    """
    if isinstance(node, SequenceNode):
        return SequenceNode(
            tuple(
                drop_unread_templates(item, reads, keys)
                for item in node.items
                if not _is_unread(item, reads, keys)
            )
        )
    if not isinstance(node, MappingNode):
        return node
    kept: list[tuple[Node, Node]] = []
    for key, value in node.entries:
        below = (*keys, key.value if isinstance(key, ScalarNode) else "")
        if not _is_unread(value, reads, below):
            kept.append((key, drop_unread_templates(value, reads, below)))
    return MappingNode(tuple(kept))


def _is_unread(node: Node, reads: Callable[[tuple[str, ...]], bool], keys: tuple[str, ...]) -> bool:
    return isinstance(node, ScalarNode) and is_template(node.value) and not reads(keys)


def list_sections(tree: Node) -> tuple[Section, ...]:
    """Return the sections of a tree.

    Raises:
        UnreadableTextError: It names more than `_MAX_FILES` models.
    """
    scalars: dict[frozenset[str], list[ScalarNode]] = {}
    _add_sections(tree, _ALL, _find_files_below(tree, {}), scalars)
    return tuple(Section(files, tuple(found)) for files, found in scalars.items())


class _Files(NamedTuple):
    """The models that a node names itself, and those that it and what is below it name."""

    own: frozenset[str]
    all: frozenset[str]


_FilesByNode = dict[int, _Files]


def _find_files_below(node: Node, found: _FilesByNode) -> _FilesByNode:
    """Return the models that each list and mapping of a tree names, by the id of the node."""
    own: set[str] = set()
    every: set[str] = set()
    for child in _list_children(node):
        if isinstance(child, (MappingNode, SequenceNode)):
            _find_files_below(child, found)
            every |= found[id(child)].all
    if isinstance(node, MappingNode):
        for key, value in node.entries:
            every.update(_read_location(key))
            for item in value.items if isinstance(value, SequenceNode) else (value,):
                own.update(_read_location(item))
    every |= own
    if len(every) > _MAX_FILES:
        raise UnreadableTextError(f"names more than {_MAX_FILES:,} models")
    found[id(node)] = _Files(frozenset(own), frozenset(every))
    return found


def _add_sections(
    node: Node,
    files: frozenset[str],
    found: _FilesByNode,
    scalars: dict[frozenset[str], list[ScalarNode]],
) -> None:
    if isinstance(node, ScalarNode):
        scalars.setdefault(files, []).append(node)
        return
    if isinstance(node, MappingNode):
        own, below = found[id(node)]
        files = own or below or files
        for key, value in node.entries:
            _add_sections(key, files, found, scalars)
            _add_sections(value, _read_location(key) or files, found, scalars)
        return
    for child in _list_children(node):
        _add_sections(child, files, found, scalars)


def _read_location(node: Node) -> frozenset[str]:
    """Return the location of the model that a text names, if it does."""
    if not isinstance(node, ScalarNode) or not node.value.endswith(MODEL_SUFFIX):
        return _ALL
    return frozenset({posixpath.normpath(node.value)})


def _list_children(node: Node) -> Iterator[Node]:
    if isinstance(node, SequenceNode):
        yield from node.items
    elif isinstance(node, MappingNode):
        for key, value in node.entries:
            yield key
            yield value
