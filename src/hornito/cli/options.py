"""Shared pieces of the verbs' command lines: errors, environment twins, value types."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.runtime.overflow import Overflow
    from hornito.runtime.sampler import SamplingKeywords

    class OverflowKeywords(TypedDict, total=False):
        """At most one key."""

        overflow: Overflow


WEIGHTS = ("fp32", "fp16", "bf16", "int8", "int4", "int4m", "keep")
TUNE = ("off", "fast", "full")
FEATURES = ("float16", "dot_product", "cooperative_matrix", "subgroups")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageError, without the usage text in front."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake on the command line."""
        raise UsageError(f"{message}{self._guess(message)}; see `{self.prog} --help`")

    def _guess(self, message: str) -> str:
        """The option that an unknown one was likely meant to be."""
        _, found, rest = message.partition("unrecognized arguments: ")
        unknown = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
        if not found or not unknown:
            return ""
        known = [flag for action in self._actions for flag in action.option_strings]
        close = difflib.get_close_matches(unknown[0], known, 1)
        return f" (did you mean {close[0]}?)" if close else ""


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    *,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    metavar: str | None = None,
    repeat: bool = False,
) -> None:
    """Adds an option with its environment twin: `--max-tokens` is also `HORNITO_MAX_TOKENS`.

    The command line wins over the environment, and the environment over `default`. With `repeat`
    the values are a list, and those of the command line follow the environment's.

    Raises:
        UsageError: the environment's value is not valid.
    """
    variable = "HORNITO_" + flag.removeprefix("--").replace("-", "_").upper()
    from_environment = os.environ.get(variable)
    if from_environment:
        try:
            value = type(from_environment)
            default = [value] if repeat else value
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"environment variable {variable}: {error}") from error
    parser.add_argument(
        flag,
        help=f"{help} [{variable}]",
        type=type,
        default=default,
        metavar=metavar,
        action="append" if repeat else "store",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds `--backend`."""
    parser.add_argument(
        "--backend",
        type=one_of(("vulkan", "cpu")),
        default="vulkan",
        help="vulkan (default), or cpu: the numpy evaluator, slow and for comparison only",
        metavar="NAME",
    )


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


def whole_numbers(text: str) -> list[int]:
    """'0,512,4096' as numbers, none below 0."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,512")
    return numbers


def token_ids(text: str) -> list[int]:
    """A value type: token ids separated by commas or spaces."""
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit() or len(word) > 10:
            raise argparse.ArgumentTypeError(f"'{word:.40}' is no token id")
    if not words:
        raise argparse.ArgumentTypeError("no token ids")
    return [int(word) for word in words]


def number(text: str) -> float:
    """A value type: a number; its range is checked where its meaning is known."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text:.40}' is no number") from error


def positive_number(text: str) -> float:
    """A value type: a number above 0."""
    found = number(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text:.40}' is no number above 0")
    return found


def whole(text: str) -> int:
    """A value type: a whole number from 0."""
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise argparse.ArgumentTypeError(f"'{text:.40}' is no whole number from 0")
    return int(text)


def bias_pairs(text: str) -> dict[int, float]:
    """A value type: ID=VALUE, or several of them with commas between."""
    pairs: dict[int, float] = {}
    for part in text.split(","):
        token, sign, value = part.partition("=")
        if not sign:
            raise argparse.ArgumentTypeError(f"'{part:.40}' is not ID=VALUE")
        pairs[whole(token.strip())] = number(value)
    return pairs


#: Flag, sampling keyword, value type, placeholder, help.
SAMPLING: tuple[tuple[str, str, Callable[[str], Any], str, str], ...] = (
    ("--temp", "temperature", number, "T", "temperature; 0 takes the most likely token (default)"),
    ("--top-k", "top_k", whole, "K", "draw from the K most likely tokens; 0 is off (default)"),
    ("--top-p", "top_p", number, "P", "draw from the most likely tokens up to probability P"),
    ("--min-p", "min_p", number, "P", "drop tokens below P times the most likely one"),
    (
        "--repeat-penalty",
        "repetition_penalty",
        number,
        "X",
        "divides the logits of tokens that occurred, prompt included; 1 is off (default)",
    ),
    (
        "--presence-penalty",
        "presence_penalty",
        number,
        "X",
        "taken from the logits of tokens that the answer has",
    ),
    (
        "--frequency-penalty",
        "frequency_penalty",
        number,
        "X",
        "taken from them for each time that the answer has them",
    ),
    ("--seed", "seed", whole, "N", "of the draws; by default a random one"),
    (
        "--sampling",
        "sampling",
        one_of(("default", "model")),
        "FROM",
        "where what is not given comes from: default (greedy), or model (its generation_config)",
    ),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose tokens, each with its environment twin.

    `--logprobs` is not among them: a verb that prints log-probabilities adds it (`add_logprobs`).
    """
    for flag, _, kind, metavar, text in SAMPLING:
        add_option(parser, flag, type=kind, help=text, metavar=metavar)
    add_option(
        parser,
        "--logit-bias",
        type=bias_pairs,
        help="add VALUE to the logit of token ID; may be repeated",
        metavar="ID=VALUE",
        repeat=True,
    )


