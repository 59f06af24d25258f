#!/usr/bin/env python3
"""Writes docs/models.md: tables of models, formats, RoPE scalings, ops and passes, from the code.

Nothing in them is typed by hand: a model or an op that exists is listed, one that does not is not.
A test compares the file with what this makes. `--check` compares only (exit code 1 when they
differ).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
KERNELS = ROOT / "src" / "hornito" / "kernels"

INTRO = """\
# Models, formats and ops

This page is made by `tools/gen_tables.py` from the code; change that, not this. Whatever is not
here is refused by name before any work is done: an unknown model type, tensor, weight format, RoPE
scaling, or a config setting that changes the result.
"""

LONGROPE = """\
The longrope set is chosen by the context capacity at load: the long factors when it is larger than
`original_max_position_embeddings`, for every length; `hornito run --stats` says which.
`freq_factors` is how GGUF spells a scaling that no rule explains.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def paragraph(module: ModuleType) -> str:
    """The first paragraph of a module's text, on one line."""
    text = inspect.getdoc(module) or ""
    return " ".join(text.split("\n\n")[0].split())


def code(words: Iterable[str]) -> str:
    """Words as code, with commas."""
    return ", ".join(f"`{word}`" for word in words)


def models() -> str:
    """One row a module of hornito.models."""
    from hornito.importers import supported_model_types
    from hornito.importers.gguf_names import ARCHITECTURES

    rows = []
    for name in supported_model_types():
        module = importlib.import_module(f"hornito.models.{name}")
        title, _, what = paragraph(module).partition(": ")
        source = re.search(r"Source: `(\w+)`", inspect.getdoc(module) or "")
        files = [arch for arch, entry in ARCHITECTURES.items() if entry.model_type == name]
        if name == "mistral":  # comes under Llama's name; the window tells them apart
            files = ["llama"]
        rows.append(
            (
                title,
                f"`{name}`",
                code(files) + (" (with a sliding window)" if name == "mistral" else ""),
                what[:1].upper() + what[1:],
                code(module.HANDLED),
                f"`{source[1]}`" if source else "",
            )
        )
    return table(
        ("family", "model_type", "GGUF architecture", "what it is", "settings", "reference"), rows
    )


def rope_scalings() -> str:
    """One row a scaling."""
    from hornito.models._rope import SCALINGS

    return table(
        ("rope_type", "settings"),
        [(f"`{k}`", code(sorted(v)) or "none") for k, v in SCALINGS.items()],
    )


def formats() -> str:
    """Where weights can come from, and how they are stored in a package."""
    from hornito.graph.storage import CHOICES
    from hornito.importers.safetensors_file import FLOAT_TYPES
    from hornito.quant.formats import FORMATS
    from hornito.quant.ggml import GGML_TYPES

    stored = table(
        ("stored as", "bits a weight", "exactly GGUF's"),
        [(f"`{f.name}`", f"{f.bits:g}", f"`{f.ggml}`" if f.ggml else "") for f in FORMATS.values()],
    )
    sources = table(
        ("source", "weight types"),
        [
            ("Hugging Face directory (safetensors, one file or shards)", code(FLOAT_TYPES)),
            ("GGUF file, version 2 or 3", code(fmt.name for fmt in GGML_TYPES.values())),
            (
                "[ONNX decoder](onnx.md), opset 13 to 24",
                "`FLOAT`, `FLOAT16`, `BFLOAT16`, `INT8`, `UINT8`, `INT4`, `UINT4`, and blocks of "
                "2, 4 or 8 bits (`MatMulNBits`, `GatherBlockQuantized`)",
            ),
            ("package (`hornito compile --weights`)", code(CHOICES)),
        ],
    )
    return f"{sources}\nHow a package can hold a matrix ([format](format.md)):\n\n{stored}"


def ops() -> str:
    """One row an op."""
    from hornito.ops import registry

    rows = []
    for name in registry.names():
        kernels = sorted(path.stem for path in (KERNELS / name).glob("*.comp"))
        text = paragraph(importlib.import_module(f"hornito.ops.{name}"))
        rows.append(
            (f"`{name}`", text, code(f"{name}/{k}" for k in kernels) or "those of `linear`")
        )
    return table(("op", "meaning", "kernels"), rows)


def passes() -> str:
    """One row a pass, in their order."""
    from hornito.graph.passes import ORDER

    return table(
        ("pass", "what it does"),
        [
            (f"`{name}`", paragraph(importlib.import_module(f"hornito.graph.passes.{name}")))
            for name in ORDER
        ],
    )


def render() -> str:
    """The whole page."""
    from hornito.models._builder import ACTIVATIONS

    return "\n".join(
        [
            INTRO,
            "## Models\n",
            models(),
            f"Activations: {code(sorted(ACTIVATIONS))}.\n",
            "## RoPE scalings\n",
            rope_scalings(),
            LONGROPE,
            "## Formats\n",
            formats(),
            "## Ops\n",
            "Every op runs on the GPU; there is no other backend.\n",
            ops(),
            "## Passes\n",
            "Each can be switched off: `hornito.compile_source(..., disabled_passes=[NAME])`.\n",
            passes(),
        ]
    )


if __name__ == "__main__":
    from generated_page import write_or_check

    raise SystemExit(write_or_check(PAGE, render, __doc__))
