"""Trees of texts, and what they say whatever they look like."""

from __future__ import annotations

from onnxkvrename.sidecars.tree import (
    MappingNode,
    OpaqueNode,
    ScalarNode,
    SequenceNode,
    TreeBuilder,
    read_content,
)


def test_a_tree_grows_in_the_order_of_the_text() -> None:
    growth = TreeBuilder()
    growth.open_collection(mapping=True)
    growth.add_node(ScalarNode("a", 0, 1, ""))
    growth.open_collection(mapping=False)
    growth.add_node(OpaqueNode("an alias"))
    growth.close_collection()
    growth.close_collection()
    (root,) = growth.roots
    assert root == MappingNode(
        ((ScalarNode("a", 0, 1, ""), SequenceNode((OpaqueNode("an alias"),))),)
    )
    assert isinstance(root, MappingNode)
    assert root.get("a") == SequenceNode((OpaqueNode("an alias"),))
    assert root.get("b") is None


def test_trees_say_the_same_wherever_their_scalars_stand() -> None:
    one = SequenceNode((ScalarNode("a", 0, 1, ""), SequenceNode((ScalarNode("b", 2, 3, ""),))))
    moved = SequenceNode((ScalarNode("a", 5, 8, "'"), SequenceNode((ScalarNode("b", 9, 10, ""),))))
    flat = SequenceNode((ScalarNode("a", 0, 1, ""), SequenceNode(()), ScalarNode("b", 2, 3, "")))
    assert read_content(one, {}) == read_content(moved, {})
    assert read_content(one, {}) != read_content(flat, {})
    assert read_content(one, {ScalarNode("b", 2, 3, ""): "c"}) != read_content(one, {})
