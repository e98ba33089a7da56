"""Arguments of the public functions: each is checked by its annotation; errors name it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args

from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.find import check_is_local
from onnxkvrename.files.read import MemoryFile, ModelSource, read_status
from onnxkvrename.options import find_conflict, list_options
from onnxkvrename.rules.load import AUTO_PROFILE, list_profiles
from onnxkvrename.rules.load import load_rules as load
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import SidecarPolicy

if TYPE_CHECKING:
    from onnx import ModelProto

PathLike = str | os.PathLike[str]
ModelLike = Union[PathLike, bytes, "ModelProto"]
"""A model: its path, or for one in memory the serialized model or the ``onnx.ModelProto``, of
which external data is neither read nor checked."""
RulesLike = Rules | str | os.PathLike[str] | None
"""Rules, the name of a profile, or the path of a rules file; ``"auto"`` for the profile that knows
the models' names, ``None`` for the profile qeff, or the one that knows the names if qeff does not.
"""
_Request = TypeVar("_Request")
_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")
_PATH = "a path (str or os.PathLike)"
_MODEL = "a path (str or os.PathLike), bytes or an onnx.ModelProto"
_BYTES = (bytes, bytearray, memoryview)
_OUTPUTS = ("output", "directory")
"""The arguments whose paths are written."""


def load_rules(rules: RulesLike = None) -> Rules:
    """Return the rules of a profile or of a rules file.

    Args:
        rules: The name of a profile, the path of a rules file, or rules, which are returned
            as they are. ``None`` for the profile ``qeff``.

    Returns:
        The rules, for the argument ``rules`` of the other functions.

    Raises:
        RulesError: The profile or file does not exist or cannot be used.
        ModelError: It cannot be determined if there is such a file.
        TypeError: The argument has the wrong type.

    Examples:
        >>> rules = onnxkvrename.load_rules("huggingface")
        >>> onnxkvrename.inspect("model.onnx", rules=rules).buffers
        ()
    """
    arguments = read_arguments(load_rules, locals())
    return find_rules(arguments["profile"], arguments["rules"])


def find_rules(
    profile: str | None,
    rules: Path | Rules | None,
    paths: Sequence[ModelSource] = (),
) -> Rules:
    """Return the rules that a request asks for, or that know the names of the models.

    Args:
        profile: A profile; ``None`` for the default one, or another one that knows the names.
        rules: Rules to use instead, or a file of them.
        paths: The models, in files or in memory, and directories of models; without any, the
            names do not count.

    Raises:
        RulesError: They cannot be used, or several profiles know the names equally well.
        ModelError: A path does not exist, or a model cannot be read.
    """
    if isinstance(rules, Rules):
        return rules
    if not paths:
        return load(profile, rules)
    from onnxkvrename.rules.pick import pick_rules  # a rename needs it only where qeff fails

    return pick_rules(paths, profile, rules)


def speak_python(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Make a public function name arguments where its findings and errors name options."""

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        from onnxkvrename.api.wording import reword_result  # the command has no use for it

        try:
            result: _Result = reword_result(function(*args, **kwargs), call)
            return result
        except KvRenameError as error:
            reword_result(error, call)
            raise

    return call


