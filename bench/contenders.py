"""The contenders of each workload, with their command lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from environments import BENCH, OURS, PEERS, Environments
from workloads import Workload

Command = Callable[[Environments, Workload], list[str]]
EACH = "each file its own process"


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # "ours", "peer" or "limit"
    command: Command


def single(environments: Environments, workload: Workload) -> list[str]:
    source, target = workload.pairs[0]
    program = environments.program(OURS, OURS)
    return [program, str(source), "--prefix", "VLLM", "-o", str(target)]


def directory(environments: Environments, workload: Workload) -> list[str]:
    program = environments.program(OURS, OURS)
    return [program, str(workload.root), "--prefix", "VLLM", "-d", str(workload.out)]


def without_sync(command: Command) -> Command:
    def build(environments: Environments, workload: Workload) -> list[str]:
        ours = command(environments, workload)
        return [environments.python(OURS), "-I", str(BENCH / "nosync.py"), *ours]

    return build


def each_ours(environments: Environments, workload: Workload) -> list[str]:
    program = environments.program(OURS, OURS)
    return _loop(f'"{program}" "$f" --prefix VLLM -o "$out/${{f##*/}}"', workload)


def script(environment: str, name: str) -> Command:
    def build(environments: Environments, workload: Workload) -> list[str]:
        paths = [str(path) for pair in workload.pairs for path in pair]
        return [environments.python(environment), str(PEERS / name), *paths]

    return build


def each_script(environment: str, name: str) -> Command:
    def build(environments: Environments, workload: Workload) -> list[str]:
        python = environments.python(environment)
        return _loop(f'"{python}" "{PEERS / name}" "$f" "$out/${{f##*/}}"', workload)

    return build


def sor4onnx(environments: Environments, workload: Workload) -> list[str]:
    """One pass: the look-ahead keeps its three replacements of one name from adding up."""
    source, target = workload.pairs[0]
    return [
        environments.program("sor4onnx", "sor4onnx"),
        *("-if", str(source), "-of", str(target), "-m", "full", "-sm", "prefix_match"),
        *("-on", r"((?:past_key|past_value)\.\d+)(?=$|_RetainedState$)", r"\1_VLLM"),
    ]


def each_sor4onnx(environments: Environments, workload: Workload) -> list[str]:
    program = environments.program("sor4onnx", "sor4onnx")
    line = (
        f'"{program}" -if "$f" -of "$out/${{f##*/}}" -m full -sm prefix_match '
        r"-on '((?:past_key|past_value)\.\d+)(?=$|_RetainedState$)' '\1_VLLM'"
    )
    return _loop(line, workload)


def copy(environments: Environments, workload: Workload) -> list[str]:
    if workload.many:
        return ["/bin/cp", *(str(path) for path in workload.sources), str(workload.out)]
    source, target = workload.pairs[0]
    return ["/bin/cp", str(source), str(target)]


def copy_and_sync(environments: Environments, workload: Workload) -> list[str]:
    source, target = workload.pairs[0]
    return ["/bin/sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", str(source), str(target)]


def python(code: str) -> Command:
    return lambda environments, workload: [environments.python("onnx"), "-c", code]


def option(environment: str, program: str, name: str) -> Command:
    return lambda environments, workload: [environments.program(environment, program), name]


def _loop(line: str, workload: Workload) -> list[str]:
    """The shell loop that people write."""
    body = f'out=$1; shift; for f in "$@"; do {line} || exit 1; done'
    paths = [str(path) for path in workload.sources]
    return ["/bin/sh", "-c", body, "sh", str(workload.out), *paths]


SCRIPTS = {
    "onnx loop, lazy": ("onnx", "onnx_loop_lazy.py"),
    "onnx loop": ("onnx", "onnx_loop.py"),
    "onnx-graphsurgeon": ("graphsurgeon", "graphsurgeon.py"),
    "onnx-ir": ("onnx-ir", "onnx_ir_values.py"),
    "onnxruntime OnnxModel": ("onnxruntime", "ort_model.py"),
}
PEER_SCRIPTS = tuple(Contender(name, "peer", script(*at)) for name, at in SCRIPTS.items())
PEER_LOOPS = tuple(
    Contender(f"{name}, {EACH}", "peer", each_script(*at)) for name, at in SCRIPTS.items()
)
LAZY_SURGEON = Contender(
    "onnx-graphsurgeon, lazy", "peer", script("graphsurgeon", "graphsurgeon_lazy.py")
)
SOR = Contender("sor4onnx", "peer", sor4onnx)
PLAIN = Contender(OURS, "ours", single)
NO_SYNC = Contender(f"{OURS}, fsync off", "ours", without_sync(single))
NO_SYNC_DIRECTORY = Contender(f"{OURS}, fsync off", "ours", without_sync(directory))
COPY = Contender("cp", "limit", copy)
PEER_FILES = (*PEER_SCRIPTS, SOR)
FIDELITY = (PLAIN, *PEER_FILES)

LINEUP: dict[str, tuple[Contender, ...]] = {
    "a": (
        PLAIN,
        NO_SYNC,
        COPY,
        Contender("cp and sync", "limit", copy_and_sync),
        *PEER_FILES,
    ),
    "b": (PLAIN, NO_SYNC, LAZY_SURGEON, *PEER_FILES),
    "c": (PLAIN, NO_SYNC, COPY, *PEER_FILES),
    "d": (
        Contender(OURS, "ours", directory),
        NO_SYNC_DIRECTORY,
        Contender(f"{OURS}, {EACH}", "ours", each_ours),
        COPY,
        *PEER_SCRIPTS,
        *PEER_LOOPS,
        Contender(f"sor4onnx, {EACH}", "peer", each_sor4onnx),
    ),
    "e": (
        PLAIN,
        NO_SYNC,
        COPY,
        Contender("python -c pass", "limit", python("pass")),
        Contender('python -c "import onnx"', "limit", python("import onnx")),
        *PEER_FILES,
    ),
    "f": (
        Contender(f"{OURS} --help", "ours", option(OURS, OURS, "--help")),
        Contender(f"{OURS} --version", "ours", option(OURS, OURS, "--version")),
        Contender("sor4onnx --help", "peer", option("sor4onnx", "sor4onnx", "--help")),
        Contender("python -c pass", "limit", python("pass")),
    ),
}
