"""`hornito check FILE`: whether every node of a model runs on the GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hornito.cli.binding import add_binding, common, parsed_source
from hornito.cli.options import add_json
from hornito.cli.output import print_json
from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.package import is_package
from hornito.plan.records import dropped_here
from hornito.support import SUPPORTED, missing, support_report, unsupported_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="model (ONNX or GGUF file, directory), package (.vxm), or support report (.json)",
    )
    add_binding(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict and every node at fault; returns 0 when supported, 2 when not."""
    report = _report(Path(arguments.file), arguments)
    faults = missing(report)
    supported = report["verdict"] == SUPPORTED and not faults
    dropped = dropped_here()
    if dropped:
        report = {**report, "dropped_kernels": dropped}
    if arguments.json:
        verdict = SUPPORTED if supported else "UNSUPPORTED"
        print_json({**report, "verdict": verdict})
    else:
        _print(arguments.file, report, faults, supported)
    return 0 if supported else 2


def _print(
    file: str, report: dict[str, Any], faults: list[tuple[str, str, str]], supported: bool
) -> None:
    summary = report.get("summary", {})
    if supported:
        print(f"SUPPORTED: {file}")
        if summary.get("source_nodes"):
            print(
                f"{summary['source_nodes']} nodes of the source: {summary['raised']} run on "
                f"Vulkan, {summary['folded']} are folded at import; {summary['graph_nodes']} "
                "operations"
            )
        else:
            print(
                f"{summary.get('graph_nodes', len(report.get('nodes', [])))} operations on Vulkan"
            )
        for kernel, why in report.get("dropped_kernels", {}).items():
            print(f"not used on this machine: kernel {kernel} ({why}); its twin takes its place")
        return
    print(f"UNSUPPORTED: {file}")
    for name, op, reason in faults:
        print(f"  {name} ({op}): {reason}" if op else f"  {name}: {reason}")
    if not faults:
        print(f"  {report.get('message', 'no reason is given')}")


def _report(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The support report of a source or package, or the one that the file is."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix == ".json" and path.name != "config.json":
            return _load(path)
        if is_package(path):
            return _of_package(path)
    return _of_source(path, arguments)


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: not a support report")
    inner = value.get("support", value)  # a compile report holds one
    if not isinstance(inner, dict):
        raise FormatError(f"{path}: not a support report")
    try:
        missing(inner)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    return inner


def _of_package(path: Path) -> dict[str, Any]:
    from hornito.package import open_package
    from hornito.package.model import model_graph
    from hornito.tensor.package import is_tensor_package, read_buckets

    with open_package(path) as package:
        stored = package.manifest.support
        if is_tensor_package(package):
            read_buckets(package)
            return stored
        # The ops are looked up again: this Hornito may not be the one that compiled it.
        try:
            graph = model_graph(package)
        except UnsupportedError as error:
            return unsupported_report(error)
        if "verdict" in stored:
            return stored
        return support_report(graph, [], before=len(graph.nodes), passes={})


def _of_source(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from hornito.compiler import source_support

    try:
        parsed = parsed_source(path)
        if parsed is not None:
            from hornito.importers.onnx_generic import import_generic
            from hornito.tensor.package import support

            return support(import_generic(parsed, common(arguments).binding()))
        return source_support(path)
    except UnsupportedError as error:
        return unsupported_report(error)
