"""The settings of one worker as a ``vllm serve`` line gives them, and how such a line is read.

Which spellings vLLM accepts follows ``utils/argparse_utils.py``, ``engine/arg_utils.py``,
``config/`` and ``envs.py`` of vLLM 0.24.0 and 0.33.0. A setting that the line does not have is
``None`` here; what vLLM then does depends on its version, and on the model.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain, dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from onnxkvrename.documents import UnreadableTextError, parse_json, parse_yaml
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import find_similar, quote_path, suggest_similar
from onnxkvrename.limits import shorten_text
from onnxkvrename.storage.read import is_occupied, read_text_file

NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
DEFAULT_CONNECTOR = NIXL_CONNECTORS[0]
"""The connector of a line without ``--kv-transfer-config``: a hand-over requires one."""
DRAFTLESS_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Methods of ``--speculative-config`` whose drafts come from no layers."""


class ServeSettings(NamedTuple):
    """What a ``vllm serve`` line says about KV caches and their hand-over.

    Attributes:
        model: The model's name or path; empty if the line has flags alone.
        tensor_parallel_size: vLLM's ``--tensor-parallel-size``, in ranks.
        pipeline_parallel_size: vLLM's ``--pipeline-parallel-size``, in stages.
        context_parallel_size: Ranks over which the tokens of one request are divided: vLLM's
            ``--decode-context-parallel-size`` times ``--prefill-context-parallel-size``.
        block_size: vLLM's ``--block-size``, in tokens.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``, except ``auto``.
        skipped_layers: vLLM's ``--kv-cache-dtype-skip-layers``: layers with another cache dtype.
        dtype: vLLM's ``--dtype``: ``float16``, ``bfloat16`` or ``float32``.
        kv_cache_memory_bytes: vLLM's ``--kv-cache-memory-bytes``, for each GPU.
        max_model_len: vLLM's ``--max-model-len``: tokens of a prompt and its answer.
        max_num_batched_tokens: vLLM's ``--max-num-batched-tokens``: those that run at once.
        max_num_seqs: vLLM's ``--max-num-seqs``: requests that run at once.
        has_prefix_caching: vLLM's ``--enable-prefix-caching``.
        has_hybrid_manager: Whether groups of several kinds are allowed: the opposite of
            ``--disable-hybrid-kv-cache-manager``.
        mamba_cache_mode: vLLM's ``--mamba-cache-mode``.
        speculative_config: vLLM's ``--speculative-config``, as it was given, with
            ``--spec-method``, ``--spec-model`` and ``--spec-tokens``.
        connector: The ``kv_connector`` of ``--kv-transfer-config``; ``None`` without that flag.
        kv_role: Its ``kv_role``; empty if it has none.
        extra_config: Its ``kv_connector_extra_config``.
        attention_backend: vLLM's ``--attention-backend``, in capital letters, except ``auto``.
        kv_cache_layout: ``VLLM_KV_CACHE_LAYOUT``.
        ssm_conv_state_layout: ``VLLM_SSM_CONV_STATE_LAYOUT``.
        layer_partition: ``VLLM_PP_LAYER_PARTITION``: the layers of each pipeline stage.
        uses_v2_model_runner: ``VLLM_USE_V2_MODEL_RUNNER``.
        uses_full_transfer: ``VLLM_QAIC_USE_FULL_KV_TRANSFER``, of vllm-qaic; off by default.
        notes: A sentence for each flag or variable that could matter and is not understood.
        unread: What is not read of the line and may change caches.
        gaps: What of it may set a flag or variable that is read elsewhere, so that a refusal is not
            known either: words that a shell expands, flags in another spelling, files of variables.
    """

    model: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    skipped_layers: tuple[str, ...] = ()
    dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    has_prefix_caching: bool | None = None
    has_hybrid_manager: bool | None = None
    mamba_cache_mode: str | None = None
    speculative_config: Mapping[str, object] | None = None
    connector: str | None = None
    kv_role: str = ""
    extra_config: Mapping[str, object] = MappingProxyType({})
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    ssm_conv_state_layout: str | None = None
    layer_partition: tuple[int, ...] | None = None
    uses_v2_model_runner: bool | None = None
    uses_full_transfer: bool | None = None
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def uses_nixl(self) -> bool:
        """True if NIXL hands over, as it does where the line does not name a connector."""
        return (self.connector or DEFAULT_CONNECTOR) in NIXL_CONNECTORS

    @property
    def pulls_by_nixl(self) -> bool:
        """True if decode reads what it needs by NIXL."""
        return self.uses_nixl and self.connector != "NixlPushConnector"

    @property
    def enables_cross_layers(self) -> bool:
        """True if ``enable_cross_layers_blocks`` is set, as text or as a truth value."""
        return str(self.extra_config.get("enable_cross_layers_blocks", "")).lower() == "true"

    def decide_full_transfer(self, is_requested: bool) -> bool:
        """Return whether vllm-qaic moves all of each buffer, as requested or as the line says.

        Raises:
            KvRenameError: It is requested, and the line turns it off.
        """
        if is_requested and self.uses_full_transfer is False:
            raise KvRenameError(
                "--full-transfer contradicts VLLM_QAIC_USE_FULL_KV_TRANSFER=0 in --serve",
                hint="leave out one of them",
            )
        return is_requested or bool(self.uses_full_transfer)

    @property
    def has_draft_layers(self) -> bool:
        """True if a draft model, or layers of the model that draft, have KV caches of their own."""
        config = self.speculative_config
        if config is None:
            return False
        method = config.get("method") or config.get("model")
        return str(method).strip("[]") not in DRAFTLESS_METHODS


class _Value(NamedTuple):
    """A value as it was typed.

    Attributes:
        label: What messages put in front: the option, and the side.
        name: The flag or variable as it was typed.
        text: Its value; ``None`` if there is none.
        version: The version of vLLM.
    """

    label: str
    name: str
    text: str | None
    version: str

    def build_error(self, problem: str, hint: str | None = None) -> KvRenameError:
        """Return the error for the value; `problem` completes the sentence."""
        shown = "" if self.text is None else f" {shorten_text(self.text)!r}"
        return KvRenameError(f"{self.label} {self.name}{shown}: {problem}", hint=hint)

    def get_text(self) -> str:
        """Return the text.

        Raises:
            KvRenameError: There is none, or a shell would have expanded it.
        """
        if self.text is None:
            raise self.build_error("requires a value")
        if "$" in self.text or "`" in self.text:
            raise self.build_error(
                "the shell has not expanded it; write the value itself, or in a script assign it "
                "on a line above, once and in any case, as NAME=VALUE"
            )
        return self.text


