"""How weights are rounded: the options of `compile`, and what they say."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hornito.cli.options import add_option, number, positive_int, whole
from hornito.errors import UsageError
from hornito.quant.choice import DEFAULT_ERROR, Quantisation

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_quantisation(parser: argparse.ArgumentParser) -> None:
    """Adds -Os and the options of rounded weights."""
    parser.add_argument(
        "-Os",
        action="store_const",
        const="int4",
        dest="weights",
        help="the same as --weights int4",
    )
    add_option(
        parser,
        "--group",
        type=positive_int,
        metavar="N",
        help="weights that share a scale: 32, 64 or 128 (default 64 for 4 bits, 32 for 8)",
    )
    add_option(
        parser,
        "--table",
        metavar="TYPE",
        help="storage type of the tables that tokens are looked up in and scored by (default "
        "int8g64 beside 4 bits; int4 puts everything in 4 bits)",
    )
    add_option(
        parser,
        "--outliers",
        type=number,
        metavar="PERCENT",
        help="input columns that stay fp16 beside the rest (default 1 for 4 bits, 0 for 8)",
    )
    add_option(
        parser,
        "--quant-samples",
        type=whole,
        metavar="N",
        help="sequences of 256 tokens that show on the device which inputs matter; 0 goes by the "
        "weights alone and needs no device (default 8 for 4 bits, 0 for 8)",
    )
    add_option(
        parser, "--calib", metavar="FILE", help="text that they are taken from (default: our own)"
    )
    add_option(
        parser,
        "--quant-err",
        type=number,
        default=DEFAULT_ERROR,
        metavar="X",
        help="a matrix whose outputs would be off by more than this part of them stays at more "
        f"bits (default {DEFAULT_ERROR})",
    )
    add_option(
        parser,
        "--target-size",
        type=byte_size,
        metavar="SIZE",
        help="most bytes of all weights, such as 300M; what is left over goes to the tensors that "
        "matter most",
    )


def quantisation_of(arguments: argparse.Namespace) -> Quantisation:
    """What the options ask for.

    Raises:
        UsageError: a value is out of range, or the calibration text can't be read.
    """
    text = None
    if arguments.calib is not None:
        try:
            text = Path(arguments.calib).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--calib {arguments.calib}: {error}") from error
    return Quantisation(
        group=arguments.group,
        table=arguments.table,
        outliers=None if arguments.outliers is None else arguments.outliers / 100,
        samples=arguments.quant_samples,
        text=text,
        error=arguments.quant_err,
        target_bytes=arguments.target_size,
        device=arguments.device,
    )


def refuse_quantisation(arguments: argparse.Namespace) -> None:
    """Raise UsageError when a model of tensors was given one of the options: none is for it."""
    if quantisation_of(arguments) != Quantisation(device=arguments.device):
        raise UsageError(
            "--group, --table, --outliers, --quant-samples, --calib, --quant-err and --target-size "
            "are for text models; a model of tensors takes --weights alone"
        )


def byte_size(text: str) -> int:
    """A value type: a number of bytes, with k, M or G behind it for 10^3, 10^6 and 10^9."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kmg]?)b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text:.40}' is no size such as 300M")
    return int(float(match[1]) * _UNITS[match[2]])
