"""A model as every command starts from it: read, planned and checked once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import OpenFile
from onnxkvrename.findings import Finding
from onnxkvrename.model.external_data import DataFile, find_data_files
from onnxkvrename.model.file import open_model, splice_payloads
from onnxkvrename.model.occurrences import Occurrences, find_occurrences
from onnxkvrename.model.proto_reader import read_export_info
from onnxkvrename.model.protobuf import ByteSource, Piece
from onnxkvrename.model.signature import Dim, ExportInfo, NameUses, Signature
from onnxkvrename.rules.checks import check_model
from onnxkvrename.rules.plan import (
    KvPair,
    RenamePlan,
    TokenChange,
    build_minimal_plan,
    build_rename_plan,
    list_parts_in_functions,
    map_function_names,
    rename_symbols,
)
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, PartPath

_MOVE_OPS = frozenset(("Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"))
"""Operators that may pass a buffer through, as an Identity does."""


class KvModel(NamedTuple):
    """A model that was read, planned and checked; it may travel between processes.

    Attributes:
        path: The model's path as the user gave it.
        signature: Graph inputs and outputs, as they are in the file.
        plan: The KV pairs, and the new name of each side.
        findings: Problems of the pairs, then of the external data.
        data_files: The usable files of external data, each once.
        data_locations: All locations that the model names, usable or not, each once.
        part: What the file's path says about a set of windows; ``None`` outside of sets.
        export: Who exported the model; read for parts of sets only.
        needs: The inputs that nothing in this graph writes, so that another model must.
        possible_needs: Inputs of which that has to be traced: what makes their outputs only
            moves a value, which need not be the input.
        is_apart: True if it does not matter which other model fills its buffers.
    """

    path: str
    signature: Signature
    plan: RenamePlan
    findings: tuple[Finding, ...] = ()
    data_files: tuple[DataFile, ...] = ()
    data_locations: tuple[str, ...] = ()
    part: PartPath | None = None
    export: ExportInfo | None = None
    needs: tuple[str, ...] = ()
    possible_needs: tuple[str, ...] = ()
    is_apart: bool = False

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """Where the external data lie that the model names, usable or not."""
        return locate_data(Path(self.path), self.data_locations)

    @property
    def pairs(self) -> tuple[KvPair, ...]:
        """The KV buffers: each input with its retained output."""
        return self.plan.pairs

    @property
    def tokens(self) -> frozenset[str]:
        """The tokens of the buffers' names; empty strings for names without one."""
        return frozenset(side.token for pair in self.pairs for side in pair.sides)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the graph outputs, as they are in the file."""
        return tuple(value.name for value in self.signature.outputs)

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of all graph inputs, then of all outputs."""
        return tuple(value.name for value in (*self.signature.inputs, *self.signature.outputs))

    @property
    def is_window(self) -> bool:
        """True if this is one window of a model rather than all of it."""
        return self.part is not None and self.part.name.stage != MERGED


class ScannedModel(NamedTuple):
    """A model together with where its names occur; valid while its file is open.

    The symbols are symbolic dimensions that follow a renamed output, old to new.
    """

    model: KvModel
    occurrences: Occurrences
    symbols: Mapping[str, str]


