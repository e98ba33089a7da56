from __future__ import annotations

from onnxkvrename.verification.operators import Step
from onnxkvrename.verification.provenance import (
    NOTHING,
    Origin,
    Way,
    Where,
    called,
    carried,
    doubted,
    either,
    joined,
    nearest,
    source,
    touching,
)

ADD, CONCAT = Where("Add", "add"), Where("Concat", "join")
MOVED, CHANGED = Step(0, updates=False), Step(0, changed=True)


def costs(origin: Origin) -> list[dict[int, tuple[int, int]]]:
    """The cost of each source, outcome by outcome."""
    return [{number: way.cost for (number, _), way in ways.items()} for ways in origin.ways]


def test_a_value_that_is_moved_comes_from_where_it_came_from() -> None:
    assert carried(source(2), MOVED, ADD) == source(2) == Origin(({(2, True): Way((0, 0))},), 4)


def test_each_step_costs_and_the_last_one_is_where_the_state_is_made() -> None:
    twice = carried(carried(source(0), CHANGED, CONCAT), CHANGED, ADD)
    assert twice.ways == ({(0, True): Way((0, 2), ADD)},)
    written = carried(source(0), Step(2, written=True), CONCAT)
    assert costs(written) == [{0: (1, 0)}]


def test_of_two_ways_from_one_source_the_cheaper_counts() -> None:
    far = carried(source(0), CHANGED, ADD)
    assert costs(joined([far, source(0), source(1)])) == [{0: (0, 0), 1: (0, 0)}]


def test_what_is_mixed_is_touched_and_carried_no_further() -> None:
    assert touching([source(0), source(3), NOTHING]) == Origin((), 0b1001)


def test_branches_with_different_results_are_kept_apart() -> None:
    assert costs(either([source(0), source(1), source(0)])) == [{0: (0, 0)}, {1: (0, 0)}]
    assert costs(either([NOTHING, source(1)])) == [{1: (0, 0)}]


def test_too_many_different_results_leave_doubt() -> None:
    few, many = (either([source(n) for n in range(count)]) for count in (4, 5))
    assert len(few.ways) == 4
    assert [set(ways) for ways in many.ways] == [{(n, False) for n in range(5)}]


def test_branches_are_told_apart_by_what_is_nearest_to_them() -> None:
    further = [carried(source(n), CHANGED, ADD) for n in range(1, 9)]
    (ways,) = either([joined([source(0), far]) for far in further]).ways
    assert set(nearest(ways)) == {(0, True)}


def test_of_branches_that_come_from_one_source_the_one_that_makes_a_state_is_told() -> None:
    changed = carried(source(0), CHANGED, ADD)
    for branches in ([source(0), changed], [changed, source(0)]):
        assert either(branches).ways == ({(0, True): Way((0, 0), ADD)},)


def test_doubt_stays_with_a_way() -> None:
    unsure = carried(doubted([source(0), source(1)], "because"), CHANGED, ADD)
    assert {way.doubt for ways in unsure.ways for way in ways.values()} == {"because"}
    assert nearest(joined([unsure, source(1)]).ways[0]) == {(1, True): Way((0, 0))}


def test_a_summary_is_applied_to_what_a_call_is_given() -> None:
    summary = joined([carried(source(0), CHANGED, ADD), source(1)])
    call = Where("layer", "first")
    made = called(summary, [source(7), carried(source(5), CHANGED, CONCAT)], call)
    inner = Where("Add", "add in first")
    assert made.ways == ({(7, True): Way((0, 1), inner), (5, True): Way((0, 1), CONCAT)},)
    assert made.touched == 1 << 7 | 1 << 5


def test_a_formal_input_that_is_given_nothing_leaves_room_for_the_next() -> None:
    summary = joined([source(0), carried(source(1), Step(2, written=True), ADD)])
    assert costs(called(summary, [NOTHING, source(3)], ADD)) == [{3: (1, 0)}]
