"""Consumers of KV buffers: how one selects them, orders them, and what it moves.

Each consumer is a module of its own in ``consumers/``, with a ``CONSUMER`` in it: a
few words, a few predicates, and what is to be found fault with.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.handoff import consumers
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Layout


class Consumer(NamedTuple):
    """A consumer.

    ``token`` is what it looks for in names. ``takes`` tells the inputs that it
    selects and ``gives`` the outputs; ``paired`` makes of an output's name the one that it
    goes by among inputs. ``key`` is what it sorts by, and raises ``ValueError``
    where the consumer itself would. ``moved`` is the shape that it hands over of a
    buffer, for a prompt of so many tokens, or ``None`` for the whole of it; the
    shape has numbers only. ``appended`` tells the outputs that prefill puts behind those
    of buffers; of all the last is taken off again. ``itemsize`` is its bytes for an
    element of a dtype, ``None`` where it knows none. ``checks`` say what would go wrong
    with a layout at this consumer alone; ``whole`` tells them that all of each buffer is
    moved.
    """

    name: str
    token: str
    selects_input: Callable[[str], bool]
    selects_output: Callable[[str], bool]
    input_name_of: Callable[[str], str]
    sort_key: Callable[[str], tuple[int, str]]
    transferred_shape: Callable[[Shape, int | None], Shape]
    is_appended_output: Callable[[str], bool]
    itemsize_of: Callable[[str], int | None]
    checks: tuple[Callable[[Layout, bool], Iterator[Finding]], ...] = ()


def load_consumer(name: str) -> Consumer:
    """The consumer of this name. Raises :class:`KvRenameError` if there is none."""
    known = list_consumers()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise KvRenameError(f"no target is called {name}", hint=hint)
    module = import_module(f"{consumers.__name__}.{name.replace('-', '_')}")
    target: Consumer = module.CONSUMER
    return target


def list_consumers() -> tuple[str, ...]:
    """The consumers that there are, each a module of the package."""
    modules = iter_modules(consumers.__path__)
    return tuple(sorted(module.name.replace("_", "-") for module in modules))
