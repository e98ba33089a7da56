"""Plan the new names in a configuration by which a runtime binds the inputs and outputs.

Any text in it may be a name or a template, of the models that its section refers to. It follows
completely or not at all: a template changes only if all names that it generates change alike, and
no name may change that the runtime would make itself.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.limits import (
    MAX_ALTERNATIVES,
    MAX_FILES,
    MAX_MATCHED_CHARS,
    MAX_TEMPLATES,
    describe_excess,
    shorten_text,
)
from onnxkvrename.sidecars.formats import MODEL_SUFFIX, SidecarFormat
from onnxkvrename.sidecars.model_names import ModelNames, OneModel, check_distinct
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    OpaqueNode,
    ScalarNode,
    SequenceNode,
    list_children,
)
from onnxkvrename.text import format_list

PLACEHOLDER = "%d"
"""Where a template has the number of a layer, as printf writes it."""

_PRINTED = re.compile(r"%[-+ #0]*[0-9]*(?:hh?|ll?|z)?[dius]|\{[A-Za-z_]*\}")
_PLACES = 2
"""Places in a text that a program may print into."""
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_ALL: frozenset[str] = frozenset()


class BoundModels(NamedTuple):
    """The models that a configuration may refer to.

    Attributes:
        find: Returns the model at a location beside the configuration, as it is written there;
            ``None`` if there is none that can be read.
        beside: The models that it refers to where it names none.
        build_names: Collects the names of some models.
        near: All models of the run beside it and below it, whatever it names.
        neighbour_names: Inputs and outputs of other models beside it.
    """

    find: Callable[[str], OneModel | None]
    beside: tuple[OneModel, ...]
    build_names: Callable[[Iterable[OneModel]], ModelNames]
    near: tuple[OneModel, ...] = ()
    neighbour_names: frozenset[str] = frozenset()


class Refusal(NamedTuple):
    """Why a configuration cannot follow its models, and what to do about it."""

    problem: str
    hint: str


class BindingPlan(NamedTuple):
    """The changes of the names in a configuration.

    Attributes:
        changes: The new text of each scalar that changes.
        matched_names: The texts that are names of the models, or templates of such.
        shared_names: Old names of a section that names no model: another may have them, too.
        refusals: Why it cannot follow, if so.
        has_other_token: True if names have a different token, which the run may not replace.
    """

    changes: Mapping[ScalarNode, str]
    matched_names: frozenset[str]
    shared_names: frozenset[str]
    refusals: tuple[Refusal, ...]
    has_other_token: bool = False


def plan_bindings(tree: Node, sidecar_format: SidecarFormat, models: BoundModels) -> BindingPlan:
    """Plan the new text of each name and template in a configuration.

    Raises:
        UnreadableTextError: It has too many templates, or names too many models.
    """
    sections = list_sections(tree, sidecar_format.reads_template)
    locations = frozenset[str]().union(*(section.files for section in sections))
    found = {location: models.find(location) for location in sorted(locations)}
    planner = _Planner(sidecar_format)
    owned: list[tuple[Section, list[OneModel]]] = []
    groups: dict[tuple[int, ...], tuple[list[OneModel], list[ScalarNode]]] = {}
    for section in sections:
        own = [model for name in sorted(section.files) if (model := found[name]) is not None]
        if not locations:
            own = list(models.beside)
        owned.append((section, own))
        if any(model.pairs or model.name_map for model in own):
            key = tuple(sorted({id(model) for model in own}))
            groups.setdefault(key, (own, []))[1].extend(section.scalars)
    if len(groups) > MAX_TEMPLATES:
        raise UnreadableTextError(describe_excess(MAX_TEMPLATES, "groups of models"))
    for own, scalars in groups.values():
        names = models.build_names(own)._replace(neighbour_names=models.neighbour_names)
        planner.plan_section(scalars, names, own, is_shared=not locations)
    governed = [model for model in found.values() if model is not None]
    if not planner.has_other_token:
        planner.check_cover(governed if locations else models.beside)
    if not planner.refusals:
        rest = [*governed, *models.near] if locations else models.beside
        planner.check_rest(owned, rest)
    if locations:
        planner.check_shared_nodes(tree)
    return BindingPlan(
        planner.changes,
        frozenset(planner.matched),
        frozenset(planner.shared),
        tuple(planner.refusals),
        planner.has_other_token,
    )


class _Planner:
    """Collects the plan, section by section."""

    def __init__(self, sidecar_format: SidecarFormat) -> None:
        self.format = sidecar_format
        self.changes: dict[ScalarNode, str] = {}
        self.matched: set[str] = set()
        self.shared: set[str] = set()
        self.refusals: list[Refusal] = []
        self.templates: set[str] = set()
        self.covered: dict[int, set[str]] = defaultdict(set)
        """The names that are written in the file, old and new, by the id of their model."""
        self.texts: dict[int, set[str]] = defaultdict(set)
        """All texts of the sections of a model, by its id."""
        self.has_other_token = False
        """Whether a name has a different token, which the run may not replace."""

    def plan_section(
        self,
        scalars: Iterable[ScalarNode],
        names: ModelNames,
        models: Iterable[OneModel],
        *,
        is_shared: bool,
    ) -> None:
        new_texts: dict[str, str | None] = {}
        covered: set[str] = set()
        scalars = tuple(scalars)
        for text, new_by_old in self._find_all_names(scalars, names).items():
            new = new_texts[text] = self._plan_text(text, new_by_old, names)
            covered.update(new_by_old, new_by_old.values())
            if new is not None:
                self.matched.add(text)
                if is_template(new):
                    covered.update(find_generated_names(new, names.name_map.values()).values())
            if is_shared:
                self.shared.update(old for old, new in new_by_old.items() if old != new)
        for scalar in scalars:
            new = new_texts[scalar.value]
            if new is not None and new != scalar.value:
                self.changes[scalar] = new
        check_distinct(new_texts)
        for model in models:
            self.covered[id(model)].update(covered)
            self.texts[id(model)].update(new_texts)

    def _find_all_names(
        self, scalars: Iterable[ScalarNode], names: ModelNames
    ) -> dict[str, dict[str, str]]:
        """Return for each text the old and new names that it matches; none if it is not a name."""
        found: dict[str, dict[str, str]] = {}
        filled: dict[str, str] = {}
        for text in dict.fromkeys(scalar.value for scalar in scalars):
            found[text] = self._find_generated(text, names)
            if not is_template(text):
                filled[text] = text
            elif not found[text]:
                layer = names.find_layer(fill_template(text, 0))
                filled |= {} if layer is None else {text: fill_template(text, layer)}
        present = {new for new_by_old in found.values() for new in new_by_old.values()}
        new_names, conflicting = names.find_new_names(filled.values(), present)
        refused = dict.fromkeys(conflicting)
        for text, old in filled.items():
            new = old if old in refused else new_names[old]
            if new is not None:
                found[text] = {old: new}
        if refused:
            self.has_other_token = True
            texts = [text for text, old in filled.items() if old in refused]
            problem, hint = names.describe_conflict(texts)
            self._refuse(f"it has {problem}", hint)
        return found

    def _find_generated(self, text: str, names: ModelNames) -> dict[str, str]:
        """Return the current and new names that a template generates."""
        if not is_template(text):
            return {}
        self.templates.add(text)
        if len(self.templates) > MAX_TEMPLATES:
            raise UnreadableTextError(describe_excess(MAX_TEMPLATES, "templates"))
        generated = find_generated_names(text, names.graph_values).values()
        return {name: names.name_map.get(name, name) for name in generated}

    def _plan_text(self, text: str, new_by_old: Mapping[str, str], names: ModelNames) -> str | None:
        """Return the new text; the old one if it may not change, ``None`` if it is not a name."""
        if not new_by_old:
            return None
        if all(old == new for old, new in new_by_old.items()):
            return text
        kept = [old for old in new_by_old if old in names.staying_values]
        if kept:
            self._refuse_partial(text, new_by_old, kept[0])
            return text
        if not is_template(text):
            return new_by_old[text]
        numbers = {name: number for number, name in find_generated_names(text, new_by_old).items()}
        template = derive_template(text, {numbers[old]: new for old, new in new_by_old.items()})
        if template is None:
            first, second = list(new_by_old.items())[:2] if len(new_by_old) > 1 else [("", "")] * 2
            self._refuse(
                f"{shorten_text(text)} can no longer match all of its names: {first[0]} becomes "
                f"{first[1]}, but {second[0]} becomes {second[1]}",
                "use rules that rename all layers in the same way",
            )
            return text
        self._check_length(text, new_by_old.values())
        return template

    def _refuse_partial(self, text: str, new_by_old: Mapping[str, str], kept: str) -> None:
        if is_template(text):
            problem = f"{shorten_text(text)} matches {len(new_by_old)} names, and"
        else:
            problem = f"{shorten_text(text)} changes in one model, and in another"
        self._refuse(
            f"{problem} {shorten_text(kept)} stays",
            "rename all of them: pass all models of the folder, with rules for all layers",
        )

    def _check_length(self, text: str, names: Iterable[str]) -> None:
        limit = self.format.max_name_bytes
        longest = max(names, key=lambda name: len(name.encode("utf-8", "surrogateescape")))
        if limit is not None and len(longest.encode("utf-8", "surrogateescape")) > limit:
            self._refuse(
                f"{shorten_text(text)} would make {shorten_text(longest)}, longer than the "
                f"{limit} bytes that {self.format.reader} accepts",
                "choose a shorter token",
            )

    def check_cover(self, models: Iterable[OneModel]) -> None:
        """Refuse a change of names that the file does not have: its reader makes them itself."""
        for model in models:
            covered, texts = self.covered[id(model)], self.texts[id(model)]
            if not covered and not self.format.default_names:
                continue
            missing = [
                old
                for old, new in model.name_map.items()
                if old not in covered and new not in covered and not self._is_default(new, texts)
            ]
            if missing:
                self._refuse_uncovered(missing)
                return

    def check_rest(
        self, owned: Iterable[tuple[Section, list[OneModel]]], models: Iterable[OneModel]
    ) -> None:
        """Refuse a text that stays although it is, or makes, a name that a model gives up.

        It is right only where a model of its own section has that name after the rename.
        """
        given_up = sorted({name for m in models for name, new in m.name_map.items() if name != new})
        stale_by_text: dict[str, frozenset[str]] = {}
        kept: dict[int, set[str]] = {}
        for section, own in owned if given_up else ():
            for text in dict.fromkeys(s.value for s in section.scalars if s not in self.changes):
                if text not in stale_by_text:
                    stale_by_text[text] = find_printed_names(text, given_up)
                left = set(stale_by_text[text])
                for model in own if left else ():
                    if id(model) not in kept:
                        kept[id(model)] = _list_kept(model)
                    left = {name for name in left if name not in kept[id(model)]}
                if left:
                    self._refuse_rest(text, min(left))
                    return

    def _refuse_rest(self, text: str, name: str) -> None:
        has = "is" if text == name else f"makes {shorten_text(name)},"
        self._refuse(
            f"{shorten_text(text)} {has} a name that changes in a model here, but this entry "
            "would keep the old name",
            "set its filename to that model, and write templates with %d",
        )

    def check_shared_nodes(self, tree: Node) -> None:
        """Refuse a change where an alias takes it to another place of the file."""
        aliases = _find_aliases(tree)
        shared = next((s for s in self.changes if not aliases.isdisjoint(s.anchors)), None)
        if shared is not None:
            self._refuse(
                f"{shorten_text(shared.value)} is below a YAML anchor, and its alias may belong to "
                "another model",
                "replace the alias with the full text",
            )

    def _refuse_uncovered(self, missing: list[str]) -> None:
        entries: dict[str, dict[str, None]] = {}
        for place, entry in map(self._describe_entry, missing):
            entries.setdefault(place, {})[entry] = None
        additions = [
            f"{f'to {place}: ' if place else ''}{format_list(list(texts), limit=4)}"
            for place, texts in entries.items()
        ]
        self._refuse(
            f"it lacks {len(missing)} names that change (first: {shorten_text(missing[0])}), so "
            f"{self.format.reader} would keep looking for the old ones",
            f"first add {'; '.join(additions)}",
        )

    def _describe_entry(self, name: str) -> tuple[str, str]:
        """Return the object that would have to have an entry for a name, and the entry.

        The object is empty, and the entry has no key, where the reader has no default.
        """
        for key, place, template in self.format.default_names:
            if find_generated_names(template, [name]):
                return place, f'"{key}": "{template}"'
        return "", abstract_number(name)

    def _is_default(self, name: str, texts: Collection[str]) -> bool:
        """Return whether the reader makes a name itself, as its key is not among some texts."""
        return any(
            key not in texts and find_generated_names(template, [name])
            for key, _, template in self.format.default_names
        )

    def _refuse(self, problem: str, hint: str) -> None:
        self.refusals.append(Refusal(problem, hint))


def _list_kept(model: OneModel) -> set[str]:
    """Return the names of the inputs and outputs of a model after the rename."""
    return {model.name_map.get(name, name) for name in model.graph_values}


def _find_aliases(node: Node) -> set[str]:
    """Return the anchors that a tree repeats elsewhere."""
    if isinstance(node, OpaqueNode):
        return {node.anchor}
    return set[str]().union(*map(_find_aliases, list_children(node)))


def is_template(text: str) -> bool:
    """Return whether a text has one ``%d``, and nothing else that printf would replace."""
    return text.count("%") == 1 and PLACEHOLDER in text and len(text) <= MAX_MATCHED_CHARS


def fill_template(template: str, number: int | str) -> str:
    """Return the name that a template has for the layer with a number."""
    return template.replace(PLACEHOLDER, str(number))


def find_generated_names(template: str, names: Iterable[str]) -> dict[str, str]:
    """Return the names that a template generates, each by the number of its layer."""
    head, _, tail = template.partition(PLACEHOLDER)
    return {
        number: name
        for name in names
        if name.startswith(head)
        and name.endswith(tail)
        and _NUMBER.fullmatch(number := name[len(head) : len(name) - len(tail)])
    }


def find_printed_names(text: str, sorted_names: Sequence[str]) -> frozenset[str]:
    """Return the names that a text is, or makes if a program prints numbers or words into it."""
    at = bisect_left(sorted_names, text)
    if at < len(sorted_names) and sorted_names[at] == text:
        return frozenset((text,))
    places = list(_PRINTED.finditer(text[: MAX_MATCHED_CHARS + 1]))
    is_short = len(text) <= MAX_MATCHED_CHARS
    if not is_short or not 1 <= len(places) <= _PLACES or places[0].start() == 0:
        return frozenset()
    head = text[: places[0].start()]
    first = bisect_left(sorted_names, head)
    pattern, end = "", 0
    for place in places:
        # A bounded length keeps the time for hostile names linear.
        printed = "[A-Za-z_]{1,64}" if place[0].endswith("s") else "[0-9]{1,20}"
        pattern += re.escape(text[end : place.start()]) + printed
        end = place.end()
    name_pattern = re.compile(pattern + re.escape(text[end:]))
    similar = takewhile(lambda name: name.startswith(head), islice(sorted_names, first, None))
    return frozenset(name for name in similar if name_pattern.fullmatch(name))


def derive_template(template: str, new_names: Mapping[str, str]) -> str | None:
    """Return the template that generates new names; ``None`` if there is none.

    The new names, at least one, are by the number of the layer.
    """
    number, name = next(iter(new_names.items()))
    candidates = []
    if "%" not in name and len(name) <= MAX_MATCHED_CHARS:
        starts = (match.start() for match in re.finditer(f"(?={number})", name))
        candidates = [
            f"{name[:at]}{PLACEHOLDER}{name[at + len(number) :]}"
            for at in islice(starts, MAX_ALTERNATIVES)
        ]
    fitting = [
        candidate
        for candidate in candidates
        if all(fill_template(candidate, layer) == new for layer, new in new_names.items())
    ]
    head = template.partition(PLACEHOLDER)[0]
    # A token may have the layer's number as well: take the one at the same place.
    return max(
        fitting, key=lambda candidate: candidate.startswith(head + PLACEHOLDER), default=None
    )


def abstract_number(name: str) -> str:
    """Return the template that a name most likely comes from: its first number is the layer."""
    return re.sub("[0-9]+", PLACEHOLDER, name, count=1)


class Section(NamedTuple):
    """The texts of a configuration that refer to the same models.

    The files are the locations of those models, without needless parts; none where none are named.
    The scalars are in the order of the file, keys included.
    """

    files: frozenset[str]
    scalars: tuple[ScalarNode, ...]


def list_sections(
    tree: Node, reads_template: Callable[[tuple[str, ...]], bool] | None = None
) -> tuple[Section, ...]:
    """Return the sections of a tree, without the templates that its reader does not read.

    Raises:
        UnreadableTextError: It names more than `MAX_FILES` models.
    """
    scalars: dict[frozenset[str], list[ScalarNode]] = {}
    found = _find_files_below(tree, {})
    for files, keys, scalar in _walk_scalars(tree, _ALL, found, ()):
        is_read = reads_template is None or not is_template(scalar.value) or reads_template(keys)
        if is_read:
            scalars.setdefault(files, []).append(scalar)
    return tuple(Section(files, tuple(texts)) for files, texts in scalars.items())


class _Files(NamedTuple):
    """The models that a node names itself, and those that it and what is below it name."""

    own: frozenset[str]
    all: frozenset[str]


_FilesByNode = dict[int, _Files]


def _find_files_below(node: Node, found: _FilesByNode) -> _FilesByNode:
    """Return the models that each list and mapping of a tree names, by the id of the node."""
    own: set[str] = set()
    every: set[str] = set()
    for child in list_children(node):
        if isinstance(child, (MappingNode, SequenceNode)):
            _find_files_below(child, found)
            every |= found[id(child)].all
    if isinstance(node, MappingNode):
        for key, value in node.entries:
            every.update(_read_location(key))
            for item in value.items if isinstance(value, SequenceNode) else (value,):
                own.update(_read_location(item))
    every |= own
    if len(every) > MAX_FILES:
        raise UnreadableTextError(describe_excess(MAX_FILES, "names of models"))
    found[id(node)] = _Files(frozenset(own), frozenset(every))
    return found


def _walk_scalars(
    node: Node, files: frozenset[str], found: _FilesByNode, keys: tuple[str, ...]
) -> Iterator[tuple[frozenset[str], tuple[str, ...], ScalarNode]]:
    """Yield each text with the models that it refers to, and the keys that lead to it."""
    if isinstance(node, ScalarNode):
        yield files, keys, node
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _walk_scalars(item, files, found, keys)
    elif isinstance(node, MappingNode):
        own, below = found[id(node)]
        files = own or below or files
        for key, value in node.entries:
            name = key.value if isinstance(key, ScalarNode) else ""
            yield from _walk_scalars(key, files, found, ())
            yield from _walk_scalars(value, _read_location(key) or files, found, (*keys, name))


def _read_location(node: Node) -> frozenset[str]:
    """Return the location of the model that a text names, if it does."""
    if not isinstance(node, ScalarNode) or not node.value.endswith(MODEL_SUFFIX):
        return _ALL
    return frozenset({posixpath.normpath(node.value)})
