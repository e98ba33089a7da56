"""Which outputs are KV, what they pair with, what they become.

A profile is TOML, never code: RE2 patterns with named groups that match whole
names in linear time, and templates that write the same parts back. See
``profiles/qeff.toml`` for the form.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.patterns import Pattern, expression

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LAYER = re.compile("[0-9]{1,9}")
_SIDES = ("input", "output")
_TEMPLATE = re.compile(r"\{([a-z]+)\}|([{}\[\]])")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
MAX_TOKEN = 64
WINDOW, PREFIXED, MERGED = STAGES = ("window", "prefixed", "merged")
"""What a part of a set can be: as exported, made ready to be merged, merged."""


class Match(NamedTuple):
    """A name that a KV rule knows, taken apart.

    ``parts`` are the named groups as they stand in the name; ``token`` is empty
    where the name carries none.
    """

    side: str
    rule: KvRule
    kind: str
    scope: str
    buffer: str
    layer: int
    token: str
    parts: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str, int]:
        """What the two sides of a pair have in common, whatever token either carries."""
        return self.scope, self.buffer, self.layer


class KvRule(NamedTuple):
    """How KV inputs and outputs are called; ``kinds`` lists each kind's parts."""

    patterns: Mapping[str, Pattern]
    templates: Mapping[str, str]
    kinds: Mapping[str, tuple[str, ...]]

    def match(self, side: str, name: str) -> Match | None:
        """Take a name apart, or ``None`` if it is not one of this rule's."""
        parts = self.patterns[side].parts(name)
        if parts is None:
            return None
        buffer, token = parts["buffer"], parts.get("token", "")
        kind = next((kind for kind, names in self.kinds.items() if buffer in names), None)
        if kind is None or (token and token_fault(token)) or not _LAYER.fullmatch(parts["layer"]):
            return None
        layer, scope = int(parts["layer"]), parts.get("scope", "")
        return Match(side, self, kind, scope, buffer, layer, token, parts)


class KeepRule(NamedTuple):
    """Names that are left alone, and why."""

    reason: str
    pattern: Pattern


class FeedBack(NamedTuple):
    """The call that hands a renamed model back, for models that have a certain input."""

    pattern: Pattern
    call: str


class PartName(NamedTuple):
    """What the name of a file says: layers ``first`` up to, but without, ``end``.

    ``end`` is ``None`` where the name does not say it.
    """

    stage: str
    model: str
    first: int
    end: int | None


class PartRule(NamedTuple):
    """How the files of one stage are called, and a folder that stands around each."""

    stage: str
    file: Pattern
    folder: Pattern | None

    def match(self, file: str) -> PartName | None:
        """Take the name of a file apart, or ``None`` if it is not one of these."""
        parts = self.file.parts(file) or {"first": ""}
        first, end = parts["first"], parts.get("end", "")
        if not all(_LAYER.fullmatch(layer) for layer in (first, end or first)):
            return None
        return PartName(self.stage, parts.get("model", ""), int(first), int(end) if end else None)


class SetRule(NamedTuple):
    """Which files are parts of one model, and what those have in common.

    ``seam`` is the output of one window and the input of the next that takes it
    over, ``shared`` the inputs of all windows. No model has buffers of two kinds
    of ``apart``.
    """

    parts: tuple[PartRule, ...] = ()
    seam: tuple[str, str] | None = None
    shared: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()


