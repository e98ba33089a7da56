"""Each side of a hand-off by itself: what stops the consumer before it moves anything."""

from __future__ import annotations

from handoff_sides import CONSUMER, build_side, build_side_layout, describe_attention

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.side_checks import check_side, check_startup
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model.signature import Value


def startup_findings(decode: Layout) -> list[Finding]:
    """Return the findings that stop decode, next to a prefill that starts."""
    prefill = check_side(
        build_side("prefill", build_side_layout(*describe_attention(0))),
        CONSUMER,
        full_transfer=False,
    )
    return list(check_startup(prefill, check_side(build_side("decode", decode), CONSUMER, False)))


def test_what_has_no_layer_to_read_stops_the_consumer() -> None:
    side = build_side_layout("past_key.0:2,ctx_len,4")
    strange = Value("x.y_vllmKvCache", "FLOAT16", ("batch_size", 4))
    other = Value("past.5_vllmKvCache", "FLOAT16", ("batch_size", 4))
    found = startup_findings(side._replace(inputs=(*side.inputs, strange)))
    assert [(one.code, one.name) for one in found] == [("KV603", strange.name)]
    assert "no number" in found[0].message
    assert "decode" in found[0].message
    assert not startup_findings(side._replace(inputs=(*side.inputs, other)))


def test_what_has_no_bytes_for_it_stops_it_too() -> None:
    found = startup_findings(build_side_layout(*describe_attention(0, dtype="BFLOAT16")))
    assert [one.code for one in found] == ["KV610"]
    assert "2 names (first: past_key.0_vllmKvCache)" in found[0].message
    assert "BFLOAT16" in found[0].message
    side = build_side_layout(*describe_attention(0))
    shapeless = side._replace(inputs=tuple(one._replace(shape=None) for one in side.inputs))
    assert [one.code for one in startup_findings(shapeless)] == ["KV610"]
    assert "no shape on decode" in startup_findings(shapeless)[0].message
    empty = build_side_layout(*describe_attention(0, shape="0,ctx_len,4"))
    assert [one.code for one in startup_findings(empty)] == ["KV610"]
    assert not startup_findings(side)