def read_serve_option(
    value: str, vllm_version: str, label: str = "--serve", folder: Path | None = None
) -> ServeSettings:
    """Return the settings of a line, or of the file that ``@FILE`` names.

    Args:
        value: The line, or ``@`` and the path of a script with one such line, or of the YAML that
            vLLM takes as ``--config``.
        vllm_version: The version of vLLM that runs it.
        label: What messages put in front.
        folder: Where a path in the line begins; the working directory by default.

    Raises:
        KvRenameError: A file cannot be read, there is not one line, or a flag that matters has a
            value that vLLM does not take.
    """
    if not value.startswith("@"):
        return parse_serve_line(value, vllm_version, label, folder)
    path = Path(value[1:])
    label = f"{label} {path.name}:"
    if path.suffix in (".yaml", ".yml"):
        words = _read_config(path, vllm_version)
        if found := {f"--{key}" for key in _KEYS_OF_OTHERS}.intersection(words):
            raise KvRenameError(
                f"is not the YAML of vLLM's --config: it has {min(found)[2:]}",
                path=str(path),
                hint="pass that YAML, or a script with the line that starts vLLM",
            )
        return _build_settings({}, words, vllm_version, label)
    return parse_serve_line(read_text_file(path), vllm_version, label, path.parent)


def parse_serve_line(
    text: str, vllm_version: str, label: str = "--serve", folder: Path | None = None
) -> ServeSettings:
    """Return the settings of a ``vllm serve`` line.

    Variables may precede it, and it may be flags alone.

    Args:
        text: The line, or a script with one such line.
        vllm_version: The version of vLLM that runs it: it decides which values exist.
        label: What messages put in front.
        folder: Where the path of ``--config`` in the line begins.

    Raises:
        KvRenameError: As for `read_serve_option`.
    """
    command = _find_command(text, label)
    words = list(command.words)
    names = [_normalize_flag(word.partition("=")[0]) for word in words]
    if "--config" in names:
        index = names.index("--config")
        _, separator, path = words[index].partition("=")
        if not separator:
            path = words[index + 1] if index + 1 < len(words) else ""
        given = _read_config((folder or Path()) / path, vllm_version)
        has_model = bool(words) and not words[0].startswith("-")
        rest = words[:index] + words[index + (1 if separator else 2) :]
        words = [*rest[:has_model], *given, *rest[has_model:]]
    settings = _build_settings(command.variables, words, vllm_version, label)
    if command.image_version not in ("", vllm_version):
        note = f"the image has vLLM {command.image_version}, and {vllm_version} is assumed (--vllm)"
        settings = settings._replace(notes=(*settings.notes, note))
    sources = tuple(dict.fromkeys(command.sources))
    if not sources:
        return settings
    return settings._replace(
        notes=(*settings.notes, f"not known: {', '.join(sources)}"),
        unread=(*settings.unread, *sources),
        gaps=(*settings.gaps, *sources),
    )


# Words of a shell


class _Command(NamedTuple):
    """A command: the variables that it gets, and the words after ``vllm serve``.

    Its sources are what else may set variables: files (``source``, docker's ``--env-file``), and
    statements that may not run. The version is that of vLLM in the tag of its image.
    """

    variables: Mapping[str, str]
    words: Sequence[str]
    sources: Sequence[str]
    image_version: str


class _Statement(NamedTuple):
    """A simple command of a script.

    Attributes:
        words: Its words, without redirections.
        group: The number of its group of statements, which are joined by ``&&``.
        is_certain: Whether it runs in any case, and once: it is in no block, and not after ``&&``
            or ``||``.
        is_nested: Whether it is in an ``if``, a loop, a function or a here-document.
        is_text: Whether it is in a here-document.
    """

    words: list[str]
    group: int
    is_certain: bool
    is_nested: bool
    is_text: bool


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_DOCKER_VARIABLE = re.compile(r"(?:--env=|-e)(?=[A-Za-z_][A-Za-z0-9_]*=)")
_DOCKER_NAME = re.compile(r"(?:--env=|-e)([A-Za-z_][A-Za-z0-9_]*)")
_BEFORE_COMMENT = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<![\s;&|])(?<!^)\#|[^\#\\'"])*""", re.DOTALL
)
"""A text up to its comment: a ``#`` that begins a word; or up to a quote that is not closed."""
_CONTAINER_RUNNERS = ("docker", "podman", "nerdctl")
_CONTAINER_SWITCHES = re.compile(
    r"-[ditqP]+|--(rm|init|detach|interactive|tty|privileged|read-only|publish-all|quiet|"
    r"no-healthcheck|oom-kill-disable)"
)
"""The options of ``docker run`` without a value."""
_KEYS_OF_OTHERS = ("services", "apiVersion", "kind")
"""Keys of the YAML of Docker Compose and of Kubernetes."""
_VLLM_IMAGE = re.compile(r"vllm-openai:v?([0-9]+\.[0-9]+)[0-9.]*")
_REDIRECTION = re.compile(r"[0-9]*(?:>>?|<)(.*)", re.DOTALL)
_SEPARATORS = ";&|"
_UNKNOWN_TEXT = re.compile(r"^\(|[$`~<>]")
"""A part of a value by which a shell, or an array, may mean something else."""
_GLOB = re.compile(r"[*?[]")
_CHANGE = re.compile(
    r"(?:^|[({)])([A-Za-z_][A-Za-z0-9_]*)(?:\[[^]]{0,99}\])?(?:[-+*/%:]?=|\+\+|--|$)"
)
"""A place in a word at which a builtin of the shell may change a variable."""
_ASSIGNING = (
    *("export", "declare", "typeset", "local", "readonly", "unset", "let", "eval"),
    *("read", "readarray", "mapfile", "getopts", "for", "select", "case"),
)
"""The commands that may change a variable that they name; another program cannot."""
_UNFOLLOWED = (
    *("function", "alias", "trap", "builtin", "command", "exec"),
    *_ASSIGNING,
)
"""What a script may do to variables and that is not followed: a success then has a condition."""
_CHANGES_FIRST = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^]]{0,99}\])?\+?=")
_PROGRAM = re.compile(r"[A-Za-z0-9_./~][^()]*")
_HEREDOC = re.compile(r"""(?<!<)<<-?\s*(['"]?)([A-Za-z_][A-Za-z0-9_.-]*)\1""")
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_ARRAY = re.compile(r"(?:^|\s)([A-Za-z_][A-Za-z0-9_]*)\+?=\(")
_MAY_BE_WORDS = re.compile(r"\$\(|`|\$[^/:]*$|\$\{[^}]*@")
"""A word that a shell may expand to several, such as variables or options: not a path."""
_OPENING = ("if", "while", "until", "for", "select", "case", "(")
_CLOSING = ("fi", "done", "esac", "}", ")")
_INNER = ("then", "else", "elif", "do", "!", "time", "{")
"""The reserved words before a command: those that begin a block, that end one, and others."""
_VARIABLE = r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})"
_ESCAPED = r"\\."
_EXPANDED_IN_QUOTES = re.compile(f"{_ESCAPED}|{_VARIABLE}", re.DOTALL)
_EXPANDED_OUTSIDE = re.compile(f"{_ESCAPED}|'[^']*'|{_VARIABLE}", re.DOTALL)
_DOUBLE_QUOTES = re.compile(rf"({_ESCAPED}|'[^']*')|\"(?:{_ESCAPED}|[^\"\\])*\"", re.DOTALL)
_SIDES = ("prefill", "decode")
_SIDE_SIMILARITY = 0.8
_MAX_VALUE_CHARS = 1000
"""The longest value of a variable that is expanded: values of values double."""
_MAX_JOINED_LINES = 1000
_MAX_JOINED_CHARS = 20_000
"""The most lines of one quote or array, and the most characters of one or of what is expanded."""
_MAX_NAME_CHARS = 200
"""The longest word that is looked up as a file that lacks its ``@``."""


