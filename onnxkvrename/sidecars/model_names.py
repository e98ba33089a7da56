"""The names of the models that a sidecar belongs to, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.plan import KvPair, TokenChange
from onnxkvrename.rules.profile import Rules

_NO_NAMES: Mapping[str, str] = {}


class SameBufferError(UnreadableTextError):
    """Two names in a text become one, so the change could not be undone."""


class OneModel(NamedTuple):
    """The names of one model.

    It has no pairs if it stays as it is. The graph's values have their current names.
    """

    pairs: tuple[KvPair, ...] = ()
    graph_values: tuple[str, ...] = ()
    name_map: Mapping[str, str] = _NO_NAMES
    function_name_map: Mapping[str, str] = _NO_NAMES


class _Match(NamedTuple):
    """What a name in a sidecar becomes.

    If it is not one that the models have or had, it has a different token, which the run may be
    allowed to replace, or not.
    """

    new_name: str
    is_own: bool = True
    may_change: bool = True


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
        function_name_map: The new name of each name that changes in local functions.
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
    function_name_map: Mapping[str, str] = _NO_NAMES

    @classmethod
    def from_models(
        cls, models: Iterable[OneModel], change: TokenChange, rules: Rules
    ) -> ModelNames:
        """Collect the names of models, including models that were renamed before."""
        pairs: list[KvPair] = []
        name_map: dict[str, str] = {}
        function_name_map: dict[str, str] = {}
        graph_values: set[str] = set()
        staying_values: set[str] = set()
        for model in models:
            pairs += model.pairs
            name_map |= model.name_map
            function_name_map |= model.function_name_map
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
            function_name_map=function_name_map,
        )

    def find_new_names(
        self, names: Iterable[str], present: Iterable[str] = (), *, is_graph_value: bool = True
    ) -> tuple[dict[str, str | None], list[str]]:
        """Return what names in a sidecar become, and those with a token that may not be replaced.

        Of names with a different token only those count whose buffer has no other name in the
        file: a file may serve several models.

        Args:
            names: The names in the sidecar.
            present: Further new names that will be in it.
            is_graph_value: Whether they are inputs and outputs of the graph, whose suffix may be
                normalised, too.

        Returns:
            The new name of each, ``None`` for one that matches nothing; and the names that are
            refused.
        """
        matches = {name: self._find_match(name, is_graph_value) for name in names}
        new_names = {
            name: match.new_name if match and match.is_own else None
            for name, match in matches.items()
        }
        present = {*present, *(new for new in new_names.values() if new is not None)}
        refused = []
        for name, match in matches.items():
            if match is None or match.is_own or match.new_name in present:
                continue
            if match.may_change:
                new_names[name] = match.new_name
            else:
                refused.append(name)
        return new_names, refused

    def _find_match(self, name: str, is_graph_value: bool) -> _Match | None:
        """Return what a name becomes; ``None`` if it matches nothing.

        The sidecar of a model that was renamed before may still contain the old names; their
        new names follow from the rules. A name that only has a different token than the buffers
        have is from before a rename, too, unless another model beside the sidecar has it.
        """
        if _has_surrogate(name):
            return None
        if name in self.name_map or name in self.graph_values:
            return _Match(self.name_map.get(name, name))
        if name in self.function_name_map and not is_graph_value:
            return _Match(self.function_name_map[name])
        found = list(self._rewrite_name(name, is_graph_value))
        own_tokens = {"", self.token_change.final_token, *self.tokens}
        for token, new_name in found:
            if token in own_tokens and self.token_change.can_replace(token):
                return _Match(new_name)
        if not found or name in self.neighbour_names:
            return None
        token, new_name = found[0]
        return _Match(new_name, is_own=False, may_change=self.token_change.can_replace(token))

    def may_be_current(self, text: str) -> bool:
        """Return whether the models may have a name now; a template: names that match it."""
        match = self._find_match(text, is_graph_value=True)
        return match is None or match.is_own

    def _rewrite_name(self, name: str, is_graph_value: bool) -> Iterator[tuple[str, str]]:
        """Yield the token of a name, and the name that a buffer of the models has instead."""
        token = self.token_change.final_token
        suffixes = (True, False) if self.token_change.normalize and is_graph_value else (False,)
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is None:
                continue
            for normalize in suffixes:
                new_name = self.rules.rename(match, token, normalize=normalize)
                if new_name in self.kv_names:
                    yield match.token, new_name

    def describe_conflict(self, conflicting: Sequence[str]) -> tuple[str, str]:
        """Return what is wrong with names that have a different token, and a hint.

        The names are in the sidecar's order.
        """
        token = self.token_change.token
        than = f" than {token}" if token else ""
        count = f"{len(conflicting)} names" if len(conflicting) > 1 else "a name"
        problem = f"{count} with a different token{than} (first: {shorten_text(conflicting[0])})"
        if self.token_change.strip:
            return problem, "`--strip` removes any token"
        return problem, "`--replace` replaces it with the new token"

    def find_layer(self, name: str) -> int | None:
        """Return the first layer with a buffer of the same part as a KV name of any layer."""
        for side in ("input", "output"):
            match = self.rules.match(side, name)
            if match is not None and (match.scope, match.part) in self.first_layers:
                return self.first_layers[match.scope, match.part]
        return None


def check_distinct(new_names: Mapping[str, str | None]) -> None:
    """Raise :class:`SameBufferError` if two texts become the same; ``None`` is not a name."""
    sources: dict[str, str] = {}
    for old, new in new_names.items():
        if new is not None and sources.setdefault(new, old) != old:
            raise SameBufferError(
                f"names both {shorten_text(sources[new])} and {shorten_text(old)}, "
                "which are the same buffer",
                "keep one of the two",
            )


def _has_surrogate(name: str) -> bool:
    """Return whether a text has a character that only an escape in its file can make."""
    return any("\ud800" <= char <= "\udfff" for char in name)
