"""vllm-qaic: what it selects and moves, and what goes wrong with it, finding by finding."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.consumers.vllm_qaic import (
    CONSUMER,
    compute_transferred_shape,
    derive_input_name,
    parse_sort_key,
    selects_input,
    selects_output,
)
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.layout.layout import (
    KvBuffer,
    Layout,
    apply_sizes,
    build_layout,
)
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.kinds import BufferKind
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import build_minimal_plan

ATTENTION: tuple[Dim, ...] = ("batch_size", 2, "ctx_len", 4)
WINDOW: tuple[Dim, ...] = ("batch_size", 2, "sliding_window", 4)
CONV: tuple[Dim, ...] = ("batch_size", 8, 3)
RECURRENT: tuple[Dim, ...] = ("batch_size", 2, 16, 4)
END = "_vllmKvCache"
INPLACE = BufferUpdate("inplace")
OUT = "_RetainedState"


def model(
    shapes: dict[str, tuple[Dim, ...] | None],
    *,
    end: str = END,
    out: str = OUT,
    dtype: str = "FLOAT16",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = ("logits",),
) -> Layout:
    """A model with these buffers, by their plain names, and with other inputs and outputs."""
    given = [Value(f"{name}{end}", dtype, shape) for name, shape in shapes.items()]
    made = [Value(f"{name}{end}{out}", dtype, shape) for name, shape in shapes.items()]
    others = [Value(name, "FLOAT", ("batch_size", 1, 8)) for name in ("input_ids", *inputs)]
    ends = [Value(name, "FLOAT", ("batch_size", 1, 8)) for name in outputs]
    return read((*others, *given), (*ends, *made))


def read(inputs: Sequence[Value], outputs: Sequence[Value]) -> Layout:
    """A model with these inputs and outputs, as the built-in rules read them."""
    signature = Signature(tuple(inputs), tuple(outputs))
    plan = build_minimal_plan(signature, load_rules())
    return write_in_place(build_layout([KvModel("m.onnx", signature, plan)]))


def write_in_place(layout: Layout) -> Layout:
    """The same layout, with buffers that are known to be written in place."""
    return layout._replace(buffers=tuple(b._replace(update=INPLACE) for b in layout.buffers))


def decoder(
    count: int = 2, shape: tuple[Dim, ...] | None = ATTENTION
) -> dict[str, tuple[Dim, ...] | None]:
    """The keys and values of so many layers."""
    return {f"past_{part}.{n}": shape for n in range(count) for part in ("key", "value")}


def called(
    *names: tuple[str | None, str | None, int], kind: BufferKind = "full_attention"
) -> Layout:
    """A model of buffers with these names and layers, whatever rules made them."""
    buffers = tuple(
        KvBuffer(
            layer=layer,
            part=f"part{at}",
            kind=kind,
            buffer="past_key",
            scope="",
            input=into,
            output=out,
            dtype="FLOAT16",
            shape=ATTENTION,
            sequence_axis=2,
            window=None,
            model="m.onnx",
            update=INPLACE,
        )
        for at, (into, out, layer) in enumerate(names)
    )
    inputs = [Value(b.input, "FLOAT16", ATTENTION) for b in buffers if b.input is not None]
    outputs = [Value(b.output, "FLOAT16", ATTENTION) for b in buffers if b.output is not None]
    logits = Value("logits", "FLOAT", ("batch_size", 1, 8))
    return Layout(("m.onnx",), tuple(inputs), (*outputs, logits), buffers, ())


def found(of: Layout, *, whole: bool = False) -> list[Finding]:
    """Return the findings of the consumer check."""
    return list(check_consumer(of, CONSUMER, full_transfer=whole))


def codes(of: Layout, *, whole: bool = False) -> list[str]:
    """Return the codes of these findings."""
    return [one.code for one in found(of, whole=whole)]


def only(of: Layout, code: str, *, whole: bool = False) -> Finding:
    """The one finding with this code."""
    (one,) = [one for one in found(of, whole=whole) if one.code == code]
    return one


def test_a_renamed_decoder_is_taken() -> None:
    assert codes(model(decoder(12))) == []


def test_a_model_without_buffers_is_nothing_to_it() -> None:
    assert codes(model({})) == []


# What it does, told again from the facts, in other words than the module's


def consumer(inputs: Sequence[str], outputs: Sequence[str]) -> list[tuple[str, str]]:
    """The slots that the consumer makes of names: inputs and outputs by position."""

    def place(name: str) -> tuple[int, str]:
        pieces = name.split(".")
        return (int(pieces[1].split("_")[0]), name) if len(pieces) > 1 else (0, name)

    into = [name for name in inputs if "vllmKvCache" in name]
    out = [name for name in outputs if "vllmKvCache" in name and name.endswith("RetainedState")]
    out.sort(key=lambda name: place(name.replace("_RetainedState", "")))
    return list(zip(sorted(into, key=place), out, strict=False))


PARTS = st.sampled_from(["past_key", "past_value", "compressed_kv", "k_pe", "conv_state"])
TAILS = st.sampled_from(["", "", "2", ".x", "_Z"])
BUFFERS = st.lists(
    st.tuples(PARTS, st.integers(0, 120), TAILS), min_size=1, max_size=24, unique=True
)


@given(BUFFERS, st.randoms(use_true_random=False))
def test_slots_are_those_of_the_consumer_whatever_the_order_of_the_graph(
    buffers: list[tuple[str, int, str]], chance: random.Random
) -> None:
    starts = [(f"{part}.{n}{END}{tail}", n) for part, n, tail in buffers]
    names = [(start, start + OUT, n) for start, n in starts]
    built = called(*names)
    inputs, outputs = list(built.inputs), list(built.outputs)
    chance.shuffle(inputs)
    chance.shuffle(outputs)
    built = built._replace(inputs=tuple(inputs), outputs=tuple(outputs))
    slots = select_values(built, CONSUMER).value_pairs
    assert [(into.name, out.name) for into, out in slots if into and out] == consumer(
        [value.name for value in inputs], [value.name for value in outputs]
    )
    assert [
        layer for layer, _ in map(parse_sort_key, (into.name for into, _ in slots if into))
    ] == sorted(n for _, n, _ in buffers)
    assert codes(built) == []


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("past_key.0_vllmKvCache", (True, False)),
        ("past_key.0_vllmKvCache_RetainedState", (True, True)),
        ("past_key.0_vllmKvCache_InternalRetainedState", (True, True)),
        ("past_key.0_vllmkvcache_RetainedState", (False, False)),
        ("past_key.0", (False, False)),
    ],
)
def test_names_are_selected_by_token_and_outputs_by_their_end(
    name: str, selected: tuple[bool, bool]
) -> None:
    assert (selects_input(name), selects_output(name)) == selected


def test_an_output_goes_by_its_name_without_the_suffix() -> None:
    assert derive_input_name("past_key.0_vllmKvCache_RetainedState") == "past_key.0_vllmKvCache"
    internal = "past_key.0_vllmKvCache_InternalRetainedState"
    assert derive_input_name(internal) == internal


def test_the_third_of_four_axes_is_cut_to_the_prompt() -> None:
    assert compute_transferred_shape((8, 2, 128, 4), 5) == (1, 2, 5, 4)
    assert compute_transferred_shape((8, 2, 128, 4), 129) == (1, 2, 128, 4)
    assert compute_transferred_shape((8, 2, 128, 4), None) == (1, 2, 128, 4)
    assert compute_transferred_shape((8, 64, 3), 1) == (1, 64, 3)
    assert math.prod(compute_transferred_shape((8, 2, 128, 4), 1)) == 8


# KV601


def test_names_without_the_token_are_told_once() -> None:
    one = only(model(decoder(), end=""), "KV601")
    assert one.name == "past_key.0"
    assert "8 names" in one.message
    assert "past_key.0)" in one.message
    assert "vllmKvCache" in one.message
    assert one.subject == ""
    assert one.hint == "`onnxkvrename m.onnx --target vllm-qaic`"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("_vllmkvcache", "differ from the token vllmKvCache"),
        ("_VLLM", "carry a different token"),
    ],
)
def test_another_token_has_to_give_way(end: str, said: str) -> None:
    one = only(model(decoder(), end=end), "KV601")
    assert f"8 names (first: past_key.0{end}) {said}" in one.message
    assert one.hint.endswith(" --replace`")


def test_names_with_a_different_token_and_without_one_need_one_command() -> None:
    shape = ("batch_size", 2, "ctx_len", 4)
    inputs = [Value("past_key.0_VLLM", "FLOAT", shape), Value("past_value.0", "FLOAT", shape)]
    outputs = [Value(f"past_{part}.0{OUT}", "FLOAT", shape) for part in ("key", "value")]
    finding = only(read(inputs, outputs), "KV601")
    assert finding.message.startswith("4 names (first: past_key.0_VLLM) do not carry the token")
    assert "(2 carry a different one)" in finding.message
    assert "--replace" in finding.hint


@pytest.mark.parametrize("side", ["input", "output"])
def test_the_token_on_one_side_only_is_told_with_the_other_one(side: str) -> None:
    into, out = "past_key.0", f"past_key.0{OUT}"
    if side == "input":
        out = f"past_key.0{END}{OUT}"
    else:
        into += END
    one = only(called((into, out, 0)), "KV601")
    assert one.name == (into if side == "input" else out)
    other = "output" if side == "input" else "input"
    assert f"{side}, so its {other}" in one.message
    assert one.subject == one.name
    assert "KV609" not in codes(called((into, out, 0)))


def test_a_token_at_an_output_that_ends_otherwise_is_not_selected() -> None:
    one = only(called((f"past_key.0{END}", f"past_key.0{END}_Kept", 0)), "KV601")
    suffix = "has the token but not the suffix that vllm-qaic requires (_RetainedState);"
    assert one.message.startswith(suffix)
    assert "past_key.3_RetainedState" in one.hint


def test_the_token_may_stand_anywhere_in_a_name() -> None:
    assert codes(called(("a.0_xvllmKvCachex", f"a.0_xvllmKvCachex{OUT}", 0))) == []


# KV602


def test_an_internal_suffix_pairs_by_position() -> None:
    layout = model(decoder(), out="_InternalRetainedState")
    assert codes(layout) == []
    assert select_values(layout, CONSUMER).is_paired


def test_an_internal_suffix_gets_no_slices_in_a_hybrid_model() -> None:
    shapes = {**decoder(1), "past_key.1": WINDOW, "past_value.1": WINDOW}
    one = only(model(shapes, out="_InternalRetainedState"), "KV602")
    assert one.name == f"past_key.0{END}_InternalRetainedState"
    assert one.message.startswith("4 outputs")
    assert one.hint == "`onnxkvrename m.onnx --target vllm-qaic --normalize`"
    assert "KV602" not in codes(model(shapes))


def test_an_internal_suffix_without_the_token_is_only_not_selected() -> None:
    assert set(codes(model(decoder(), end="", out="_InternalRetainedState"))) == {"KV601"}


# KV603


@pytest.mark.parametrize(
    "name", ["vllmKvCache.past_key.3", "past_key.vllmKvCache.3", "a.x3_vllmKvCache"]
)
def test_a_name_in_which_no_layer_can_be_read_stops_it(name: str) -> None:
    one = only(called((name, name + OUT, 3)), "KV603")
    assert one.name == name
    assert f"2 names (first: {name})" in one.message
    assert "cannot start" in one.message


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.7_a/past_key.3_vllmKvCache", 7), ("past_key_3_vllmKvCache", 0)],
)
def test_a_name_in_which_another_layer_is_read_is_found(name: str, layer: int) -> None:
    one = only(called((name, name + OUT, 3)), "KV603")
    assert f"of layer 3, read as {layer};" in one.message


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("past_key.3_vllmKvCache", 3),
        ("decoder/past_key.3_vllmKvCache", 3),
        ("past_key.3_vllmKvCache.x", 3),
        ("past_key_vllmKvCache", 0),
    ],
)
def test_a_layer_behind_the_first_dot_is_read(name: str, layer: int) -> None:
    assert codes(called((name, name + OUT, layer))) == []


# KV604


def test_without_logits_the_last_buffer_is_dropped() -> None:
    one = only(model(decoder(), outputs=["next_tokens"]), "KV604")
    assert one.message == (
        "the model has no logits output; vllm-qaic then drops the last KV buffer instead, and "
        "prefill fails at the first prompt"
    )


def test_logits_at_another_place_of_a_name_are_not_found() -> None:
    one = only(model(decoder(), outputs=["next_tokens", "layer_0/logits"]), "KV604")
    assert one.name == "layer_0/logits"
    assert "no logits" not in one.message


def test_a_model_for_decode_is_renamed_without_the_check() -> None:
    layout = model(decoder(), outputs=["next_tokens"])
    assert "`--prefix vllmKvCache`, without --target" in only(layout, "KV604").hint


def test_more_outputs_that_start_with_log_are_too_many() -> None:
    one = only(model(decoder(), outputs=["logits", "log_a", "log_b"]), "KV604")
    assert one.name == "log_a"
    assert "at start-up" in one.message


def prefill_starts(of: Layout) -> bool:
    """Whether the consumer's own assertion on its buffers holds, told again in its words."""
    buffers = [value.name for value in of.inputs if "vllmKvCache" in value.name]
    outputs = [value.name for value in of.outputs]
    buff_map = [n for n in outputs if "vllmKvCache" in n and n.endswith("RetainedState")]
    buff_map += [name for name in outputs if name.startswith("log")]
    buff_map = buff_map[:-1]
    return len(buffers) == len(buff_map) or len(buffers) + 1 == len(buff_map)


