"""Describe a consumer of KV buffers: its name, its token and its rules.

This module has the type only. `find_consumers` finds consumers by name; each built-in one
is a module of `consumers/` with a `CONSUMER` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Layout


class Consumer(NamedTuple):
    """A program that receives KV buffers, as data and pure functions.

    Each function repeats one step of the consumer's own code, on names and shapes. The
    checks and `compare` know a consumer only by these fields.

    Attributes:
        name: The name for `--target`; the same as its module's, with ``-`` for ``_``, or as its
            entry point's.
        token: The text that a rename puts into names so that the consumer selects them.
        selects_input: Returns whether the consumer takes a graph input of this name for a
            buffer.
        selects_output: Returns whether the consumer takes a graph output of this name for a
            retained buffer.
        input_name_of: Returns the input name that the consumer derives from an output name, e.g.
            without ``_RetainedState``. Returns the name unchanged where the consumer derives
            nothing from it (KV602).
        sort_key: Returns the layer and the name that the consumer sorts by, of an input name.
            Raises `ValueError` where the consumer itself cannot read a layer and stops
            (KV603).
        transferred_shape: Returns the shape that the consumer hands over of a buffer. The first
            argument is the buffer's full shape, batch first, numbers only; the second the
            prompt's length in tokens, or `None` for all of each buffer.
        itemsize_of: Returns the bytes of one element of an ONNX dtype (``FLOAT16``), or `None`
            for a dtype that the consumer cannot move (KV610).
        is_appended_output: Returns whether prefill adds a graph output of this name to its list
            of retained outputs; the consumer then drops the last entry of that list. `None`
            for a consumer that adds and drops nothing.
        needs_in_place: Whether a retained output must go back into its input as it is (KV120);
            `None` if that is not known, which makes it a warning.
        checks: Further checks of this consumer alone. Each takes a layout and whether all of each
            buffer is moved, and yields findings.
    """

    name: str
    token: str
    selects_input: Callable[[str], bool]
    selects_output: Callable[[str], bool]
    input_name_of: Callable[[str], str]
    sort_key: Callable[[str], tuple[int, str]]
    transferred_shape: Callable[[Shape, int | None], Shape]
    itemsize_of: Callable[[str], int | None]
    is_appended_output: Callable[[str], bool] | None = None
    needs_in_place: bool | None = None
    checks: tuple[Callable[[Layout, bool], Iterator[Finding]], ...] = ()