class Rules(NamedTuple):
    """A profile, ready for use."""

    name: str
    kv: tuple[KvRule, ...]
    keep: tuple[KeepRule, ...]
    retained: Pattern
    suffixes: Mapping[str, str]
    feed_back: tuple[FeedBack, ...]
    sets: SetRule = SetRule()

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """For each kind of buffer, of all rules together, the parts a layer must have."""
        parts: dict[str, tuple[str, ...]] = {}
        for rule in self.kv:
            for kind, names in rule.kinds.items():
                parts[kind] = tuple(dict.fromkeys((*parts.get(kind, ()), *names)))
        return parts

    def match(self, side: str, name: str) -> Match | None:
        """What the first rule that knows it makes of a graph ``input`` or ``output``."""
        matches = (rule.match(side, name) for rule in self.kv)
        return next((match for match in matches if match is not None), None)

    def kept(self, name: str) -> str | None:
        """Why a name is left alone, if a rule says so."""
        return next((rule.reason for rule in self.keep if rule.pattern.fits(name)), None)

    def retains(self, name: str) -> bool:
        """Whether an output is called like a retained state, of whatever kind."""
        return self.retained.fits(name)

    def call(self, inputs: Iterable[str], path: str, token: str) -> str | None:
        """How to hand the renamed model at ``path`` back to its exporter, if the profile says."""
        names = list(inputs)
        for rule in self.feed_back:
            if any(rule.pattern.fits(name) for name in names):
                quoted = path.replace("\\", "\\\\").replace('"', '\\"')
                return _fill(rule.call, {"path": quoted, "token": token}, token)
        return None

    def normal_suffix(self, match: Match) -> str:
        """The suffix that consumers pair, for an output's own one."""
        suffix = match.parts.get("suffix", "")
        return self.suffixes.get(suffix, suffix)

    def rewrite(self, match: Match, token: str, *, normalize: bool = False) -> str:
        """The name with ``token`` in it, or with none.

        Raises :class:`RulesError` where the new name does not lead back to the
        same buffer, layer and token: it could not be undone.
        """
        parts = {**match.parts, "token": token}
        if normalize and "suffix" in parts:
            parts["suffix"] = self.normal_suffix(match)
        name = _fill(match.rule.templates[match.side], parts, token)
        again = match.rule.match(match.side, name)
        if again is None or (again.key, again.token) != (match.key, token):
            raise RulesError(
                f"the {match.side}_name template makes {name!r}, which no longer says "
                f"{match.buffer}, layer {match.layer}, token {token or 'none'}",
                hint=f"mend the {match.side}_name template in profile {self.name}",
            )
        return name


def token_fault(token: str) -> str | None:
    """What is wrong with a token, if anything.

    Consumers read the layer up to the next underscore, and the compiler looks
    for ``_RetainedState`` at the end, so neither may stand in a token.
    """
    if not token:
        return "is empty"
    if not re.fullmatch("[A-Za-z0-9]+", token):
        return "may hold ASCII letters and digits only"
    if "RetainedState" in token:
        return "may not contain RetainedState"
    if len(token) > MAX_TOKEN:
        return f"is longer than {MAX_TOKEN} characters"
    return None


