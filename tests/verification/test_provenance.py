from __future__ import annotations

from onnxkvrename.verification.operators import OperandFlow
from onnxkvrename.verification.provenance import (
    NO_ORIGIN,
    FlowPath,
    NodeLocation,
    Origin,
    apply_summary,
    build_source_origin,
    build_uncertain_origin,
    carry_origin,
    combine_alternatives,
    join_origins,
    select_cheapest_paths,
)

ADD, CONCAT = NodeLocation("Add", "add"), NodeLocation("Concat", "join")
MOVED, CHANGED = OperandFlow(0, makes_new_state=False), OperandFlow(0, is_computed=True)


def list_costs(origin: Origin) -> list[dict[int, tuple[int, int]]]:
    """The cost of each source, outcome by outcome."""
    return [{number: path.cost for (number, _), path in paths.items()} for paths in origin]


def test_a_value_that_is_moved_comes_from_where_it_came_from() -> None:
    assert (
        carry_origin(build_source_origin(2), MOVED, ADD)
        == build_source_origin(2)
        == ({(2, True): FlowPath((0, 0))},)
    )


def test_each_step_costs_and_the_last_one_is_where_the_state_is_made() -> None:
    twice = carry_origin(carry_origin(build_source_origin(0), CHANGED, CONCAT), CHANGED, ADD)
    assert twice == ({(0, True): FlowPath((0, 2), ADD, is_written_again=True)},)
    written = carry_origin(build_source_origin(0), OperandFlow(2, overwrites=True), CONCAT)
    assert list_costs(written) == [{0: (1, 0)}]


def test_of_two_ways_from_one_source_the_cheaper_counts() -> None:
    far = carry_origin(build_source_origin(0), CHANGED, ADD)
    assert list_costs(join_origins([far, build_source_origin(0), build_source_origin(1)])) == [
        {0: (0, 0), 1: (0, 0)}
    ]


def test_branches_with_different_results_are_kept_apart() -> None:
    assert list_costs(
        combine_alternatives(
            [build_source_origin(0), build_source_origin(1), build_source_origin(0)]
        )
    ) == [{0: (0, 0)}, {1: (0, 0)}]
    assert list_costs(combine_alternatives([NO_ORIGIN, build_source_origin(1)])) == [{1: (0, 0)}]


def test_too_many_different_results_leave_doubt() -> None:
    few, many = (
        combine_alternatives([build_source_origin(n) for n in range(count)]) for count in (4, 5)
    )
    assert len(few) == 4
    assert [set(paths) for paths in many] == [{(n, False) for n in range(5)}]


def test_branches_are_told_apart_by_what_is_nearest_to_them() -> None:
    further = [carry_origin(build_source_origin(n), CHANGED, ADD) for n in range(1, 9)]
    (paths,) = combine_alternatives(
        [join_origins([build_source_origin(0), far]) for far in further]
    )
    assert set(select_cheapest_paths(paths)) == {(0, True)}


def test_of_branches_that_come_from_one_source_the_one_that_makes_a_state_is_told() -> None:
    changed = carry_origin(build_source_origin(0), CHANGED, ADD)
    for branches in ([build_source_origin(0), changed], [changed, build_source_origin(0)]):
        assert combine_alternatives(branches) == ({(0, True): FlowPath((0, 0), ADD)},)


def test_doubt_stays_with_a_way() -> None:
    uncertain = carry_origin(
        build_uncertain_origin([build_source_origin(0), build_source_origin(1)], "because"),
        CHANGED,
        ADD,
    )
    assert {path.uncertainty for paths in uncertain for path in paths.values()} == {"because"}
    assert select_cheapest_paths(join_origins([uncertain, build_source_origin(1)])[0]) == {
        (1, True): FlowPath((0, 0))
    }


def test_a_summary_is_applied_to_what_a_call_is_given() -> None:
    summary = join_origins(
        [carry_origin(build_source_origin(0), CHANGED, ADD), build_source_origin(1)]
    )
    call = NodeLocation("layer", "first")
    origin = apply_summary(
        summary,
        [build_source_origin(7), carry_origin(build_source_origin(5), CHANGED, CONCAT)],
        call,
    )
    inner = NodeLocation("Add", "add in first")
    assert origin == ({(7, True): FlowPath((0, 1), inner), (5, True): FlowPath((0, 1), CONCAT)},)


def test_a_formal_input_that_is_given_nothing_leaves_room_for_the_next() -> None:
    summary = join_origins(
        [
            build_source_origin(0),
            carry_origin(build_source_origin(1), OperandFlow(2, overwrites=True), ADD),
        ]
    )
    assert list_costs(apply_summary(summary, [NO_ORIGIN, build_source_origin(3)], ADD)) == [
        {3: (1, 0)}
    ]
