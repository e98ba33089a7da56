"""The token that ``--target`` stands for."""

from __future__ import annotations

import click

from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import load_consumer


def find_consumer_token(target: str, prefix: str | None, *, strip: bool) -> str | None:
    """Return the consumer's token, or that of ``--prefix`` for a consumer that has none.

    Args:
        target: The consumer's name.
        prefix: The token of ``--prefix``, if any.
        strip: Whether the token is removed.

    Raises:
        KvRenameError: There is no such consumer, or it accepts no renamed model.
        click.UsageError: The options do not fit the consumer.
    """
    consumer = load_consumer(target)
    if not consumer.token:
        return _check_prefix(consumer, prefix, strip=strip)
    if strip:
        raise click.UsageError("--strip and --target cannot both be: a consumer wants its token")
    if prefix not in (None, consumer.token):
        raise click.UsageError(
            f"--prefix {prefix}: {target} requires {consumer.token}; leave out --prefix"
        )
    return consumer.token


def _check_prefix(consumer: Consumer, prefix: str | None, *, strip: bool) -> str | None:
    """Return the token of ``--prefix`` for a consumer without one of its own."""
    check = f"onnxkvrename check-consumer MODEL --target {consumer.name}"
    if consumer.refusal and not strip:
        raise KvRenameError(
            f"{consumer.name} accepts no renamed model: {consumer.refusal}",
            hint=f"keep the names as they are; {check}",
        )
    if consumer.configure is not None:
        raise click.UsageError(
            f"--target {consumer.name}: it reads names from a file that a rename updates; "
            f"rename without --target, then {check}"
        )
    if prefix is None and not strip:
        raise click.UsageError(
            f"--target {consumer.name}: it selects names without a token; pass --prefix TOKEN, or "
            f"check the names as they are: {check}"
        )
    return prefix
