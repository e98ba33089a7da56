"""QEfficient's export cache: the directory and the parameters of an export with a token.

An export is in ``NAME-HASH/``, together with the parameters that the hash was computed from.
The parameters of the same export with a token follow from those without, and so does the
directory: QEfficient finds a renamed model there, and does not export again.

The rules are those of https://github.com/quic/efficient-transformers:
``utils/hash_utils.py`` (``create_export_hash``), ``utils/_utils.py`` (``create_json``),
``utils/export_utils.py`` (``export_wrapper``), ``base/modeling_qeff.py``
(``_export_layerwise``) and the ``export`` methods of ``transformers/models/modeling_auto.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from onnxkvrename.documents import ObjectReader, UnreadableTextError, parse_json
from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import read_text_file
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_TEXT_BYTES
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import PARAMS_FILE, split_directory_name
from onnxkvrename.text import format_list, quote_path

ExportParams = Mapping[str, Any]
"""The parameters of an export as :func:`parse_export_params` returns them, in the file's order."""

_CLASS_KEY, _TOKEN_KEY = "qeff_auto_class", "kv_cache_prefix"
_IDS_AXIS, _EMBEDDINGS_AXIS = "input_ids", "inputs_embeds"
# Only QEFFAutoModelForCausalLM.export writes the token into the hashed parameters.
_CAUSAL_LM_CLASS = "QEFFAutoModelForCausalLM"
_CLASSES_WITH_TOKEN = {
    _CAUSAL_LM_CLASS,
    "QEffCausalLMForTextImageToTextModel",
    "_QEFFAutoModelForImageTextToTextSingleQPC",
}
_VISION_ENCODER_CLASS = "QEffVisionEncoderForTextImageToTextModel"
# The names into which apply_kv_cache_prefix puts the token, according to its tests in
# test_model_quickcheck.py.
_QEFFICIENT_KV_PATTERN = (
    r"(?:past_key|past_value|compressed_kv|k_pe|conv_state|recurrent_state)\.[0-9]+"
    r"(?:_[A-Za-z0-9]+)?_(?:Internal)?RetainedState"
)
WEIGHTS_FILE = "weight_spec.json"
"""The file in which a weight-free export says which weights its inputs are."""


class CacheEntry(NamedTuple):
    """An export whose hash follows from its parameters.

    Attributes:
        name: The first part of the directory's name.
        hash: The second part, 16 hexadecimal digits.
        params: The parameters.
        is_layerwise: True if the hash follows only with ``input_ids`` in the dynamic axes
            where `params` have ``inputs_embeds``: a layerwise export changes its parameters
            after it has computed the hash, and before it saves them.
    """

    name: str
    hash: str
    params: ExportParams
    is_layerwise: bool = False

    @property
    def directory_name(self) -> str:
        """The name of the export's directory."""
        return f"{self.name}-{self.hash}"

    @property
    def output_names(self) -> list[str]:
        """The outputs in the parameters."""
        return list(self.params["export_params"]["output_names"])


def parse_export_params(text: str, path: str) -> ExportParams:
    """Return the parameters in a JSON text; messages name the path.

    Raises:
        ModelError: QEfficient does not write such a text: it is not strict JSON, or a value
            has another type.
    """
    try:
        params = parse_json(text)
        if not isinstance(params, dict):
            raise UnreadableTextError("must hold an object")
        _check_types(ObjectReader(params))
    except UnreadableTextError as error:
        hint = "export the model again: QEfficient writes this file"
        raise ModelError(str(error), path=path, hint=hint) from None
    return params


def read_export_params(directory: Path) -> ExportParams:
    """Return the parameters of the export in a directory.

    Raises:
        ModelError: The file cannot be read, or QEfficient does not write such a file.
    """
    path = directory / PARAMS_FILE
    return parse_export_params(read_text_file(path, MAX_TEXT_BYTES), str(path))


def find_checkpoint(weights: bytes) -> str:
    """Return the name, beside the model, of the checkpoint of a list of weights; empty for none.

    After QEfficient's exporter/weight_free/export.py (``link_prepared_checkpoint_dir``).
    """
    with suppress(UnicodeDecodeError, UnreadableTextError):
        content = ObjectReader(parse_json(weights.decode("utf-8")))
        name = Path(content.read_string("model_id")).name
        return "" if name == os.pardir else name
    return ""


def render_export_params(params: ExportParams) -> str:
    """Return the text of the file, as QEfficient writes it, with the keys in their order."""
    import json

    return json.dumps(params, allow_nan=False, indent=4, separators=(",", ":"))