def _find_command(text: str, label: str) -> _Command:
    """Return the only command of a text that starts vLLM, with all variables that it gets."""
    environment = _Environment()
    statements = list(_split_statements(text, label))
    commands = []
    for statement in statements:
        start = _find_arguments(statement.words, may_be_flags=statement.is_certain)
        if start is None:
            environment.run(statement)
        else:
            commands.append(environment.start(statement, start))
    if len(commands) == 1:
        return commands[0]
    found = "several vllm serve lines" if commands else "no vllm serve line"
    raise KvRenameError(
        f"{label} {shorten_text(' '.join(text.split()))!r}: {found}",
        hint=_suggest_line(text, label, statements),
    )


def _suggest_line(text: str, label: str, statements: Iterable[_Statement]) -> str:
    """Return what to pass in place of a text that does not start vLLM."""
    prefix, separator, _ = text.strip().partition(":")
    if separator and find_similar(prefix, _SIDES, _SIDE_SIMILARITY):
        return f"leave out {prefix}: (only compare takes lines for one side)"
    if any(_find_image(statement.words) for statement in statements):
        return (
            "an image counts as vLLM's if its name has vllm, and flags or serve follow it; for "
            "another one, pass `vllm serve MODEL` with its flags"
        )
    word = text.strip()
    if len(text.split()) == 1 and len(word) < _MAX_NAME_CHARS and is_occupied(word):
        return f"pass `{label}{'' if label.endswith(':') else ' '}@{quote_path(word)}`"
    return (
        "pass `vllm serve MODEL` with its flags, flags alone such as '--block-size 16', or @FILE "
        "for a script"
    )


class _Environment:
    """What the statements of a script, one after the other, give to a command that follows."""

    def __init__(self) -> None:
        self.assigned: dict[str, str] = {}
        self.exported: dict[str, str | None] = {}
        self.sources: list[str] = []
        self.doubtful: list[tuple[int, str]] = []

    def run(self, statement: _Statement) -> None:
        """Take what a statement sets; what it may set besides becomes a source."""
        words = _drop_reserved(statement.words)
        assignments = _find_assignments(words)
        builtin, *arguments = [*dropwhile(_ASSIGNMENT.fullmatch, words)] or [""]
        if statement.is_text or any(map(_ARRAY.match, words)):
            return  # what uses an array is not read either
        if not statement.is_certain:
            known = _VARIABLES.keys() | _NOT_READ
            self.doubtful += [(statement.group, name) for name in assignments if name in known]
        if builtin == "export":
            named = [name for name in arguments if name.isidentifier()]
            self.exported |= {name: self.assigned.get(name) for name in named}
            self.exported |= assignments
            if len(named) + len(assignments) < len(arguments) or (named and statement.is_nested):
                self.sources.append("what export sets")
        elif not builtin:
            self.assigned |= assignments
            kept = self.exported.keys() & assignments.keys()
            self.exported |= {name: assignments[name] for name in kept}
        elif builtin in ("source", "."):
            self.sources += map(_describe_file, arguments[:1])
        elif builtin == "unset" and statement.is_certain and "-" not in "".join(arguments):
            for name in arguments:
                self.exported.pop(name, None)
        elif builtin == "set":
            if any(word == "allexport" or re.match("-[a-z]*a", word) for word in arguments):
                self.sources.append("what set exports")
        elif not _is_harmless(builtin):
            self.sources.append(f"what {shorten_text(builtin)} does")

    def start(self, statement: _Statement, start: int) -> _Command:
        """Return the command that a statement starts, of which the arguments begin at `start`."""
        before, arguments = statement.words[:start], statement.words[start:]
        doubtful = (name for group, name in self.doubtful if group != statement.group)
        arrays = [match[1] for word in before if (match := _ARRAY.match(word))]
        if arrays and arguments[-1:] == [")"]:
            arguments.pop()
        unknown = [
            *self.sources,
            *(f"what {name} is with" for name in arrays),
            *(["what runs the line"] if statement.is_nested and not arrays else []),
            *(shorten_text(word) for word in before if _MAY_BE_WORDS.match(word)),
            *map(_describe_file, _list_environment_files(before)),
            *(f"whether {name} is set" for name in doubtful),
        ]
        passed: Iterable[str] = self.exported
        if _find_image(statement.words) is not None:  # a container gets what is passed to it
            joined = (_DOCKER_NAME.fullmatch(word) for word in before)
            passed = [word for option, word in pairwise(before) if option in ("-e", "--env")]
            passed += [match[1] for match in joined if match]
        values = {name: self.exported.get(name) for name in passed}
        variables = {name: value for name, value in values.items() if value is not None}
        variables |= _find_assignments(before)
        tags = (_VLLM_IMAGE.fullmatch(word.rpartition("/")[2]) for word in before)
        return _Command(variables, arguments, unknown, next((tag[1] for tag in tags if tag), ""))


