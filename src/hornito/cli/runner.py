"""`hornito runner MODEL`: token ids on stdin, token ids on stdout, for another machine to drive."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from hornito.cli.model import add_fp32_tensors, add_model, load_model
from hornito.cli.options import (
    add_option,
    add_overflow,
    add_sampling,
    overflow_keywords,
    positive_int,
    sampling_keywords,
    token_ids,
)
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.request import AnswerKeywords
    from hornito.runtime.idle import IdleProof


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    add_fp32_tensors(parser)
    add_option(
        parser,
        "--max-tokens",
        type=positive_int,
        default=1024,
        help="tokens of a turn's answer at most (default 1024)",
        metavar="N",
    )
    add_sampling(parser)
    add_overflow(parser)
    parser.add_argument(
        "--eos", type=token_ids, help="ids that end an answer (default: the model's)", metavar="IDS"
    )


def run(arguments: argparse.Namespace) -> int:
    """Answers lines until the input ends."""
    from hornito.runner import Runner
    from hornito.runtime.idle import IdleProof

    keywords = cast(
        "AnswerKeywords",
        {
            "max_tokens": arguments.max_tokens,
            **sampling_keywords(arguments),
            **overflow_keywords(arguments),
        },
    )
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        progress.finish()
        print(
            f"ready: {arguments.model} on {llm.device_line}, context {llm.context}",
            file=sys.stderr,
            flush=True,
        )
        for name in llm.fp32_nodes:
            print(f"fp32 operands: {name}", file=sys.stderr, flush=True)
        runner = Runner(llm, sys.stdout, keywords, arguments.model)
        try:
            with IdleProof(llm.engine) as proof:
                runner.serve(_lines(proof))
        finally:
            runner.close()
    return 0


def _lines(proof: IdleProof) -> Iterator[bytes]:
    """The lines of the input; kernels are tested while one is awaited."""
    while True:
        with proof.meanwhile():
            line = sys.stdin.buffer.readline()
        if not line:
            return
        yield line
