"""`hornito inspect FILE`: what a package holds."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from hornito.cli.files import PACKAGE, expect
from hornito.cli.options import add_json
from hornito.cli.output import describe_quality, megabytes, print_fields, print_json, print_table
from hornito.package import Package, open_package
from hornito.plan.records import dropped_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("package", metavar="FILE.vxm")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the package's manifest, tensors and carried files."""
    expect(arguments.package, PACKAGE)
    with open_package(arguments.package) as package:
        if arguments.json:
            print_json(_to_dict(package))
        else:
            _print(package)
            if arguments.tensors:
                print()
                rows = [
                    (name, info.dtype, "x".join(map(str, info.shape)), info.offset, info.nbytes)
                    for name, info in package.tensors.items()
                ]
                print_table(("tensor", "dtype", "shape", "offset", "bytes"), rows)
    return 0


def _operations(graph: dict[str, Any]) -> dict[str, int]:
    """How often each op occurs in a graph, the most frequent first."""
    parts = graph.get("buckets", [graph])  # a model of tensors has several
    lists = (
        [p.get("nodes") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
    )
    nodes = [node for found in lists if isinstance(found, list) for node in found]
    ops = Counter(str(node.get("op")) for node in nodes if isinstance(node, dict))
    return dict(ops.most_common())


def _to_dict(package: Package) -> dict[str, Any]:
    manifest = package.manifest.to_json()
    operations = _operations(manifest.pop("graph"))
    hashes = manifest.pop("sha256")
    return {
        "path": str(package.path),
        "bytes": package.size,
        **manifest,
        "operations": operations,
        "dropped_kernels": dropped_here(),
        "tensors": {
            name: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "offset": info.offset,
                "bytes": info.nbytes,
                "sha256": hashes[name],
            }
            for name, info in package.tensors.items()
        },
        "blobs": {name: info.nbytes for name, info in package.blobs.items()},
    }


def _print(package: Package) -> None:
    manifest = package.manifest
    operations = _operations(manifest.graph)
    by_dtype = Counter(info.dtype for info in package.tensors.values())
    weight_bytes = sum(info.nbytes for info in package.tensors.values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in by_dtype.most_common())
    blobs = ", ".join(f"{name} ({megabytes(b.nbytes)})" for name, b in package.blobs.items())
    ops = ", ".join(f"{count} {op}" for op, count in operations.items())
    fields: list[tuple[str, object]] = [
        ("package", f"{package.path}, {megabytes(package.size)}"),
        ("format", f"version {manifest.format_version}, Hornito {manifest.hornito_version}"),
        *((f"source.{name}", _text(value)) for name, value in manifest.source.items()),
        *((name, _text(value)) for name, value in manifest.facts.items()),
        *((f"generation.{name}", _text(value)) for name, value in manifest.generation.items()),
        *_quant(manifest.quant),
        ("quality", describe_quality(manifest.quality) if manifest.quality else ""),
        ("weights", f"{len(package.tensors)} tensors ({kinds}), {megabytes(weight_bytes)}"),
        ("files", blobs),
        ("operations", f"{sum(operations.values())} nodes: {ops}" if ops else ""),
        *((f"not used here: {kernel}", why) for kernel, why in dropped_here().items()),
    ]
    print_fields(fields)


def _quant(quant: dict[str, Any]) -> list[tuple[str, object]]:
    """How matrices are stored: one line a storage type, with its bits a weight."""
    rows: list[tuple[str, object]] = [
        (f"quant.{name}", _text(value)) for name, value in quant.items() if name != "formats"
    ]
    formats = quant.get("formats")
    for name, entry in formats.items() if isinstance(formats, dict) else ():
        known = entry if isinstance(entry, dict) else {}
        size = known.get("bytes")
        rows.append(
            (
                f"quant.formats.{name}",
                f"{known.get('matrices')} matrices, {known.get('bits')} bits a weight"
                + (f", {megabytes(size)}" if isinstance(size, int) else ""),
            )
        )
    return rows


def _text(value: object) -> str:
    """A manifest value on one line; a long one is cut visibly (--json has all of it)."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if value is None:
        return ""
    text = text.replace("\n", "\\n")
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