def add_logprobs(parser: argparse.ArgumentParser) -> None:
    """Adds `--logprobs`."""
    add_option(
        parser,
        "--logprobs",
        type=whole,
        help="report the log-probability of each token, and of the N (0 to 20) most likely ones",
        metavar="N",
    )


def sampling_keywords(arguments: argparse.Namespace) -> SamplingKeywords:
    """What `add_sampling` and `add_logprobs` read, as keywords of `LLM.stream`.

    Only what was given is among them.

    Raises:
        UsageError: a value is out of its range.
    """
    from hornito.runtime.sampler import sampling_params

    found: dict[str, Any] = {}
    for flag, keyword, *_ in SAMPLING:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            found[keyword] = value
    if getattr(arguments, "logprobs", None) is not None:
        found["logprobs"] = arguments.logprobs
    biases: dict[int, float] = {}
    for pairs in arguments.logit_bias or ():
        biases |= pairs
    if biases:
        found["logit_bias"] = biases
    keywords = cast("SamplingKeywords", found)
    sampling_params(keywords, {})
    return keywords


def spell_options(message: str) -> str:
    """An error of the Python interface with the options that its arguments have here."""
    flags = {keyword: flag for flag, keyword, *_ in SAMPLING} | {
        "logit_bias": "--logit-bias",
        "max_tokens": "--max-tokens",
        "keep_first": "--keep-first",
        "keep_last": "--keep-last",
    }
    message = message.replace("give temperature=1.0", "give --temp 1")
    # `temperature` is a word of other sentences too: an argument when a sentence begins with it.
    for word in ("temperature", "seed"):
        message = re.sub(rf"^{word} must", f"{flags.pop(word)} must", message)
    del flags["sampling"]
    names = "|".join(flags)
    return re.sub(rf"(?<![\w-])({names})(?!\w)", lambda match: flags[match[1]], message)


def add_overflow(parser: argparse.ArgumentParser) -> None:
    """Adds `--overflow`, `--keep-first` and `--keep-last`."""
    add_option(
        parser,
        "--overflow",
        type=one_of(("error", "truncate")),
        default="error",
        help="when the context is full: error (default), or truncate: go on with what is kept",
        metavar="POLICY",
    )
    add_option(
        parser,
        "--keep-first",
        type=whole,
        help="with truncate, tokens kept from the start (default 0)",
        metavar="N",
    )
    add_option(
        parser,
        "--keep-last",
        type=positive_int,
        help="with truncate, tokens kept from the end (default half of the rest)",
        metavar="N",
    )


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Adds `--prefix`."""
    parser.add_argument(
        "--prefix", metavar="FILE", help="begin with what `hornito cache save` evaluated"
    )


def overflow_keywords(arguments: argparse.Namespace) -> OverflowKeywords:
    """What `add_overflow` read, as a keyword of `LLM.stream` and `ChatSettings`, when it was given.

    Raises:
        UsageError: a number of tokens to keep without `truncate`.
    """
    from hornito.runtime.overflow import Overflow

    if arguments.overflow == "error":
        for flag, value in (("first", arguments.keep_first), ("last", arguments.keep_last)):
            if value is not None:
                raise UsageError(f"--keep-{flag} goes with --overflow truncate")
        return {}
    return {"overflow": Overflow("truncate", arguments.keep_first or 0, arguments.keep_last)}
