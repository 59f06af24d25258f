"""The MODEL argument and the options of loading it, for every verb that runs a model."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from hornito.cli.options import KV_TYPES, PRECISIONS, WEIGHTS, add_option, one_of, positive_int
from hornito.progress import Progress

if TYPE_CHECKING:
    from hornito.api import LLM


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, --device, --context, --verify, --precision, --kv and --weights."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="package, GGUF file, model directory, or a name from `hornito list`",
    )
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser, *, precision: str | None = "normal") -> None:
    """Adds what `add_model` does, but for MODEL; `precision` is the default one."""
    add_option(parser, "--device", help="index, name part, vendor, pci:..., UUID or 'software'")
    add_option(
        parser,
        "--context",
        type=positive_int,
        help="positions to hold (default: the model's own, or what fits)",
        metavar="N",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        default=os.environ.get("HORNITO_VERIFY", "") not in ("", "0"),
        help="check every byte of the package before it is used [HORNITO_VERIFY]",
    )
    _add_choice(parser, "--precision", PRECISIONS, precision, "arithmetic")
    _add_choice(parser, "--kv", KV_TYPES, None, "KV cache")
    _add_choice(parser, "--weights", WEIGHTS, None, "weights, when MODEL is no package")


def load_model(
    arguments: argparse.Namespace,
    progress: Progress,
    *,
    slots: int = 1,
    kv_bytes: int | None = None,
) -> LLM:
    """The model that the arguments of `add_model` describe."""
    import hornito

    return hornito.load(
        arguments.model,
        device=arguments.device,
        context=arguments.context,
        precision=arguments.precision,
        kv=arguments.kv,
        weights=arguments.weights,
        slots=slots,
        kv_bytes=kv_bytes,
        verify=arguments.verify,
        progress=progress,
    )


def _add_choice(
    parser: argparse.ArgumentParser,
    flag: str,
    values: tuple[str, ...],
    default: str | None,
    what: str,
) -> None:
    text = f"{what}: {', '.join(values)}" + (f" (default {default})" if default else "")
    add_option(parser, flag, type=one_of(values), default=default, help=text, metavar="TYPE")
