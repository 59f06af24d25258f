"""The MODEL argument and the options of loading it, for every verb that runs a model."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from hornito.cli.options import (
    FEATURES,
    TUNE,
    WEIGHTS,
    add_option,
    one_of,
    positive_int,
    positive_number,
)
from hornito.cli.output import note
from hornito.errors import UsageError
from hornito.precision import KV_TYPES, PRECISIONS
from hornito.progress import Progress

if TYPE_CHECKING:
    from hornito.api import LLM


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL and the options of loading it."""
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
    _add_device_use(parser)


def _add_device_use(parser: argparse.ArgumentParser) -> None:
    """Adds what says how the device is used."""
    add_option(
        parser,
        "--tune",
        type=one_of(TUNE),
        help="measure kernels first: fast (what was never measured), full (all); off: defaults",
        metavar="HOW",
    )
    add_option(
        parser,
        "--submission-ms",
        type=positive_number,
        help="most GPU time of one submission (default 200; discrete GPUs: no bound)",
        metavar="MS",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        default=os.environ.get("HORNITO_RECOVER", "") not in ("", "0"),
        help="after a loss of the device, open it again and go on [HORNITO_RECOVER]",
    )
    add_option(
        parser,
        "--disable-feature",
        type=one_of(FEATURES),
        help=f"do without a device feature ({', '.join(FEATURES)}); may be repeated",
        metavar="NAME",
        repeat=True,
    )


def add_fp32_tensors(parser: argparse.ArgumentParser) -> None:
    """Adds `--fp32-tensors`."""
    parser.add_argument(
        "--fp32-tensors",
        action="append",
        default=[],
        help="keep fp32 operands in the products of nodes, values or weights that PATTERN names; "
        "may be repeated",
        metavar="PATTERN",
    )


def check_tensor_precision(arguments: argparse.Namespace) -> None:
    """Raise UsageError for `--precision low` with a model of tensors."""
    if arguments.precision == "low":
        raise UsageError(
            f"{arguments.model} is a model of tensors, whose values are fp32 between ops: "
            "--precision low is for decoders"
        )


def prove_kernels(llm: LLM, progress: Progress) -> None:
    """Test the kernels that the load had no time for, which would not be used and so not be timed,
    and say what came of it; nothing where the load did all."""
    if llm.engine.trust.complete:
        return
    progress.finish()
    note("testing the kernels that loading had no time for")
    note(llm.prove())


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
        tune=arguments.tune,
        submission_ms=arguments.submission_ms,
        recover=arguments.recover,
        disable_features=tuple(arguments.disable_feature or ()),
        fp32_tensors=tuple(getattr(arguments, "fp32_tensors", ())),
        eos_ids=getattr(arguments, "eos", None),
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