def scan_model(
    source: ByteSource,
    signature: Signature,
    path: Path,
    rules: Rules,
    change: TokenChange | None = None,
    *,
    data_beside: OpenFile | None,
) -> ScannedModel:
    """Plan and check an open model.

    Args:
        source: The bytes of the model.
        signature: What was read of it.
        path: The model's path.
        rules: The rules that recognize KV names.
        change: The token to add or remove. By default the model is planned as it is:
            the token that most of its names carry is the one to keep.
        data_beside: The open model, beside which its external data is looked for; ``None`` for
            a model whose data does not matter.

    Raises:
        ModelError: The bytes are not a readable model.
        RulesError: A rule makes names that could not be undone.
    """
    try:
        if change is None:
            plan = build_minimal_plan(signature, rules)
        else:
            plan = build_rename_plan(signature, rules, change)
    except ModelError as error:
        raise source.build_error(error.message, hint=error.hint) from None
    names = plan.old_names.union(plan.name_map, plan.name_map.values())
    occurrences = find_occurrences(source, names, list_parts_in_functions(plan, rules))
    in_functions = map_function_names(occurrences.names_in_functions, plan, rules)
    plan = plan._replace(function_name_map=in_functions)
    uses = occurrences.build_name_uses(plan.name_map, plan.function_name_map)
    references = occurrences.references
    data = tuple(find_data_files(references, data_beside)) if data_beside and references else ()
    part = rules.set_rule.parse_path(path.as_posix())
    model = KvModel(
        path=str(path),
        signature=signature,
        plan=plan,
        findings=(
            *check_model(signature, plan, uses),
            *(finding for finding in data if isinstance(finding, Finding)),
        ),
        data_files=tuple(file for file in data if isinstance(file, DataFile)),
        data_locations=tuple(dict.fromkeys(reference.location for reference in references)),
        part=part,
        export=None if part is None else read_export_info(source),
        needs=tuple(_find_needs(plan, uses, {"Identity"})),
        possible_needs=tuple(_find_needs(plan, uses, _MOVE_OPS)),
    )
    symbols = rename_symbols(uses.symbols, uses.producer_op_types, plan)
    return ScannedModel(model, occurrences, symbols)


def _find_needs(plan: RenamePlan, uses: NameUses, op_types: Set[str]) -> Iterator[str]:
    """Yield the inputs of attention that another model fills: their size has no symbol.

    Only in a model that names the context of other buffers is that no accident. One of the
    operators in `op_types` makes the output.
    """
    passed = [
        pair.input
        for pair in plan.pairs
        if pair.kind == "attention"
        and pair.input is not None
        and pair.output is not None
        and uses.producer_op_types.get(pair.output.old_name) in op_types
        and _is_context_fixed(pair.input.value.shape) is True
    ]
    if passed and any(_is_context_fixed(pair.sides[0].value.shape) is False for pair in plan.pairs):
        yield from (side.old_name for side in passed)


def _is_context_fixed(shape: tuple[Dim, ...] | None) -> bool | None:
    """Return whether axis 2 of a buffer of rank 4 is a number; ``None`` for other buffers."""
    if shape is None or len(shape) != 4 or shape[2] is None:
        return None
    return isinstance(shape[2], int)


def splice_model(source: ByteSource, scanned: ScannedModel) -> tuple[tuple[Piece, ...], Signature]:
    """Put the new names into a model.

    Args:
        source: The bytes of the model.
        scanned: Its plan, and the occurrences of its names.

    Returns:
        The pieces of the result, and the signature that reading it must give.
    """
    plan = scanned.model.plan
    name_map = plan.name_map
    edits = scanned.occurrences.build_edits(name_map, scanned.symbols, plan.function_name_map)
    pieces = splice_payloads(source, edits)
    return pieces, scanned.model.signature.apply_name_map(name_map, scanned.symbols)


def read_kv_model(path: Path, rules: Rules, *, check_data: bool = True) -> KvModel:
    """Read, plan and check a model as it is.

    With `check_data` it looks at the files of external data, too.

    Raises:
        ModelError: The file is not a readable model.
        RulesError: A rule makes names that could not be undone.
    """
    with open_model(path) as opened:
        data_beside = opened.file if check_data else None
        scanned = scan_model(opened.source, opened.signature, path, rules, data_beside=data_beside)
        return scanned.model


def locate_data(model: Path, locations: Iterable[str]) -> tuple[Path, ...]:
    """Return the paths of external data, without those that no file can have.

    The data lie beside the model, at the locations that it names.
    """
    return tuple(
        model.parent / location
        for location in locations
        if "\0" not in location and max(map(len, map(os.fsencode, location.split("/")))) < 256
    )
