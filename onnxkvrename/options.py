"""Options: what a command line says of the fields of a request.

A request is a named tuple of which the fields are what a user can ask for. A field that a command
line sets is ``Annotated`` with its :class:`Option`: that is its only declaration. The command and
its help are made from it (:mod:`onnxkvrename.cli.options`), and the library fills the same fields.
"""

# Annotations here are values, which are read again: to evaluate them twice takes time.
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from onnxkvrename.text import quote_path, quote_word

_NO_RESULT = {"jobs", "dask", "output_format", "quiet", "verbose", "check", "dry_run"}
"""Fields that change no result: how the work is done, what is shown, and whether to write."""
SIDES = ("prefill", "decode")
"""The sides of a hand-off, for which a value may be given with ``SIDE:`` in front."""


class Option(NamedTuple):
    """How a field is set on the command line; the type of the field says what its values are.

    A bool is a flag, a tuple may be repeated, and a path is read unless `writes` says otherwise.

    Attributes:
        flags: Its spellings, as in ``-o --output``; empty for an argument.
        help: What it does; ``{names}`` is about all of `names`.
        metavar: What the help calls a value.
        section: The heading of this option and those that follow it in the help.
        names: A key of ``onnxkvrename.cli.options.NAMES``, which lists its values; empty for none.
        choices: The only values; empty if there are others.
        most: The largest number; the smallest is 1.
        writes: What becomes of a path that is not read.
        is_required: Whether the command needs it.
        shows_default: Whether the help shows the default.
        needs: Fields of which one must be set, or it has no meaning.
        excludes: Fields that cannot be set together with it.
        why: The reason for `needs` or `excludes`, for the message; empty where it is plain.
        envvar: The environment variable that sets it where nothing is typed.
        yields_to: Fields that, if typed, make the variable count for nothing, as those do that
            exclude it.
        is_main: Whether the help of the program itself shows it.
    """

    flags: str
    help: str = ""
    metavar: str | None = None
    section: str = ""
    names: str = ""
    choices: Sequence[str] = ()
    most: int | None = None
    writes: Literal["", "file", "directory"] = ""
    is_required: bool = False
    shows_default: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    why: str = ""
    envvar: str | None = None
    yields_to: tuple[str, ...] = ()
    is_main: bool = False


class Example(NamedTuple):
    """A command line that the help shows, and that the tests run.

    Attributes:
        line: The command line.
        meaning: What it does.
    """

    line: str
    meaning: str


class Conflict(NamedTuple):
    """Two fields that cannot be set together, or one without which another has no meaning.

    Attributes:
        name: The field that is set.
        other: The other field; of several that would do, the first.
        is_missing: Whether the other field would have to be set, and is not.
        why: The reason, after a colon; empty where it is plain.
    """

    name: str
    other: str
    is_missing: bool
    why: str


@cache
def read_hints(request: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a request, with their options."""
    return get_type_hints(request, include_extras=True)


def list_options(request: Any) -> Mapping[str, Option]:
    """Return the options of a request by its fields, in their order."""
    return {
        name: detail
        for name, hint in read_hints(request).items()
        for detail in get_args(hint)[1:]
        if isinstance(detail, Option)
    }


def format_command(command: str, request: Any) -> str:
    """Return the command line that asks for what a request says, each word quoted for a shell.

    It writes what a request with ``--check`` only looks for. What a variable gave is an option, as
    another machine lacks the variable.

    Args:
        command: The name of the command; empty for ``rename``, which needs none.
        request: The request, with its models.
    """
    words = ["onnxkvrename", *command.split(), *(quote_path(str(path)) for path in request.models)]
    for name, option in list_options(type(request)).items():
        value = getattr(request, name)
        if not option.flags or name in _NO_RESULT or value == request._field_defaults[name]:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words.append(option.flags.split()[0])
            if not isinstance(item, bool):
                quote = quote_path if isinstance(item, Path) else quote_word
                words.append(quote(str(item)))
    return " ".join(words)


def find_conflict(options: Mapping[str, Option], given: Collection[str]) -> Conflict | None:
    """Return the first conflict among fields that a user sets; ``None`` without one."""
    for name, option in options.items():
        why = f": {option.why}" if option.why else ""
        if name in given:
            for other in option.excludes:
                if other in given:
                    return Conflict(name, other, False, why)
            if option.needs and not any(other in given for other in option.needs):
                return Conflict(name, option.needs[0], True, why)
    return None


FULL_TRANSFER = Option(
    "--full-transfer",
    "The consumer transfers all of each buffer, whatever the prompt: "
    "VLLM_QAIC_USE_FULL_KV_TRANSFER=1 is set on both sides.",
)
FullTransferOfTarget = Annotated[
    bool,
    FULL_TRANSFER._replace(
        help=FULL_TRANSFER.help.replace("The consumer", "With --target: it"), needs=("target",)
    ),
]
DIM = Option(
    "--dim", "The size of a symbolic dimension, e.g. ctx_len=4096. May be repeated.", "SYMBOL=SIZE"
)
TARGET = Option(
    "--target",
    "The consumer, one of: {names}.",
    "NAME",
    names="consumers",
    shows_default=True,
    envvar="ONNXKVRENAME_TARGET",
)
PAGE = Option("--html", "Also write an HTML page.", "FILE", writes="file")
ReplacedByPage = Annotated[
    bool, Option("--force", "With --html: replace any file, not only a page.")
]
FORMAT = Option(
    "--format",
    "Output format: {names}.",
    "FORMAT",
    names="formats",
    shows_default=True,
    envvar="ONNXKVRENAME_FORMAT",
)
JOBS = Option(
    "--jobs",
    "Number of processes; by default one for each core, if there are enough models.",
    "N",
    most=10_000,
    envvar="ONNXKVRENAME_JOBS",
)

Models = Annotated[tuple[Path, ...], Option("", metavar="MODEL...")]
Strict = Annotated[
    bool, Option("--strict", "Treat warnings as errors.", envvar="ONNXKVRENAME_STRICT")
]
Profile = Annotated[
    str | None,
    Option(
        "--profile",
        "Rules for the names of buffers: {names} (the profile that matches). By default qeff, or "
        "the profile that matches if qeff does not.",
        "NAME",
        names="profiles, auto",
        excludes=("rules",),
        envvar="ONNXKVRENAME_PROFILE",
    ),
]
RULES = Option(
    "--rules",
    "Your own rules, in TOML like a profile.",
    "FILE",
    excludes=("profile",),
    envvar="ONNXKVRENAME_RULES",
)
RulesFile = Annotated[Path | None, RULES]
Jobs = Annotated[int | None, JOBS]
Format = Annotated[str, FORMAT]
Quiet = Annotated[
    bool, Option("-q --quiet", "Print findings and errors only.", excludes=("verbose",))
]
VERBOSE = Option("-v --verbose", "Show every finding.", excludes=("quiet",))
Verbose = Annotated[bool, VERBOSE]