@pytest.mark.parametrize("logs", range(5))
@pytest.mark.parametrize("strangers", range(3))
@pytest.mark.parametrize("with_inputs", [False, True])
def test_outputs_are_refused_exactly_where_prefill_itself_stops(
    logs: int, strangers: int, with_inputs: bool
) -> None:
    """The strangers come after all buffers, so that only the numbers count."""
    names = [f"z.9_{number}_vllmKvCache" for number in range(strangers)]
    layout = model(
        decoder(),
        inputs=names if with_inputs else [],
        outputs=[*(f"log{number}" for number in range(logs)), *(name + OUT for name in names)],
    )
    errors = {one.code for one in found(layout) if one.severity == "error"}
    assert bool(errors & {"KV604", "KV608"}) is not prefill_starts(layout)


def test_one_output_that_starts_with_log_is_right() -> None:
    assert codes(model(decoder(), outputs=["log", "x_logits", "Logits"])) == []


# KV605

STATES: dict[str, tuple[Dim, ...]] = {"conv_state.1": CONV, "recurrent_state.1": RECURRENT}


def test_a_state_of_four_axes_is_cut_as_if_it_were_a_context() -> None:
    one = only(model({**decoder(1), **STATES}), "KV605")
    assert one.name == f"recurrent_state.1{END}"
    assert "not the context (a state): a prompt shorter than 16 tokens" in one.message
    assert "VLLM_QAIC_USE_FULL_KV_TRANSFER=1" in one.hint


