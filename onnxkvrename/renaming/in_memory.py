"""Rename a model in memory: bytes in, bytes out, with the checks of a file."""

from __future__ import annotations

from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import CheckError, Finding
from onnxkvrename.model.file import join_pieces, read_model_signature, sum_piece_sizes
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.renaming.output_path import check_result_size
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.kv_model import scan_model, splice_model
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules

_NO_PATH = Path("<memory>")


def rename_in_memory(data: bytes, change: TokenChange, rules: Rules) -> bytes:
    """Return the bytes of the renamed model.

    External data is neither read nor changed: the bytes do not say where it is.

    Args:
        data: A serialized ModelProto.
        change: The token to add or remove.
        rules: The rules that recognize KV names.

    Raises:
        CheckError: A check refuses the model; its ``findings`` say why.
        ModelError: The bytes are not a readable model, or would become too many.
        RulesError: The token or the rules cannot be used.
    """
    check_token_change(change)
    source = ByteSource.from_bytes(data)
    scanned = scan_model(
        source, read_model_signature(source), _NO_PATH, rules, change, data_beside=None
    )
    model = scanned.model
    (set_findings,) = check_models_together([model], rules, change, check_current_tokens=False)
    _refuse_errors((*model.findings, *set_findings))
    name_map = model.plan.name_map
    if not name_map and not (change.strip and model.stamp is not None):
        return data
    pieces, expected = splice_model(source, scanned, drops_stamp=model.stamp is not None)
    check_result_size(sum_piece_sizes(pieces))
    result = join_pieces(source, pieces)
    if read_signature(ByteSource.from_bytes(result)) != expected:
        raise ModelError(
            "the result did not read back as planned",
            hint="this is a bug in onnxkvrename: please report it",
        )
    return result


def _refuse_errors(findings: tuple[Finding, ...]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        subject = f"{first.subject} " if first.subject else ""
        more = f" and {len(errors) - 1} more errors" if len(errors) > 1 else ""
        raise CheckError(f"{first.code}: {subject}{first.message}{more}", findings, hint=first.hint)
