"""The command ``compare``: predict whether a hand-off from prefill to decode works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.api.layouts import compare_loaded, load_traced
from onnxkvrename.cli.files import check_page, collect_inputs, write_page
from onnxkvrename.cli.options import (
    SideValues,
    declare_command,
    parse_dim_sizes,
)
from onnxkvrename.cli.output import print_answer, print_choice
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.handoff.compare import Handoff
from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER, load_consumer
from onnxkvrename.layout.load import (
    LoadedLayout,
    apply_given_sizes,
    check_size_symbols,
)
from onnxkvrename.options import (
    DIM,
    FULL_TRANSFER,
    PAGE,
    TARGET,
    Example,
    Format,
    Option,
    Profile,
    Quiet,
    ReplacedByPage,
    RulesFile,
    Strict,
    Verbose,
)
from onnxkvrename.report.compare_text import (
    build_handoff_result,
    format_handoff_verdict,
    render_handoff,
)
from onnxkvrename.report.documents.compare_json import CompareContent, describe_handoff
from onnxkvrename.report.formats import (
    Answer,
    Line,
    Note,
    build_file_result,
)
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import RULES_FILE
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.text import quote_path, quote_word


class CompareArguments(NamedTuple):
    """What a user asks for with ``compare``."""

    prefill: Annotated[Path, Option("", metavar="PREFILL", is_required=True)]
    decode: Annotated[Path | None, Option("", metavar="[DECODE]")] = None
    target: Annotated[str, TARGET] = DEFAULT_CONSUMER
    dims: Annotated[SideValues, DIM] = SideValues()
    full_transfer: Annotated[bool, FULL_TRANSFER] = False
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    html: Annotated[
        Path | None,
        PAGE._replace(
            help="Also write a page for a browser: the memory of both sides for any prompt length."
        ),
    ] = None
    force: ReplacedByPage = False
    output_format: Format = "text"
    quiet: Quiet = False
    verbose: Verbose = False

    @property
    def sides(self) -> tuple[Path, Path]:
        """What prefill and decode use: one model may be both."""
        return self.prefill, self.prefill if self.decode is None else self.decode


@declare_command(
    "compare",
    CompareArguments,
    "Exit codes: 0 the hand-off works; 1 it would corrupt data, lose data or fail, or this cannot "
    "be decided; 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename compare prefill.onnx decode.onnx", "Check for every prompt length."),
    Example("onnxkvrename compare prefill.onnx decode.onnx --html page.html", "Also draw a page."),
)
def command(arguments: CompareArguments) -> int:
    """Predict for every prompt length whether decode reads the KV buffers that prefill wrote.

    PREFILL and DECODE are each a model, a directory with the windows of one, or a layout file,
    which `inspect MODEL --format json` prints. Without DECODE, both are PREFILL. Buffers are
    paired by layer and part, and also in the consumer's way, by position and byte offset. A value
    for one side alone begins with prefill: or decode:, as in --dim decode:ctx_len=4096.
    """
    consumer = load_consumer(arguments.target)
    sides = arguments.sides
    rules = find_rules(arguments.profile, arguments.rules, sides)
    print_choice(rules.choice, arguments.output_format, arguments.quiet)
    prefill, decode = _load_sides(arguments, rules)
    if consumer.token:  # KV616 is about the same names, with the command for this consumer
        prefill, decode = (side.remove_findings("KV303") for side in (prefill, decode))
    handoff = compare_loaded(
        sides,
        (prefill, decode),
        consumer,
        rules,
        full_transfer=arguments.full_transfer,
    )
    content = cache(
        partial(
            describe_handoff,
            handoff,
            (prefill.reports, decode.reports),
            rules.profile_choice,
        )
    )
    if arguments.html is not None:
        _write_page(arguments.html, content, (prefill, decode), arguments)
    answer = _build_answer(handoff, prefill, decode, arguments, content)
    return print_answer(answer, arguments.output_format)


def _load_sides(arguments: CompareArguments, rules: Rules) -> tuple[LoadedLayout, LoadedLayout]:
    """Load both sides with their sizes; one for no symbol of either side is an error."""
    prefill, decode = (
        load_traced((path,), rules, strict=arguments.strict, command=_format_compare(arguments))
        for path in arguments.sides
    )
    shared = parse_dim_sizes(arguments.dims.both)
    check_size_symbols(shared, sorted({*prefill.layout.symbols, *decode.layout.symbols}))
    prefill, decode = (
        _apply_sizes(loaded, side, shared, parse_dim_sizes(texts, f"{side}:"))
        for loaded, side, texts in (
            (prefill, "prefill", arguments.dims.prefill),
            (decode, "decode", arguments.dims.decode),
        )
    )
    return prefill, decode


def _format_compare(arguments: CompareArguments) -> str:
    """Return the command that was typed, with the file of rules that hints suggest."""
    words = ["onnxkvrename compare", quote_path(str(arguments.prefill))]
    if arguments.decode is not None:
        words.append(quote_path(str(arguments.decode)))
    if arguments.target != DEFAULT_CONSUMER:
        words += ["--target", quote_word(arguments.target)]
    for prefix, texts in zip(("", "prefill:", "decode:"), arguments.dims, strict=True):
        words += [f"--dim {quote_word(prefix + text)}" for text in texts]
    words += ["--full-transfer"] if arguments.full_transfer else []
    return " ".join((*words, f"--rules {RULES_FILE}"))


def _apply_sizes(
    loaded: LoadedLayout, side: str, shared: Mapping[str, int], own: Mapping[str, int]
) -> LoadedLayout:
    """Return a side with the sizes of both sides, and its own ones."""
    symbols = loaded.layout.symbols
    check_size_symbols(own, symbols, f"{side}:")
    sizes = {symbol: size for symbol, size in {**shared, **own}.items() if symbol in symbols}
    return loaded._replace(layout=apply_given_sizes(loaded.layout, sizes))


def _write_page(
    path: Path,
    build_content: Callable[[], CompareContent],
    sides: tuple[LoadedLayout, LoadedLayout],
    arguments: CompareArguments,
) -> None:
    """Write the page of a hand-off.

    Raises:
        WriteError: The page would replace a file that the run reads or that is not an earlier
            page, or it cannot be written. Nothing is written then.
    """
    from onnxkvrename.report.pages.compare import render_compare_page  # jinja2, only for a page

    reports = (report for side in sides for report in side.reports)
    files = collect_inputs(
        (
            *((Path(report.path), f"the model {report.path}") for report in reports),
            *(
                (data, "external data of a model of this run")
                for s in sides
                for data in s.data_paths
            ),
            *((side, "what is compared") for side in arguments.sides),
            (arguments.rules, "a file that this run reads"),
        )
    )
    check_page(path, "compare", files, force=arguments.force)
    page = render_compare_page(build_content())
    write_page(path, page, files)


def _build_answer(
    handoff: Handoff,
    prefill: LoadedLayout,
    decode: LoadedLayout,
    arguments: CompareArguments,
    build_content: Callable[[], CompareContent],
) -> Answer:
    code = decide_exit_code(failed=handoff.failed or prefill.failed or decode.failed)
    result = build_handoff_result(handoff)
    verdict = Note("compare", format_handoff_verdict(handoff), result.path)
    return Answer(
        "compare",
        code,
        build_content=build_content,
        render_text=partial(_render_text, handoff, arguments),
        files=(*map(build_file_result, _list_failed_models(prefill, decode)), result),
        notes=() if arguments.quiet else (verdict,),
        is_verbose=arguments.verbose,
    )


def _list_failed_models(prefill: LoadedLayout, decode: LoadedLayout) -> list[ModelReport]:
    """Return each broken model once; the comparison itself reports a side without buffers."""
    sides = (
        side if side.layout.buffers else side.remove_findings("KV001") for side in (prefill, decode)
    )
    reports = (report for side in sides for report in side.reports if report.failed)
    return [*{(report.path, report.findings): report for report in reports}.values()]


def _render_text(
    handoff: Handoff,
    arguments: CompareArguments,
    width: int | None,
) -> Iterator[Line]:
    if not arguments.quiet:
        if arguments.html is not None:
            yield Line(f"{arguments.html}: page written", err=True)
        yield from render_handoff(handoff, width)
