"""The numpy evaluator on the command line: `--backend cpu`, for comparison only."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from hornito.cli.output import print_json, rate, say_cut
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.package import Package

LOUD = (
    "hornito: --backend cpu: the numpy reference evaluator runs this, not the GPU: slow, and for "
    "comparison only"
)

_GPU_ONLY = (
    *("prefix", "logprobs", "logit_bias", "temp", "top_k", "top_p", "min_p"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "seed", "sampling", "stats"),
)


def say_cpu() -> None:
    """One line on stderr: nobody may take the evaluator's figures for the GPU's."""
    print(LOUD, file=sys.stderr, flush=True)


def run_text(arguments: argparse.Namespace, prompt: str | list[int]) -> int:
    """Answers a prompt with the most likely tokens, as the evaluator finds them.

    Raises:
        UsageError: an option that only the GPU path has.
    """
    from hornito.diag.compare_numpy import NumpySide, StoredWeights
    from hornito.loading import open_model
    from hornito.package.model import model_graph
    from hornito.progress import TerminalProgress

    given = [name for name in _GPU_ONLY if getattr(arguments, name, None)]
    given += ["stop"] * bool(arguments.stop) + ["overflow"] * (arguments.overflow != "error")
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"--backend cpu takes the most likely tokens, and no {flags}")
    say_cpu()
    with (
        TerminalProgress() as progress,
        open_model(arguments.model, arguments.weights, progress) as package,
    ):
        progress.finish()
        facts = package.manifest.facts
        context = arguments.context or int(facts["context_length"])
        ids = _ids(arguments, package, prompt)
        if len(ids) >= context:
            raise UsageError(f"the prompt has {len(ids)} tokens; the context holds {context}")
        graph = model_graph(package)
        side = NumpySide(graph, StoredWeights(graph, package), context, keep=False)
        ends = () if arguments.ignore_eos else tuple(facts["eos_ids"])
        began = time.monotonic()
        tokens: list[int] = []
        most = min(arguments.max_tokens or 256, context - len(ids))
        for token in side.tokens(ids):
            tokens.append(token)
            if token in ends or len(tokens) >= most:
                break
        seconds = time.monotonic() - began
        reason = "stop" if tokens and tokens[-1] in ends else "length"
        text = _text(package, [token for token in tokens if token not in ends])
    _print(arguments, text, tokens, reason, seconds)
    if reason == "length" and not arguments.json:
        asked = arguments.max_tokens or 256
        say_cut(len(tokens), asked, context, int(facts["context_length"]))
    return 0


def _ids(arguments: argparse.Namespace, package: Package, prompt: str | list[int]) -> list[int]:
    """The prompt as `hornito run` would give it to the model."""
    from hornito.text.template import ChatTemplate, encode_chat
    from hornito.text.tokenizer import package_tokenizer

    if not isinstance(prompt, str):
        ids = list(prompt)
    else:
        tokenizer = package_tokenizer(package)
        if arguments.raw or "chat_template.jinja" not in package.blobs:
            if arguments.system is not None:
                raise UsageError("--system needs a chat template")
            ids = tokenizer.encode(prompt)
        else:
            strings = package.manifest.facts["token_strings"]
            template = ChatTemplate(package.blob("chat_template.jinja").decode(), strings)
            messages = [{"role": "user", "content": prompt}]
            if arguments.system is not None:
                messages.insert(0, {"role": "system", "content": arguments.system})
            ids = encode_chat(tokenizer, template, messages)
    vocabulary = int(package.manifest.facts["vocab_size"])
    if not ids or max(ids) >= vocabulary:
        raise UsageError(f"the prompt must be ids below {vocabulary}, at least one")
    return ids


def _text(package: Package, tokens: list[int]) -> str | None:
    from hornito.text.tokenizer import package_tokenizer

    return package_tokenizer(package).decode(tokens) if "tokenizer.json" in package.blobs else None


def _print(
    arguments: argparse.Namespace, text: str | None, tokens: list[int], reason: str, seconds: float
) -> None:
    if arguments.json:
        print_json(
            {
                "model": arguments.model,
                "device": "cpu (numpy reference)",
                "text": text or "",
                "token_ids": tokens,
                "finish_reason": reason,
            }
        )
        return
    if text is not None:
        print(text)
    if arguments.show_ids or text is None:
        print(",".join(map(str, tokens)))
    print(f"hornito: {rate(len(tokens), seconds)} on the numpy evaluator", file=sys.stderr)
