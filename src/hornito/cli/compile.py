"""`hornito compile SRC OUT.vxm`: a model becomes one file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.cli.binding import add_binding, add_buckets
from hornito.cli.files import EMPTY, SNAPSHOT, TEXT, expect, kind_of
from hornito.cli.options import WEIGHTS, add_json, add_option, one_of
from hornito.cli.output import describe_quality, megabytes, print_json
from hornito.cli.quantising import add_quantisation, quantisation_of
from hornito.cli.tensors import compile_source as compile_tensors
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.quality import ModelQuality


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="GGUF file, Hugging Face directory, ONNX model, a pulled ORG/REPO, or a package",
    )
    parser.add_argument("out", metavar="OUT.vxm", nargs="?", help="package to write")
    add_option(
        parser,
        "--weights",
        type=one_of(WEIGHTS),
        help=f"how weights are stored: {', '.join(WEIGHTS)} (default: keep, as the source holds "
        "them, when some are quantised, else fp16)",
        metavar="TYPE",
    )
    add_quantisation(parser)
    parser.add_argument(
        "--support-report",
        metavar="FILE",
        help="also write the report as JSON to FILE: what runs every node",
    )
    parser.add_argument(
        "--eval",
        metavar="TEXT",
        help="measure the package on this text, as `hornito eval quality` does, and store the "
        "figures in it; needs a device",
    )
    add_option(
        parser,
        "--device",
        help="for --eval and --quant-samples: index, name part, vendor, pci:..., UUID",
    )
    add_binding(parser)
    add_buckets(parser)
    parser.add_argument(
        "--list-dims",
        action="store_true",
        help="print the named dims of an ONNX model, and stop",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compiles and prints what was covered."""
    from hornito.cache import is_repository, resolve_model
    from hornito.compiler import compile_source

    _check_report(arguments)
    if arguments.out is not None or not arguments.graph:
        _refuse_what_is_no_source(Path(arguments.source))
    quantisation = quantisation_of(arguments)
    code = compile_tensors(arguments)
    if code is not None:
        if arguments.eval:
            raise UsageError("--eval goes with text models; the package of tensors is written")
        return code
    if arguments.out is None:
        raise UsageError("OUT.vxm is missing: the package to write")
    source = arguments.source
    if is_repository(source):  # a path of that form comes first
        source = str(resolve_model(source))
    with TerminalProgress() as progress:
        report = compile_source(
            source,
            arguments.out,
            weights=arguments.weights,
            quantisation=quantisation,
            progress=progress,
        )
    for warning in report.warnings:
        print(f"hornito: warning: {warning}", file=sys.stderr)
    if arguments.support_report:
        text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
        Path(arguments.support_report).write_text(text + "\n", encoding="utf-8")
    quality = _measured(arguments, source) if arguments.eval else None
    if arguments.json:
        facts = {k: v for k, v in report.to_dict().items() if k != "support"}
        print_json(facts if quality is None else {**facts, "quality": quality.label})
        return 0
    print(f"{report.path}: {megabytes(report.bytes)} in {report.seconds:.1f} s")
    print(
        f"tensors: {report.tensors_used} of {report.tensors_in_file} in the file used;"
        f" graph nodes: {report.nodes}, all with a GPU kernel"
    )
    summary = report.support["summary"]
    if summary["source_nodes"]:
        print(
            f"source nodes: {summary['source_nodes']}, {summary['raised']} of them run on Vulkan,"
            f" {summary['folded']} folded at import; raised to"
            f" {summary['graph_nodes_before_passes']} nodes, {summary['graph_nodes']} after passes"
            f" ({summary['graph_nodes_per_layer']} a layer)"
        )
    if quality is not None:
        print(f"quality: {describe_quality(quality.label)}")
    return 0


def _measured(arguments: argparse.Namespace, source: str) -> ModelQuality:
    """The quality of the package, which is stored in it."""
    from hornito.diag.quality_models import QualityOptions, measure_models
    from hornito.package import is_package

    options = QualityOptions(text=arguments.eval, device=arguments.device)
    reference = None if is_package(source) else source
    with TerminalProgress() as progress:
        _, (found,), _ = measure_models([arguments.out], reference, options, progress)
    return found


def _check_report(arguments: argparse.Namespace) -> None:
    """Refuse a --support-report that could not be written, or would replace what is no report."""
    if arguments.support_report is None:
        return
    path = Path(arguments.support_report)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--support-report {path}: is a directory, or its folder does not exist")
    names = [arguments.source, arguments.out, *(option.file for option in arguments.graph)]
    places = {Path(name).resolve() for name in names if name is not None}
    found = path.resolve()
    of_model = found in places or (path.exists() and not places.isdisjoint(found.parents))
    if of_model or (path.is_file() and not _may_be_json(path)):
        raise UsageError(
            f"--support-report {path}: is a file of the model, or no JSON; give another name"
        )


def _may_be_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip()[:1] in (b"{", b"")


def _refuse_what_is_no_source(path: Path) -> None:
    """Say what a file is that no importer would know."""
    known = not path.is_file() or path.suffix in (".json", ".onnx")
    if not known and kind_of(path) in (EMPTY, SNAPSHOT, TEXT):
        expect(str(path), "a model")