def _is_harmless(command: str) -> bool:
    """Return whether a command changes no variable: a test, or a program of its own."""
    is_program = _PROGRAM.fullmatch(command) is not None and "=" not in command
    return command in ("[", "[[") or (is_program and command not in _UNFOLLOWED)


def _find_assignments(words: Iterable[str]) -> dict[str, str]:
    """Return the variables that words set, also by docker's ``-eNAME=VALUE``."""
    texts = (_DOCKER_VARIABLE.sub("", word) for word in words)
    return {match[1]: match[2] for text in texts if (match := _ASSIGNMENT.fullmatch(text))}


def _describe_file(path: str) -> str:
    return f"the variables of {path}"


def _list_environment_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the files of docker's ``--env-file``."""
    for index, word in enumerate(words):
        name, separator, path = word.partition("=")
        if name == "--env-file":
            yield path if separator else "".join(words[index + 1 : index + 2])


def _split_statements(text: str, label: str) -> Iterator[_Statement]:
    """Yield the statements of a script, as a shell reads them.

    What lines above assign is expanded, unless another place in the script may change it; a word
    with any other variable stays as it is.

    Raises:
        KvRenameError: A quote is not closed.
    """
    values: dict[str, str] = {}
    lines = list(_join_lines(text, label))
    unexpanded = _read_statements(lines, label, values)
    changes = Counter(chain.from_iterable(_list_changed(each.words) for each in unexpanded))
    for statement in _read_statements(lines, label, values):
        yield statement
        if statement.is_certain:
            known = _read_assignments(statement.words).items()
            values |= {name: value for name, value in known if changes[name] == 1}


def _read_statements(
    lines: Iterable[tuple[str, bool]], label: str, values: Mapping[str, str]
) -> Iterator[_Statement]:
    """Yield the statements of joined lines, with the values that are known when a line is read."""
    depth, group, is_after = 0, 0, False
    for line, is_here in lines:
        try:
            words = _split_words(_expand_variables(line, values))
        except ValueError:
            if is_here:
                continue  # text, not a command
            raise _build_open_error(line, label) from None
        for is_separator, run in groupby(words, _is_separator):
            found = list(run)
            if is_separator:
                is_after = found[-1] in ("&&", "||", "|")
                group += found != ["&&"]
            elif statement := _drop_redirections(found):
                if not is_here:
                    depth = max(depth + _measure_nesting(statement), 0)
                is_nested = is_here or depth > 0
                is_certain = not (is_nested or is_after)
                yield _Statement(statement, group, is_certain, is_nested, is_text=is_here)
                is_after = False
        group += not is_after