def test_it_is_cut_even_where_all_buffers_are_alike() -> None:
    alike = called(("a.0_vllmKvCache", f"a.0_vllmKvCache{OUT}", 0), kind="mamba")
    alike = alike._replace(buffers=tuple(b._replace(sequence_axis=None) for b in alike.buffers))
    assert "KV606" not in codes(alike)
    assert codes(alike).count("KV605") == 1


@pytest.mark.parametrize(("axis", "cut"), [(1, True), (2, False), (3, True), (None, False)])
def test_a_context_on_another_axis_is_cut_wrongly(axis: int | None, cut: bool) -> None:
    shape: list[Dim] = [1, 2, 8, 4]  # nobody can tell what this is
    if axis is not None:
        shape[axis] = "ctx_len"
    assert ("KV605" in codes(model(decoder(1, tuple(shape))))) is cut


def test_nothing_is_cut_where_all_of_each_buffer_is_moved() -> None:
    assert "KV605" not in codes(model({**decoder(1), **STATES}), whole=True)


def test_buffers_that_grow_are_refused_whatever_is_moved_of_each() -> None:
    growing = write_in_place(model({**decoder(1), **STATES}))
    longer = growing.buffers[0]._replace(update=BufferUpdate("append", 2))
    growing = growing._replace(buffers=(longer, *growing.buffers[1:]))
    assert "KV120" in codes(growing)
    assert "KV120" in codes(growing, whole=True)


