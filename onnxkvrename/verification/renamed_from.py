"""Prove that a model is another one with new names of KV buffers, and nothing else.

The source is renamed once more, without writing it, and the result compared with the given
model: at the speed of reading both, whatever tool has made it. Only where bytes differ are
the two compared as messages, to tell what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.external_data import DataFile, open_data_file
from onnxkvrename.model.file import (
    OpenModel,
    build_spliced_source,
    open_model,
    read_pieces,
    sum_piece_sizes,
)
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import KvModel, ScannedModel, scan_model, splice_model
from onnxkvrename.rules.plan import RenamePlan, TokenChange, list_parts_in_functions
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import ModelSource, is_content_of, read_chunks
from onnxkvrename.verification.message_diff import compare_models

Equality = Literal["bytes", "content", "different"]

_CONTENT_HINT = (
    "check that SOURCE is what this model was made from; then rename SOURCE again: the tool that "
    "wrote this file changed more than names"
)
_ENCODING = "some tags, lengths or numbers are encoded in a different way"
_ENCODING_HINT = "all readers see the same model; only the encoding of its bytes differs"


@show_briefly
class RenameProof(NamedTuple):
    """The comparison of a model with the source that it is renamed from.

    Attributes:
        source: The path of the source.
        token: The token of the model; empty for none.
        names: The names that changed, new by old.
        equal: Whether the model has the bytes of the renamed source, the same content
            written in another way, or another content.
        reordered: What is found by its name and comes in another order, such as ``functions``,
            by its place in the schema; empty where the content is another one.
        data_sha256: The SHA-256 of each file of external data, by its location, where both
            sides have the same; `None` where only the references were compared.
    """

    source: str
    token: str
    names: Mapping[str, str]
    equal: Equality
    reordered: tuple[str, ...]
    data_sha256: Mapping[str, str | None]


def prove_renamed(
    path: ModelSource, source_path: Path, rules: Rules, *, compare_data: bool
) -> tuple[RenameProof, tuple[Finding, ...]]:
    """Prove that a model is the renamed source, to the byte, or say what differs.

    Another order of what is found by its name is not a difference: functions, initializers, value
    infos, metadata.

    Args:
        path: The model.
        source_path: The model before its names were changed.
        rules: The rules that recognize KV names and how a token goes into them.
        compare_data: Compare the contents of external data, not only the references.

    Returns:
        The proof, and findings: KV121 for the first place with another content, or else KV122
        if nothing is but written otherwise, and KV121 for external data.

    Raises:
        ModelError: One of the files cannot be read, or is not a model.
        RulesError: A template of the rules makes names that could not be undone.
    """
    with open_model(path) as result, open_model(source_path) as source:
        data_beside = result.data_beside if compare_data else None
        own_path, signature = result.file.path, result.signature
        model = scan_model(result.source, signature, own_path, rules, data_beside=data_beside).model
        scanned = _plan_source(model, result.source, source, rules, check_data=compare_data)
        pieces, _ = splice_model(source.source, scanned)
        findings = list(_find_refusals(scanned.model))
        reordered: tuple[str, ...] = ()
        expected = read_pieces(source.file, pieces)
        has_same_bytes = is_content_of(result.file, sum_piece_sizes(pieces), expected)
        if not has_same_bytes:
            expected_model = build_spliced_source(source.source, pieces)
            difference, reordered = compare_models(expected_model, result.source)
            if difference is not None:
                findings.append(build_finding("KV121", *difference, _CONTENT_HINT))
            elif not reordered:
                findings.append(build_finding("KV122", "", _ENCODING, _ENCODING_HINT))
    locations = scanned.model.data_locations
    digests: Mapping[str, str | None] = dict.fromkeys(locations)
    if compare_data:
        digests, data_findings = _compare_data_files(locations, scanned.model, model)
        findings += data_findings
    is_different = any(finding.code == "KV121" for finding in findings)
    equality: Equality = "different" if is_different else "bytes" if has_same_bytes else "content"
    plan = scanned.model.plan
    token = plan.token_change.final_token
    names = {**plan.name_map, **plan.function_name_map, **plan.name_map}
    return (
        RenameProof(str(source_path), token, names, equality, reordered, digests),
        tuple(findings),
    )


def _plan_source(
    model: KvModel, result: ByteSource, source: OpenModel, rules: Rules, *, check_data: bool
) -> ScannedModel:
    """Plan the change of token that leads from the source to the names of a model.

    Names in local functions change if the model has a new one there; some tools leave them.
    """
    token = model.plan.token_change.token
    in_graph = rules._replace(renames_in_functions=False)
    scans = []
    for normalize, used in product((False, True), (rules, in_graph)):
        change = TokenChange(token, strip=not token, replace=True, normalize=normalize)
        scanned = scan_model(
            source.source,
            source.signature,
            source.file.path,
            used,
            change,
            data_beside=source.file if check_data else None,
        )
        plan = scanned.model.plan
        new_signature = source.signature.apply_name_map(plan.name_map, scanned.symbols)
        if new_signature == model.signature and _has_names_in_functions(result, plan, used):
            return scanned
        scans.append(scanned)
    return scans[0]


def _has_names_in_functions(result: ByteSource, plan: RenamePlan, rules: Rules) -> bool:
    """Return whether a model has a new name in a local function, if any name changes there."""
    new_names = plan.function_name_map.values()
    if not new_names:
        return True
    found = find_occurrences(result, (), list_parts_in_functions(plan, rules))
    return not found.names_in_functions.isdisjoint(new_names)


def _find_refusals(source: KvModel) -> Iterator[Finding]:
    """Yield a finding for each reason why the source cannot have these names."""
    for finding in source.findings:
        if finding.code == "KV201" and finding.severity == "error":
            yield build_finding(
                "KV121", finding.name, f"cannot be renamed: {finding.message}", finding.hint
            )


def _compare_data_files(
    locations: Sequence[str], source: KvModel, result: KvModel
) -> tuple[dict[str, str | None], list[Finding]]:
    """Return the digest of each file that both sides have, and a finding for each other one."""
    digests: dict[str, str | None] = {}
    findings = []
    sides = [{file.location: file for file in model.data_files} for model in (source, result)]
    for location in locations:
        files = [side.get(location) for side in sides]
        values = [None if file is None else _hash_file(file) for file in files]
        digests[location] = values[0] if values[0] == values[1] else None
        if None in values:
            missing = (source, result)[values.index(None)].path
            message = f"cannot be compared: the data of {missing} is missing or not readable"
            findings.append(build_finding("KV121", location, message, "put it beside the model"))
        elif values[0] != values[1]:
            findings.append(
                build_finding(
                    "KV121",
                    location,
                    f"differs from the data of the source: SHA-256 {values[1]}, "
                    f"in the source {values[0]}",
                    "copy the data of the source beside this model",
                )
            )
    return digests, findings


def _hash_file(file: DataFile) -> str:
    digest = hashlib.sha256()
    with open_data_file(file) as opened:
        for chunk in read_chunks(opened, 0, opened.size):
            digest.update(chunk)
    return digest.hexdigest()