def _join_lines(text: str, label: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a script; one continues while a quote or an array is open.

    Each comes with whether it is the text of a here-document.

    Raises:
        KvRenameError: A quote or an array is not closed.
    """
    pending, count, ends = "", 0, list[str]()
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    present = Counter(line.strip() for line in lines)
    for line in lines:
        if ends and not pending:
            if line.strip() == ends[0]:
                ends.pop(0)
            else:
                yield line, True
            continue
        if not pending and line.lstrip().startswith("#"):
            continue
        is_array = _is_array_open(pending)
        count = count + 1 if pending else 0
        pending += _cut_comment(line) if is_array else line
        if count > _MAX_JOINED_LINES or (count and len(pending) > _MAX_JOINED_CHARS):
            break
        closes = ")" in line if is_array else count == 0 or "'" in line or '"' in line
        if not closes or _is_open(pending):
            pending += " " if is_array else "\n"
            continue
        yield pending, False
        # A shift in arithmetic, or a text about one, has no line that ends it.
        ends += [match[2] for match in _HEREDOC.finditer(pending) if present[match[2]]]
        pending = ""
    if pending:
        raise _build_open_error(pending, label)


def _build_open_error(text: str, label: str) -> KvRenameError:
    what = "an array" if _is_array_open(text) else "a quote"
    return KvRenameError(f"{label} {shorten_text(text.strip())!r}: {what} is not closed")


def _is_open(text: str) -> bool:
    """Return whether a quote or an array is not closed at the end of a text."""
    before = _BEFORE_COMMENT.match(text)
    end = len(text) if before is None else before.end()
    return text[end : end + 1] in ("'", '"') or _is_array_open(text)


def _is_array_open(text: str) -> bool:
    plain = _QUOTED.sub("", text)
    start = _ARRAY.search(plain)
    return start is not None and plain.count("(", start.start()) > plain.count(")", start.start())


def _cut_comment(line: str) -> str:
    before = _BEFORE_COMMENT.match(line)
    end = len(line) if before is None else before.end()
    return line[:end] if line[end : end + 1] == "#" else line


def _is_separator(word: str) -> bool:
    return bool(word) and not word.strip(_SEPARATORS)


def _measure_nesting(words: Sequence[str]) -> int:
    """Return how many blocks and arrays a statement begins, less those that it ends."""
    change = words.count("{") + words[-1].endswith("=(")
    for word in words:
        change += (word in _OPENING) - (word in _CLOSING)
        if word not in (*_OPENING, *_CLOSING, *_INNER):
            break
    return change


def _split_words(line: str) -> list[str]:
    # shlex takes every # for a comment, a shell only one that begins a word.
    lexer = shlex.shlex(_cut_comment(line), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def _list_changed(words: Sequence[str]) -> Iterator[str]:
    """Yield the variables that a statement assigns, or may change as ``read`` and ``for`` do."""
    words = _drop_reserved(words)
    if words[:1] == ["export"]:
        names = (word.partition("=") for word in words[1:] if "=" in word)
        yield from (name.rstrip("+") for name, _, value in names if value.strip("{$}") != name)
        return
    assignments = list(takewhile(_CHANGES_FIRST.match, words))
    rest = words[len(assignments) :]
    is_assigning = rest[:2] == ["printf", "-v"] or (
        # A word that cannot name a program is a condition, arithmetic, or a pattern of case.
        rest != [] and (rest[0] in _ASSIGNING or _PROGRAM.fullmatch(rest[0]) is None)
    )
    for word in (*assignments, *rest) if is_assigning else assignments:
        yield from _CHANGE.findall(word)


def _drop_reserved(words: Sequence[str]) -> list[str]:
    """Return a statement without the reserved words in front of its command."""
    reserved = (*_OPENING, *_INNER)
    return list(dropwhile(lambda word: word in reserved and word not in _ASSIGNING, words))


def _read_assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the values that a statement assigns, if it does nothing else and they are known."""
    assignments = [_ASSIGNMENT.fullmatch(w) for w in words[words[0] == "export" :]]
    if None in assignments:
        return {}
    known = (m for m in assignments if m and len(m[2]) <= _MAX_VALUE_CHARS)
    return {m[1]: m[2] for m in known if _UNKNOWN_TEXT.search(m[2]) is None}


def _expand_variables(line: str, values: Mapping[str, str]) -> str:
    """Replace the variables with a known value, except for those in single quotes.

    Without quotes, a shell splits a value at its spaces, and takes what is between for names of
    files if it has ``*``.
    """

    def expand_in_quotes(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[2] or "")
        return match[0] if value is None else re.sub(r'(["\\])', r"\\\1", value)

    def expand(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[2] or "")
        if value is None or _GLOB.search(value):
            return match[0]
        return re.sub(r"\S+", lambda word: shlex.quote(word[0]), value)

    parts = []
    end = 0
    for quotes in _DOUBLE_QUOTES.finditer(line):
        if quotes[1] is None:
            parts.append(_EXPANDED_OUTSIDE.sub(expand, line[end : quotes.start()]))
            parts.append(_EXPANDED_IN_QUOTES.sub(expand_in_quotes, quotes[0]))
            end = quotes.end()
    expanded = "".join([*parts, _EXPANDED_OUTSIDE.sub(expand, line[end:])])
    return expanded if len(expanded) <= max(_MAX_JOINED_CHARS, len(line)) else line


def _drop_redirections(words: Iterable[str]) -> list[str]:
    kept: list[str] = []
    is_target = False
    for word in words:
        redirection = _REDIRECTION.fullmatch(word)
        if redirection is None and not is_target:
            kept.append(word)
        is_target = redirection is not None and not redirection[1]
    return kept


def _find_arguments(words: Sequence[str], *, may_be_flags: bool) -> int | None:
    """Return where the arguments of vLLM begin; ``None`` if the words do not start it.

    They may be flags alone, except within an array or a block.
    """
    image = _find_image(words)
    if image is not None and "vllm" in words[image].rpartition("/")[2]:
        if words[image + 1 : image + 2] == ["serve"]:
            return image + 2
        has_flags = any(word.startswith("-") for word in words[image + 1 : image + 2])
        if has_flags and not any(word.startswith("--entrypoint") for word in words[:image]):
            return image + 1
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        following = words[index + 1 : index + 2]
        if name == "vllm" and following == ["serve"]:
            return index + 2
        is_module = word == "-m" and following and following[0].startswith("vllm.entrypoints.")
        if is_module:
            return index + 2
        if name == "api_server.py" or name.partition(":")[0] == "vllm-openai":
            return index + 1
    for index, word in enumerate(words if may_be_flags else ()):
        if word.startswith("-"):
            return index
        if not (_ASSIGNMENT.fullmatch(word) or word == "env") or _ARRAY.match(word):
            return None
    return None


def _find_image(words: Sequence[str]) -> int | None:
    """Return where the image of ``docker run`` is; ``None`` for another command."""
    runners = [word.rpartition("/")[2] in _CONTAINER_RUNNERS for word in words]
    if True not in runners or "run" not in words[runners.index(True) :]:
        return None
    index = words.index("run", runners.index(True)) + 1
    if "compose" in words[:index]:  # its file says what is run
        return None
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        is_joined = "=" in word or (len(word) > 2 and word[1] != "-")
        index += 1 if is_joined or _CONTAINER_SWITCHES.fullmatch(word) else 2
    return index if index < len(words) else None


# Flags


def _read_config(path: Path, version: str) -> list[str]:
    """Return the words that vLLM makes of the file of ``--config``.

    What is false becomes ``--no-``, from 0.33 on and for a key as the help of vLLM spells it;
    otherwise vLLM drops it.
    """
    try:
        config = parse_yaml(read_text_file(path))
    except UnreadableTextError as error:
        raise KvRenameError(str(error), path=str(path)) from None
    if not isinstance(config, dict):
        raise KvRenameError("is not a mapping of flags to values", path=str(path))
    words: list[str] = []
    for key, value in config.items():
        flag = f"--{key}"
        if value is False:
            words += [f"--no-{key}"] if flag in _SWITCHES and version != "0.24" else []
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        else:
            words += [flag] if value is True else [flag, str(value)]
    return words


def _normalize_flag(word: str) -> str:
    """Return the long spelling of a flag, with the keys after a dot as they are."""
    name, dot, keys = word.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return _SHORT_FLAGS.get(name, name) + dot + keys


class _GivenFlag(NamedTuple):
    """A flag with the words that follow it."""

    typed: str
    name: str
    values: Sequence[str]


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[_GivenFlag]]:
    """Return the words before the first flag, and each flag with its values."""
    first: list[str] = []
    flags: list[_GivenFlag] = []
    for word in words:
        if _is_flag(word):
            typed, separator, value = word.partition("=")
            flags.append(_GivenFlag(typed, _normalize_flag(typed), [value] if separator else []))
        elif flags:
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, word))
        else:
            first.append(word)
    return first, flags


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and re.fullmatch(r"-\d+(\.\d*)?", word) is None


def _read_count(value: _Value) -> int:
    text = value.get_text()
    if not re.fullmatch(r"\+?[0-9]{1,9}", text.strip(), re.ASCII) or int(text) < 1:
        raise value.build_error("pass a whole number of at least 1")
    return int(text)


def _read_optional_count(value: _Value) -> int | None:
    return None if value.get_text() in ("", "None") else _read_count(value)


def _read_amount(value: _Value) -> int | None:
    """Return a number with or without a unit (``human_readable_int``)."""
    if value.get_text() in ("", "None"):
        return None
    amount = _parse_amount(value.get_text())
    if amount is None or amount < 1:
        raise value.build_error("pass a number such as 8192, 8k (8,000) or 8K (8,192)")
    return amount


def _parse_amount(text: str) -> int | None:
    """Return a number such as 8192, 8k (8,000), 8K (8,192) or 1.5k; ``None`` if it is none."""
    match = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,9})?([kmgtKMGT]?)", text.strip(), re.ASCII)
    if match is None:
        return None
    number, fraction, unit = match.groups()
    power = " kmgt".index(unit.lower() or " ")
    if fraction is None:
        return int(number) * int((1024 if unit.isupper() else 1000) ** power)
    return int(float(number + fraction) * 1000**power) if unit.islower() else None


def _read_length(value: _Value) -> int | None:
    is_auto = value.get_text().strip().lower() in ("-1", "auto")
    return None if is_auto else _read_amount(value)


