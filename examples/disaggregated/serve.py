"""Disaggregated serving in small: prefill in one process, decode in another.

    python serve.py                     the whole story; exit code 0 if all of it holds
    python serve.py PREFILL [DECODE]    one hand-off; exit code 0 if the tokens are right

Needs onnxkvrename and its extra [run]. What is done stands in serving.py; here, how it is asked
for, and how it ends when it cannot be done: with one line, and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from workers import WorkerError

CONTEXT = "ctx_len"
"""The symbolic dimension that all tokens of a sequence must fit in."""


class Refused(Exception):
    """The request cannot be served."""


def main() -> int:
    """Tell the story, or do one hand-off; the exit code."""
    args = _arguments()
    # Until there is something to tidy up: imports of C code make an error of their own of Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import story

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        code = story.tell() if args.prefill is None else _one(args)
        print(end="", flush=True)
        return code
    except ModuleNotFoundError as error:
        return _fail(f"{error}: pip install '.[run]'")
    except (Refused, WorkerError) as error:
        return _fail(str(error))
    except OSError as error:
        # What nobody takes, as in `| head`, is not to be tried once more at the very end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _fail(f"not finished: {error.strerror or error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A prefill and a decode worker, and a hand-off.")
    parser.add_argument("prefill", nargs="?", type=Path, help="a model; none: the whole story")
    parser.add_argument("decode", nargs="?", type=Path, help="another one for decode")
    parser.add_argument("--dim", action="append", default=[], type=_dim, metavar="SYMBOL=SIZE")
    parser.add_argument("--prompt-length", type=_positive, default=9, metavar="N")
    parser.add_argument("--full-transfer", action="store_true", help="buffers in full")
    args = parser.parse_args()
    if args.prefill is None and args != parser.parse_args([]):
        parser.error("options are for a model; the story has its own")
    for model in (args.prefill, args.decode):
        if model is not None and not model.is_file():
            parser.error(f"{model}: no such file")
    return args


def _dim(text: str) -> tuple[str, int]:
    symbol, _, size = text.partition("=")
    return symbol, _positive(size or text)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return number


def _one(args: argparse.Namespace) -> int:
    """Hand over between two models; the exit code."""
    from serving import SIZES, Setting, say, serve

    sizes = SIZES | dict(args.dim)
    setting = Setting(args.prefill, args.decode or args.prefill, sizes, args.full_transfer)
    models = {setting.prefill, setting.decode}
    known = set().union(*(_symbols(model, sizes) for model in models))
    _check(sizes, known, [symbol for symbol, _ in args.dim], args.prompt_length)
    (served,) = serve(setting, [args.prompt_length])
    say(served)
    return 0 if served.right else 1


def _symbols(model: Path, sizes: dict[str, int]) -> set[str]:
    """The symbolic dimensions of a model's buffers, if it can be loaded."""
    from device import Device

    try:
        return Device(str(model), sizes).symbols
    except Exception as error:  # onnxruntime's own have nothing else in common
        raise Refused(f"{model} cannot be served: {error}") from None


def _check(sizes: dict[str, int], known: set[str], given: list[str], length: int) -> None:
    from serving import COUNT

    for symbol in given:
        if symbol not in known:
            names = ", ".join(sorted(known)) or "none"
            raise Refused(f"--dim {symbol}: no buffer has this dimension; there are: {names}")
    if CONTEXT in known and length + COUNT > sizes[CONTEXT]:
        raise Refused(
            f"a prompt of {length} tokens and the {COUNT} to generate do not fit in the context "
            f"({CONTEXT}={sizes[CONTEXT]})"
        )


def _stop(number: int, frame: object) -> None:
    """End on demand as in any other way: workers are stopped, memory is given back."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _fail(reason: str) -> int:
    print("serve.py:", " ".join(reason.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
