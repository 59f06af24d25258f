"""How verbs print: JSON, aligned columns, sizes and rates."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_json(data: object) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Aligned 'name  value' lines on stdout; empty values are left out."""
    rows = [(name, str(value)) for name, value in fields if value not in (None, "", (), [], {})]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, records: bool = False
) -> None:
    """Left-aligned columns on stdout.

    Args:
        records: on a terminal that is too narrow for the columns, a row is printed as lines of
            `name  value`; it is for tables of few rows.
    """
    cells = [list(header), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    wide = sum(widths) + 2 * (len(widths) - 1)
    if records and sys.stdout.isatty() and wide > shutil.get_terminal_size().columns:
        for number, row in enumerate(cells[1:]):
            if number:
                print()
            print_fields(zip(header, row, strict=True))
        return
    for row in cells:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def megabytes(count: int) -> str:
    """A byte count in MB (10^6), with kB for small ones."""
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def rate(tokens: int, seconds: float) -> str:
    """'31 tokens in 0.80 s, 38.8 tok/s'."""
    text = f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s"
    return f"{text}, {tokens / seconds:.1f} tok/s" if seconds > 0 else text


def note(text: str) -> None:
    """A line for people on stderr, at once."""
    print(f"hornito: {text}", file=sys.stderr, flush=True)


def say_cut(count: int, most: int, context: int, model_context: int) -> None:
    """On stderr: what ended an answer of `count` tokens that the model did not end."""
    if count >= most:
        why = f"at {most} tokens; --max-tokens {2 * most} allows more"
    else:
        more = "--context holds more, and " if context < model_context else ""
        why = (
            f"for the context of {context} tokens is full; {more}--overflow truncate goes on with "
            "the end"
        )
    note(f"the answer was cut {why}")


def describe_quality(label: Mapping[str, Any]) -> str:
    """The `quality` of a manifest on one line; what is not there is left out."""
    reference = label.get("reference")
    of = reference.get("weights") if isinstance(reference, dict) else None
    parts = [
        _figure(label, "perplexity", "perplexity {:.4f}"),
        _figure(label, "reference_perplexity", f"({of} {{:.4f}})" if of else "(reference {:.4f})"),
        _figure(label, "kl_mean", "mean KL {:.3g}"),
        _figure(label, "kl_p99", "99 % KL {:.3g}"),
        _figure(label, "top1", "top-1 {:.2%}"),
    ]
    found = ", ".join(part for part in parts if part).replace(", (", " (")
    where = f"{label.get('scored')} tokens of {label.get('text')}, {label.get('precision')}"
    return f"{found}; {where}"


def _figure(label: Mapping[str, Any], name: str, form: str) -> str:
    value = label.get(name)
    return form.format(value) if isinstance(value, int | float) else ""
