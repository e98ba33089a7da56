"""vllm-qaic, which moves buffers through shared memory, by position.

After qualcomm/vllm-qaic, at 10d331f: ``model_loader/qaic_session_np.py``
(what is selected, in which order, and how it is sliced on the device),
``distributed/kv_transfer/kv_connector/v1/qaic_connector.py`` (what is moved),
``worker/model_runner.py`` (what is declared, and what LMCache refuses). Nothing of
this was seen on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.handoff import consumer_checks as consuming
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.handoff.consumer_checks import counted
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import shape_text

TOKEN = "vllmKvCache"
SUFFIX = "_RetainedState"
_CONTEXT = 2
_ITEMSIZES = {
    **dict.fromkeys(("INT8", "UINT8", "MXINT8"), 1),
    "FLOAT16": 2,
    **dict.fromkeys(("FLOAT", "INT32"), 4),
    "INT64": 8,
}


def takes(name: str) -> bool:
    """Inputs are selected by the token alone, wherever it stands."""
    return TOKEN in name


def gives(name: str) -> bool:
    """Outputs are selected by the token and their end, an internal one included."""
    return TOKEN in name and name.endswith("RetainedState")


def paired(name: str) -> str:
    """An output goes by its name without the suffix; an internal one keeps its own."""
    return name.replace(SUFFIX, "")


def key(name: str) -> tuple[int, str]:
    """By layer, which stands behind the first dot and before an underscore, then by name.

    Without a dot the layer is 0. Raises ``ValueError`` where no number stands there.
    """
    parts = name.split(".")
    return int(parts[1].split("_")[0]) if len(parts) > 1 else 0, name


def moved(shape: Shape, tokens: int | None) -> Shape:
    """One sequence; of a buffer with four axes or more the third only up to the prompt.

    That the third is the context is taken for granted, whatever it is.
    """
    if tokens is None or len(shape) <= _CONTEXT + 1:
        return (1, *shape[1:])
    length = shape[_CONTEXT]
    assert isinstance(length, int)
    return (1, shape[1], min(tokens, length), *shape[_CONTEXT + 1 :])


def appended(name: str) -> bool:
    """What is meant are the logits."""
    return name.startswith("log")


def logits(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV604. Outputs that start with ``log`` are put behind the KV buffers, and one is taken off.

    The list that is left may then be one longer than the buffers, and no shorter.
    """
    names = [value.name for value in layout.outputs if appended(value.name)]
    if not names:
        yield finding(
            "KV604",
            "",
            "no output starts with log: in its place the last KV buffer is taken off, and "
            'prefill stops with "buffer count mismatch"',
            "export with logits, without sampling on the device; a model for decode alone needs "
            f"none, and --prefix {TOKEN} renames it",
        )
    elif len(names) > 1:
        yield finding(
            "KV604",
            names[1],
            f"starts with log, as {names[0]} does: {len(names)} outputs stand behind the KV "
            f"buffers, one is taken off, and {_beyond(len(names) - 1)}",
            "rename or drop every such output but the logits",
        )


def _beyond(count: int) -> str:
    if count > 1:
        return 'prefill stops with "buffer count mismatch"'
    return "the list has one entry more than there are buffers, which passes only by chance"


