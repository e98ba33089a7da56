"""QEfficient's export cache: where an export with the token is looked for.

An export stands in ``NAME-HASH/`` together with the parameters that the hash was
taken of. The parameters of the same export with a token follow from those without,
and so does its directory: a renamed model put there is found, not exported again.

After quic/efficient-transformers: ``utils/hash_utils.py`` (``create_export_hash``),
``utils/_utils.py`` (``create_json``), ``utils/export_utils.py`` (``export_wrapper``),
``base/modeling_qeff.py`` (``_export_layerwise``) and the ``export`` methods of
``transformers/models/modeling_auto.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.qefficient.find_export import PARAMS_FILE
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import Rules

Params = Mapping[str, Any]
"""The parameters of an export as :func:`parse` gives them, in the file's order."""

_DIRECTORY = re.compile(r"(?s)(.+)-([0-9a-f]{16})")
_MAX_DEPTH, _MAX_DIGITS = 100, 1000
_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep"
_CLASS, _TOKEN = "qeff_auto_class", "kv_cache_prefix"
_PLAIN, _EMBEDDED = "input_ids", "inputs_embeds"
# QEFFAutoModelForCausalLM.export alone writes the token into what is hashed.
_KEYED = "QEFFAutoModelForCausalLM"
_TAKING = {
    _KEYED,
    "QEffCausalLMForTextImageToTextModel",
    "_QEFFAutoModelForImageTextToTextSingleQPC",
}
_ENCODER = "QEffVisionEncoderForTextImageToTextModel"
# What apply_kv_cache_prefix puts the token into, as its tests in test_model_quickcheck.py tell.
_BUFFERS = re.compile(
    r"(?:past_key|past_value|compressed_kv|k_pe|conv_state|recurrent_state)\.[0-9]+"
    r"(?:_[A-Za-z0-9]+)?_(?:Internal)?RetainedState"
)
_ELSEWHERE = "-d DIR writes the renamed model elsewhere, to be handed over by compile(onnx_path=…)"


class Entry(NamedTuple):
    """An export of which the hash follows from the parameters.

    ``layerwise`` tells that it follows only with ``input_ids`` in the dynamic axes,
    where ``params`` have ``inputs_embeds``: the windows of a layerwise export change
    the parameters between hashing and saving them.
    """

    name: str
    hash: str
    params: Params
    layerwise: bool = False

    @property
    def directory(self) -> str:
        """What the directory of the export is called."""
        return f"{self.name}-{self.hash}"


def parse(text: str, path: str) -> Params:
    """The parameters in a JSON file; ``path`` is what messages call it.

    Raises :class:`ModelError` for what QEfficient does not write: text that is no
    JSON or could be read in two ways, and values of another type.
    """
    try:
        params = _loaded(text)
    except ValueError as error:
        fault: str | None = str(error)
    else:
        fault = _wrong_type(params)
    if fault is not None:
        raise ModelError(fault, path=path, hint="export again: QEfficient writes this file")
    return dict(params)


def text_of(params: Params) -> str:
    """The parameters as QEfficient writes them to a file, in the order they have."""
    import json

    return json.dumps(params, allow_nan=False, indent=4, separators=(",", ":"))


