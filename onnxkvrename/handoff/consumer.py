"""Describe a consumer of KV buffers: its name, its token and its rules.

This module has the type only. `find_consumers` finds consumers by name; each built-in one
is a module of `consumers/` with a `CONSUMER` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.layout.layout import Shape

if TYPE_CHECKING:
    from onnxkvrename.handoff.selection import ConsumerView

MemoryKind = Literal["shared", "separate"]
"""Where a consumer puts the buffers that it hands from prefill to decode.

``shared``: one after the other into one piece of memory, so that the size of each buffer decides
where the next one starts; ``separate``: each into a separate array, by position.
"""


def _keep_whole_shape(shape: Shape, tokens: int | None) -> Shape:
    """Return the shape unchanged, for a consumer that moves all of each buffer or nothing."""
    return shape


class Consumer(NamedTuple):
    """A program that receives KV buffers and retains them in place, as data and pure functions.

    Each function repeats one step of the consumer's own code, on names and shapes. The
    checks and `compare` know a consumer only by these fields.

    Attributes:
        name: The name for `--target`; the same as its module's, with ``-`` for ``_``.
        token: The text that a rename puts into names so that the consumer selects them; empty
            for a consumer that selects names without one.
        selects_input: Returns something true if the consumer treats a graph input of this name as
            a buffer, such as a match of a regular expression.
        selects_output: The same for a graph output, as a retained buffer.
        input_name_of: Returns the input name that the consumer derives from an output name, e.g.
            without ``_RetainedState``. Returns the name unchanged if the consumer cannot derive
            one.
        sort_key: Returns the layer and the name that the consumer sorts by, of an input name.
            Raises `ValueError` where the consumer itself cannot read a layer and stops
            (KV603). Inputs and outputs are paired by their positions in this order.
        itemsize_of: Returns the bytes of one element of an ONNX dtype (``FLOAT16``), or `None`
            for a dtype that the consumer cannot move (KV610).
        transferred_shape: Returns the shape of the part of a buffer that is handed over. The first
            argument is the buffer's full shape, batch first, numbers only; the second the
            prompt's length in tokens, or `None` for all of each buffer. By default all.
        is_appended_output: Returns whether prefill adds a graph output of this name to its list
            of retained outputs; the consumer then drops the last entry of that list. `None`
            for a consumer that adds and drops nothing.
        trial_output: The output with which it tries the model at start-up, where wrong numbers of
            buffers then show; empty if it tries none, so that they show at the first prompt.
        checks: Further checks, only for this consumer. Each gets the layout as the consumer sees
            it, and yields findings.
        selected_inputs: The pattern of the names of selected inputs, for messages: ``past_key* or
            past_value*``. Only for a consumer without a token.
        selected_outputs: The same for outputs; empty if they look like inputs.
        output_suffix: The suffix that an output needs so that the consumer derives its input's
            name, for messages: ``_RetainedState``. Empty if it derives names in another way.
        unselected_hint: What to do about such a name, where no token makes the consumer select
            it.
        memory: Where the consumer puts the buffers that it hands over.
        setting: The setting of its program that selects this consumer, empty for the default:
            ``VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1``.
        alternative: The name of the same program with another setting, which `verify --target`
            mentions if that one can use a model that this one cannot; empty for none.
    """

    name: str
    token: str
    selects_input: Callable[[str], object]
    selects_output: Callable[[str], object]
    input_name_of: Callable[[str], str]
    sort_key: Callable[[str], tuple[int, str]]
    itemsize_of: Callable[[str], int | None]
    transferred_shape: Callable[[Shape, int | None], Shape] = _keep_whole_shape
    is_appended_output: Callable[[str], bool] | None = None
    trial_output: str = ""
    checks: tuple[Callable[[ConsumerView], Iterator[Finding]], ...] = ()
    selected_inputs: str = ""
    selected_outputs: str = ""
    output_suffix: str = ""
    unselected_hint: str = ""
    memory: MemoryKind = "shared"
    setting: str = ""
    alternative: str = ""

    @property
    def selecting_trait(self) -> str:
        """How it selects names: by ``the token vllmKvCache``, by ``the pattern past_key*``."""
        return f"the token {self.token}" if self.token else f"the pattern {self.selected_inputs}"
