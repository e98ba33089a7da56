"""Small constants are read as onnx reads them."""

from __future__ import annotations

import numpy as np
import onnx.helper
import pytest
from models import decoder, node, read_graph_of
from onnx import NodeProto, TensorProto, numpy_helper
from tiers import thin

from onnxkvrename.verification.constants import SmallConstants

DTYPES = (
    *("BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"),
    *("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
)
VALUES = ([0.0, 0.0], [-0.0, 0.0], [1.0, 2.0], [0.0, 1.0], [1.0, -0.0], [-1.0, -2.0], [])
CASES = [(dtype, values) for dtype in DTYPES for values in VALUES]


def read_constants(
    *tensors: TensorProto, nodes: tuple[NodeProto, ...] = (), as_node: bool = False
) -> SmallConstants:
    if as_node:
        nodes = (*nodes, *(node("Constant", [], [each.name], value=each) for each in tensors))
    model = decoder(*nodes)
    model.graph.initializer.extend([] if as_node else tensors)
    return SmallConstants(read_graph_of(model).main)


def expect_truth(tensor: TensorProto) -> bool | None:
    truths = set(numpy_helper.to_array(tensor).astype(bool).tolist())
    return truths.pop() if len(truths) == 1 else None


@pytest.mark.parametrize("as_node", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("dtype", "values"), thin(CASES, 40))
def test_a_constant_is_true_or_false_as_onnx_reads_it(
    dtype: str, values: list[float], raw: bool, as_node: bool
) -> None:
    number = TensorProto.DataType.Value(dtype)
    if dtype.startswith("U"):
        values = [abs(value) for value in values]
    array = np.array(values).astype(onnx.helper.tensor_dtype_to_np_dtype(number))
    tensor = numpy_helper.from_array(array, "c")
    if not raw:
        plain = array.astype(np.float32 if "FLOAT" in dtype or dtype == "DOUBLE" else array.dtype)
        tensor = onnx.helper.make_tensor("c", number, [len(values)], plain)
    assert read_constants(tensor, as_node=as_node).find_truth("c") is expect_truth(tensor)


@pytest.mark.parametrize("values", [[0], [-1, 2**31 - 1], [*range(8)], [*range(9)], []])
@pytest.mark.parametrize("dtype", [TensorProto.INT32, TensorProto.INT64])
def test_a_short_list_of_integers_is_read(dtype: int, values: list[int]) -> None:
    expected = tuple(values) if 0 < len(values) <= 8 else None
    array = np.array(values, onnx.helper.tensor_dtype_to_np_dtype(dtype))
    for tensor in (
        numpy_helper.from_array(array, "c"),
        onnx.helper.make_tensor("c", dtype, [len(values)], values),
    ):
        assert read_constants(tensor).find_integers("c") == expected
        assert read_constants(tensor, as_node=True).find_integers("c") == expected
    ints = node("Constant", [], ["c"], value_ints=values or [0])
    del ints.attribute[0].ints[len(values) :]
    assert read_constants(nodes=(ints,)).find_integers("c") == expected


@pytest.mark.parametrize(
    ("attributes", "truth"),
    [
        ({"value_int": 0}, False),
        ({"value_int": -3}, True),
        ({"value_float": 0.0}, False),
        ({"value_float": -0.0}, False),
        ({"value_float": 0.5}, True),
        ({"value_string": "no"}, None),
    ],
)
def test_a_constant_may_be_a_number_of_its_node(
    attributes: dict[str, float | str], truth: bool | None
) -> None:
    constants = read_constants(nodes=(node("Constant", [], ["c"], **attributes),))
    assert constants.find_truth("c") is truth


def test_what_is_not_known_is_no_constant() -> None:
    large = numpy_helper.from_array(np.zeros(2000, np.float32), "large")
    default = numpy_helper.from_array(np.zeros(1, np.float32), "x")
    elsewhere = numpy_helper.from_array(np.zeros(1, np.int64), "elsewhere")
    elsewhere.data_location = TensorProto.EXTERNAL
    wrong = numpy_helper.from_array(np.zeros(2, np.float32), "wrong")
    wrong.dims[0] = 3
    of_caller = node("Constant", [], ["of_caller"], value_int=1)
    of_caller.attribute[0].ref_attr_name = "how"
    constants = read_constants(large, default, elsewhere, wrong, nodes=(of_caller,))
    for name in ("large", "x", "elsewhere", "wrong", "of_caller", "nowhere"):
        assert constants.find_truth(name) is None
        assert constants.find_integers(name) is None