def digest(params: Params) -> str:
    """The hash that QEfficient takes of these parameters: 16 hexadecimal digits.

    They count in their own order. QEfficient sorts them, but before numbers among
    the keys become text: ``10`` comes after ``9`` in its files, and so it does here.
    """
    import hashlib
    import json

    text = json.dumps(params, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def named(directory: str) -> tuple[str, str] | None:
    """Name and hash, if a directory is called like one of the cache."""
    found = _DIRECTORY.fullmatch(directory)
    return (found[1], found[2]) if found else None


def recognise(directory: str, params: Params) -> Entry | None:
    """The export in a directory of that name, or ``None`` if its hash cannot be reproduced."""
    found = named(directory)
    if found is None:
        return None
    if digest(params) == found[1]:
        return Entry(*found, params)
    if digest(_put_back(params)) == found[1]:
        return Entry(*found, params, layerwise=True)
    return None


def seeded(entry: Entry, rules: Rules, wish: Wish) -> Entry:
    """Where QEfficient looks for the same export after renaming, and with what parameters.

    The same entry where nothing changes. Raises :class:`RulesError` where a template
    does not lead back to its name.
    """
    params = retold(entry.params, rules, wish)
    hashed = _put_back(params) if entry.layerwise else params
    return entry._replace(hash=digest(hashed), params=params)


def retold(params: Params, rules: Rules, wish: Wish) -> Params:
    """The parameters of the same export after renaming.

    Only output names tell of the token, and keep their suffix whatever becomes of it
    in the model; dynamic axes have the names of an export without one.
    """
    export = params["export_params"]
    names = [_renamed(name, rules, wish) for name in export["output_names"]]
    told = {**params, "export_params": {**export, "output_names": names}}
    if params.get(_CLASS) == _KEYED and _tokens(names, rules) == {wish.target}:
        if wish.target:
            told[_TOKEN] = wish.target
        elif told.get(_TOKEN):
            del told[_TOKEN]
        return dict(sorted(told.items()))
    return told


def token_refusal(params: Params, rules: Rules) -> str | None:
    """Why QEfficient would never look for this export with a token, if so."""
    owner = params.get(_CLASS)
    if owner == _ENCODER:
        return "a vision encoder keeps no KV cache: its export is the same with any token"
    if owner not in _TAKING:
        which = owner or (
            "PEFT models" if params.get("peft_config") else "models of no known class"
        )
        return f"QEfficient takes no token for {which}, so it would not look for this export"
    names = params["export_params"]["output_names"]
    known = [(name, rules.match("output", name) is not None) for name in names]
    odd = [name for name, kv in known if kv != (_BUFFERS.fullmatch(name) is not None)]
    if odd:
        return f"QEfficient has rules of its own for what is KV, and they differ on {listed(odd)}"
    return None


def unrecognised(directory: str, params: Params) -> Finding:
    """KV401, saying in what name and parameters of a directory differ."""
    found = named(directory)
    if found is None:
        message = "is not called NAME-HASH like a directory of QEfficient's export cache"
    else:
        message = f"does not have the hash that {PARAMS_FILE} gives, {digest(params)}"
    return finding("KV401", directory, message, _ELSEWHERE)


def reused(model: str, directory: str, params: Params, rules: Rules, wish: Wish) -> Finding | None:
    """KV402, if a model renamed in place would be taken for the export that stands there.

    ``model`` is the file's name. It is in order if its directory is none of the cache,
    or if the parameters have the names that the model will have.
    """
    if named(directory) is None or retold(params, rules, wish) == params:
        return None
    tokens = sorted(_tokens(params["export_params"]["output_names"], rules) - {""})
    kind = f"with the token {listed(tokens)}" if tokens else "without a token"
    return finding(
        "KV402",
        model,
        f"stands in QEfficient's cache as an export {kind}: a later one of that kind "
        "would take the renamed model without exporting",
        _ELSEWHERE
        if token_refusal(params, rules)
        else "--seed-cache puts it where QEfficient looks for it under its new names",
    )


def occupied(directory: str, *, same: bool = False) -> Finding:
    """KV403: there is something where an export is to be put, or one of the ``same`` parameters."""
    return finding(
        "KV403",
        directory,
        "is where QEfficient looks for the renamed export, and holds "
        + ("one already" if same else "something else"),
        "move that directory away, or use what it holds",
    )


def _put_back(params: Params) -> Params:
    """The parameters as they were hashed, if a layerwise export changed them afterwards."""
    export = params["export_params"]
    axes = dict(export.get("dynamic_axes") or {})
    if _EMBEDDED not in axes or _PLAIN in axes:
        return params
    axes[_PLAIN] = axes.pop(_EMBEDDED)
    return {**params, "export_params": {**export, "dynamic_axes": dict(sorted(axes.items()))}}


def _renamed(name: str, rules: Rules, wish: Wish) -> str:
    match = rules.match("output", name)
    if match is None or not wish.yields(match.token):
        return name
    return rules.rewrite(match, wish.target)


def _tokens(names: Sequence[str], rules: Rules) -> set[str]:
    matches = (rules.match("output", name) for name in names)
    return {match.token for match in matches if match is not None}


def _loaded(text: str) -> Any:
    """What a JSON text holds. Raises ValueError, saying why it is not taken."""
    import json

    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"has the key {key[:60]!r} twice")
        found[key] = value
    return found


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"has a number of {len(text):,} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"has the number {text[:60]}, which is too large")
    return value


def _constant(text: str) -> None:
    raise ValueError(f"has {text}, which is no JSON")


def _too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    return bool(level)


def _wrong_type(params: Any) -> str | None:
    """The first value that is not of the type that QEfficient writes, if any."""
    if not isinstance(params, dict):
        return "must hold an object"
    export = params.get("export_params")
    if not isinstance(export, dict):
        return "export_params must be an object"
    names = export.get("output_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "export_params.output_names must be a list of text"
    if any("\ud800" <= letter <= "\udfff" for name in names for letter in name):
        return "export_params.output_names has a name that no ONNX file can hold"
    if not isinstance(export.get("dynamic_axes"), (dict, type(None))):
        return "export_params.dynamic_axes must be an object"
    for key in (_CLASS, _TOKEN):
        if not isinstance(params.get(key), (str, type(None))):
            return f"{key} must be text"
    return None