def test_three_axes_are_never_cut() -> None:
    conv = dict.fromkeys(("conv_state.1", "recurrent_state.1"), CONV)
    assert "KV605" not in codes(model({**decoder(1), **conv}))


def test_of_an_axis_of_one_nothing_is_cut() -> None:
    states = {"conv_state.1": CONV, "recurrent_state.1": ("batch_size", 2, 1, 16)}
    assert "KV605" not in codes(model({**decoder(1), **states}))


def test_keys_and_values_of_an_encoder_are_cut_whatever_their_axis_is_called() -> None:
    """Four of 1500 positions would be handed over for a prompt of four tokens."""
    for length in ("encoder_ctx_len", 1500):
        shape: tuple[Dim, ...] = ("batch_size", 2, length, 4)
        layout = model(decoder(1, shape))
        buffers = tuple(
            one._replace(kind="cross_attention", kind_guessed=False) for one in layout.buffers
        )
        one = only(layout._replace(buffers=buffers), "KV605")
        assert "not the context (the encoder's output)" in one.message
        assert f"a prompt shorter than {length} tokens loses data" in one.message
        assert "KV605" not in codes(layout._replace(buffers=buffers), whole=True)


def test_what_is_written_once_does_not_follow_the_prompt() -> None:
    """Keys and values of an image have four axes of fixed size, and prefill writes them whole."""
    image: tuple[Dim, ...] = ("batch_size", 2, 6404, 4)
    layout = model({**decoder(1), "past_key.1": image, "past_value.1": image})
    open_kinds = [b._replace(kind="unknown") if b.shape == image else b for b in layout.buffers]
    written_once = [
        b._replace(update=BufferUpdate("once")) if b.shape == image else b for b in open_kinds
    ]
    assert "KV605" not in codes(layout._replace(buffers=tuple(open_kinds)))
    one = only(layout._replace(buffers=tuple(written_once)), "KV605")
    assert one.name == f"past_key.1{END}"
    assert "written once" in one.message


