"""Findings: what is wrong with a model, and one table of what can be, each with its code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError
from onnxkvrename.text import format_list

UNKNOWN_TRANSFER = "KV630"
"""The finding of a value of which it is not known whether decode gets it."""
Severity = Literal["error", "warning"]


@show_briefly
class Finding(NamedTuple):
    """Something that is, or may be, wrong with a model.

    Attributes:
        code: The code, one of `CODES`, such as KV101.
        severity: That of the code, or ``error`` under ``--strict``. An error makes the exit
            code 1.
        name: The value or the file that it is about, the first of several; empty for the model
            itself.
        message: A sentence without its subject, which is `name`. About several names it is a
            whole sentence, which counts them.
        hint: How to fix it.
    """

    code: str
    severity: Severity
    name: str
    message: str
    hint: str

    @property
    def subject(self) -> str:
        """The name to show before the message; empty if the message says it: ``(first: NAME)``."""
        return "" if f"(first: {self.name})" in self.message else self.name


class CheckError(KvRenameError):
    """Report that checks reject a model in memory.

    Attributes:
        findings: All problems, as :class:`Finding` values.
    """

    def __init__(
        self, message: str, findings: tuple[Finding, ...] = (), **where: str | None
    ) -> None:
        super().__init__(message, **where)
        self.findings = findings


def build_finding(code: str, name: str, message: str, hint: str) -> Finding:
    """Return a finding with the severity of its code."""
    return Finding(code, CODES[code].severity, name, message, hint)


def build_names_finding(
    code: str, names: Sequence[str], messages: tuple[str, str], hint: str, *, shown: int = 1
) -> Finding:
    """Return a finding about one name, or about several, which its message counts.

    Args:
        code: One of `CODES`.
        names: The names, at least one.
        messages: What is wrong with one name (``carries``), and with several (``carry``).
        hint: How to fix it.
        shown: How many of several names the message shows.
    """
    if shown == 1 or len(names) == 1:
        return build_finding(code, names[0], begin_message(names, *messages), hint)
    listed = format_list(names, limit=shown)
    return build_finding(code, "", f"{len(names):,} names ({listed}) {messages[1]}", hint)


def begin_message(names: Sequence[str], singular: str, plural: str, noun: str = "names") -> str:
    """Return the beginning of a message about one name, the finding's own, or about several.

    ``carries`` for one name, which goes before the message; ``8 names (first: past_key.0) carry``
    for eight.

    Args:
        names: The names, that of the finding first.
        singular: The verb for one name.
        plural: The verb for several.
        noun: What the names are, in the plural.
    """
    return singular if len(names) == 1 else f"{len(names):,} {noun} (first: {names[0]}) {plural}"


def report_names(
    code: str,
    names: Sequence[str],
    verbs: tuple[str, str],
    text: str,
    hint: str,
    noun: str = "names",
) -> Iterator[Finding]:
    """Yield one finding about all of some names, on the first of them; none without names.

    Args:
        code: The code.
        names: The names.
        verbs: The verb for one name and the verb for several.
        text: What follows the verb.
        hint: What helps.
        noun: What the names are, in the plural.
    """
    if names:
        yield build_finding(code, names[0], f"{begin_message(names, *verbs, noun)} {text}", hint)


def promote_to_errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings with severity ``error``, for ``--strict``."""
    return tuple(finding._replace(severity="error") for finding in findings)


def decide_exit_code(
    *, failed: bool = False, not_done: bool = False, interrupted: bool = False
) -> int:
    """Return the exit code of a command; the later argument wins.

    Args:
        failed: Whether there is a finding of severity error, or something else that the command
            should detect (a name that would change, a hand-off that breaks).
        not_done: Whether the job, or any part of it, could not be done.
        interrupted: Whether a signal ended the job.

    Returns:
        130 if `interrupted`, 2 if `not_done`, 1 if `failed`, else 0.
    """
    if interrupted:
        return 130
    return 2 if not_done else int(failed)


