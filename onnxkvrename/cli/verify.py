"""The command ``verify``: proves that each KV buffer is retained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import click

from onnxkvrename.api.arguments import choose_rules
from onnxkvrename.cli.files import check_one_model
from onnxkvrename.cli.options import declare_command, parse_dim_sizes
from onnxkvrename.cli.output import print_answer, print_choice
from onnxkvrename.errors import KvRenameError
from onnxkvrename.options import (
    DIM,
    VERBOSE,
    Format,
    GroupWindows,
    Jobs,
    Models,
    Option,
    Pairs,
    Profile,
    Quiet,
    RulesFile,
    Strict,
)
from onnxkvrename.qefficient.export_cache import check_cache_state
from onnxkvrename.renaming.parallel import map_ordered, open_executor
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.report.verify_text import build_verify_answer
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.patterns import Pattern, compile_pattern
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import ProfileChoice, Rules
from onnxkvrename.storage.read import is_directory, read_status
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    verify_model,
    verify_window_sets,
)


class VerifyArguments(NamedTuple):
    """What a user asks for with ``verify``."""

    models: Models = ()
    token: Annotated[
        str | None,
        Option("--prefix", "Also: this token is on every pair, and nowhere else.", "TOKEN"),
    ] = None
    select: Annotated[
        str | None,
        Option(
            "--select",
            "Also: this expression matches the names of all KV buffers, and no others.",
            "REGEX",
        ),
    ] = None
    run: Annotated[
        bool, Option("--run", "Also: run the retention loop in onnxruntime (extra [run]).")
    ] = False
    reference: Annotated[
        Path | None,
        Option(
            "--reference",
            "With --run: this model must give the very same results, as the one before a rename "
            "does.",
            "FILE",
            needs="run",
        ),
    ] = None
    dims: Annotated[
        tuple[str, ...],
        DIM._replace(
            help="With --run: the size of a symbolic dimension, e.g. ctx_len=32; others are those "
            "of a specializations.json with the model, or guessed.",
            needs="run",
        ),
    ] = ()
    renamed_from: Annotated[
        Path | None,
        Option(
            "--renamed-from",
            "Also: except for the names of KV buffers, this model is SOURCE to the byte, whatever "
            "tool renamed it; shows the first other difference. The order of functions, "
            "initializers and the like does not count. In a directory, the model with the same "
            "path.",
            "SOURCE",
        ),
    ] = None
    compare_data: Annotated[
        bool,
        Option(
            "--compare-data",
            "With --renamed-from: external data have the same SHA-256, too, and not only the same "
            "references.",
            needs="renamed_from",
        ),
    ] = False
    group_windows: GroupWindows = True
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    pairs: Pairs = None
    jobs: Jobs = None
    output_format: Format = "text"
    quiet: Quiet = False
    verbose: Annotated[
        bool, VERBOSE._replace(help="Show each buffer, and where it is updated.")
    ] = False


@declare_command(
    "verify",
    VerifyArguments,
    "Exit codes: 0 all holds; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
def command(arguments: VerifyArguments) -> int:
    """Prove that every KV buffer is retained, in the models as they are; write nothing.

    Beside all checks of a rename: each retained output is computed from its own
    input, through subgraphs and local functions; onnx's checker accepts the
    model; external data are there. Weights are not read.
    """
    models, profile = _verify_models(arguments)
    answer = build_verify_answer(models, profile, quiet=arguments.quiet, verbose=arguments.verbose)
    return print_answer(answer, arguments.output_format)


def _verify_models(arguments: VerifyArguments) -> tuple[tuple[VerifiedModel, ...], ProfileChoice]:
    """Verify each model, then the windows of a set together, by the profile that is named."""
    request = _build_request(arguments)
    paths = [job.model for job in find_jobs(arguments.models)]
    sources = _find_sources(paths, arguments)
    if request.reference is not None:
        check_one_model("--reference is for one model", [str(path) for path in paths])
    rules = choose_rules(arguments, paths, arguments.token)
    is_wanted = arguments.output_format == "text" and not arguments.quiet
    print_choice(rules.choice, is_wanted=is_wanted)
    verify = partial(_verify_with_source, rules=rules, request=request)
    with open_executor(None, arguments.jobs, len(paths)) as executor:
        models = tuple(map_ordered(verify, [*sources.items()], executor, is_read_only=True))
    _check_dims(models, request)
    return verify_window_sets(models, rules, request), rules.profile_choice


def _verify_with_source(
    item: tuple[Path, Path | None], rules: Rules, request: VerifyRequest
) -> VerifiedModel:
    path, source = item
    return verify_model(path, rules, request._replace(renamed_from=source))


def _find_sources(paths: Sequence[Path], arguments: VerifyArguments) -> dict[Path, Path | None]:
    """Return for each model the one of ``--renamed-from``; in a directory, by its relative path.

    Raises:
        KvRenameError: There is no such model, or it is one file for several models.
    """
    source = arguments.renamed_from
    if source is None or not is_directory(source):
        if source is not None and len(paths) > 1:
            raise KvRenameError(
                f"--renamed-from names one model, but {len(paths):,} are verified",
                hint="pass the directory of their sources",
            )
        return dict.fromkeys(paths, source)
    sources: dict[Path, Path | None] = {}
    for path in paths:
        typed = next(each for each in arguments.models if each == path or each in path.parents)
        found = source / (path.name if typed == path else path.relative_to(typed))
        if read_status(found) is None:
            hint = "models are matched by their paths below the directories"
            raise KvRenameError(f"no source of {path}", path=str(found), hint=hint)
        sources[path] = found
    return sources


def _build_request(arguments: VerifyArguments) -> VerifyRequest:
    if arguments.token is not None:
        check_token_change(TokenChange(arguments.token))
    return VerifyRequest(
        token=arguments.token,
        select_pattern=None if arguments.select is None else _parse_select(arguments.select),
        run_in_onnxruntime=arguments.run,
        reference=arguments.reference,
        renamed_from=arguments.renamed_from,
        compare_data=arguments.compare_data,
        dims=parse_dim_sizes(arguments.dims),
        strict=arguments.strict,
        group_windows=arguments.group_windows,
        checks=(check_cache_state,),
    )


def _parse_select(text: str) -> Pattern:
    try:
        return compile_pattern(text)
    except ValueError as error:
        raise click.UsageError(f"--select {text!r} {error}") from None


def _check_dims(models: tuple[VerifiedModel, ...], request: VerifyRequest) -> None:
    """Raise :class:`click.UsageError` for a size that no run had a use for."""
    symbols = {symbol for model in models if model.run is not None for symbol in model.run.dims}
    unknown = [symbol for symbol in request.dims if symbol not in symbols]
    if symbols and unknown:
        raise click.UsageError(
            f"--dim {unknown[0]}: no model has that dimension, but {', '.join(sorted(symbols))}"
        )