def _read_choice(choices: Mapping[str, Sequence[str]], value: _Value) -> str | None:
    """Return one of the values that a version has; ``None`` for ``auto``."""
    text = value.get_text()
    known = choices.get(value.version) or choices[""]
    if text not in known:
        raise value.build_error(f"vLLM {value.version} takes {', '.join(known)}")
    return None if text == "auto" else text


def _read_dtype(value: _Value) -> str | None:
    """Return vLLM's own name of a dtype, of which ``half`` and ``float`` are aliases."""
    dtype = _read_choice(_DTYPE_CHOICES, value)
    return None if dtype is None else {"half": "float16", "float": "float32"}.get(dtype, dtype)


def _read_backend(value: _Value) -> str | None:
    """Return a backend's name: ``validate_backend_before`` does not accept the path of a class.

    Names are not checked for versions whose names are not known here.
    """
    text = value.get_text()
    if text in ("", "None") or text.lower() == "auto":
        return None
    known = _BACKEND_CHOICES.get(value.version)
    if known is not None and text.upper() not in known:
        problem = f"vLLM {value.version} has no attention backend of this name"
        raise value.build_error(problem, suggest_similar(text, known))
    return text.upper()


def _read_truth(value: _Value) -> bool:
    """Return what a variable of 0 or 1 says (``bool(int(...))``)."""
    if value.get_text().strip() not in ("0", "1"):
        raise value.build_error("pass 0 or 1")
    return value.get_text().strip() == "1"


def _read_partition(value: _Value) -> tuple[int, ...]:
    parts = value.get_text().split(",")
    if not all(re.fullmatch("[0-9]{1,6}", part.strip(), re.ASCII) for part in parts):
        raise value.build_error("pass the layers of each stage, such as 16,16")
    return tuple(map(int, parts))


def _read_object(value: _Value) -> Mapping[str, Any] | None:
    """Return an object of JSON, in which numbers may have units."""
    text = value.get_text()
    if text in ("", "None"):
        return None
    try:
        parsed = parse_json(_expand_amounts(text))
    except UnreadableTextError as error:
        has_lost_quotes = '"' not in text and re.search("[{:]", text) is not None
        hint = explain_lost_quotes(value.label) if has_lost_quotes else None
        raise value.build_error(str(error), hint) from None
    if not isinstance(parsed, dict):
        raise value.build_error("is not an object of JSON")
    return parsed


def explain_lost_quotes(label: str) -> str:
    """Return how to pass JSON in a line, whose quotes the shell takes within other quotes.

    Args:
        label: What messages put in front: the option, and the side if the line is for one.
    """
    side = next((side for side in _SIDES if label.startswith(f"--serve {side}:")), "")
    script = f"{side}:@{side}.sh" if side else "@serve.sh"
    return (
        "the shell took the quotes of the JSON: write the line into a script, quoted as usual, "
        f"and pass `--serve {script}`"
    )


