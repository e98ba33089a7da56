"""An independent reference for a rename: parse with onnx, map names in the messages, compare.

It shares no code with the program. A result must read as the model with its names mapped, and
taking the token out again must give back the bytes of the original.
"""

from __future__ import annotations

from random import Random

from google.protobuf.message import DecodeError
from models import defined, patched
from onnx import ModelProto

from onnxkvrename import KvRenameError, load_rules, rename_bytes

TOKEN, RULES = "VLLM", load_rules()


def find_mistake(raw: bytes) -> tuple[str, str | None]:
    """Rename a model and take the token out again.

    Returns:
        What became of it (``refused``, ``unchanged`` or ``renamed``), and what is wrong with
        that, if anything is.
    """
    try:
        result = rename_bytes(raw, TOKEN, rules=RULES)
    except KvRenameError as error:
        text = str(error)
        return "refused", None if "\n" not in text and "bug" not in text else f"says {text!r}"
    expected = read_expected(raw)
    if is_readable(raw) != is_readable(result):
        return "renamed", "protobuf reads the result, or the original, alone"
    if expected is not None and ModelProto.FromString(result) != expected:
        return "renamed", "the result is not the model with its names mapped"
    if result == raw:
        return "unchanged", None
    return "renamed", _find_mistake_in_undo(raw, result)


def _find_mistake_in_undo(raw: bytes, result: bytes) -> str | None:
    """Return what is wrong with taking the token out of a result and putting it in again."""
    if rename_bytes(result, TOKEN, rules=RULES) != result:
        return "a second rename changes the result"
    try:
        undone = rename_bytes(result, strip=True, rules=RULES)
    except KvRenameError as error:
        return f"the token cannot be taken out: {error}"
    return None if undone == raw else "taking the token out does not give back the original"


def is_readable(raw: bytes) -> bool:
    """Return whether protobuf reads a model."""
    try:
        ModelProto.FromString(raw)
    except DecodeError:
        return False
    return True


def read_model(raw: bytes) -> ModelProto | None:
    """Return a model, or ``None`` if protobuf reads none, or names that are not text."""
    try:
        model = ModelProto.FromString(raw)
        for value in (*model.graph.input, *model.graph.output):
            value.name.encode()
    except (DecodeError, UnicodeDecodeError, TypeError, AttributeError):
        return None
    return model


def read_expected(raw: bytes) -> ModelProto | None:
    """Return the expected result; ``None`` if protobuf can read no model, or no names.

    What is not looked at is not judged: damage outside of names is copied, and a model that
    nobody can read stays one.
    """
    try:
        model = ModelProto.FromString(raw)
        result = patched(model, list_symbols(model))
        _restore_hidden_bindings(model, result)
    except (DecodeError, UnicodeDecodeError, TypeError):  # names that are bytes
        return None
    return result


def _restore_hidden_bindings(model: ModelProto, result: ModelProto) -> None:
    """Undo the change of bindings of training whose names belong to the training graphs."""
    for before, after in zip(model.training_info, result.training_info, strict=True):
        own = {
            "key": defined(before.algorithm),
            "update": defined(before.algorithm),
            "initialization": defined(before.initialization),
        }
        for kind in ("update", "initialization"):
            pairs = zip(
                getattr(before, f"{kind}_binding"), getattr(after, f"{kind}_binding"), strict=True
            )
            for old, new in pairs:
                if new.key != old.key and old.key in own["key"]:
                    new.key = old.key
                if new.value != old.value and old.value in own[kind]:
                    new.value = old.value


def list_symbols(model: ModelProto) -> dict[str, str]:
    """Return the symbols that torch derives from the names of renamed outputs, mapped."""
    symbols = {}
    for value in model.graph.output:
        head, end, rest = value.name.rpartition("_RetainedState")
        if not end or rest:
            continue
        operators = [node.op_type for node in model.graph.node if value.name in node.output]
        for operator in ("", *operators[-1:]):
            for axis in range(20):
                old = f"{operator}{value.name}_dim_{axis}"
                symbols[old] = f"{operator}{head}_{TOKEN}{end}_dim_{axis}"
    return symbols


def damage_bytes(raw: bytes, random: Random) -> bytes:
    """Change, cut, double or move some bytes."""
    data = bytearray(raw)
    for _ in range(random.choice([1, 1, 2, 4])):
        start, size = random.randrange(len(data) + 1), random.choice([1, 1, 2, 8, 64])
        part = data[start : start + size]
        kind = random.randrange(5)
        if kind == 0 and part:
            data[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[start : start + size]
        elif kind == 2:
            data[start:start] = part
        elif kind == 3:
            data[start : start + size] = random.randbytes(len(part))
        else:
            position = random.randrange(len(data) + 1)
            data[position:position] = part
    return bytes(data)
