"""The command ``verify``: proves that each KV buffer is retained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_dim_option,
    add_format_option,
    add_jobs_option,
    add_models_argument,
    add_no_set_option,
    add_pairs_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_single_option,
    add_strict_option,
    add_verbose_option,
    check_one_model,
)
from onnxkvrename.cli.options.sizes import parse_dim_sizes
from onnxkvrename.cli.output import print_answer
from onnxkvrename.cli.requested_rules import pick_requested_rules
from onnxkvrename.errors import KvRenameError
from onnxkvrename.qefficient.find_export import check_cache_state
from onnxkvrename.renaming.parallel import map_ordered, open_executor
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.report.verify_text import build_verify_answer, verified_to_json
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


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    models: tuple[Path, ...]
    prefix: str | None
    select: str | None
    run: bool
    reference: Path | None
    renamed_from: Path | None
    compare_data: bool
    dims: tuple[str, ...]
    no_set: bool
    strict: bool
    profile: str | None
    rules: Path | None
    pairs: str | None
    jobs: int | None
    output_format: str
    quiet: bool
    verbose: bool


@click.command(
    "verify",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 all holds; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
@add_models_argument()
@add_single_option(
    "--prefix", metavar="TOKEN", help="Also: this token is on every pair, and nowhere else."
)
@add_single_option(
    "--select",
    metavar="REGEX",
    help="Also: this expression matches the names of all KV buffers, and no others.",
)
@click.option(
    "--run", is_flag=True, help="Also: run the retention loop in onnxruntime (extra [run])."
)
@add_single_option(
    "--reference",
    metavar="FILE",
    type=NonEmptyPath(path_type=Path),
    help="With --run: this model must give the very same results, as the one before a rename does.",
)
@add_dim_option(
    "With --run: the size of a symbolic dimension, e.g. ctx_len=32; others are those of a "
    "specializations.json with the model, or guessed."
)
@add_single_option(
    "--renamed-from",
    metavar="SOURCE",
    type=NonEmptyPath(path_type=Path),
    help="Also: except for the names of KV buffers, this model is SOURCE to the byte, whatever "
    "tool renamed it; shows the first other difference. The order of functions, initializers and "
    "the like does not count. In a directory, the model with the same path.",
)
@click.option(
    "--compare-data",
    is_flag=True,
    help="With --renamed-from: external data have the same SHA-256, too, "
    "and not only the same references.",
)
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_pairs_option()
@add_jobs_option()
@add_format_option()
@add_quiet_option()
@add_verbose_option("Show each buffer, and where it is updated.")
def command(**values: Any) -> int:
    """Prove that every KV buffer is retained, in the models as they are; write nothing.

    Beside all checks of a rename: each retained output is computed from its own
    input, through subgraphs and local functions; onnx's checker accepts the
    model; external data are there. Weights are not read.
    """
    arguments = _Arguments(**values)
    models, profile = _verify_models(arguments)
    answer = build_verify_answer(models, profile, quiet=arguments.quiet, verbose=arguments.verbose)
    return print_answer(answer, arguments.output_format)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    return verified_to_json((), code, error)


def _verify_models(arguments: _Arguments) -> tuple[tuple[VerifiedModel, ...], ProfileChoice]:
    """Verify each model, then the windows of a set together, by the profile that is named."""
    request = _build_request(arguments)
    paths = [job.model for job in find_jobs(arguments.models)]
    sources = _find_sources(paths, arguments)
    if request.reference is not None:
        check_one_model("--reference is for one model", [str(path) for path in paths])
    rules = pick_requested_rules(paths, arguments, arguments.prefix)
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


def _find_sources(paths: Sequence[Path], arguments: _Arguments) -> dict[Path, Path | None]:
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


def _build_request(arguments: _Arguments) -> VerifyRequest:
    if arguments.prefix is not None:
        check_token_change(TokenChange(arguments.prefix))
    dims = parse_dim_sizes(arguments.dims)
    if (arguments.reference or dims) and not arguments.run:
        raise KvRenameError("--reference and --dim are for --run", hint="add `--run`")
    if arguments.compare_data and arguments.renamed_from is None:
        raise click.UsageError("--compare-data is for --renamed-from")
    return VerifyRequest(
        token=arguments.prefix,
        select_pattern=None if arguments.select is None else _parse_select(arguments.select),
        run_in_onnxruntime=arguments.run,
        reference=arguments.reference,
        renamed_from=arguments.renamed_from,
        compare_data=arguments.compare_data,
        dims=dims,
        strict=arguments.strict,
        group_windows=not arguments.no_set,
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