def _expand_amounts(text: str) -> str:
    """Replace the numbers with units outside of quotes in a JSON text."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    parts[::2] = (
        re.sub(
            r"\b[0-9]+(?:\.[0-9]+)?[kmgtKMGT]\b", lambda m: str(_parse_amount(m[0]) or m[0]), part
        )
        for part in parts[::2]
    )
    return "".join(parts)


_SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
_OTHER_SHORT_FLAGS = frozenset(["-q", "-n", "-r", "-ep", "-dc", "-cc", "-h", "-v"])
"""vLLM's flags with one dash that do not matter, beside ``-dp`` and those that begin with it."""
_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "mxint8",  # vllm-qaic's own
)
_NEW_CACHE_DTYPES = (
    "nvfp4_ds_mla",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "ultraquant_4bit",
    "int4_per_token_head",
    "nvfp4_4over6",
)
_CACHE_DTYPE_CHOICES = {"0.24": _CACHE_DTYPES, "": (*_CACHE_DTYPES, *_NEW_CACHE_DTYPES)}
_LAYOUT_CHOICES = {
    "0.24": ("NHD", "HND"),
    "": ("LBNHC", "LBHNC", "LHBNC", "NHD", "HND", "BLHNC", "BLNHC", "BHLNC"),
}
_BACKENDS_OF_ALL = (
    "CPU_ATTN",
    "CUSTOM",  # what a plugin registers
    "CUTLASS_MLA",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_DSV4",
    "FLASHINFER_MLA_SPARSE_SM120",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASHMLA_SPARSE_DSV4",
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASH_ATTN_MLA",
    "FLEX_ATTENTION",
    "MINIMAX_M3_SPARSE",
    "NO_ATTENTION",
    "ROCM_AITER_FA",
    "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_SPARSE",
    "ROCM_AITER_TRITON_MLA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_ATTN",
    "ROCM_FLASHMLA_SPARSE_DSV4",
    "TOKENSPEED_MLA",
    "TORCH_SDPA",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
    "TRITON_MLA",
    "TURBOQUANT",
    "XPU_MLA_SPARSE",
)
_NEW_BACKENDS = (
    "AMX_MLA",
    "B12X",
    "CPU_MLA",
    "CUTLASS_MSA",
    "FLASHINFER_MLA_SPARSE_DSV41",
    "FLASHINFER_MLA_SPARSE_SM90",
    "FLASHMLA_MEGA_ATTN_DSV41",
    "FLASHMLA_SPARSE_DSV41",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE_FA4",
    "HPC_ATTN",
    "ROCM_FLASHMLA_SPARSE_DSV41",
    "ROCM_OCTAVE",
    "ROCM_SEGMENTED_ATTN",
    "STEP5_DSA",
    "TRITON_FLASHINFER",
    "TRITON_FLASH_ATTN",
    "TRITON_MSA",
    "ULTRAQUANT",
)
_BACKEND_CHOICES = {"0.24": _BACKENDS_OF_ALL, "0.33": (*_BACKENDS_OF_ALL, *_NEW_BACKENDS)}
"""The members of ``AttentionBackendEnum`` in ``v1/attention/backends/registry.py``."""
_DTYPE_CHOICES = {"": ("auto", "half", "float16", "bfloat16", "float", "float32")}
_Reader = Callable[[_Value], object]
_FLAGS: Mapping[str, tuple[str, _Reader]] = {
    "--tensor-parallel-size": ("tensor_parallel_size", _read_count),
    "--pipeline-parallel-size": ("pipeline_parallel_size", _read_count),
    "--decode-context-parallel-size": ("decode_context_parallel_size", _read_count),
    "--prefill-context-parallel-size": ("prefill_context_parallel_size", _read_count),
    "--block-size": ("block_size", _read_count),
    "--kv-cache-dtype": ("kv_cache_dtype", partial(_read_choice, _CACHE_DTYPE_CHOICES)),
    "--dtype": ("dtype", _read_dtype),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", _read_amount),
    "--max-model-len": ("max_model_len", _read_length),
    "--max-num-batched-tokens": ("max_num_batched_tokens", _read_amount),
    "--max-num-seqs": ("max_num_seqs", _read_optional_count),
    "--mamba-cache-mode": (
        "mamba_cache_mode",
        partial(_read_choice, {"": ("all", "align", "none")}),
    ),
    "--attention-backend": ("attention_backend", _read_backend),
    "--spec-method": ("spec_method", _Value.get_text),
    "--spec-model": ("spec_model", _Value.get_text),
    "--spec-tokens": ("spec_tokens", _read_count),
}
"""The flags with one value, each with its field and how it is read."""
_OBJECTS = ("--kv-transfer-config", "--speculative-config", "--attention-config")
"""The flags whose values are objects of JSON."""
_SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--enable-prefix-caching": ("has_prefix_caching", True),
    "--disable-prefix-caching": ("has_prefix_caching", False),
    "--enable-hybrid-kv-cache-manager": ("has_hybrid_manager", True),
    "--disable-hybrid-kv-cache-manager": ("has_hybrid_manager", False),
}
"""The flags without a value, each with its field and what it sets; ``--no-`` sets the opposite."""
_LISTS = {"--kv-cache-dtype-skip-layers": "skipped_layers"}
_VARIABLES: Mapping[str, tuple[str, _Reader]] = {
    "VLLM_KV_CACHE_LAYOUT": ("kv_cache_layout", partial(_read_choice, _LAYOUT_CHOICES)),
    "VLLM_SSM_CONV_STATE_LAYOUT": (
        "ssm_conv_state_layout",
        partial(_read_choice, {"": ("SD", "DS")}),
    ),
    "VLLM_PP_LAYER_PARTITION": ("layer_partition", _read_partition),
    "VLLM_USE_V2_MODEL_RUNNER": ("uses_v2_model_runner", _read_truth),
    "VLLM_QAIC_USE_FULL_KV_TRANSFER": ("uses_full_transfer", _read_truth),
}
_NOT_READ = frozenset(
    {
        "--additional-config",
        "--calculate-kv-scales",
        "--cp-kv-cache-interleave-size",
        "--dcp-kv-cache-interleave-size",
        "--disable-sliding-window",
        "--engram-config",
        "--hf-config-path",
        "--hf-overrides",
        "--kv-offloading-backend",
        "--kv-offloading-size",
        "--kv-sharing-fast-prefill",
        "--mamba-block-size",
        "--mamba-cache-dtype",
        "--mamba-ssm-cache-dtype",
        "--model-class-overrides",
        "--num-gpu-blocks-override",
        "--replayssm-buffer-len",
        "--revision",
        "--swa-bounded-replay",
        "--use-replayssm",
        "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
        "VLLM_MLA_DISABLE",
    }
)
"""Flags and variables that change caches in ways that are not known here."""
_IGNORED_BY_VLLM = {
    "VLLM_ATTENTION_BACKEND": "vLLM 0.24 and later have --attention-backend instead",
    "VLLM_QAIC_USE_LEGACY_SLICING_SPEC": "pass --target vllm-qaic-legacy for it",
}
_CONFIG_KEYS = {
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
}
_OLD_CONFIG_KEYS = {"kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"}
"""The keys of ``--kv-transfer-config`` that 0.24 has and 0.33 refuses."""
_DEFAULT_KEYS: Mapping[str, object] = {
    "kv_connector_module_path": None,
    "kv_buffer_device": "cuda",
    "enable_permute_local_kv": False,
}
"""Keys of it that change what a connector does in ways that are not known here, with defaults."""
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_CUT_COMMAND = re.compile(r"\$\((?!.*\))|^[^`]*`[^`]*$", re.DOTALL)
"""The first word of a command of several whose output is a value, such as ``$(hostname -I)``."""


class _Reading(NamedTuple):
    """What is read of a line so far.

    Attributes:
        fields: The fields of the settings, and those of flags that join others.
        objects: What JSON says for each flag that takes an object.
        nested: What keys after a dot say for each of them; of both, vLLM takes this.
        doubtful: The flags and variables that could matter and are not read.
        misspelled: The flags that may be one that is read, each with that one.
        unexpanded: The words with a variable of the shell.
    """

    fields: dict[str, Any]
    objects: dict[str, Mapping[str, Any]]
    nested: dict[str, dict[str, Any]]
    doubtful: list[str]
    misspelled: dict[str, str]
    unexpanded: list[str]


def _build_settings(
    variables: Mapping[str, str], words: Sequence[str], version: str, label: str
) -> ServeSettings:
    """Return the settings of the variables and words of a command."""
    first, flags = _split_flags(words)
    reading = _Reading({}, {}, {}, [], {}, [])
    for name, text in variables.items():
        if name in _VARIABLES:
            field, read = _VARIABLES[name]
            reading.fields[field] = read(_Value(label, name, text, version))
        elif name in _NOT_READ:
            reading.doubtful.append(name)
    for flag in flags:
        value = _Value(label, flag.typed, flag.values[0] if flag.values else None, version)
        _read_flag(reading, flag, value)
    model = first[0] if first else reading.fields.get("model", "")
    others = (*first[1:], *(word for flag in flags for word in (flag.typed, *flag.values[1:])))
    values = (word for flag in flags for word in flag.values[:1] if _CUT_COMMAND.search(word))
    reading.unexpanded.extend(word for word in (model, *others) if "$" in word or "`" in word)
    reading.unexpanded.extend(values)
    reading.fields["model"] = "" if model in reading.unexpanded else model
    objects = {**reading.objects, **reading.nested}
    _apply_objects(reading.fields, objects, version, label)
    if first:  # vLLM refuses a second model
        stray = (word for flag in flags if flag.name in _FLAGS for word in flag.values[1:])
        surplus = (*first[1:], *stray)
        reading.doubtful.extend(word for word in surplus if word not in reading.unexpanded)
    reading.doubtful.extend(_list_unread_keys(objects.get("--kv-transfer-config") or {}))
    unexpanded = (word for word in reading.unexpanded if word != model or not _is_model(word))
    gaps = tuple(dict.fromkeys(map(shorten_text, (*unexpanded, *reading.misspelled))))
    return ServeSettings(
        **reading.fields,
        notes=tuple(_list_notes(variables, reading)),
        unread=(*gaps, *dict.fromkeys(reading.doubtful)),
        gaps=gaps,
    )