def cuts(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV605. Where there are four axes or more, the third is cut to the prompt's length.

    The connector does so with hybrid buffers and others, unless it moves the whole of each.
    """
    if whole:
        return
    found: dict[tuple[object, ...], list[str]] = {}
    for buffer in consuming.selected(layout, TARGET):
        if _is_cut(buffer):
            assert buffer.input is not None
            assert buffer.shape is not None
            key = (buffer.kind, layout.sized(buffer.shape))
            found.setdefault(key, []).append(buffer.input)
    for (kind, shape), names in found.items():
        assert isinstance(shape, tuple)
        what = "is a state" if kind == "mamba" else "has its context on another axis"
        yield finding(
            "KV605",
            names[0],
            f"{what}, {shape_text(shape)}{counted(names)}: of a prompt of n tokens only the "
            f"first n along axis {_CONTEXT} are moved, and the rest is lost where n is less "
            f"than {shape[_CONTEXT]}",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides, and check with --full-transfer",
        )


def _is_cut(buffer: Buffer) -> bool:
    if buffer.shape is None or len(buffer.shape) <= _CONTEXT + 1:
        return False
    return buffer.kind == "mamba" or buffer.sequence not in (None, _CONTEXT)


def mixed(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV606. The LMCache connector takes one shape and dtype only, and asserts it at start."""
    values = [value for value in layout.inputs if takes(value.name)]
    count = len(consuming.families(layout, values))
    if count > 1:
        yield finding(
            "KV606",
            "",
            f"{count} different shapes or dtypes: hybrid, which QaicLMCacheConnectorV1 refuses "
            "at start",
            "hand over with QaicConnector",
        )


def declared(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV607. Every layer is declared as full attention, of one count and one size of heads."""
    buffers = [buffer for buffer in consuming.selected(layout, TARGET) if buffer.kind != "unknown"]
    others = [buffer for buffer in buffers if buffer.kind != "full_attention"]
    if others:
        kinds = listed(sorted({buffer.kind for buffer in others}))
        yield finding(
            "KV607",
            others[0].names[0],
            f"is {others[0].kind}, one of {len(others)} such buffers ({kinds}): every layer is "
            "declared as full_attention, and vLLM counts blocks and bytes accordingly",
            "do not size memory by vLLM's numbers for this model",
        )
    heads = {
        buffer.shape[1]: buffer
        for buffer in buffers
        if buffer.kind != "mamba" and buffer.shape is not None and len(buffer.shape) == 4
    }
    if len(heads) > 1:
        _, buffer = heads.popitem()
        counts = listed([str(count) for count in (*heads, (buffer.shape or ())[1])])
        yield finding(
            "KV607",
            buffer.names[0],
            f"has other heads than most: there are {counts}, and every layer is declared alike",
            "do not size memory by vLLM's numbers for this model",
        )


def strangers(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV608, with what the stranger does to the buffers of this very model."""
    found = consuming.strangers(layout, TARGET)
    if found:
        names = [value.name for value in found]
        yield finding(
            "KV608",
            names[0],
            f"carries {TOKEN}, and is no KV buffer{counted(names)}: {_harm(layout, found[0].name)}",
            f"take {TOKEN} out of that name where the model is exported",
        )


def _harm(layout: Layout, name: str) -> str:
    chosen = consuming.selection(layout, TARGET)
    inputs, outputs = len(chosen.inputs), len(chosen.outputs)
    if not chosen.ordered:
        return "no layer can be read in one of the names, and it cannot start"
    if outputs not in (inputs, inputs + 1):
        said = f"{inputs} inputs and {outputs} outputs"
        return f'with it {said} are selected, and prefill stops with "buffer count mismatch"'
    for number, value in enumerate(chosen.inputs):
        if value.name != chosen.partners[number]:
            other = chosen.outputs[number].name
            return f"it shifts the pairing by position, and {other} goes to {value.name}"
    if outputs > inputs:
        return "it comes last among the outputs, and is left out: only its name keeps it there"
    alone = [value for value in chosen.inputs if value.name in _buffers(layout)]
    if len(consuming.families(layout, chosen.inputs)) > 1 >= len(consuming.families(layout, alone)):
        return "its shape or dtype makes the buffers hybrid, which they are not"
    return "it is handed over with every prompt, as if it were a buffer"


def _buffers(layout: Layout) -> frozenset[str]:
    return frozenset(name for buffer in layout.buffers for name in buffer.names)


def sliced(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV610. Slices on the device have four axes; with hybrid buffers also three, for all others.

    What the device's runtime makes of another rank is not documented.
    """
    hybrid = consuming.hybrid(layout, TARGET)
    ranks = (3, 4) if hybrid else (4,)
    for buffer in consuming.selected(layout, TARGET):
        if buffer.shape and len(buffer.shape) not in ranks:
            assert buffer.input is not None
            yield finding(
                "KV610",
                buffer.input,
                f"has {_axes(len(buffer.shape))}, and is sliced as if it had {ranks[0]}",
                "no option of vllm-qaic mends this",
            )
            return
    if hybrid:
        yield from _overlaps(layout)


def _axes(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _overlaps(layout: Layout) -> Iterator[Finding]:
    """KV610. Each hybrid buffer has its slices under ``NAME.*``, which may take another's name."""
    outputs = (value for value in layout.outputs if gives(value.name))
    bases = sorted(((paired(value.name), value) for value in outputs), key=lambda pair: pair[0])
    for (base, value), (other, longer) in pairwise(bases):
        alike = {(len(v.shape or ()), TARGET.itemsize(v.dtype)) for v in (value, longer)}
        if other.startswith(base) and len(alike) > 1:
            yield finding(
                "KV610",
                longer.name,
                f"begins like {base}, whose slices go by {base}.*: two expressions fit it, of "
                "different slices",
                "mend the templates in your rules (--rules FILE), so that no name begins another",
            )


TARGET = Target(
    name="vllm-qaic",
    token=TOKEN,
    takes=takes,
    gives=gives,
    paired=paired,
    key=key,
    moved=moved,
    appended=appended,
    itemsize=_ITEMSIZES.get,
    checks=(logits, cuts, mixed, declared, strangers, sliced),
)
