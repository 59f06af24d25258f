"""`hornito run MODEL PROMPT`: one answer, streamed to stdout.

Without a prompt there is a chat on a terminal; from a pipe or a file, stdin is the prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from hornito.answer import join_logprobs
from hornito.cli.chat import interrupting
from hornito.cli.cpu import run_text
from hornito.cli.files import SNAPSHOT, expect, read_text_file
from hornito.cli.forms import FORMS, add_form, form_keywords
from hornito.cli.model import add_model, load_model
from hornito.cli.options import (
    add_backend,
    add_json,
    add_logprobs,
    add_option,
    add_overflow,
    add_prefix,
    add_sampling,
    overflow_keywords,
    positive_int,
    sampling_keywords,
    token_ids,
)
from hornito.cli.output import note, print_json, rate, say_cut
from hornito.cli.stdin import on_terminal, stdin_text, text_waits
from hornito.cli.tensors import add_tensors
from hornito.cli.tensors import run as run_tensors
from hornito.errors import HornitoError, UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.api import LLM, Chunk
    from hornito.request import AnswerKeywords
    from hornito.runtime.snapshot import Snapshot

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="text; '-' reads it from stdin (one newline at the end is dropped). Without it a chat "
        "begins on a terminal, and what is piped in is the prompt",
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--ids", type=token_ids, help="prompt as token ids: 1,2,3", metavar="IDS")
    parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
    add_option(parser, "--system", help="system message", metavar="TEXT")
    add_option(
        parser,
        "--max-tokens",
        type=positive_int,
        help="tokens to generate at most (default 256; in a chat 1024)",
        metavar="N",
    )
    add_sampling(parser)
    add_logprobs(parser)
    add_overflow(parser)
    add_prefix(parser)
    add_form(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at TEXT; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument("--show-ids", action="store_true", help="also print the answer's token ids")
    parser.add_argument(
        "--stats", action="store_true", help="print device, speed and plan on stderr"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print the prompt as the model gets it, and its token count, on stderr",
    )
    add_tensors(parser)
    add_backend(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, streams the answer, prints statistics when asked."""
    if arguments.input or arguments.output or arguments.dim or arguments.bucket:
        return run_tensors(arguments)
    prompt = _prompt(arguments)
    if arguments.prefix is not None:
        expect(arguments.prefix, SNAPSHOT)
    if prompt is None:
        return _chat(arguments)
    if arguments.backend == "cpu":
        return run_text(arguments, prompt)
    if arguments.max_tokens is None:
        arguments.max_tokens = 256
    given = {
        "max_tokens": arguments.max_tokens,
        "stop": tuple(arguments.stop),
        "ignore_eos": arguments.ignore_eos,
        **sampling_keywords(arguments),
        **overflow_keywords(arguments),
        **form_keywords(arguments),
    }
    keywords = cast("AnswerKeywords", given)
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        progress.finish()
        llm.prompt_progress = progress
        if isinstance(prompt, str) and not llm.has_tokenizer:
            raise UsageError(
                f"{arguments.model} has no tokenizer: give the prompt as token ids with --ids"
            )
        prefix = None if arguments.prefix is None else llm.load_prefix(arguments.prefix)
        return _answer(arguments, llm, prompt, prefix, keywords)


def _prompt(arguments: argparse.Namespace) -> str | list[int] | None:
    """What to answer; None for a chat.

    Raises:
        UsageError: several prompts are given, or one that is empty or no text.
    """
    given = [arguments.prompt, arguments.prompt_file, arguments.ids]
    count = sum(value is not None for value in given)
    if count > 1:
        raise UsageError("give one of PROMPT ('-' reads stdin), --prompt-file and --ids")
    if count == 0:
        return None if on_terminal() else stdin_text()
    if arguments.ids is not None:
        ids: list[int] = arguments.ids
        return ids
    if arguments.prompt_file is not None:
        return read_text_file("--prompt-file", arguments.prompt_file)
    text: str = arguments.prompt
    if text == "-":
        return stdin_text()
    if text_waits():
        note(
            "stdin is not read beside PROMPT; to have it in the prompt, pipe all of that in and "
            "leave PROMPT out"
        )
    return text


def _chat(arguments: argparse.Namespace) -> int:
    """No prompt was given: a chat with the same options."""
    from hornito.cli import chat

    if arguments.backend == "cpu":
        raise UsageError("--backend cpu needs a prompt: PROMPT, --prompt-file or --ids")
    for flag in ("raw", "json", "show_ids", "verbose", "logprobs", *FORMS):
        value = getattr(arguments, flag)
        if value is not None and value is not False:
            raise UsageError(
                f"--{flag.replace('_', '-')} needs a prompt: PROMPT, --prompt-file or --ids"
            )
    if arguments.max_tokens is None:
        arguments.max_tokens = 1024
    return chat.run(arguments)


