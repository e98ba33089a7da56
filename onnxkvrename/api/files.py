"""Rename models in files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    as_change,
    as_optional_path,
    as_optional_text,
    as_output_file,
    as_path,
    as_paths,
    check_executor,
    check_flags,
    list_rules_files,
    load_rules_for,
)
from onnxkvrename.qefficient.export_cache import check_cache_reuse, restate_cache_reuse
from onnxkvrename.renaming.run import find_sidecars, rename_batch
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.results import ModelReport, Options, Report, SidecarSearch
from onnxkvrename.storage.read import is_directory

if TYPE_CHECKING:
    from concurrent.futures import Executor


def rename(
    model: PathLike,
    token: str | None = None,
    *,
    output: PathLike | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
    to: str | None = None,
    verify: bool = False,
    consumer: str | None = None,
    strict: bool = False,
    force: bool = False,
    sidecars: bool = True,
    dry_run: bool = False,
) -> ModelReport:
    """Rename the KV buffers of one model: in place, or into ``output``.

    After an exception, all files are as they were.

    Args:
        model: The model's path.
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        output: The file for the result. Its directory is created if it is missing, and gets a copy
            of the external data if it is not that of the model. By default the result replaces the
            model.
        strip: Remove the token.
        replace: Replace a different token.
        normalize: Give outputs the suffix that consumers pair with an input.
        rules: Rules, a profile's name or the path of a rules file.
        to: The profile whose names the buffers get, if they are what those names say.
        verify: Prove dataflow and validity of the result before it is written.
        consumer: Check that this consumer, such as ``vllm-qaic``, can take the result.
        strict: Treat every warning as an error.
        force: Overwrite existing and read-only files; write through links.
        sidecars: Rename in text files beside the model that repeat its names, such as
            ``custom_io.yaml``. If false, they stay as they are, with a warning.
        dry_run: Plan and check only.

    Returns:
        The report. Its status is ``renamed``, ``unchanged``, ``would-rename`` (with
        ``dry_run``), or ``failed`` with the findings that say why; then no file has changed.

    Raises:
        RulesError: The token or the rules cannot be used.
        ModelError: The model cannot be read.
        WriteError: The result cannot be written.
        KvRenameError: The consumer does not exist.
        TypeError: An argument has the wrong type.

    Examples:
        >>> report = onnxkvrename.rename("model.onnx", "VLLM", output="renamed.onnx")
        >>> report.status, report.failed, report.name_map["past_key.0"]
        ('renamed', False, 'past_key.0_VLLM')
    """
    path = as_path(model, "model", renames=True)
    check_flags(sidecars=sidecars)
    change = as_change(token, strip=strip, replace=replace, normalize=normalize, to=to)
    options = _build_options(
        rules, consumer, dry_run=dry_run, strict=strict, force=force, verify=verify
    )
    job = build_job(path, as_output_file(output, "output"))
    loaded_rules = load_rules_for(rules, [job.model], to)
    found = find_sidecars([job], change, loaded_rules, _build_search(sidecars))
    (report,) = rename_batch([job], change, loaded_rules, options, sidecars=found).models
    if report.error is not None:
        raise report.error
    return report


def rename_all(
    models: PathLike | Iterable[PathLike],
    token: str | None = None,
    *,
    directory: PathLike | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
    to: str | None = None,
    verify: bool = False,
    consumer: str | None = None,
    group_windows: bool = True,
    strict: bool = False,
    force: bool = False,
    sidecars: bool = True,
    dry_run: bool = False,
    executor: Executor | None = None,
) -> Report:
    """Rename many models, all of them or none.

    After an exception, all files are as they were. ``strip``, ``replace``, ``normalize``,
    ``rules``, ``to``, ``verify``, ``consumer``, ``strict``, ``force``, ``sidecars`` and
    ``dry_run`` are as for `rename`.

    Args:
        models: Paths of models, and of directories: then every ``.onnx`` file below.
        token: As for `rename`.
        directory: Where the results go, laid out like the models; by default in place.
        group_windows: Check the windows of one model against each other.
        executor: Reads and writes, such as a ``ProcessPoolExecutor`` or Dask's; results are
            put in place by this process.

    Returns:
        The report on each model. Where one failed, no file changed.

    Raises:
        RulesError: The token or the rules cannot be used.
        ModelError: A path leads to no model.
        WriteError: Two results have one path, or a result would replace another model.
        KvRenameError: The consumer does not exist.
        TypeError: An argument has the wrong type.

    Examples:
        >>> report = onnxkvrename.rename_all("windows", "VLLM", directory="renamed")
        >>> [model.status for model in report.models]
        ['renamed', 'renamed', 'renamed']
    """
    paths = as_paths(models, renames=True)
    check_flags(group_windows=group_windows, sidecars=sidecars)
    check_executor(executor)
    change = as_change(token, strip=strip, replace=replace, normalize=normalize, to=to)
    options = _build_options(
        rules, consumer, dry_run=dry_run, strict=strict, force=force, verify=verify
    )._replace(group_windows=group_windows)
    results = as_optional_path(directory, "directory", is_output=True)
    jobs = find_jobs(paths, None, results)
    loaded_rules = load_rules_for(rules, paths, to)
    search = _build_search(sidecars, paths)._replace(takes_folders=directory is not None)
    found = find_sidecars(jobs, change, loaded_rules, search)
    report = rename_batch(jobs, change, loaded_rules, options, executor=executor, sidecars=found)
    return report._replace(profile=loaded_rules.profile_choice)


def _build_search(follow: bool, paths: Iterable[Path] = ()) -> SidecarSearch:
    directories = tuple(path for path in paths if is_directory(path))
    return SidecarSearch((), "follow" if follow else "leave", directories)


def _build_options(
    rules: RulesLike,
    consumer: str | None,
    *,
    dry_run: bool,
    strict: bool,
    force: bool,
    verify: bool,
) -> Options:
    check_flags(dry_run=dry_run, strict=strict, force=force, verify=verify)
    return Options(
        write=not dry_run,
        strict=strict,
        force=force,
        verify=verify,
        consumer=as_optional_text(consumer, "consumer"),
        checks=(check_cache_reuse,),
        restate=restate_cache_reuse,
        read_files=list_rules_files(rules),
    )
