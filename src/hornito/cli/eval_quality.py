"""`hornito eval quality MODEL...`: what a storage type costs, beside the fp32 tier."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hornito.cli.options import positive_int
from hornito.cli.output import note, print_json
from hornito.errors import UsageError
from hornito.precision import default_kv
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.quality import ModelQuality, Text

OPTIONS = ("text", "window", "tokens", "no_store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what only `eval quality` takes; an option that is not given is None."""
    parser.add_argument("--text", metavar="FILE", help="quality: the text to evaluate, in UTF-8")
    parser.add_argument(
        "--window", type=positive_int, metavar="N", help="quality: tokens of a window (512)"
    )
    parser.add_argument(
        "--tokens", type=positive_int, metavar="N", help="quality: only the text's first N tokens"
    )
    parser.add_argument(
        "--no-store",
        action="store_const",
        const=True,
        help="quality: don't write the figures into the packages",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures every model, stores the figures, and prints a table."""
    from hornito.diag.quality import WINDOW, to_markdown
    from hornito.diag.quality_models import QualityOptions, measure_models

    if arguments.text is None:
        raise UsageError("--text FILE is missing: the text to evaluate")
    if arguments.context is not None:
        raise UsageError("a text is evaluated in windows: --window takes the place of --context")
    precision = arguments.precision or "high"
    options = QualityOptions(
        text=arguments.text,
        window=arguments.window or WINDOW,
        tokens=arguments.tokens,
        precision=precision,
        kv=arguments.kv or default_kv(precision),
        device=arguments.device,
        store=not arguments.no_store,
    )
    with TerminalProgress() as progress:
        text, models, device = measure_models(
            arguments.paths,
            arguments.reference,
            options,
            progress,
            weights=arguments.weights,
            verify=arguments.verify,
            note=note,
        )
    rounded = "" if precision == "high" else f" (but for the arithmetic of --precision {precision})"
    for model in models:
        if model.same_values:
            note(
                f"{model.model} keeps its source's weights as they are, and the reference is made "
                f"of the same: mean KL 0 and top-1 100 % are so by construction{rounded}, and say "
                "nothing of what the source lost to the model that it was made of; --ref takes "
                "that model's fp32 package"
            )
    if arguments.json:
        print_json(_to_dict(text, models, device))
    else:
        print(to_markdown(text, models, device))
    return 0


def _to_dict(text: Text, models: list[ModelQuality], device: str) -> dict[str, Any]:
    return {
        "device": device,
        "text": {"name": text.name, "sha256": text.sha256, "tokens": text.tokens},
        "window": text.window,
        "evaluated": text.evaluated,
        "scored": text.scored,
        "models": [model.to_dict() for model in models],
    }