def _answer(
    arguments: argparse.Namespace,
    llm: LLM,
    prompt: str | list[int],
    prefix: Snapshot | None,
    keywords: AnswerKeywords,
) -> int:
    """Streams one answer, then prints what was asked for."""
    timer = llm.time_gpu() if arguments.stats else None
    chunks = _chunks(arguments, llm, prompt, prefix, keywords)
    stopping: list[bool] = []

    def stop() -> None:
        if last is None:  # the prompt is still being evaluated: nothing is there to keep
            raise KeyboardInterrupt
        stopping.append(True)

    pieces: list[Chunk] = []
    last: Chunk | None = None
    with interrupting(stop):
        for last in chunks:
            pieces.append(last)
            if not arguments.json:
                print(last.text, end="", flush=True)
            if stopping:
                break
    if stopping:
        if not arguments.json:
            print(flush=True)
        print("hornito: interrupted", file=sys.stderr)
    if last is None or (last.timings is None and not stopping):
        raise HornitoError("the answer ended without a finish reason")
    if arguments.json:
        _print_json(arguments, llm, pieces)
    elif not stopping:
        if llm.has_tokenizer:
            print()
        if arguments.show_ids or not llm.has_tokenizer:
            print(",".join(str(token) for piece in pieces for token in piece.token_ids))
    sys.stdout.flush()
    if not arguments.json:
        if last.finish_reason == "length":
            count = sum(len(piece.token_ids) for piece in pieces)
            say_cut(count, arguments.max_tokens, llm.context, llm.model_context)
        _print_logprobs(llm, pieces)
    if arguments.stats and last.timings is not None:
        gpu_seconds = timer.seconds() if timer is not None else None
        print("\n".join(_statistics(llm, last, gpu_seconds)), file=sys.stderr, flush=True)
    return INTERRUPTED if stopping else 0


def _print_logprobs(llm: LLM, pieces: list[Chunk]) -> None:
    """On stderr: a line for each token, with its text, and the most likely ones of its place."""
    from hornito.serve.tokens import token_text

    places = join_logprobs(pieces)
    if not places:
        return
    tokenizer = llm.tokenizer if llm.has_tokenizer else None

    def shown(token: int, logprob: float) -> str:
        text = "" if tokenizer is None else f" {token_text(tokenizer, token)!r}"
        return f"{token}{text}: {logprob:.4f}"

    most = f", then the {len(places[0].top)} most likely ones of its place" if places[0].top else ""
    print(f"log-probability of each token{most}:", file=sys.stderr)
    for place in places:
        line = [shown(place.token_id, place.logprob), *(shown(*one) for one in place.top)]
        print("  ".join(line), file=sys.stderr)


def _statistics(llm: LLM, last: Chunk, gpu_seconds: float | None) -> list[str]:
    """What ran where, and how fast."""
    timings = last.timings
    assert timings is not None
    wall = timings.prompt_seconds + timings.decode_seconds
    if gpu_seconds is None:
        share = "not known: the device has no timestamps"
    else:
        part = f" ({gpu_seconds / wall:.0%})" if wall > 0 else ""
        if gpu_seconds > wall:
            part = " (all of it, and of the work around it)"
        share = f"{gpu_seconds:.2f} of {wall:.2f} s{part}, by the device's timestamps"
    return [
        f"device: {llm.device_line}",
        f"features: {llm.feature_line}",
        f"prompt: {rate(timings.prompt_tokens - timings.reused_tokens, timings.prompt_seconds)}"
        + (f"; {timings.reused_tokens} reused" if timings.reused_tokens else ""),
        f"decode: {rate(timings.decode_tokens, timings.decode_seconds)}"
        f" (finish: {last.finish_reason})",
        *([f"seed: {last.seed}"] if last.seed is not None else []),
        f"device busy: {share}",
        llm.plan_summary(),
    ]


def _chunks(
    arguments: argparse.Namespace,
    llm: LLM,
    prompt: str | list[int],
    prefix: Snapshot | None,
    keywords: AnswerKeywords,
) -> Iterator[Chunk]:
    """The answer to come; with --verbose, the prompt as the model gets it goes to stderr."""
    if isinstance(prompt, str) and llm.has_chat_template and not arguments.raw:
        messages = [{"role": "user", "content": prompt}]
        if prefix is not None:
            messages = [*_beginning(arguments, prefix), *messages]
        if arguments.system is not None:
            messages.insert(0, {"role": "system", "content": arguments.system})
        if arguments.verbose:
            _show(llm.render_chat(messages), len(llm.chat_ids(messages)), "the chat template's")
        return llm.stream_chat(messages, **keywords)
    if arguments.system is not None:
        raise UsageError("--system needs a chat template; this prompt goes to the model as it is")
    if arguments.verbose:
        text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
        count = len(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        _show(text, count, "raw")
    if prefix is None:
        return llm.stream(prompt, **keywords)
    return llm.stream(prompt, prefix=prefix, **keywords)


def _beginning(arguments: argparse.Namespace, prefix: Snapshot) -> list[dict[str, str]]:
    """The messages that a conversation's prefix stands for."""
    if not prefix.messages:
        raise UsageError(
            f"{arguments.prefix} was made from plain text: give --raw, or make a prefix of "
            "messages with `hornito cache save MODEL FILE --system-file FILE`"
        )
    if arguments.system is not None:
        raise UsageError("--system and --prefix are both the beginning of the conversation")
    return [dict(message) for message in prefix.messages]


def _show(text: str, count: int, kind: str) -> None:
    print(f"prompt ({kind}, {count} tokens):\n{text}\n--", file=sys.stderr, flush=True)


def _print_json(arguments: argparse.Namespace, llm: LLM, pieces: list[Chunk]) -> None:
    last = pieces[-1]
    timings = last.timings
    logprobs = join_logprobs(pieces)
    print_json(
        {
            "model": arguments.model,
            "device": llm.device_line,
            "text": "".join(piece.text for piece in pieces),
            "token_ids": [token for piece in pieces for token in piece.token_ids],
            "finish_reason": last.finish_reason or "interrupted",
            "prompt_tokens": timings.prompt_tokens if timings else None,
            "reused_tokens": timings.reused_tokens if timings else None,
            "prompt_seconds": timings.prompt_seconds if timings else None,
            "decode_tokens": timings.decode_tokens if timings else None,
            "decode_seconds": timings.decode_seconds if timings else None,
            "seed": last.seed,
            "logprobs": None
            if logprobs is None
            else [
                {"token_id": one.token_id, "logprob": one.logprob, "top": one.top}
                for one in logprobs
            ],
        }
    )