class FindingCode(NamedTuple):
    """What is known of a finding before there is a model.

    Attributes:
        code: What a program matches on, such as KV101. Its meaning never changes.
        name: The same in words, such as ``missing-input``.
        severity: An error stops the command before anything is written.
        title: What is wrong, in a few words; what makes it the other severity, in parentheses.
        why: Why that matters, and what else is worth knowing, in sentences of Markdown.
        fix: What to do, in sentences of Markdown; pages are linked as from ``docs/``.
    """

    code: str
    name: str
    severity: Severity
    title: str
    why: str
    fix: str


_ROWS = (
    FindingCode(
        code="KV001",
        name="no-kv-buffers",
        severity="error",
        title="no KV buffer in any of the models",
        why="The model is an encoder, comes from another exporter, or keeps no cache in its "
        "outputs.",
        fix="Pass the model with the language part, or [rules that match its names](rules.md). If "
        "only the graph has the caches: `onnxkvrename pairs MODEL --as rules > rules.toml`, then "
        "`onnxkvrename MODEL --prefix TOKEN --rules rules.toml`. If the names have a token "
        "already: `--rules FILE` with the rules of the rename. If an operator or a type ended the "
        "search, the finding names it, and the first command drafts rules as comments: remove the "
        "first two characters of each line that is right.",
    ),
    FindingCode(
        code="KV101",
        name="missing-input",
        severity="error",
        title="retained output without its input",
        why="The next step cannot read this buffer. The compiler for QAic rejects such a model.",
        fix="Export again. QEfficient's windows need `layerwise_window_size=1`. If the graph has "
        "the input under a name that no rule matches, the hint has the commands that write rules "
        "for both names.",
    ),
    FindingCode(
        code="KV102",
        name="missing-output",
        severity="error",
        title="KV input without its retained output",
        why="What a step writes to this buffer is lost.",
        fix="Export again; Whisper without `use_onnx_subfunctions`, which leaves outputs with "
        "bare numbers. If the output has another name, correct `output` in your "
        "[rules](rules.md); where the graph shows that output, the hint has the commands that "
        "write them.",
    ),
    FindingCode(
        code="KV103",
        name="dtype-mismatch",
        severity="error",
        title="dtype differs between input and retained output",
        why="Both sides of a pair are one piece of memory on the device.",
        fix="Export again with one precision for the cache.",
    ),
    FindingCode(
        code="KV104",
        name="shape-mismatch",
        severity="error",
        title="rank, a size or the order of axes differs between input and retained output",
        why="Both sides of a pair are one piece of memory on the device. Commands that follow the "
        "graph, such as `verify`, also find axes that a Transpose or an Einsum brings into "
        "another order.",
        fix="Export again. If the output really holds only new positions, say so in your "
        '[rules](rules.md): `update = "delta"`.',
    ),
    FindingCode(
        code="KV105",
        name="output-not-produced",
        severity="error",
        title="retained output that no node produces",
        why="The model cannot run, or the buffer never changes.",
        fix="Export again.",
    ),
    FindingCode(
        code="KV106",
        name="ambiguous-name",
        severity="error",
        title="one name is both input and retained output, or is declared twice",
        why="It is not clear which value is retained. Or two names claim one buffer: "
        "`past_key.0_scale` can look like `past_key.0` with the token `scale`.",
        fix="Export again, without the token if the export added it, or exclude the other name "
        "with a `[[keep]]` rule, whose pattern the message shows.",
    ),
    FindingCode(
        code="KV107",
        name="input-not-read",
        severity="warning",
        title="KV input that no node reads",
        why="Attention does not see what the previous steps retained.",
        fix="Check the export. This is harmless only if the layer shares the cache of another one.",
    ),
    FindingCode(
        code="KV108",
        name="incomplete-layer",
        severity="warning",
        title="a layer with a part missing (a key without its value)",
        why="A consumer moves the parts of a layer together.",
        fix="Check the export.",
    ),
    FindingCode(
        code="KV109",
        name="missing-layers",
        severity="warning",
        title="layers missing between the first and the last",
        why="Layers may be lost.",
        fix="Check the export, unless these layers have no cache.",
    ),
    FindingCode(
        code="KV110",
        name="not-a-later-state",
        severity="error",
        title="retained output that is not a later state of its own input",
        why="All names are right, but the cache is mixed up (key and value swapped, layers "
        "exchanged), lost, or overwritten: new values are written, joined or shifted in along the "
        "heads or the size of a head, rather than along the positions. The axis of positions is "
        "known from the profile, from a symbol, or from a size that changes; where nothing tells "
        "it, nothing is said. An input of which nothing is left does not count: a constant "
        "condition does not choose it, it is multiplied by 0, subtracted from itself, divided by "
        "itself, or cut to an empty part. Every command that follows the graph reports it.",
        fix="Export again. The message names the inputs that the output is made from.",
    ),
    FindingCode(
        code="KV111",
        name="unmatched-buffer",
        severity="warning",
        title="retained buffer that no rule matches: not renamed",
        why="If it is a KV buffer, it has no token and is not transferred. With rules that "
        "`pairs` wrote: an output that looks like a later state of an input, which is not proved.",
        fix="If it is KV, add it to [your own rules](rules.md); `pairs --as rules` writes a file "
        "to start from. Otherwise nothing is wrong.",
    ),
    FindingCode(
        code="KV112",
        name="unusual-suffix",
        severity="warning",
        title="KV output with a suffix that some consumers do not match with an input",
        why="vllm-qaic pairs such an output, for example with `_InternalRetainedState`, by "
        "position, except in a hybrid model ([KV602](#kv602)).",
        fix="Rename with `--normalize`.",
    ),
    FindingCode(
        code="KV113",
        name="retention-not-proved",
        severity="warning",
        title="retained output that could not be traced to its input: not proved",
        why="The dataflow or a size could not be followed; another input, which is not followed, "
        "may be the cache; or values of another buffer enter this one, or new positions may be "
        'cut off again. The buffer does not count as retained. "Not traced": the graph was not '
        "examined.",
        fix="Look at the node that the message names. "
        "[`examples/run_retention.py`](verify.md#run-it) runs the model in onnxruntime.",
    ),
    FindingCode(
        code="KV114",
        name="buffer-never-written",
        severity="warning",
        title="buffer that is read but never written: it passes through unchanged",
        why="New tokens never enter the cache. Right only if another model, such as a vision "
        "encoder, fills it.",
        fix="Check the export.",
    ),
    FindingCode(
        code="KV115",
        name="rejected-by-checker",
        severity="error",
        title="onnx's checker rejects the model",
        why="Every tool that checks models rejects this one. Outputs that are declared without a "
        "type or a shape are only a warning: onnxruntime accepts them.",
        fix="Export again. The message is from the checker.",
    ),
    FindingCode(
        code="KV116",
        name="misplaced-token",
        severity="error",
        title="a KV buffer without the token, or another value with it",
        why="From `verify --prefix TOKEN`. The consumer ignores the buffer, or takes another "
        "value for one.",
        fix="`onnxkvrename MODEL --prefix TOKEN`, or choose a token that occurs in no other name.",
    ),
    FindingCode(
        code="KV120",
        name="growing-cache",
        severity="warning",
        title="a cache that grows: its output does not fit into its input (an error where it must)",
        why="The output is longer than its input, or has only the new positions. It is an error "
        "where the rules or the consumer require in-place updates. A plain rename does not follow "
        "the graph; it warns if the declared shapes show it.",
        fix="Export with a cache of fixed size, unless the runtime grows its cache. QEfficient "
        "writes one (not for Gemma 3 as text alone), as do `mobius --static-cache` and the static "
        "cache of transformers; the caches of Optimum and onnxruntime-genai grow.",
    ),
    FindingCode(
        code="KV121",
        name="differs-from-source",
        severity="error",
        title="the model differs from its source in more than names of KV buffers (--renamed-from)",
        why="The tool that renamed the model lost metadata, changed a weight, or connected other "
        "values.",
        fix="Check that the source is what this model was made from; then rename it again.",
    ),
    FindingCode(
        code="KV123",
        name="undefined-operator",
        severity="warning",
        title="operators that onnx does not define: their nodes were not checked",
        why="onnx's checker skips these nodes and checks everything else.",
        fix="None where your runtime has these operators; "
        "[`examples/run_retention.py`](verify.md#run-it) shows whether onnxruntime does.",
    ),
    FindingCode(
        code="KV124",
        name="duplicate-function",
        severity="warning",
        title="a local function defined more than once, with the same bytes",
        why="Only some tools accept this.",
        fix="QEfficient's merge keeps one of each. For other tools remove the copies.",
    ),
    FindingCode(
        code="KV125",
        name="too-few-axes",
        severity="error",
        title="a value with the name of a cache, but with too few axes for one",
        why="A built-in profile knows the name, but a cache has the batch, the context and a size "
        "at least. States, shapes that are not declared, and names from your own rules are not "
        "checked.",
        fix="Do not rename this model. If the value is a KV buffer, say so in [your own "
        "rules](rules.md).",
    ),
    FindingCode(
        code="KV201",
        name="name-in-use",
        severity="error",
        title="a new name is already in use",
        why="The rename would connect two different values of the graph, a subgraph or a function.",
        fix="Choose another token, or rename the other value first.",
    ),
    FindingCode(
        code="KV202",
        name="different-token",
        severity="error",
        title="buffers already carry a different token",
        why="A rename would add a second token or silently replace the first one.",
        fix="`--replace` replaces the token, `--strip` removes it. If your rules list the names "
        "with the token, use those that you renamed with.",
    ),
    FindingCode(
        code="KV204",
        name="token-capitals",
        severity="warning",
        title="the token differs from a known consumer's token only in capitals",
        why="Consumers distinguish capitals.",
        fix="Use the consumer's token. `--target vllm-qaic` knows it.",
    ),
    FindingCode(
        code="KV205",
        name="old-names-needed",
        severity="warning",
        title="a program of the exporter looks for the old names",
        why="transformers.js and transformers' own runner compute the names of inputs; vLLM and "
        "onnxruntime do not mind.",
        fix="Keep the export for that program: `-d` writes the result elsewhere. `--strip` gives "
        "back the original names.",
    ),
    FindingCode(
        code="KV301",
        name="layer-in-two-windows",
        severity="error",
        title="a layer in two windows",
        why="The merged model would have the layer twice.",
        fix="Remove one of the two files. They may be from different exports.",
    ),
    FindingCode(
        code="KV302",
        name="layer-in-no-window",
        severity="error",
        title="a layer in no window",
        why="The merged model would lack the layer.",
        fix="Pass all windows of the model, or one of them alone.",
    ),
    FindingCode(
        code="KV303",
        name="mixed-tokens",
        severity="error",
        title="files of one model with different tokens, or only some with a token",
        why="They merge, compile and serve, but the output is wrong. It is a warning where one "
        "window is renamed alone in place, since the others are not read. For an encoder-decoder "
        "it is a warning of `verify`: only a runtime that finds names by a template fails.",
        fix="Rename all of them in one command. If a run was stopped, run the same command again.",
    ),
    FindingCode(
        code="KV304",
        name="misnamed-window",
        severity="error",
        title="the layers in a file differ from those in its name",
        why="The merge orders windows by name, so layers would be exchanged.",
        fix="Restore the original file name. For windows larger than 1, export with "
        "`layerwise_window_size=1`.",
    ),
    FindingCode(
        code="KV305",
        name="window-mismatch",
        severity="error",
        title="windows that do not fit together: a value is missing or has a different type",
        why="The windows cannot be merged, or the merge connects wrong values.",
        fix="Export all windows again, together.",
    ),
    FindingCode(
        code="KV306",
        name="mixed-exports",
        severity="error",
        title="windows of different models or exports",
        why="A merge would mix two exports: producer, opset, functions or shapes differ.",
        fix="Export all windows again, together. If the model really varies by layer, rename each "
        "window by itself.",
    ),
    FindingCode(
        code="KV307",
        name="merged-file-differs",
        severity="error",
        title="a merged file differs from the windows",
        why="One of them is outdated.",
        fix="Pass all windows that were merged, or merge again.",
    ),
    FindingCode(
        code="KV308",
        name="incomplete-encoder-decoder",
        severity="error",
        title="an encoder without the decoder whose buffers it fills, or the reverse",
        why="An encoder fills inputs of a decoder by name. One of the two is missing, does not "
        "fit, or would be renamed alone.",
        fix="Rename the encoder and the decoder in one command, with the same token.",
    ),
    FindingCode(
        code="KV401",
        name="export-hash-mismatch",
        severity="error",
        title="export directory whose hash does not match its JSON",
        why="The directory was renamed, or comes from another version: QEfficient would not find "
        "a renamed export.",
        fix="`-d DIR` writes the renamed model elsewhere; pass it to `compile` by its path.",
    ),
    FindingCode(
        code="KV402",
        name="renamed-in-cache",
        severity="warning",
        title="renamed in place in QEfficient's cache: a later export reuses it (an error if not "
        "forced)",
        why="The rename is refused; with `--force` it is done. Then the rename, `verify`, "
        "`--check` and `--seed-cache` warn until the model has its names back.",
        fix="`--seed-cache` makes a renamed copy where QEfficient looks for it, and `-d` writes "
        "elsewhere. After `--force`, `--strip` restores the export; for one that was made with a "
        "token, `--prefix TOKEN --replace`.",
    ),
    FindingCode(
        code="KV403",
        name="seed-target-in-use",
        severity="error",
        title="the directory of the seeded export already holds something else",
        why="Nothing is overwritten there.",
        fix="Move that directory away.",
    ),
    FindingCode(
        code="KV404",
        name="unknown-sidecar-name",
        severity="warning",
        title="a name in a sidecar is not in the model (an error if none is)",
        why="The compiler drops these entries, and with them the precision. It is an error if no "
        "name matches.",
        fix="Remove the entries or correct their names; pass the file that belongs to this model.",
    ),
    FindingCode(
        code="KV405",
        name="one-sided-sidecar",
        severity="warning",
        title="a sidecar names only one side of a pair",
        why="Both sides of a buffer need the same precision.",
        fix="Add the other side.",
    ),
    FindingCode(
        code="KV406",
        name="outdated-sidecar",
        severity="warning",
        title="a sidecar or a compile has old names (an error for a sidecar that must be updated)",
        why="A compiler drops the old entries of a sidecar, and with them the precision of the "
        "cache; a runtime fails at the first token. It is an error in `verify`, and in a rename "
        "for a file with a different token (without `--replace`) or one that [cannot get the new "
        "names](sidecars.md#what-is-refused). A rename never changes a compile (`qpc-HASH`), so "
        "one that is there before has the old names. `verify` names each that is older than a "
        "model with a token.",
        fix="Rename again without `--sidecars off`, or pass the file with `--sidecar`. If it "
        "cannot be updated, the message says what to change. For a compile, compile the model "
        "again, and delete the old one.",
    ),
    FindingCode(
        code="KV407",
        name="export-not-seedable",
        severity="error",
        title="an export that QEfficient would not look for under its new names",
        why="From `--seed-cache`: seeding would have no effect, and no export of the command is "
        "seeded.",
        fix="The hint is the command that seeds the others. For this export, `-d DIR` writes the "
        "result elsewhere.",
    ),
    FindingCode(
        code="KV501",
        name="external-data-outside",
        severity="error",
        title="external data outside the model's directory",
        why="Such a model could read any file.",
        fix="Move the data into the model's directory and save the model again.",
    ),
    FindingCode(
        code="KV502",
        name="external-data-missing",
        severity="error",
        title="external data missing, or not a regular file",
        why="The model cannot be loaded. With `--seed-cache` it is a warning: the weights of a "
        "weight-free export are a link beside it, which is not copied.",
        fix="Put the file beside the model; the warning has the command.",
    ),
    FindingCode(
        code="KV503",
        name="external-data-invalid",
        severity="error",
        title="external data shorter than the model says, or a malformed entry",
        why="The file was cut off, or belongs to another model.",
        fix="Copy the file again, or export again.",
    ),
    FindingCode(
        code="KV504",
        name="output-exists",
        severity="error",
        title="another file is already where one would be written",
        why="Nothing is overwritten unless you say so. For `--seed-cache`, the message says what "
        "is broken in the export that is there.",
        fix="Choose another path, or `--force`.",
    ),
    FindingCode(
        code="KV601",
        name="buffer-not-selected",
        severity="error",
        title="a KV buffer that the consumer does not select, for example without its token",
        why="This buffer is not handed over.",
        fix="`onnxkvrename MODEL --target NAME`, with `--replace` if it has a different token. "
        "Where the exporter's names never fit, export with names as QEfficient gives them, such "
        "as `past_key.3` and `past_key.3_RetainedState`; see [what is "
        "selected](consumers.md#built-in-consumers). A cache that the consumer cannot use under "
        "any name (KV120, KV610) has no findings about its names.",
    ),
    FindingCode(
        code="KV602",
        name="output-not-matched",
        severity="error",
        title="an output that the consumer selects, but does not match with an input",
        why="vllm-qaic accepts another suffix where all buffers have one shape; in a hybrid model "
        "it slices only outputs that end in `_RetainedState`. With legacy slicing it also selects "
        "a buffer of which only one name has the token, which the compiler does not retain.",
        fix="`onnxkvrename MODEL --target NAME --normalize`.",
    ),
    FindingCode(
        code="KV603",
        name="unreadable-layer",
        severity="error",
        title="a name whose layer the consumer cannot read, or reads wrongly",
        why="The consumer does not start, or orders layers differently.",
        fix="Export with names as QEfficient gives them, such as `past_key.3` and "
        "`past_key.3_RetainedState`.",
    ),
    FindingCode(
        code="KV604",
        name="wrong-logits-count",
        severity="error",
        title="too few or too many outputs that start with log, which prefill counts",
        why="vllm-qaic removes one output that starts with `log` from its list; without one, the "
        "last KV buffer. A model with an output `logits` fails at start-up, where vllm-qaic tries "
        "it; another one fails at the first prompt.",
        fix="Export with logits, without sampling on the device. A model for decode alone needs "
        "none: `--prefix` without `--target`.",
    ),
    FindingCode(
        code="KV605",
        name="state-is-sliced",
        severity="error",
        title="a buffer that the consumer slices as if it had a context axis",
        why="The consumer cuts axis 2 to the length of the prompt. A part of a recurrent state, "
        "or of an encoder's cross cache, is lost.",
        fix="Set `VLLM_QAIC_USE_FULL_KV_TRANSFER=1` on both sides and check with "
        "`--full-transfer`.",
    ),
    FindingCode(
        code="KV606",
        name="mixed-cache-shapes",
        severity="warning",
        title="layers with different cache shapes: the consumer's LMCache connector will not start",
        why="The connector refuses buffers with different shapes or dtypes at start-up.",
        fix="Use QaicConnector.",
    ),
    FindingCode(
        code="KV607",
        name="not-full-attention",
        severity="warning",
        title="buffers that the consumer declares as full attention, but that are not",
        why="vLLM's numbers of blocks and bytes are wrong for this model.",
        fix="Do not size memory by vLLM's numbers for this model.",
    ),
    FindingCode(
        code="KV608",
        name="selected-by-mistake",
        severity="error",
        title="a value that is not a KV buffer, but is selected as one (a warning if harmless)",
        why="It has the consumer's token, or a name like the penalty buffers of a QEfficient "
        "sampler. The pairing shifts, or the model counts as hybrid.",
        fix="Change that name where the model is exported.",
    ),
    FindingCode(
        code="KV609",
        name="paired-differently",
        severity="error",
        title="inputs and outputs that the consumer pairs differently from the graph",
        why="A consumer that pairs by position sends buffers to wrong layers.",
        fix="Export with names as QEfficient gives them, such as `past_key.3` and "
        "`past_key.3_RetainedState`. If a part is missing, export again.",
    ),
    FindingCode(
        code="KV610",
        name="not-transferable",
        severity="error",
        title="a dtype or a shape that the consumer cannot transfer",
        why="The consumer stops at start-up.",
        fix="Export the caches in another dtype, such as FLOAT16, and with shapes.",
    ),
    FindingCode(
        code="KV611",
        name="buffer-on-one-side",
        severity="error",
        title="a buffer on one side of a hand-off only",
        why="The offsets of all later buffers differ.",
        fix="Check that both sides are the same model, complete and with all windows.",
    ),
    FindingCode(
        code="KV612",
        name="handoff-dtype-mismatch",
        severity="error",
        title="dtype differs between prefill and decode",
        why="Decode reads wrong sizes or values.",
        fix="Export both with the same precision.",
    ),
    FindingCode(
        code="KV613",
        name="handoff-shape-mismatch",
        severity="error",
        title="rank or a fixed dimension differs between prefill and decode",
        why="Offsets and contents differ.",
        fix="Export both from the same model, in the same way.",
    ),
    FindingCode(
        code="KV614",
        name="handoff-window-mismatch",
        severity="error",
        title="a window on one side, a different window or the whole context on the other",
        why="Short prompts work, longer ones are corrupted.",
        fix="Export and compile both in the same way (`enable_chunking`, `retain_full_kv`, "
        "`sliding_window`).",
    ),
    FindingCode(
        code="KV615",
        name="handoff-axis-order",
        severity="error",
        title="axes in a different order on the two sides",
        why="The size is equal, but all values are in wrong places.",
        fix="Export both with the same release of the exporter.",
    ),
    FindingCode(
        code="KV616",
        name="handoff-token-mismatch",
        severity="error",
        title="tokens differ between prefill and decode, or nothing is selected",
        why="The two sides exchange different buffers, or none.",
        fix="`onnxkvrename MODEL --target NAME` for both.",
    ),
    FindingCode(
        code="KV617",
        name="wrong-buffer-read",
        severity="error",
        title="a buffer that decode reads as a different one",
        why="The consumer pairs buffers by their order, and the orders of the two sides differ. "
        "Decode reads the wrong layer or part.",
        fix="Export with the same names on both sides.",
    ),
    FindingCode(
        code="KV618",
        name="shifted-offset",
        severity="error",
        title="a buffer whose bytes are at different offsets on the two sides",
        why="Decode reads bytes of another buffer and cannot detect it.",
        fix="Fix the other findings first: offsets shift after the first buffer that differs. Set "
        "`VLLM_QAIC_USE_FULL_KV_TRANSFER=1` on both sides or on neither.",
    ),
    FindingCode(
        code="KV624",
        name="selection-count-mismatch",
        severity="error",
        title="the numbers of selected inputs and outputs differ: prefill counts them, and stops",
        why="The consumer stops at the first prompt, vllm-qaic at start-up if there is an output "
        "`logits`. Names for another consumer cause this.",
        fix="Export for this consumer, with names as QEfficient gives them, such as `past_key.3` "
        "and `past_key.3_RetainedState`.",
    ),
    FindingCode(
        code="KV630",
        name="unknown-transfer",
        severity="error",
        title="an input that decode requires and the consumer does not move: whether decode gets "
        "it is not known",
        why="Decode requires a value that is not handed over, such as the `cumulative_length` of "
        "a static cache of transformers. This is neither a success nor a refusal.",
        fix="If your runner feeds the length of the prompt to decode, rename with `--prefix "
        "vllmKvCache`, without `--target`. Then hand one prompt over and compare the tokens.",
    ),
)

# Python, and not TOML: the table loads in 0.2 ms from bytecode; TOML takes 6 ms to parse.
CODES = {row.code: row for row in _ROWS}
"""The findings by their code."""
