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
from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.qefficient.find_export import PARAMS_FILE
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules

ExportParams = Mapping[str, Any]
"""The parameters of an export as :func:`parse` gives them, in the file's order."""

_DIRECTORY_PATTERN = re.compile(r"(?s)(.+)-([0-9a-f]{16})")
_MAX_DEPTH, _MAX_DIGITS = 100, 1000
_TOO_DEEP_MESSAGE = f"is nested more than {_MAX_DEPTH} levels deep"
_CLASS, _TOKEN = "qeff_auto_class", "kv_cache_prefix"
_PLAIN, _EMBEDDED = "input_ids", "inputs_embeds"
# QEFFAutoModelForCausalLM.export alone writes the token into what is hashed.
_CAUSAL_LM_CLASS = "QEFFAutoModelForCausalLM"
_CLASSES_WITH_TOKEN = {
    _CAUSAL_LM_CLASS,
    "QEffCausalLMForTextImageToTextModel",
    "_QEFFAutoModelForImageTextToTextSingleQPC",
}
_VISION_ENCODER_CLASS = "QEffVisionEncoderForTextImageToTextModel"
# What apply_kv_cache_prefix puts the token into, as its tests in test_model_quickcheck.py tell.
_QEFFICIENT_KV_PATTERN = re.compile(
    r"(?:past_key|past_value|compressed_kv|k_pe|conv_state|recurrent_state)\.[0-9]+"
    r"(?:_[A-Za-z0-9]+)?_(?:Internal)?RetainedState"
)
_OUTPUT_DIRECTORY_HINT = (
    "-d DIR writes the renamed model elsewhere, to be handed over by compile(onnx_path=…)"
)


class CacheEntry(NamedTuple):
    """An export of which the hash follows from the parameters.

    ``layerwise`` tells that it follows only with ``input_ids`` in the dynamic axes,
    where ``params`` have ``inputs_embeds``: the windows of a layerwise export change
    the parameters between hashing and saving them.
    """

    name: str
    hash: str
    params: ExportParams
    layerwise: bool = False

    @property
    def directory_name(self) -> str:
        """What the directory of the export is called."""
        return f"{self.name}-{self.hash}"


def parse_export_params(text: str, path: str) -> ExportParams:
    """The parameters in a JSON file; ``path`` is what messages call it.

    Raises :class:`ModelError` for what QEfficient does not write: text that is no
    JSON or could be read in two ways, and values of another type.
    """
    try:
        params = _parse_json(text)
    except ValueError as error:
        fault: str | None = str(error)
    else:
        fault = _find_wrong_type(params)
    if fault is not None:
        raise ModelError(fault, path=path, hint="export again: QEfficient writes this file")
    return dict(params)


def render_export_params(params: ExportParams) -> str:
    """The parameters as QEfficient writes them to a file, in the order they have."""
    import json

    return json.dumps(params, allow_nan=False, indent=4, separators=(",", ":"))


