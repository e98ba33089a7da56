"""Write what a model's KV buffers are: a manifest beside it, a stamp into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.api.layouts import load_traced
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import decide_exit_code, quote_path
from onnxkvrename.layout.layout import compute_layout_digest
from onnxkvrename.layout.load import CompileInfo, LoadedLayout
from onnxkvrename.layout.manifest import DOCUMENT, describe_layout
from onnxkvrename.renaming.run import refuse_errors, stamp_models
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.storage.recover import settle_stopped_runs
from onnxkvrename.storage.run_files import RunFiles
from onnxkvrename.storage.write_file import needs_write, write_files


@speak_python
def write_manifest(
    paths: ModelLike | Iterable[PathLike],
    output: PathLike,
    *,
    sizes: Mapping[str, int] | None = None,
    specializations: PathLike | None = None,
    custom_io: PathLike | None = None,
    rules: RulesLike = None,
    force: bool = False,
) -> LoadedLayout:
    """Write a manifest, which `load_layout`, `check_consumer` and `compare` take for its model.

    ``paths``, ``sizes``, ``specializations``, ``custom_io`` and ``rules`` are as for `load_layout`.

    Args:
        output: The file to write, completely or not at all.
        force: Overwrite an existing file.

    Returns:
        What was written: the layout, and what is wrong with the models.

    Raises:
        ModelError: A model cannot be read, or several paths are not one model.
        WriteError: The file exists, is one that is read, or cannot be written.
        KvRenameError: The model has no such symbol.
        RulesError: The rules cannot be used.
        ValueError: A size is less than 1, or a path is empty.
        TypeError: An argument has the wrong type.

    Examples:
        >>> loaded = onnxkvrename.write_manifest("model.onnx", "model.json")
        >>> onnxkvrename.compare("model.json", "model.onnx").failed, loaded.failed
        (True, False)
    """
    arguments = read_arguments(write_manifest, locals())
    compile_info = build_request(CompileInfo, arguments)
    found = find_rules(arguments["profile"], arguments["rules"], arguments["paths"])
    loaded = load_traced(arguments["paths"], found, compile_info)
    content = describe_layout(
        loaded.layout, loaded.reports, stamp=loaded.stamp, vllm=None, profile=found.profile_choice
    )
    text = DOCUMENT.render(content, decide_exit_code(failed=loaded.failed))
    files = {arguments["output"]: f"{text}\n".encode()}
    read = (compile_info.specializations, compile_info.custom_io, arguments["rules"])
    inputs = check_manifest_outputs(loaded, files, read, force=force)
    write_files(files, force=force, inputs=inputs)
    return loaded


@speak_python
def stamp(
    models: PathLike | Iterable[PathLike], *, rules: RulesLike = None, force: bool = False
) -> tuple[ModelReport, ...]:
    """Write the digest of a layout into the metadata of its models, in place; all or none.

    ``rename(model, strip=True)`` removes it.

    Args:
        models: A model, a directory with the windows of one, or several such windows.
        rules: Rules, a profile's name or the path of a rules file.
        force: Write to read-only models, and through symbolic and hard links.

    Returns:
        The report on each model: ``renamed`` if it got the stamp, ``unchanged`` if it had it.

    Raises:
        CheckError: A model has an error, so that none gets a stamp; ``findings`` say which.
        ModelError: A model cannot be read, or is a manifest.
        WriteError: A model cannot be written.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.
        ValueError: A path is empty.

    Examples:
        >>> [report.status for report in onnxkvrename.stamp("model.onnx")]
        ['renamed']
    """
    arguments = read_arguments(stamp, locals())
    paths = arguments["models"]
    settle_stamps(paths)
    found = find_rules(arguments["profile"], arguments["rules"], paths)
    loaded = plan_stamp(load_traced(paths, found), found)
    refuse_errors(tuple(each for report in loaded.reports for each in report.findings))
    check_manifest_outputs(loaded, {}, (arguments["rules"],), is_stamped=True)
    return write_stamps(loaded, found, force=force)


def settle_stamps(models: Sequence[Path]) -> None:
    """Undo or finish stopped runs in the directories of models that get a stamp."""
    jobs = find_jobs(models)
    settle_stopped_runs([job.target.parent for job in jobs], [job.model for job in jobs])


def check_manifest_outputs(
    loaded: LoadedLayout,
    contents: Mapping[Path, bytes],
    read: Iterable[Path | Rules | None],
    *,
    is_stamped: bool = False,
    force: bool = False,
) -> list[Path]:
    """Check that a manifest and stamps can be written; nothing is written yet.

    Args:
        loaded: The layout.
        contents: The file of the manifest, if one is written.
        read: What the manifest is made from, beside the models; all but paths is ignored.
        is_stamped: Whether the models get a stamp.
        force: Whether an existing file is replaced.

    Returns:
        The files that are read.

    Raises:
        WriteError: An output cannot be written.
    """
    if not contents and not is_stamped:
        return []
    files = RunFiles()
    for data_path in loaded.data_paths:
        files.add_input(data_path, "external data of a model of this run")
    for path in read:
        if isinstance(path, Path):
            files.add_input(path, "what the manifest is made from")
    models = {
        report.path: files.add_input(
            Path(report.path),
            f"the model {report.path}" if loaded.identities else "the manifest that is read",
        )
        for report in loaded.reports
    }
    results = [files.add_output(output, "the manifest") for output in contents]
    for model in loaded.layout.models if is_stamped else ():
        role = f"the model {model}, which gets a stamp"
        results.append(files.add_output(Path(model), role, replaces=models[model]))
    for result in results:
        files.check_output(result)
    for output, content in contents.items():
        needs_write(output, content, force=force)
    return files.list_inputs()


def plan_stamp(loaded: LoadedLayout, rules: Rules) -> LoadedLayout:
    """Return the layout as it will be with its stamp; it gets none where there are findings.

    Raises:
        ModelError: It is that of a manifest, or of a window alone that has the stamp of its set.
    """
    if not loaded.identities:
        raise ModelError(
            "is a manifest: --stamp writes into models",
            path=loaded.reports[0].path,
            hint="pass the models that it describes",
        )
    loaded = loaded.remove_findings("KV621")
    if loaded.failed:
        return loaded
    digest = compute_layout_digest(loaded.layout)
    _check_set_stamp(loaded, digest, rules)
    return loaded._replace(stamp=digest)


def write_stamps(
    loaded: LoadedLayout, rules: Rules, *, force: bool = False
) -> tuple[ModelReport, ...]:
    """Write the stamp of the layout into its models, and return what became of each.

    Raises:
        KvRenameError: A model cannot be written; then none has changed.
    """
    assert loaded.stamp is not None
    reports = [report for report in loaded.reports if report.path in loaded.layout.models]
    jobs = [build_job(Path(report.path)) for report in reports]
    identities = [loaded.identities[report.path] for report in reports]
    results = stamp_models(
        jobs,
        reports,
        identities,
        loaded.stamp,
        rules,
        data_paths=loaded.data_paths,
        force=force,
    ).models
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _check_set_stamp(loaded: LoadedLayout, digest: str, rules: Rules) -> None:
    """Raise :class:`ModelError` for a window alone that carries the stamp of its set."""
    (path, *further_models) = loaded.layout.models
    if (
        not further_models
        and loaded.stamp not in (None, digest)
        and rules.set_rule.is_window_path(path)
    ):
        raise ModelError(
            "has the stamp of its whole set, which a window alone cannot replace",
            path=path,
            hint="pass all windows of the set, or remove the stamp first: "
            f"`onnxkvrename {quote_path(path)} --strip`",
        )
