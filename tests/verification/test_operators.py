from __future__ import annotations

import onnx.defs
import pytest

from onnxkvrename.verification import operators
from onnxkvrename.verification.operators import (
    OperandFlow,
    find_carried_operands,
    find_operand_flows,
    is_ctx_scatter,
    is_shape_only,
)

SCHEMAS = {schema.name: schema for schema in onnx.defs.get_all_schemas() if not schema.domain}


def test_every_operator_that_is_known_by_name_is_one_of_onnx() -> None:
    known = {*operators._MOVE_OPS, *operators._ELEMENTWISE_OPS, *operators._SHAPE_ONLY_OPS}
    known |= set(operators._JOIN_OPS) | {
        name for domain, name in operators._STATEFUL_OPS if not domain
    }
    assert known <= {*SCHEMAS}


@pytest.mark.parametrize(
    "op_type", sorted(name for dom, name in operators._STATEFUL_OPS if not dom)
)
def test_a_state_of_an_operator_is_what_onnx_says_it_is(op_type: str) -> None:
    schema, states = SCHEMAS[op_type], operators._STATEFUL_OPS["", op_type]
    for output, (first, *_) in states.items():
        words = ("past", "initial")
        assert schema.inputs[first.operand].name.startswith(words)
        assert schema.outputs[output].name.startswith(("present", "Y_"))


@pytest.mark.parametrize(
    ("op_type", "name"),
    [
        ("ScatterElements", "updates"),
        ("ScatterND", "updates"),
        ("TensorScatter", "update"),
        ("Where", "Y"),
    ],
)
def test_the_last_operand_that_is_joined_is_the_one_that_onnx_names(
    op_type: str, name: str
) -> None:
    steps = find_operand_flows("", op_type, 0, 3)
    assert steps is not None
    assert SCHEMAS[op_type].inputs[steps[-1].operand].name == name


def test_what_mixes_or_creates_carries_nothing_and_what_is_unknown_may_carry_all() -> None:
    assert find_operand_flows("", "MatMul", 0, 2) == ()
    assert find_operand_flows("", "Softmax", 0, 1) == ()
    assert find_operand_flows("far", "Identity", 0, 1) is None
    assert find_operand_flows("", "Identity", 0, 1) == (OperandFlow(0, makes_new_state=False),)


def test_a_scatter_of_qefficient_writes_its_last_operand_over_its_first() -> None:
    for op_type, operands in (("CtxScatter", 3), ("CtxScatterCB", 4)):
        assert find_operand_flows("com.qualcomm.cloud", op_type, 0, operands) == (
            OperandFlow(0),
            OperandFlow(-1, overwrites=True),
        )
        assert find_carried_operands("com.qualcomm.cloud", op_type, operands) == {0, operands - 1}
    assert is_ctx_scatter("com.qualcomm.cloud", "CtxScatter3D")
    assert not is_ctx_scatter("com.qualcomm.cloud", "CtxGather3D")
    assert not is_ctx_scatter("", "CtxScatter3D")


def test_a_node_is_followed_back_to_what_it_may_carry() -> None:
    assert find_carried_operands("", "Add", 2) == {0, 1}
    assert find_carried_operands("", "Gather", 2) == {0}
    assert find_carried_operands("", "MatMul", 2) == frozenset()
    assert find_carried_operands("", "Constant", 0) == frozenset()
    assert find_carried_operands("", "Attention", 7) == {1, 2, 4, 5}
    assert find_carried_operands("far", "Any", 3) == {0, 1, 2}


def test_of_a_shape_no_values_are_taken() -> None:
    assert is_shape_only("", "Shape")
    assert not is_shape_only("far", "Shape")
    assert not is_shape_only("", "Reshape")
