"""Shared pieces of the verbs' command lines: errors, environment twins, value types."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hornito.errors import UsageError

WEIGHTS = ("fp32", "fp16")
PRECISIONS = ("high", "normal")
KV_TYPES = ("fp32", "fp16")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageError, without the usage text in front."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake on the command line."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    *,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    metavar: str | None = None,
) -> None:
    """Adds an option with its environment twin: `--max-tokens` is also `HORNITO_MAX_TOKENS`.

    The command line wins over the environment, and the environment over `default`.

    Raises:
        UsageError: the environment's value is not valid.
    """
    variable = "HORNITO_" + flag.removeprefix("--").replace("-", "_").upper()
    from_environment = os.environ.get(variable)
    if from_environment:
        try:
            default = type(from_environment)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"environment variable {variable}: {error}") from error
    parser.add_argument(
        flag, help=f"{help} [{variable}]", type=type, default=default, metavar=metavar
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def one_of(values: Sequence[str]) -> Callable[[str], str]:
    """A value type: one of these words. (argparse's own `choices` skips environment values.)"""

    def convert(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(values)}")
        return text

    return convert


def positive_int(text: str) -> int:
    """A value type: a whole number from 1."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1")
    return int(text)


def token_ids(text: str) -> list[int]:
    """A value type: token ids separated by commas or spaces."""
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit() or len(word) > 10:
            raise argparse.ArgumentTypeError(f"'{word:.40}' is no token id")
    if not words:
        raise argparse.ArgumentTypeError("no token ids")
    return [int(word) for word in words]


def zero_temperature(text: str) -> float:
    """A value type: the one temperature there is so far, 0 (greedy)."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no number") from error
    if value != 0:
        raise argparse.ArgumentTypeError(
            f"sampling is not there yet: only temperature 0 (greedy) works, not {text}"
        )
    return 0.0