def compute_export_hash(params: ExportParams) -> str:
    """The hash that QEfficient takes of these parameters: 16 hexadecimal digits.

    They count in their own order. QEfficient sorts them, but before numbers among
    the keys become text: ``10`` comes after ``9`` in its files, and so it does here.
    """
    import hashlib
    import json

    text = json.dumps(params, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def split_directory_name(directory: str) -> tuple[str, str] | None:
    """Name and hash, if a directory is called like one of the cache."""
    found = _DIRECTORY_PATTERN.fullmatch(directory)
    return (found[1], found[2]) if found else None


def identify_export(directory: str, params: ExportParams) -> CacheEntry | None:
    """The export in a directory of that name, or ``None`` if its hash cannot be reproduced."""
    found = split_directory_name(directory)
    if found is None:
        return None
    if compute_export_hash(params) == found[1]:
        return CacheEntry(*found, params)
    if compute_export_hash(_restore_hashed_params(params)) == found[1]:
        return CacheEntry(*found, params, layerwise=True)
    return None


def build_renamed_entry(entry: CacheEntry, rules: Rules, wish: TokenChange) -> CacheEntry:
    """Where QEfficient looks for the same export after renaming, and with what parameters.

    The same entry where nothing changes. Raises :class:`RulesError` where a template
    does not lead back to its name.
    """
    params = rename_export_params(entry.params, rules, wish)
    hashed = _restore_hashed_params(params) if entry.layerwise else params
    return entry._replace(hash=compute_export_hash(hashed), params=params)


def rename_export_params(params: ExportParams, rules: Rules, wish: TokenChange) -> ExportParams:
    """The parameters of the same export after renaming.

    Only output names tell of the token, and keep their suffix whatever becomes of it
    in the model; dynamic axes have the names of an export without one.
    """
    export = params["export_params"]
    names = [_rename_output(name, rules, wish) for name in export["output_names"]]
    told = {**params, "export_params": {**export, "output_names": names}}
    if params.get(_CLASS) == _CAUSAL_LM_CLASS and _collect_tokens(names, rules) == {
        wish.final_token
    }:
        if wish.final_token:
            told[_TOKEN] = wish.final_token
        elif told.get(_TOKEN):
            del told[_TOKEN]
        return dict(sorted(told.items()))
    return told


def explain_token_refusal(params: ExportParams, rules: Rules) -> str | None:
    """Why QEfficient would never look for this export with a token, if so."""
    owner = params.get(_CLASS)
    if owner == _VISION_ENCODER_CLASS:
        return "a vision encoder keeps no KV cache: its export is the same with any token"
    if owner not in _CLASSES_WITH_TOKEN:
        which = owner or (
            "PEFT models" if params.get("peft_config") else "models of no known class"
        )
        return f"QEfficient takes no token for {which}, so it would not look for this export"
    names = params["export_params"]["output_names"]
    known = [(name, rules.match("output", name) is not None) for name in names]
    odd = [name for name, kv in known if kv != (_QEFFICIENT_KV_PATTERN.fullmatch(name) is not None)]
    if odd:
        return (
            f"QEfficient has rules of its own for what is KV, and they differ on {format_list(odd)}"
        )
    return None


def build_unrecognized_finding(directory: str, params: ExportParams) -> Finding:
    """KV401, saying in what name and parameters of a directory differ."""
    found = split_directory_name(directory)
    if found is None:
        message = "is not called NAME-HASH like a directory of QEfficient's export cache"
    else:
        message = f"does not have the hash that {PARAMS_FILE} gives, {compute_export_hash(params)}"
    return build_finding("KV401", directory, message, _OUTPUT_DIRECTORY_HINT)


def check_export_reuse(
    model: str, directory: str, params: ExportParams, rules: Rules, wish: TokenChange
) -> Finding | None:
    """KV402, if a model renamed in place would be taken for the export that stands there.

    ``model`` is the file's name. It is in order if its directory is none of the cache,
    or if the parameters have the names that the model will have.
    """
    if (
        split_directory_name(directory) is None
        or rename_export_params(params, rules, wish) == params
    ):
        return None
    tokens = sorted(_collect_tokens(params["export_params"]["output_names"], rules) - {""})
    kind = f"with the token {format_list(tokens)}" if tokens else "without a token"
    return build_finding(
        "KV402",
        model,
        f"stands in QEfficient's cache as an export {kind}: a later one of that kind "
        "would take the renamed model without exporting",
        _OUTPUT_DIRECTORY_HINT
        if explain_token_refusal(params, rules)
        else "--seed-cache puts it where QEfficient looks for it under its new names",
    )


def build_occupied_finding(directory: str, *, same: bool = False) -> Finding:
    """KV403: there is something where an export is to be put, or one of the ``same`` parameters."""
    return build_finding(
        "KV403",
        directory,
        "is where QEfficient looks for the renamed export, and holds "
        + ("one already" if same else "something else"),
        "move that directory away, or use what it holds",
    )


def _restore_hashed_params(params: ExportParams) -> ExportParams:
    """The parameters as they were hashed, if a layerwise export changed them afterwards."""
    export = params["export_params"]
    axes = dict(export.get("dynamic_axes") or {})
    if _EMBEDDED not in axes or _PLAIN in axes:
        return params
    axes[_PLAIN] = axes.pop(_EMBEDDED)
    return {**params, "export_params": {**export, "dynamic_axes": dict(sorted(axes.items()))}}


def _rename_output(name: str, rules: Rules, wish: TokenChange) -> str:
    match = rules.match("output", name)
    if match is None or not wish.can_replace(match.token):
        return name
    return rules.rewrite_name(match, wish.final_token)


def _collect_tokens(names: Sequence[str], rules: Rules) -> set[str]:
    matches = (rules.match("output", name) for name in names)
    return {match.token for match in matches if match is not None}


def _parse_json(text: str) -> Any:
    """What a JSON text holds. Raises ValueError, saying why it is not taken."""
    import json

    try:
        value = json.loads(
            text,
            object_pairs_hook=_build_object,
            parse_int=_parse_integer,
            parse_float=_parse_float,
            parse_constant=_reject_constant,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP_MESSAGE) from None
    if _is_too_deep(value):
        raise ValueError(_TOO_DEEP_MESSAGE)
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"has the key {key[:60]!r} twice")
        found[key] = value
    return found


def _parse_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"has a number of {len(text):,} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"has the number {text[:60]}, which is too large")
    return value


def _reject_constant(text: str) -> None:
    raise ValueError(f"has {text}, which is no JSON")


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    return bool(level)


def _find_wrong_type(params: Any) -> str | None:
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
