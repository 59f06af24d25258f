"""What 8 and 4 bits cost: a model in our storage types and in GGUF's, beside its fp32 tier.

The weights of a GGUF file are the reference, whatever they are stored as. They are compiled in each
of our forms; and put through the quantisers of the `gguf` package, as GGUF files that run from
their own blocks (`--weights keep`). All are measured as `hornito eval quality` does it.

python benchmarks/quality.py model.gguf quality --text benchmarks/data/alice.txt --tokens 20480

writes quality.json and quality.md. Forms that quality.json holds already are not measured again,
so a run may be cut into several (`--only NAME`). `--form 'NAME=int4 samples=0 group=32'` adds a
form of ours: what its weights are, and how they are rounded (the fields of `Quantisation`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hornito.compiler import compile_source
from hornito.diag.quality import WINDOW
from hornito.diag.quality_models import QualityOptions, measure_models
from hornito.progress import TerminalProgress
from hornito.quant.choice import Quantisation

#: Weights, and how they are rounded: the fields of `Quantisation`.
OURS = {
    "fp16": "fp16",
    "int8": "int8",
    "int4": "int4",
    "int4, by weights alone": "int4 samples=0",
    "int4, no outliers": "int4 outliers=0",
    "int4, by weights alone, no outliers": "int4 samples=0 outliers=0",
    "int4, everything": "int4 table=int4",
    "int4m": "int4m",
}
#: Types of the matrices and of the table of tokens.
GGUF = {
    "GGUF Q8_0": ("Q8_0", "Q8_0"),
    "GGUF Q4_0": ("Q4_0", "Q4_0"),
    "GGUF Q4_1": ("Q4_1", "Q4_1"),
    "GGUF Q4_0, table Q8_0": ("Q4_0", "Q8_0"),
    "GGUF Q4_1, table Q8_0": ("Q4_1", "Q8_0"),
}
TABLES = ("token_embd.weight", "output.weight")

SAME_SIZE = 0.995
_BESIDE = {"int8": "GGUF Q8", "int4": "GGUF Q4"}


@dataclass(frozen=True, slots=True)
class Row:
    """One form of the model; sizes are of the package, seconds of measuring and of compiling."""

    form: str
    bytes: int
    bits: float
    perplexity: float
    kl_mean: float
    kl_p99: float
    top1: float
    compile_seconds: float
    seconds: float


def write_gguf(source: Path, out: Path, matrices: str, tables: str) -> None:
    """Write a model again, its matrices dequantised and put through gguf's own quantisers.

    A matrix whose rows are no multiple of 32 long becomes F16; vectors stay as they are.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) != 2:
            data = np.array(tensor.data)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
            continue
        name = tables if tensor.name in TABLES else matrices
        kind = gguf.GGMLQuantizationType[name if tensor.shape[0] % 32 == 0 else "F16"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compile_form(source: Path, out: Path, form: str, device: str | None = None) -> None:
    """Compile the source as `WEIGHTS FIELD=VALUE ...` says."""
    weights, *fields = form.split()
    chosen: dict[str, Any] = {"device": device}
    for field in fields:
        name, _, value = field.partition("=")
        if name in ("samples", "group", "target_bytes"):
            chosen[name] = int(value)
        elif name in ("outliers", "error"):
            chosen[name] = float(value)
        else:
            chosen[name] = value
    with TerminalProgress() as progress:
        compile_source(
            source, out, weights=weights, quantisation=Quantisation(**chosen), progress=progress
        )


def make(
    source: Path, form: str, options: dict[str, str], folder: Path, device: str | None
) -> Path:
    """The package of a form, in `folder`."""
    out = folder / "form.vxm"
    if form in GGUF:
        file = folder / "form.gguf"
        write_gguf(source, file, *GGUF[form])
        compile_form(file, out, "keep")
        file.unlink()
    else:
        compile_form(source, out, options[form], device)
    return out


def measure(
    source: Path, forms: list[str], options: dict[str, str], how: QualityOptions, out: Path
) -> dict[str, Any]:
    """Measure the forms that the file does not hold yet, and bring it up to date after each."""
    found: dict[str, Any] = {}
    if out.exists():
        found = json.loads(out.read_text("utf-8"))
    rows = {row["form"]: row for row in found.get("rows", [])}
    with tempfile.TemporaryDirectory() as name, TerminalProgress() as progress:
        folder = Path(name)
        reference = folder / "fp32.vxm"
        for form in forms:
            if form in rows:
                continue
            if not reference.exists():
                compile_form(source, reference, "fp32")
            began = time.perf_counter()
            package = make(source, form, options, folder, how.device)
            compiled = time.perf_counter()
            text, (one,), device = measure_models([str(package)], str(reference), how, progress)
            quality = one.quality
            rows[form] = asdict(
                Row(
                    form,
                    one.bytes,
                    one.bits,
                    quality.perplexity,
                    quality.kl_mean,
                    quality.kl_p99,
                    quality.top1,
                    compiled - began,
                    time.perf_counter() - compiled,
                )
            )
            found = {
                "model": source.name,
                "device": device,
                "text": {"name": text.name, "sha256": text.sha256},
                "window": text.window,
                "evaluated": text.evaluated,
                "scored": text.scored,
                "precision": how.precision,
                "reference_perplexity": quality.reference_perplexity,
                "options": {**found.get("options", {}), form: options.get(form, "gguf")},
                "rows": list(rows.values()),
            }
            out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return found


def to_markdown(found: dict[str, Any]) -> str:
    """The table, and how our forms stand beside GGUF's of at least their size."""
    rows = [Row(**row) for row in found["rows"]]
    rows.sort(key=lambda row: -row.bits)
    lines = [
        f"{found['model']}: {found['evaluated']} tokens of {found['text']['name']} in windows of "
        f"{found['window']}, {found['scored']} scored; {found['precision']}, against fp32 "
        f"(perplexity {found['reference_perplexity']:.4f}); {found['device']}",
        "",
        "| form | MB | bits a weight | perplexity | mean KL | 99 % KL | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.form} | {r.bytes / 1e6:.1f} | {r.bits:.2f} | {r.perplexity:.4f} | {r.kl_mean:.3g} | "
        f"{r.kl_p99:.3g} | {r.top1:.2%} |"
        for r in rows
    ]
    lines += ["", *(f"* {text}" for text in standings(rows, found["options"]))]
    return "\n".join(lines)


def standings(rows: list[Row], options: dict[str, str]) -> list[str]:
    """Each form of ours in 8 or 4 bits beside the smallest of GGUF's in as many that is no smaller,
    or beside its largest where all are: the ratio of their mean KL."""
    lines = []
    for row in rows:
        kind = options[row.form][:4]
        theirs = [r for r in rows if r.form.startswith(_BESIDE.get(kind, "none"))]
        if not theirs or row.kl_mean == 0:
            continue
        larger = [r for r in theirs if r.bytes >= row.bytes * SAME_SIZE]
        other = min(larger, key=_size) if larger else max(theirs, key=_size)
        lines.append(
            f"{row.form}: mean KL {row.kl_mean / other.kl_mean:.3f} times that of {other.form} "
            f"({row.bytes / 1e6:.1f} and {other.bytes / 1e6:.1f} MB)"
        )
    return lines


def _size(row: Row) -> int:
    return row.bytes


def main() -> None:
    """Measure, and write OUT.json and OUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("out", help="OUT.json and OUT.md are written")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--precision", default="high")
    parser.add_argument("--device")
    parser.add_argument("--only", action="append", help="a form by its name; may be repeated")
    parser.add_argument("--form", action="append", default=[], metavar="NAME=FORM")
    arguments = parser.parse_args()
    options = {**OURS, **dict(form.split("=", 1) for form in arguments.form)}
    forms = arguments.only or [*options, *GGUF]
    unknown = sorted(set(forms) - {*options, *GGUF})
    if unknown:
        parser.error(f"no form {', '.join(unknown)}; there are {', '.join([*options, *GGUF])}")
    how = QualityOptions(
        text=arguments.text,
        window=arguments.window,
        tokens=arguments.tokens,
        precision=arguments.precision,
        kv="fp32" if arguments.precision == "high" else "fp16",
        device=arguments.device,
        store=False,
    )
    found = measure(arguments.model, forms, options, how, Path(f"{arguments.out}.json"))
    text = to_markdown(found)
    Path(f"{arguments.out}.md").write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