# KV120


def test_a_buffer_that_grows_cannot_be_retained() -> None:
    layout = model(decoder())
    grown = tuple(b._replace(update=BufferUpdate("append", 2)) for b in layout.buffers)
    one = only(layout._replace(buffers=grown), "KV120")
    assert (one.severity, one.name) == ("error", layout.buffers[0].output)
    assert "in place" in one.message
    mixed = layout._replace(buffers=(grown[0], *layout.buffers[1:]))
    assert codes(mixed).count("KV120") == 1


# KV606 and KV607


def test_hybrid_buffers_are_refused_by_its_lmcache_connector() -> None:
    one = only(model({**decoder(1), "past_key.1": WINDOW, "past_value.1": WINDOW}), "KV606")
    assert one.severity == "warning"
    assert "QaicLMCacheConnectorV1" in one.message


def test_a_window_of_the_size_of_the_context_is_no_hybrid() -> None:
    both = model({**decoder(1), "past_key.1": WINDOW, "past_value.1": WINDOW})
    assert "KV606" in codes(apply_sizes(both, {"ctx_len": 64, "sliding_window": 32}))
    assert "KV606" not in codes(apply_sizes(both, {"ctx_len": 64, "sliding_window": 64}))


def set_dtype(layout: Layout, names: Collection[str], dtype: str) -> Layout:
    """Return a layout in which some values, and the buffers that they are, have a dtype."""

    def change(value: Value) -> Value:
        return value._replace(dtype=dtype) if value.name in names else value

    buffers = (
        buffer._replace(dtype=dtype) if buffer.input in names else buffer
        for buffer in layout.buffers
    )
    return layout._replace(
        inputs=tuple(map(change, layout.inputs)),
        outputs=tuple(map(change, layout.outputs)),
        buffers=tuple(buffers),
    )