def parse(text: str, name: str) -> Rules:
    """A profile from its TOML text; ``name`` is what messages call it.

    Raises :class:`RulesError` naming the key at fault.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise RulesError(f"not TOML: {error}", path=name) from None
    reader = _Reader(data, name)
    kv = tuple(_kv_rule(table) for table in reader.tables("kv"))
    if not kv:
        raise reader.fault("kv", "there is no [[kv]] rule")
    keep = tuple(_keep_rule(table) for table in reader.tables("keep"))
    reader.text("description", "")
    rules = Rules(
        name=name,
        kv=kv,
        keep=keep,
        retained=reader.pattern("retained"),
        suffixes=reader.mapping("suffixes"),
        feed_back=tuple(_feed_back(table) for table in reader.tables("feed_back")),
        sets=_sets(reader.table("set"), {kind for rule in kv for kind in rule.kinds}),
    )
    reader.done()
    return rules


def _keep_rule(table: _Reader) -> KeepRule:
    rule = KeepRule(table.text("reason"), table.pattern("pattern"))
    table.done()
    return rule


def _feed_back(table: _Reader) -> FeedBack:
    rule = FeedBack(table.pattern("input"), table.template("call", {"path", "token"}))
    table.done()
    return rule


def _kv_rule(table: _Reader) -> KvRule:
    kinds = {kind: tuple(names) for kind, names in table.lists("kinds").items()}
    if not any(kinds.values()):
        raise table.fault("kinds", "names no buffer")
    patterns = {side: table.pattern(side, {"buffer", "layer"}) for side in _SIDES}
    templates = {
        side: table.template(f"{side}_name", {"token", *dict(patterns[side].groups)})
        for side in _SIDES
    }
    table.done()
    return KvRule(patterns, templates, kinds)


def _sets(table: _Reader, kinds: set[str]) -> SetRule:
    parts = tuple(_part(part) for part in table.tables("parts"))
    seam = table.text("seam_output", ""), table.text("seam_input", "")
    if any(seam) and not all(seam):
        raise table.fault("seam_input" if seam[0] else "seam_output", "is missing")
    shared, apart = table.texts("shared"), table.texts("apart")
    for kind in apart:
        if kind not in kinds:
            raise table.fault("apart", f"{kind} is no kind of a [[kv]] rule")
    table.done()
    return SetRule(parts, seam if all(seam) else None, shared, frozenset(apart))


def _part(table: _Reader) -> PartRule:
    stage = table.text("stage")
    if stage not in STAGES:
        raise table.fault("stage", f"must be one of {', '.join(STAGES)}")
    file = table.pattern("file", {"first"} if stage == PREFIXED else {"first", "end"})
    folder = table.pattern("folder") if "folder" in table.left else None
    table.done()
    return PartRule(stage, file, folder)


def _fill(template: str, parts: Mapping[str, str], token: str) -> str:
    text = _OPTIONAL.sub(lambda found: found[1] if token else "", template)
    return _TEMPLATE.sub(lambda found: parts[found[1]], text)


class _Reader:
    """A TOML table that names what is missing, wrong, or not known."""

    def __init__(self, table: Mapping[str, Any], name: str, where: str = "") -> None:
        self.left = dict(table)
        self.name = name
        self.where = where

    def fault(self, key: str, what: str) -> RulesError:
        return RulesError(f"{self.where}{key}: {what}", path=self.name)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.left.pop(key, default)
        if value is None:
            raise self.fault(key, "is missing")
        if not isinstance(value, kind):
            raise self.fault(key, f"must be a {kind.__name__}, not {type(value).__name__}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.take(key, str, default))

    def mapping(self, key: str) -> dict[str, str]:
        table = self.take(key, dict, {})
        if not all(isinstance(value, str) for value in table.values()):
            raise self.fault(key, "must map text to text")
        return dict(table)

    def lists(self, key: str) -> dict[str, list[str]]:
        table = self.take(key, dict)
        for value in table.values():
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.fault(key, "must map a kind to a list of buffer names")
        return dict(table)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.take(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise self.fault(key, "must be a list of text")
        return tuple(values)

    def table(self, key: str) -> _Reader:
        return _Reader(self.take(key, dict, {}), self.name, f"{key}.")

    def tables(self, key: str) -> list[_Reader]:
        tables = self.take(key, list, [])
        if not all(isinstance(table, dict) for table in tables):
            raise self.fault(key, f"must be tables, written [[{key}]]")
        where = f"{self.where}{key}"
        return [_Reader(table, self.name, f"{where}[{at}].") for at, table in enumerate(tables)]

    def pattern(self, key: str, groups: frozenset[str] | set[str] = frozenset()) -> Pattern:
        text = self.text(key)
        try:
            pattern = expression(text)
        except ValueError as error:
            raise self.fault(key, str(error)) from None
        for group in sorted(groups - set(dict(pattern.groups))):
            raise self.fault(key, f"has no group (?P<{group}>…)")
        return pattern

    def template(self, key: str, groups: set[str]) -> str:
        text = self.text(key)
        for found in _TEMPLATE.finditer(_OPTIONAL.sub(r"\1", text)):
            if found[2]:
                raise self.fault(key, f"has a {found[2]} that belongs to no {{group}} or [part]")
            if found[1] not in groups:
                raise self.fault(key, f"{{{found[1]}}} is no group of the pattern")
        return text

    def done(self) -> None:
        for key in self.left:
            raise self.fault(key, "is not known here")
