"""The names of the models that a sidecar belongs to, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxkvrename.rules.plan import KvPair, TokenChange
from onnxkvrename.rules.profile import Rules

_NO_NAMES: Mapping[str, str] = {}


class OneModel(NamedTuple):
    """The names of one model.

    Attributes:
        pairs: Its KV buffers, with their new names; none for a model that stays as it is.
        graph_values: The current names of all inputs and outputs of its graph.
        name_map: The new name of each name that changes.
    """

    pairs: tuple[KvPair, ...] = ()
    graph_values: tuple[str, ...] = ()
    name_map: Mapping[str, str] = _NO_NAMES


class ModelNames(NamedTuple):
    """The names of a model, or of all models that a sidecar belongs to.

    Attributes:
        name_map: The new name of each name that changes.
        graph_values: The current names of all inputs and outputs of the graphs.
        staying_values: Those that at least one model has and keeps.
        tokens: The tokens that the buffers carry now.
        kv_names: The names of all KV inputs and outputs after the rename.
        pairs: The names of both sides of each buffer after the rename.
        first_layers: The first layer of each buffer, by scope and part.
        token_change: The tokens to add and to remove.
        rules: The rules that recognise KV names.
        neighbour_names: Inputs and outputs of other models that the sidecar may be of.
    """

    name_map: Mapping[str, str]
    graph_values: frozenset[str]
    staying_values: frozenset[str]
    tokens: frozenset[str]
    kv_names: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    first_layers: Mapping[tuple[str, str], int]
    token_change: TokenChange
    rules: Rules
    neighbour_names: frozenset[str] = frozenset()

    @classmethod
    def from_models(
        cls, models: Iterable[OneModel], change: TokenChange, rules: Rules
    ) -> ModelNames:
        """Collect the names of models, including models that were renamed before.

        Args:
            models: The models.
            change: The tokens to add and to remove.
            rules: The rules that recognise KV names.
        """
        pairs: list[KvPair] = []
        name_map: dict[str, str] = {}
        graph_values: set[str] = set()
        staying_values: set[str] = set()
        for model in models:
            pairs += model.pairs
            name_map |= model.name_map
            graph_values.update(model.graph_values)
            staying_values.update(set(model.graph_values) - model.name_map.keys())
        first_layers: dict[tuple[str, str], int] = {}
        for pair in pairs:
            key = pair.scope, pair.buffer
            first_layers[key] = min(pair.layer, first_layers.get(key, pair.layer))
        sides = [side for pair in pairs for side in pair.sides]
        return cls(
            name_map,
            frozenset(graph_values),
            frozenset(staying_values),
            frozenset(side.token for side in sides),
            frozenset((*(side.new_name for side in sides), *name_map.values())),
            tuple((p.input.new_name, p.output.new_name) for p in pairs if p.input and p.output),
            first_layers,
            change,
            rules,
        )

    def find_new_name(self, name: str, *, is_graph_value: bool) -> str | None:
        """Return the new name of a name in a sidecar; ``None`` if it matches nothing.

        The sidecar of a model that was renamed before may still contain the old names; their
        new names follow from the rules.

        Args:
            name: The name in the sidecar.
            is_graph_value: Whether the name must be an input or output of the graph, so that its
                suffix may be normalised too.
        """
        if any("\ud800" <= char <= "\udfff" for char in name):
            return None  # only an escape in the file makes such a character
        if name in self.name_map:
            return self.name_map[name]
        if name in self.graph_values:
            return name
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and self._may_have_carried(match.token):
                normalize = self.token_change.normalize and is_graph_value
                new_name = self.rules.rewrite_name(
                    match, self.token_change.final_token, normalize=normalize
                )
                if new_name in self.kv_names:
                    return new_name
        return None

    def find_layer(self, name: str) -> int | None:
        """Return the first layer with a buffer of the same part as a KV name of any layer."""
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and (match.scope, match.buffer) in self.first_layers:
                return self.first_layers[match.scope, match.buffer]
        return None

    def _may_have_carried(self, token: str) -> bool:
        """Return whether the model may have carried a token before.

        If the model changes in this run, only its current tokens are possible.
        """
        if not self.token_change.can_replace(token):
            return False
        return not self.name_map or token in {"", self.token_change.final_token, *self.tokens}
