"""The request of a rename: everything that a user asks for, in one record, and its command."""

# Annotations here are values, as in `onnxkvrename.options`.
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from onnxkvrename.options import (
    FORMAT,
    JOBS,
    RULES,
    VERBOSE,
    FullTransferOfTarget,
    Models,
    Option,
    Profile,
    Quiet,
    Strict,
    format_command,
)
from onnxkvrename.rules.checks import CONSUMER_TOKENS
from onnxkvrename.rules.load import name_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import find_cached_export

RULES_FILE = Path("rules.toml")
"""The file of rules in commands that are suggested."""
SidecarPolicy = Literal["auto", "off"]
"""What becomes of sidecars that are found: those that belong to the models follow, or all stay as
they are."""


class Request(NamedTuple):
    """What a user asks for with ``rename``: the command line and the library make one each.

    It goes with the models to all that reads, checks and writes them, also into other processes.
    """

    models: Models = ()
    token: Annotated[
        str | None,
        Option(
            "--prefix --token",
            "The token for every KV buffer, e.g. VLLM.",
            "TOKEN",
            section="Names",
            envvar="ONNXKVRENAME_PREFIX",
            yields_to=("target", "strip"),
            is_main=True,
        ),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "--target",
            "Use the token of this consumer (vllm-qaic has one, others need --prefix), and check "
            "that it can use the results. One of: {names}.",
            "NAME",
            names="consumers",
            envvar="ONNXKVRENAME_TARGET",
            yields_to=("token", "strip"),
            is_main=True,
        ),
    ] = None
    full_transfer: FullTransferOfTarget = False
    strip: Annotated[
        bool,
        Option(
            "--strip",
            "Remove the token; with --prefix only this one.",
            excludes=("replace",),
            is_main=True,
        ),
    ] = False
    replace: Annotated[bool, Option("--replace", "Replace a different token.")] = False
    normalize: Annotated[
        bool,
        Option(
            "--normalize",
            "Rename _InternalRetainedState outputs to _RetainedState, which consumers pair.",
        ),
    ] = False
    output: Annotated[
        Path | None,
        Option(
            "-o --output",
            "Write to FILE; creates its directory if missing.",
            "FILE",
            section="Result",
            writes="file",
            excludes=("directory",),
            why="-o names a file, -d a directory",
            is_main=True,
        ),
    ] = None
    directory: Annotated[
        Path | None,
        Option(
            "-d --directory",
            "Write the results below this directory, in the same layout.",
            "DIR",
            writes="directory",
            is_main=True,
        ),
    ] = None
    check: Annotated[
        bool, Option("--check", "Write nothing; exit 1 if a name would change.", is_main=True)
    ] = False
    dry_run: Annotated[
        bool, Option("-n --dry-run", "Plan and check everything, write nothing.", is_main=True)
    ] = False
    force: Annotated[
        bool,
        Option(
            "--force",
            "Overwrite existing and read-only files; write through symbolic and hard links; rename "
            "in place in QEfficient's cache.",
        ),
    ] = False
    sidecar: Annotated[
        tuple[Path, ...],
        Option(
            "--sidecar",
            "Also rename in this text file, which must belong to the model: custom_io.yaml, "
            "genai_config.json, node precisions. May be repeated.",
            "FILE",
            section="Files that repeat the names",
        ),
    ] = ()
    sidecars: Annotated[
        SidecarPolicy,
        Option(
            "--sidecars",
            "Such files beside the models: update those that belong to the models (auto), or "
            "update none and warn about those that are then out of date (off).",
            choices=get_args(SidecarPolicy),
            shows_default=True,
        ),
    ] = "auto"
    seed_cache: Annotated[
        bool,
        Option(
            "--seed-cache",
            "Put the renamed export where QEfficient's cache will look for it.",
            section="QEfficient's export cache",
            excludes=("output", "directory"),
            why="the cache decides names and places",
        ),
    ] = False
    verify: Annotated[
        bool,
        Option(
            "--verify",
            "Check each result as `onnxkvrename verify` does before it is put in place.",
            section="Checks and rules",
        ),
    ] = False
    strict: Strict = False
    profile: Profile = None
    rules: Annotated[Path | Rules | None, RULES] = None
    jobs: Annotated[
        int | None,
        JOBS._replace(section="Workers", excludes=("dask",)),
    ] = None
    dask: Annotated[
        str | None,
        Option(
            "--dask",
            "Use the workers of this Dask cluster, which must see the files.",
            "ADDRESS",
        ),
    ] = None
    output_format: Annotated[str, FORMAT._replace(section="Output")] = "text"
    quiet: Quiet = False
    verbose: Annotated[bool, VERBOSE._replace(help="Show every name and finding.")] = False

    @property
    def change(self) -> TokenChange:
        """The token to add or remove."""
        return TokenChange(self.token, self.strip, self.replace, self.normalize)

    @property
    def writes(self) -> bool:
        """Whether to write anything; otherwise only plan and check."""
        return not (self.check or self.dry_run)

    @property
    def read_files(self) -> tuple[Path, ...]:
        """What is read beside models and sidecars; no result may replace it."""
        return (self.rules,) if isinstance(self.rules, Path) else ()


def suggest_rename(request: Request, rules: Rules | None = None) -> str:
    """Return the hint to rename as a request asks.

    Where a rename in place is refused, in QEfficient's cache, it makes a renamed copy.

    Args:
        request: What is asked for.
        rules: As for :func:`format_rename`.
    """
    seeding = _seed_exports(request)
    command = f"`{format_rename(seeding, rules)}`"
    return command if seeding == request else f"{command} makes a renamed copy: then pass that"


def format_rename(request: Request, rules: Rules | Path | None = None) -> str:
    """Return the command that renames as a request asks, each word quoted for a shell.

    Args:
        request: What is asked for.
        rules: The rules that were chosen, which count if it asks for none; or a file of rules to
            use instead.
    """
    if isinstance(rules, Path):
        request = request._replace(profile=None, rules=rules)
    elif (request.profile or request.rules) is None:
        request = request._replace(rules=rules)
    if isinstance(request.rules, Rules):
        profile, path = name_rules(request.rules)
        request = request._replace(profile=profile, rules=path)
    token = request.token or ""
    if request.target and CONSUMER_TOKENS.get(token.lower()) == (token, request.target):
        request = request._replace(token=None)  # the target sets it by itself
    return format_command("", request)


def _seed_exports(request: Request) -> Request:
    """Return a request that seeds the exports that all its models are in, or else the request."""
    if request.output or request.directory or request.force:
        return request  # it does not rename in place, or may
    found = [find_cached_export(path) for path in request.models]
    exports = tuple(dict.fromkeys(path for path in found if path is not None))
    if not exports or None in found:
        return request
    return request._replace(models=exports, seed_cache=True)