def test_another_dtype_makes_a_hybrid() -> None:
    both = model(decoder())
    names = (f"past_key.0{END}", f"past_key.0{END}{OUT}")
    assert "KV606" in codes(set_dtype(both, names, "INT8"))
    every = [value.name for value in (*both.inputs, *both.outputs) if END in value.name]
    assert codes(set_dtype(both, every, "INT8")) == []


def test_what_is_not_selected_makes_no_hybrid() -> None:
    assert "KV606" not in codes(model(decoder(), inputs=["past_conv.1"]))


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ({"past_key.1": WINDOW, "past_value.1": WINDOW}, "sliding_window"),
        ({"compressed_kv.1": ("batch_size", 1, "ctx_len", 4)}, "mla_attention"),
        (STATES, "mamba"),
    ],
)
def test_other_kinds_are_declared_as_full_attention(
    shapes: dict[str, tuple[Dim, ...]], kind: str
) -> None:
    one = next(f for f in found(model({**decoder(1), **shapes})) if f.code == "KV607")
    assert (one.code, one.severity) == ("KV607", "warning")
    verb = "is" if len(shapes) == 1 else "are"
    assert f"{verb} {kind}" in one.message


def test_layers_with_other_heads_are_declared_alike() -> None:
    more: tuple[Dim, ...] = ("batch_size", 8, "ctx_len", 4)
    one = only(model({**decoder(1), "past_key.1": more, "past_value.1": more}), "KV607")
    assert "KV heads" in one.message


def test_one_kind_and_one_count_are_declared_rightly() -> None:
    longer: tuple[Dim, ...] = ("batch_size", 2, "ctx_len", 8)
    assert "KV607" not in codes(model({**decoder(1), "past_key.1": longer, "past_value.1": longer}))
    assert "KV607" not in codes(model(decoder(1, (1, 2, 8, 4))))  # nobody can tell what this is


# KV608


def harm(inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> str:
    """Return the finding on values that are not KV buffers."""
    return only(model(decoder(), inputs=inputs, outputs=("logits", *outputs)), "KV608").message


def test_a_stranger_with_both_sides_makes_the_buffers_hybrid() -> None:
    name = "vision_embeds_vllmKvCache"
    assert "hybrid" in harm([name], [name + OUT])


def test_a_stranger_that_does_no_harm_to_the_buffers_is_a_warning() -> None:
    name = "vision_embeds_vllmKvCache"
    harmless = model(decoder(), inputs=[name], outputs=["logits", name + OUT])
    assert only(harmless, "KV608").severity == "warning"
    shifting = model(decoder(), outputs=["logits", f"a_vllmKvCache{OUT}"])
    assert only(shifting, "KV608").severity == "error"


def test_a_stranger_among_hybrids_is_handed_over() -> None:
    name = "vision_embeds_vllmKvCache"
    hybrid = {**decoder(1), "past_key.1": WINDOW, "past_value.1": WINDOW}
    one = only(model(hybrid, inputs=[name], outputs=["logits", name + OUT]), "KV608")
    assert "hands over more" in one.message


def test_a_stranger_among_the_outputs_shifts_the_pairing() -> None:
    message = harm(outputs=[f"a_vllmKvCache{OUT}"])
    assert f"a_vllmKvCache{OUT} to past_key.0{END}" in (message)


def test_a_stranger_behind_all_buffers_shifts_nothing() -> None:
    assert "left out" in harm(outputs=[f"z.9_vllmKvCache{OUT}"])


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["a_vllmKvCache"], []),
        ([], [f"a_vllmKvCache{OUT}", f"b_vllmKvCache{OUT}"]),
    ],
)
def test_other_numbers_of_strangers_stop_prefill(inputs: list[str], outputs: list[str]) -> None:
    assert "prefill fails at start-up" in harm(inputs, outputs)


def test_a_stranger_without_a_layer_stops_it_at_start() -> None:
    assert "cannot start" in harm(["a.b_vllmKvCache"], [f"a.b_vllmKvCache{OUT}"])


def test_vision_without_the_token_is_let_alone() -> None:
    assert (
        codes(
            model(
                decoder(),
                inputs=["vision_embeds"],
                outputs=["logits", "vision_embeds_RetainedState"],
            )
        )
        == []
    )