def _is_model(word: str) -> bool:
    """Return whether a word that the shell has not expanded is a model, and no list of flags."""
    return re.search(r"/|model(_(id|name|path|dir))?\W*$|^\$\{?\d\}?$", word, re.I) is not None


def _read_flag(reading: _Reading, flag: _GivenFlag, value: _Value) -> None:
    """Read one flag, unless it does not matter."""
    key, _, path = flag.name.partition(".")
    positive = flag.name.replace("--no-", "--", 1)
    if flag.name in _FLAGS:
        field, read = _FLAGS[flag.name]
        reading.fields[field] = read(value)
    elif flag.name == "--model":
        reading.fields["model"] = value.text or ""
    elif flag.name in _OBJECTS:
        reading.objects[key] = _read_object(value) or {}
    elif key in _OBJECTS:
        _nest(reading.nested.setdefault(key, {}), path, value)
    elif flag.name in _LISTS:
        reading.fields[_LISTS[flag.name]] = tuple(flag.values)
    elif positive in _SWITCHES:
        field, is_set = _SWITCHES[positive]
        reading.fields[field] = is_set == (positive == flag.name)
        if flag.values:  # a switch takes none, so this is the model
            reading.fields.setdefault("model", flag.values[0])
    elif flag.name in _NOT_READ:
        reading.doubtful.append(flag.typed)
    elif (meant := _find_meant(flag.name)) is not None:
        reading.misspelled[flag.typed] = meant


def _nest(values: dict[str, Any], path: str, value: _Value) -> None:
    """Set the value at a path of keys: ``kv_connector_extra_config.backends``."""
    text = value.get_text()
    *parents, last = path.split(".")
    for key in parents:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise value.build_error(f"{key} has a value already")
    if last.endswith("+"):
        values.setdefault(last[:-1], []).extend(text.split(","))
        return
    try:
        values[last] = parse_json(text)
    except UnreadableTextError:
        amount = _parse_amount(text)
        values[last] = text if amount is None else amount


def _apply_objects(
    fields: dict[str, Any], objects: Mapping[str, Mapping[str, Any]], version: str, label: str
) -> None:
    """Set the fields that the objects of JSON decide, and those of flags that join them."""
    ranks = [fields.pop(f"{side}_context_parallel_size", 1) for side in ("decode", "prefill")]
    fields["context_parallel_size"] = ranks[0] * ranks[1]
    speculation = dict(objects.get("--speculative-config") or {})
    names = {
        "spec_method": "method",
        "spec_model": "model",
        "spec_tokens": "num_speculative_tokens",
    }
    speculation |= {key: fields.pop(name) for name, key in names.items() if name in fields}
    if speculation:
        values = {key.replace("-", "_"): value for key, value in speculation.items()}
        fields["speculative_config"] = MappingProxyType(values)
    backend = (objects.get("--attention-config") or {}).get("backend")
    if isinstance(backend, str) and fields.get("attention_backend") is None:
        fields["attention_backend"] = _read_backend(_Value(label, "-ac.backend", backend, version))
    config = objects.get("--kv-transfer-config")
    if config:
        _apply_transfer_config(fields, config, _Value(label, "--kv-transfer-config", None, version))


def _apply_transfer_config(
    fields: dict[str, Any], config: Mapping[str, Any], value: _Value
) -> None:
    known = _CONFIG_KEYS | (set() if value.version == "0.33" else _OLD_CONFIG_KEYS)
    unknown = sorted(set(config) - known)
    if unknown:
        raise value.build_error(f"vLLM {value.version} has no key {shorten_text(unknown[0])}")
    connector, role = config.get("kv_connector"), config.get("kv_role")
    if role is not None and role not in _ROLES:
        raise value._replace(text=str(role)).build_error(f"kv_role is one of {', '.join(_ROLES)}")
    if connector is not None and role is None:
        raise value.build_error(f"kv_role is missing, one of {', '.join(_ROLES)}")
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(connector, (str, type(None))) or not isinstance(extra, dict):
        raise value.build_error("kv_connector is text, and kv_connector_extra_config an object")
    fields |= {"connector": connector, "kv_role": role or ""}
    fields["extra_config"] = MappingProxyType(extra)


def _list_unread_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of ``--kv-transfer-config`` that matter and are not read."""
    for key, default in _DEFAULT_KEYS.items():
        if config.get(key, default) != default:
            yield key
    if (config.get("kv_connector_extra_config") or {}).get("backends", ["UCX"]) != ["UCX"]:
        yield "backends"


def _find_meant(name: str) -> str | None:
    """Return the flag for which one may be an abbreviation or a slip; ``None`` if it is another.

    Python's argparse takes a flag that only one flag begins with, also ``-t 2`` for ``-tp 2``;
    vLLM refuses ``-tp2`` and ``--tp 2``. A short flag that is not known is empty.
    """
    if not name.startswith("--"):
        key = name.partition(".")[0]
        if key in _OTHER_SHORT_FLAGS or key.startswith(("-dp", "-O")):
            return None
        return next((s for s in _SHORT_FLAGS if s.startswith(key) or key.startswith(s)), "")
    if name[1:] in _SHORT_FLAGS:
        return name[1:]
    if " " in name:  # several words in quotes
        return name.partition(" ")[0]
    known = (*_FLAGS, *_OBJECTS, *_SWITCHES, *_LISTS)
    whole = [each for each in known if each.startswith(name) and len(name) > len("--m")]
    return next(iter((*whole, *get_close_matches(name, known, n=1, cutoff=0.95))), None)


def _list_notes(variables: Mapping[str, str], reading: _Reading) -> Iterator[str]:
    misspelled = (
        f"{typed} (did you mean {meant}?)" if meant else typed
        for typed, meant in reading.misspelled.items()
    )
    if names := ", ".join((*misspelled, *dict.fromkeys(reading.doubtful))):
        yield f"not read, although it may change caches: {names}"
    for name in _IGNORED_BY_VLLM.keys() & variables.keys():
        yield f"{name} is ignored: {_IGNORED_BY_VLLM[name]}"
    if reading.unexpanded:
        words = ", ".join(reading.unexpanded)
        yield f"the shell has not expanded {words}: what they contain is not read"