def read_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a public function as the rest of the program takes them.

    A path becomes a `Path`, several a tuple, and ``rules`` the `profile` and the `rules` of a
    request. Nothing is read yet.

    Args:
        function: The function, whose annotations say what each argument may be.
        values: Its arguments by their names: its ``locals()``, before all else.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A path is empty or that of a directory, or a number is less than 1.
        ModelError: A path to be read is a URL, or it cannot be determined if a file is there.
        WriteError: A path to be written is a URL.
    """
    read: dict[str, Any] = {}
    kinds = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    for number, (name, kind) in enumerate(kinds.items()):
        is_optional = kind.endswith(" | None")
        if is_optional and values[name] is None:
            read[name] = None
            continue
        argument = _Argument(name, function.__name__ if number == 0 else "", is_optional)
        if kind == "RulesLike":
            read["profile"], read["rules"] = _read_rules(argument, values[name])
        else:
            read[name] = _READERS[kind.removesuffix(" | None")](argument, values[name])
    return read


def build_request(
    record: Callable[..., _Request], arguments: Mapping[str, Any], **fields: Any
) -> _Request:
    """Return the request that the arguments of a public function make.

    Args:
        record: The request, a named tuple.
        arguments: What :func:`read_arguments` returns; others than fields are ignored.
        fields: Further fields, which no argument sets.

    Raises:
        ValueError: Arguments contradict each other, or one requires another.
    """
    defaults = getattr(record, "_field_defaults", {})
    given = {
        name: value
        for name, value in arguments.items()
        if name in defaults and name not in fields and value not in (None, defaults[name])
    }
    conflict = find_conflict(list_options(record), given)
    if conflict is not None:
        name, other, is_missing, why = conflict
        if is_missing:
            other = f"{other}=True" if isinstance(defaults[other], bool) else other
            raise ValueError(f"{name} requires {other}{why}")
        raise ValueError(f"{name} and {other} cannot be used together{why}")
    return record(**given, **fields)


def find_graph_library(value: object) -> str:
    """Return the library whose live model a value is; empty for none. It is loaded already."""
    for library, kind in (("onnx_graphsurgeon", "Graph"), ("onnx_ir", "Model")):
        module = sys.modules.get(library)
        is_function = isinstance(value, getattr(module, "Function", ()))
        if isinstance(value, getattr(module, kind, ())) and not is_function:
            return library
    return ""


class _Argument(NamedTuple):
    """An argument.

    Attributes:
        name: Its name, for messages.
        function: The function whose model it is; empty for another argument.
        is_optional: Whether it may be `None`.
    """

    name: str
    function: str = ""
    is_optional: bool = False

    def require(self, is_right: bool, value: object, expected: str) -> None:
        """Raise :class:`TypeError` for a value of the wrong type; a class is not a value of it."""
        if is_right and not isinstance(value, type):
            return
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        accepted = f"{expected} or None" if self.is_optional else expected
        raise TypeError(f"{self.name} must be {accepted}, not {kind}{self._suggest(value)}")

    def _suggest(self, value: object) -> str:
        """Return a hint for a model in another form than the function takes."""
        renames = self.function.startswith("rename")
        if not self.function or isinstance(value, type):
            return ""
        if isinstance(value, _BYTES) and renames:
            return "; rename_bytes renames a serialized model"
        if find_graph_library(value):
            return "; rename_graph renames a live graph" if renames else "; export it to one"
        if hasattr(value, "SerializeToString") and renames and self.function != "rename_model":
            return "; rename_model renames a ModelProto"
        is_path = isinstance(value, (str, os.PathLike))
        return "; rename renames a model in a file" if renames and is_path else ""


def _is_model_proto(value: object) -> bool:
    # A gs.Graph logs an error for each attribute that it does not have.
    return hasattr(type(value), "SerializeToString") and hasattr(value, "graph")


_PLAIN_TYPES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("a str", lambda value: isinstance(value, str)),
    "bytes": ("bytes", lambda value: isinstance(value, _BYTES)),
    "ModelProto": ("an onnx.ModelProto", _is_model_proto),
    "Graph | Model": (
        "an onnx_graphsurgeon.Graph or an onnx_ir.Model",
        lambda value: bool(find_graph_library(value)),
    ),
    "Executor": ("a concurrent.futures.Executor", lambda value: hasattr(value, "submit")),
}
"""Arguments that are passed on as they are, by their annotations: the type in words, and a test."""


def _read_plain(argument: _Argument, value: object, kind: str) -> Any:
    name, includes = _PLAIN_TYPES[kind]
    argument.require(includes(value), value, name)
    return value


def _read_sidecar_policy(argument: _Argument, value: object) -> str:
    choices = get_args(SidecarPolicy)
    policy: str = _read_plain(argument, value, "str")
    if policy not in choices:
        raise ValueError(f"{argument.name} must be one of {', '.join(choices)}, not {value!r}")
    return policy


def _read_path(argument: _Argument, value: object, expected: str = _PATH) -> Path:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    argument.require(isinstance(text, str), value, expected)
    if not text:  # it would mean the working directory
        raise ValueError(f"{argument.name} must not be an empty path")
    check_is_local(text, is_output=argument.name in _OUTPUTS)
    if argument.name == "output" and os.path.basename(text) in ("", ".", ".."):
        raise ValueError(
            f"output must be the path of a file, not of a directory such as {text!r}; "
            "rename_all writes into a directory"
        )
    return Path(text)


def _read_model(argument: _Argument, value: Any, expected: str = _MODEL) -> ModelSource:
    if isinstance(value, _BYTES):
        return MemoryFile(argument.name, bytes(value))
    if not isinstance(value, type) and _is_model_proto(value):
        return MemoryFile(argument.name, value.SerializeToString())
    return _read_path(argument, value, expected)


def _read_models(argument: _Argument, values: Any) -> tuple[ModelSource, ...]:
    is_model = isinstance(values, _BYTES) or _is_model_proto(values)
    return (_read_model(argument, values),) if is_model else _read_paths(argument, values)


def _read_paths(argument: _Argument, values: Any) -> tuple[Path, ...]:
    if isinstance(values, (str, os.PathLike)):
        return (_read_path(argument, values),)
    is_data = isinstance(values, _BYTES) or hasattr(values, "read")
    are_several = isinstance(values, Iterable) and not is_data
    argument.require(are_several, values, "a path or several (str or os.PathLike)")
    each = argument._replace(name=f"each of {argument.name}")
    paths = tuple(_read_path(each, value) for value in values)
    if not paths:
        raise ValueError(f"{argument.name} must not be empty")
    return paths


def _read_rules(argument: _Argument, rules: object) -> tuple[str | None, Path | Rules | None]:
    if rules is None or isinstance(rules, Rules):
        return None, rules
    if isinstance(rules, str) and (rules == AUTO_PROFILE or rules in list_profiles()):
        return rules, None
    expected = "Rules, the name of a profile or the path of a rules file"
    path = _read_path(argument, rules, expected)
    if isinstance(rules, str) and not path.suffix and read_status(path) is None:
        return rules, None  # the error for a name lists the profiles
    return None, path


def _read_sizes(argument: _Argument, sizes: Any) -> Mapping[str, int]:
    argument.require(isinstance(sizes, Mapping), sizes, "a mapping of symbols to sizes")
    for symbol, size in sizes.items():
        _read_plain(_Argument(f"each key of {argument.name}"), symbol, "str")
        _check_positive(_Argument(f"{argument.name}[{symbol!r}]"), size)
    return dict(sizes)


def _check_positive(argument: _Argument, value: Any) -> None:
    argument.require(isinstance(value, int) and not isinstance(value, bool), value, "an int")
    if value < 1:
        raise ValueError(f"{argument.name} must be 1 or more, not {value}")


def _read_layout(argument: _Argument, layout: object) -> object:
    from onnxkvrename.layout.layout import Layout  # not for a rename
    from onnxkvrename.layout.load import LoadedLayout

    if isinstance(layout, (LoadedLayout, Layout)):
        return layout
    return _read_model(argument, layout, f"a LoadedLayout, a Layout, {_MODEL}")


_READERS: Mapping[str, Callable[[_Argument, Any], Any]] = {
    **{kind: partial(_read_plain, kind=kind) for kind in _PLAIN_TYPES},
    "SidecarPolicy": _read_sidecar_policy,
    "PathLike": _read_path,
    "PathLike | Iterable[PathLike]": _read_paths,
    "ModelLike": _read_model,
    "ModelLike | Iterable[PathLike]": _read_models,
    "Mapping[str, int]": _read_sizes,
    "LoadedLayout | Layout | ModelLike": _read_layout,
}
"""How to read an argument, by its annotation."""
