"""`hornito run MODEL PROMPT`: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hornito.cli.options import (
    KV_TYPES,
    PRECISIONS,
    WEIGHTS,
    add_json,
    add_option,
    one_of,
    positive_int,
    token_ids,
    zero_temperature,
)
from hornito.cli.output import print_json, rate
from hornito.errors import HornitoError, UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.api import LLM, Chunk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("model", metavar="MODEL", help="package, GGUF file or model directory")
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="text; '-' reads it from stdin (one newline at the end is dropped)",
    )
    parser.add_argument("--ids", type=token_ids, help="prompt as token ids: 1,2,3", metavar="IDS")
    parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
    add_option(parser, "--device", help="index, name part, vendor, pci:..., UUID or 'software'")
    add_option(parser, "--context", type=positive_int, help="positions to hold", metavar="N")
    _add_choice(parser, "--precision", PRECISIONS, "normal", "arithmetic")
    _add_choice(parser, "--kv", KV_TYPES, None, "KV cache")
    _add_choice(parser, "--weights", WEIGHTS, None, "weights, when MODEL is no package")
    add_option(
        parser,
        "--max-tokens",
        type=positive_int,
        default=256,
        help="tokens to generate at most (default 256)",
        metavar="N",
    )
    add_option(
        parser,
        "--temp",
        type=zero_temperature,
        default=0.0,
        help="temperature; so far 0 only, the most likely token each time",
        metavar="T",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at TEXT; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument("--show-ids", action="store_true", help="also print the answer's token ids")
    parser.add_argument(
        "--stats", action="store_true", help="print device, speed and plan on stderr"
    )
    add_json(parser)


def _add_choice(
    parser: argparse.ArgumentParser,
    flag: str,
    values: tuple[str, ...],
    default: str | None,
    what: str,
) -> None:
    text = f"{what}: {', '.join(values)}" + (f" (default {default})" if default else "")
    add_option(parser, flag, type=one_of(values), default=default, help=text, metavar="TYPE")


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, streams the answer, prints statistics when asked."""
    prompt = _prompt(arguments)
    import hornito

    with (
        TerminalProgress() as progress,
        hornito.load(
            arguments.model,
            device=arguments.device,
            context=arguments.context,
            precision=arguments.precision,
            kv=arguments.kv,
            weights=arguments.weights,
            progress=progress,
        ) as llm,
    ):
        progress.finish()
        if isinstance(prompt, str) and not llm.has_tokenizer:
            raise UsageError(
                f"{arguments.model} has no tokenizer: give the prompt as token ids with --ids"
            )
        _answer(arguments, llm, prompt)
    return 0


def _prompt(arguments: argparse.Namespace) -> str | list[int]:
    given = [arguments.prompt is not None, arguments.ids is not None]
    if sum(given) != 1:
        raise UsageError("give either PROMPT ('-' reads stdin) or --ids")
    if arguments.ids is not None:
        ids: list[int] = arguments.ids
        return ids
    text: str = arguments.prompt
    if text != "-":
        return text
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}") from error
    return text.removesuffix("\n")


def _answer(arguments: argparse.Namespace, llm: LLM, prompt: str | list[int]) -> None:
    """Streams one answer, then prints what was asked for."""
    chunks: Iterable[Chunk]
    if isinstance(prompt, str) and llm.has_chat_template and not arguments.raw:
        chunks = llm.stream_chat(
            [{"role": "user", "content": prompt}],
            max_tokens=arguments.max_tokens,
            temperature=arguments.temp,
            stop=tuple(arguments.stop),
            ignore_eos=arguments.ignore_eos,
        )
    else:
        chunks = llm.stream(
            prompt,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temp,
            stop=tuple(arguments.stop),
            ignore_eos=arguments.ignore_eos,
        )
    text: list[str] = []
    ids: list[int] = []
    last: Chunk | None = None
    for last in chunks:
        text.append(last.text)
        ids += last.token_ids
        if not arguments.json:
            print(last.text, end="", flush=True)
    if last is None or last.finish_reason is None or last.timings is None:
        raise HornitoError("the answer ended without a finish reason")
    timings = last.timings
    if arguments.json:
        print_json(
            {
                "model": arguments.model,
                "device": llm.device_line,
                "text": "".join(text),
                "token_ids": ids,
                "finish_reason": last.finish_reason,
                "prompt_tokens": timings.prompt_tokens,
                "prompt_seconds": timings.prompt_seconds,
                "decode_tokens": timings.decode_tokens,
                "decode_seconds": timings.decode_seconds,
            }
        )
    else:
        if llm.has_tokenizer:
            print()
        if arguments.show_ids or not llm.has_tokenizer:
            print(",".join(map(str, ids)))
    if arguments.stats:
        lines = [
            f"device: {llm.device_line}",
            f"prompt: {rate(timings.prompt_tokens, timings.prompt_seconds)}",
            f"decode: {rate(timings.decode_tokens, timings.decode_seconds)}"
            f" (finish: {last.finish_reason})",
            llm.plan_summary(),
        ]
        print("\n".join(lines), file=sys.stderr)