def test_the_token_on_an_output_that_is_not_retained_does_no_harm() -> None:
    assert codes(model(decoder(), outputs=["logits", "norms_vllmKvCache"])) == []


# KV609


def test_outputs_that_sort_otherwise_than_their_inputs_are_found() -> None:
    crossed = called(
        ("a.0_vllmKvCache", f"y.0_vllmKvCache{OUT}", 0),
        ("b.0_vllmKvCache", f"x.0_vllmKvCache{OUT}", 0),
    )
    one = only(crossed, "KV609")
    assert one.name == f"x.0_vllmKvCache{OUT}"
    assert "paired with a.0_vllmKvCache" in one.message


def test_other_names_that_sort_alike_pair_all_the_same() -> None:
    alike = called(
        ("a.0_vllmKvCache", f"x.0_vllmKvCache{OUT}", 0),
        ("b.0_vllmKvCache", f"y.0_vllmKvCache{OUT}", 0),
    )
    assert codes(alike) == []


def test_a_buffer_with_one_side_leaves_the_numbers_unequal() -> None:
    alone = called(("a.0_vllmKvCache", f"a.0_vllmKvCache{OUT}", 0), ("b.0_vllmKvCache", None, 0))
    one = only(alone, "KV609")
    assert one.name == "b.0_vllmKvCache"
    assert "2 inputs and 1 output" in one.message


# KV610


@pytest.mark.parametrize("dtype", ["BFLOAT16", "FLOAT8E4M3FN", "INT16", "sequence(FLOAT)"])
def test_a_dtype_that_it_does_not_know_cannot_be_moved(dtype: str) -> None:
    one = only(model(decoder(), dtype=dtype), "KV610")
    assert f"4 buffers (first: {one.name})" in one.message
    assert f"dtype {dtype}" in one.message


@pytest.mark.parametrize("dtype", ["FLOAT16", "FLOAT", "INT8", "MXINT8"])
def test_a_dtype_that_it_knows_is_moved(dtype: str) -> None:
    assert codes(model(decoder(), dtype=dtype)) == []


@pytest.mark.parametrize("shape", [None, (), ("batch_size", 2, 0, 4), ("b", -1, 2, 2)])
def test_what_has_no_shape_cannot_be_moved(shape: tuple[Dim, ...] | None) -> None:
    assert "no shape" in only(model(decoder(1, shape)), "KV610").message


def test_one_axis_is_told_as_one() -> None:
    found = only(model({**decoder(), "past_key.2": ("batch_size",)}), "KV610")
    assert "has 1 axis, but" in found.message


@pytest.mark.parametrize("rank", [2, 5])
def test_other_ranks_than_those_of_its_slices_are_found(rank: int) -> None:
    shape = ("batch_size", "ctx_len", *(4,) * (rank - 2))
    assert f"has {rank} axes" in only(model({**decoder(), "past_key.2": shape}), "KV610").message


@pytest.mark.parametrize(
    ("name", "shape", "wrong"),
    [
        ("a.1_vllmKvCache2", CONV, True),
        ("a.1_vllmKvCache2", WINDOW, False),
        ("a.10_vllmKvCache", CONV, False),
    ],
)
def test_slices_that_go_by_the_beginning_of_a_name_may_take_another(
    name: str, shape: tuple[Dim, ...], wrong: bool
) -> None:
    both = called(
        ("a.1_vllmKvCache", f"a.1_vllmKvCache{OUT}", 1),
        (name, name + OUT, 10 if "10" in name else 1),
    )
    one, other = both.buffers
    given = [v._replace(shape=shape) if v.name == name else v for v in both.inputs]
    made = [v._replace(shape=shape) if v.name == name + OUT else v for v in both.outputs]
    other = other._replace(shape=shape)
    both = both._replace(inputs=tuple(given), outputs=tuple(made), buffers=(one, other))
    assert ("KV610" in codes(both)) is wrong


def test_three_axes_are_sliced_among_hybrids_only() -> None:
    three: tuple[Dim, ...] = ("batch_size", "ctx_len", 8)
    assert "KV610" in codes(model(decoder(1, three)))
    assert "KV610" not in codes(model({**decoder(1), "past_key.1": three, "past_value.1": three}))
