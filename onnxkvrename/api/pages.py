"""Return what ``--html`` writes: a page for a browser, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnxkvrename.api.arguments import (
    ModelLike,
    PathLike,
    RulesLike,
    find_rules,
    read_arguments,
)
from onnxkvrename.api.layouts import compare_arguments
from onnxkvrename.api.wording import speak_python
from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER
from onnxkvrename.layout.inspect import fold_windows, inspect_models
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import LoadedLayout
from onnxkvrename.report.documents.compare_json import describe_handoff
from onnxkvrename.rules.find_models import list_models
from onnxkvrename.verification import trace_buffer_updates
from onnxkvrename.vllm.specs import VLLM_VERSIONS


@speak_python
def inspect_page(models: ModelLike | Iterable[PathLike], *, rules: RulesLike = None) -> str:
    """Return a page with the KV map of models: their buffers, tokens, weights and findings.

    Args:
        models: The path of a model or of a directory, a model in memory, or several paths.
        rules: Rules, a profile's name or the path of a rules file.

    Returns:
        The HTML, with its style and script in it.

    Raises:
        ModelError: A model cannot be read.
        RulesError: The rules cannot be used.
        TypeError: An argument has the wrong type.
        ValueError: A path is empty.

    Examples:
        >>> onnxkvrename.inspect_page("model.onnx")[:15]
        '<!DOCTYPE html>'
    """
    from onnxkvrename.report.pages.inspect import render_inspect_page  # jinja2, only for a page

    arguments = read_arguments(inspect_page, locals())
    sources = arguments["models"]
    found = find_rules(arguments["profile"], arguments["rules"], sources)
    summaries = inspect_models(list_models(sources), found, trace_buffer_updates)
    for summary in summaries:
        if summary.error is not None:
            raise summary.error
    return render_inspect_page(fold_windows(summaries))


@speak_python
def compare_page(
    prefill: LoadedLayout | Layout | ModelLike,
    decode: LoadedLayout | Layout | ModelLike,
    target: str = DEFAULT_CONSUMER,
    *,
    full_transfer: bool = False,
    prompts: Sequence[int] = (),
    serve: str | Mapping[str, str] | None = None,
    vllm: str = VLLM_VERSIONS[-1],
    rules: RulesLike = None,
) -> str:
    """Return a page with the verdict of `compare`, and the memory of both sides for any prompt.

    ``full_transfer``, ``serve``, ``vllm`` and ``rules`` are as for `compare`.

    Args:
        prefill: As for `compare`.
        decode: The same for the decode worker.
        target: The consumer's name.
        prompts: Also show prompts of these lengths, in tokens, the first of them at first.

    Returns:
        The HTML, with its style and script in it.

    Raises:
        KvRenameError: As for `compare`.
        ValueError: The version is not known, or a line is for neither side.
        TypeError: An argument has the wrong type.

    Examples:
        >>> onnxkvrename.compare_page("prefill.onnx", "decode.onnx", prompts=[40])[:15]
        '<!DOCTYPE html>'
    """
    from onnxkvrename.report.pages.compare import render_compare_page  # jinja2, only for a page

    arguments = read_arguments(compare_page, locals())
    (handoff, reads), sides, consumer, found = compare_arguments(arguments)
    reports = (sides[0].reports, sides[1].reports)
    content = describe_handoff(handoff, reports, found.profile_choice, reads)
    return render_compare_page(content, arguments["prompts"], is_paged=consumer.is_paged)