def compute_export_hash(params: ExportParams) -> str:
    """Return the hash that QEfficient computes from parameters: 16 hexadecimal digits.

    The keys are hashed in their order. QEfficient sorts them before numbers among them become
    text: ``10`` follows ``9`` in its files, and so it does here.
    """
    import hashlib
    import json

    text = json.dumps(params, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def identify_export(directory: str, params: ExportParams) -> CacheEntry | None:
    """Return the export in a directory of that name, if its hash can be reproduced."""
    name_and_hash = split_directory_name(directory)
    if name_and_hash is None:
        return None
    name, directory_hash = name_and_hash
    if compute_export_hash(params) == directory_hash:
        return CacheEntry(name, directory_hash, params)
    if compute_export_hash(_restore_hashed_params(params)) == directory_hash:
        return CacheEntry(name, directory_hash, params, is_layerwise=True)
    return None


def build_renamed_entry(entry: CacheEntry, rules: Rules, change: TokenChange) -> CacheEntry:
    """Return the entry under which QEfficient looks for the same export after the rename.

    It is an equal one if no name changes.

    Raises:
        RulesError: A template makes a name that cannot be changed back.
    """
    params = rename_export_params(entry.params, rules, change)
    hashed = _restore_hashed_params(params) if entry.is_layerwise else params
    return entry._replace(hash=compute_export_hash(hashed), params=params)


def rename_export_params(params: ExportParams, rules: Rules, change: TokenChange) -> ExportParams:
    """Return the parameters of the same export after the rename.

    Only output names show the token. They keep their suffix, even if it changes in the
    model. Dynamic axes have the names of an export without a token.
    """
    export = params["export_params"]
    names = [_rename_output(name, rules, change) for name in export["output_names"]]
    renamed = {**params, "export_params": {**export, "output_names": names}}
    is_causal_lm = params.get(_CLASS_KEY) == _CAUSAL_LM_CLASS
    if is_causal_lm and collect_tokens(names, rules) == {change.final_token}:
        if change.final_token:
            renamed[_TOKEN_KEY] = change.final_token
        elif renamed.get(_TOKEN_KEY):
            del renamed[_TOKEN_KEY]
        return dict(sorted(renamed.items()))
    return renamed


def explain_token_refusal(params: ExportParams, rules: Rules) -> str | None:
    """Return why QEfficient never looks for this export with a token, ``None`` if it does."""
    model_class = params.get(_CLASS_KEY)
    if model_class == _VISION_ENCODER_CLASS:
        return "QEfficient keeps one export of a vision encoder for all tokens, with plain names"
    if model_class not in _CLASSES_WITH_TOKEN:
        models = model_class or (
            "PEFT models" if params.get("peft_config") else "models of no known class"
        )
        return (
            f"QEfficient does not accept a token for {models}, so it would never look for this "
            "export"
        )
    different = [
        name
        for name in params["export_params"]["output_names"]
        if (rules.match("output", name) is None)
        is not (re.fullmatch(_QEFFICIENT_KV_PATTERN, name) is None)
    ]
    if different:
        return (
            "QEfficient uses its own rules to decide what is KV, and they disagree on "
            f"{format_list(different)}"
        )
    return None


def build_elsewhere_hint(directories: Iterable[Path]) -> str:
    """Return how to rename exports that belong together outside of the cache, and no others."""
    paths = " ".join(quote_path(str(directory)) for directory in directories)
    return (
        f"for {paths} alone, `-d renamed` writes the result elsewhere, to be passed to "
        "compile(onnx_path=…)"
    )


def build_unrecognized_finding(directory: Path, params: ExportParams) -> Finding:
    """Return KV401 for a directory whose name does not follow from its parameters."""
    if split_directory_name(directory.name) is None:
        message = "is not named NAME-HASH, as a directory of QEfficient's export cache is"
    else:
        message = f"does not have the hash that {PARAMS_FILE} gives, {compute_export_hash(params)}"
    return build_finding("KV401", directory.name, message, build_elsewhere_hint([directory]))


def build_occupied_finding(directory: str) -> Finding:
    """Return KV403 for an existing directory at the new path of an export."""
    message = "is where QEfficient will look for the renamed export, and already holds something"
    return build_finding("KV403", directory, f"{message} else", "move that directory away")


def _restore_hashed_params(params: ExportParams) -> ExportParams:
    """Return the parameters that a layerwise export hashed before it changed them."""
    export = params["export_params"]
    axes = dict(export.get("dynamic_axes") or {})
    if _EMBEDDINGS_AXIS not in axes or _IDS_AXIS in axes:
        return params
    axes[_IDS_AXIS] = axes.pop(_EMBEDDINGS_AXIS)
    return {**params, "export_params": {**export, "dynamic_axes": dict(sorted(axes.items()))}}


def _rename_output(name: str, rules: Rules, change: TokenChange) -> str:
    match = rules.match("output", name)
    if match is None or not change.can_replace(match.token):
        return name
    return rules.rename(match, change.final_token)


def collect_tokens(names: Sequence[str], rules: Rules) -> set[str]:
    """Return the tokens in the names of KV outputs; an empty one is none."""
    matches = (rules.match("output", name) for name in names)
    return {match.token for match in matches if match is not None}


def _check_types(params: ObjectReader) -> None:
    """Raise `UnreadableTextError` for a value that does not have the type QEfficient writes."""
    export = params.read_object("export_params")
    names = export.read_strings("output_names")
    if any("\ud800" <= char <= "\udfff" for name in names for char in name):
        raise export.build_error("output_names", "has a name that an ONNX file cannot hold")
    if not export.is_null("dynamic_axes"):
        export.read_object("dynamic_axes")
    for key in (_CLASS_KEY, _TOKEN_KEY):
        if not params.is_null(key):
            params.read_string(key)
