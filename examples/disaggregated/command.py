"""The command line of the example, and its exit codes.

    python serve.py                     run all parts; exit code 0 if each ends as predicted
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right, else 1

A run that is not possible ends with one line and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from workers import WorkerError

CONTEXT = "ctx_len"
"""The symbolic dimension that limits the tokens of a sequence."""

Tell = Callable[[], int]
Serve = Callable[[argparse.Namespace, dict[str, int]], int]


class Refused(Exception):
    """The request cannot be served."""


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that an example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("prefill", nargs="?", type=Path, help="a model; without one, run all parts")
    parser.add_argument("decode", nargs="?", type=Path, help="a different model for decode")
    parser.add_argument(
        "--dim", action="append", default=[], type=_parse_dim, metavar="SYMBOL=SIZE"
    )
    parser.add_argument("--prompt-length", type=parse_count, default=9, metavar="N")
    return parser


def run_example(
    parser: argparse.ArgumentParser, load: Callable[[], tuple[Tell, Serve]], install: str
) -> int:
    """Run all parts, or serve the models in the arguments; return the exit code.

    ``load`` imports the modules that need other packages, and returns the function for each of
    the two. ``install`` is the command that installs these packages. The second function is
    called with the arguments and the sizes of all symbolic dimensions.
    """
    args = _parse(parser)
    # Until there is something to clean up: imports of C code turn Ctrl-C into their own error.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        tell, serve = load()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        code = tell() if args.prefill is None else serve(args, _check_sizes(args))
        print(end="", flush=True)
        return code
    except ImportError as error:
        return _fail(f"{error}: {install}")
    except (Refused, WorkerError) as error:
        return _fail(str(error))
    except OSError as error:
        # Python would try at exit again to write what a closed pipe did not take, as in `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _fail(f"stopped: {error.strerror or error}")


def parse_count(text: str) -> int:
    """Return a number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.prefill is None and args != parser.parse_args([]):
        parser.error("options require a model: serve.py PREFILL [DECODE]")
    args.decode = args.decode or args.prefill
    for model in (args.prefill, args.decode):
        if model is not None and not model.is_file():
            parser.error(f"{model}: no such file")
    return args


def _parse_dim(text: str) -> tuple[str, int]:
    symbol, _, size = text.partition("=")
    return symbol, parse_count(size or text)


def _check_sizes(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of all symbols, once they fit both models and the prompt."""
    from prompts import COUNT, SIZES

    sizes = SIZES | dict(args.dim)
    known = set().union(*(_symbols(model, sizes) for model in {args.prefill, args.decode}))
    for symbol, _ in args.dim:
        if symbol not in known:
            names = ", ".join(sorted(known)) or "none"
            raise Refused(f"--dim {symbol}: no buffer has this dimension; they have {names}")
    if CONTEXT in known and args.prompt_length + COUNT > sizes[CONTEXT]:
        raise Refused(
            f"a prompt of {args.prompt_length} tokens and {COUNT} generated tokens do not fit into "
            f"the context ({CONTEXT}={sizes[CONTEXT]}); pass --dim {CONTEXT}=SIZE"
        )
    return sizes


def _symbols(model: Path, sizes: dict[str, int]) -> set[str]:
    """Return the symbolic dimensions of a model's buffers."""
    from device import Device

    try:
        return Device(str(model), sizes).symbols
    except Exception as error:  # onnxruntime's own have nothing else in common
        raise Refused(f"{model} cannot be served: {error}") from None


def _stop(number: int, frame: object) -> None:
    """Exit on a signal as usual: stop the workers and free the memory."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _fail(reason: str) -> int:
    print("serve.py:", " ".join(reason.split()), file=sys.stderr)
    return 2
