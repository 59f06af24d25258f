"""Models of tensors, not text: compiling them, running them on .npy files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.cli.binding import add_dim, graph_specs, load_array, pair_value, parsed_source
from hornito.cli.model import check_tensor_precision
from hornito.cli.output import megabytes, print_json
from hornito.cli.quantising import refuse_quantisation
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.importers.onnx_generic import Parsed
    from hornito.tensor.buckets import Bucket


def add_tensors(parser: argparse.ArgumentParser) -> None:
    """Adds --input, --output, --dim and --bucket."""
    add_inputs(parser)
    parser.add_argument("--output", metavar="DIR", help="write its outputs to DIR/NAME.npy")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds --input, --dim and --bucket."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=pair_value,
        metavar="NAME=FILE.npy",
        help="input of a model of tensors (an ONNX model that is no decoder); may be repeated",
    )
    add_dim(parser, "number of one of its named dims, where its inputs leave a choice")
    parser.add_argument("--bucket", metavar="NAME", help="which of a package's graphs to run")


def compile_source(arguments: argparse.Namespace) -> int | None:
    """Compiles when the source is a model of tensors; None when it is not."""
    if arguments.graph and arguments.out is None:
        source, out = None, arguments.source
    else:
        source, out = arguments.source, arguments.out
    parsed = None if source is None else parsed_source(source)
    if parsed is None and source is not None and arguments.list_dims:
        return _list_decoder_dims(Path(source), arguments)
    if parsed is None and (source is not None or not arguments.graph):
        names = ("dim", "shape", "value", "bucket", "graph", "list_dims")
        used = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
        if used:
            raise UsageError(
                f"{source} is no ONNX model of tensors: its shapes need no {', '.join(used)}"
            )
        return None
    if arguments.list_dims:
        return _list_dims(parsed, arguments)
    if parsed is None and (arguments.dim or arguments.shape or arguments.value or arguments.bucket):
        raise UsageError(
            "--dim, --shape, --value and --bucket are for SRC: a --graph has its own, as in "
            "'FILE;dim:NAME=N'"
        )
    if out is None:
        raise UsageError("OUT.vxm is missing: the package to write")
    refuse_quantisation(arguments)
    return _compile(parsed, out, arguments)


def _compile(parsed: Parsed | None, out: str, arguments: argparse.Namespace) -> int:
    from hornito.progress import TerminalProgress
    from hornito.tensor.package import compile_graphs

    with TerminalProgress() as progress:
        specs, weights = graph_specs(parsed, arguments), arguments.weights or "fp32"
        report = compile_graphs(specs, out, progress, weights=weights)
    for warning in report.warnings:
        print(f"hornito: warning: {warning}", file=sys.stderr)
    data = report.to_dict()
    if arguments.support_report:
        text = json.dumps(data, indent=2, ensure_ascii=False)
        Path(arguments.support_report).write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print_json({k: v for k, v in data.items() if k != "support"})
        return 0
    print(f"{report.path}: {megabytes(report.bytes)} in {report.seconds:.1f} s")
    for bucket in report.buckets:
        if len(report.buckets) > 1:
            print(f"bucket {bucket['name']}")
        for label in ("input", "output"):
            for name, (dtype, shape) in bucket[f"{label}s"].items():
                print(f"{label} {name}: {dtype} [{', '.join(map(str, shape))}]")
    summary = report.support["summary"]
    print(
        f"source nodes: {summary['source_nodes']}, {summary['raised']} of them run on Vulkan,"
        f" {summary['folded']} folded at import"
    )
    return 0


def _list_dims(parsed: Parsed | None, arguments: argparse.Namespace) -> int:
    from hornito.importers.onnx_generic import symbolic_dims

    models = [parsed] if parsed is not None else []
    models += [spec.parsed for spec in graph_specs(None, arguments)]
    found: dict[str, list[str]] = {}
    for model in models:
        for dim, places in symbolic_dims(model).items():
            known = found.setdefault(dim, [])
            known += [place for place in places if place not in known]
    _print_dims(found, arguments)
    return 0


def _list_decoder_dims(path: Path, arguments: argparse.Namespace) -> int:
    """The axes of an ONNX decoder, which nobody need bind."""
    from hornito.importers.onnx.folder import find_model, has_onnx
    from hornito.importers.onnx.reader import read_model

    if path.suffix != ".onnx" and not (path.is_dir() and has_onnx(path)):
        raise UsageError(f"{path} is no ONNX model: it has no named dims")
    found: dict[str, list[str]] = {}
    for name, dims in read_model(find_model(path).model).inputs.items():
        for axis, dim in enumerate(dims):
            if isinstance(dim, str):
                found.setdefault(dim, []).append(f"{name}[{axis}]")
    _print_dims(found, arguments)
    print("a decoder: what its inputs are binds every dim, none needs a number", file=sys.stderr)
    return 0


def _print_dims(found: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(found)
        return
    for dim, places in found.items():
        print(f"{dim}: {', '.join(places)}")
    if not found:
        print("every dim is a number")


def run(arguments: argparse.Namespace) -> int:
    """Runs a package or an ONNX model on the arrays of --input."""
    import numpy as np

    from hornito.cache import resolve_model
    from hornito.cli.cpu import say_cpu
    from hornito.tensor.buckets import pick
    from hornito.tensor.model import TensorModels
    from hornito.tensor.reference import evaluate
    from hornito.vk.device import open_device

    check_tensor_precision(arguments)
    if arguments.prompt is not None or arguments.prompt_file or arguments.ids:
        raise UsageError("--input and --output are for models of tensors, which take no prompt")
    if not arguments.output:
        raise UsageError("--output DIR is missing: where the outputs go")
    inputs = {name: load_array(path) for name, path in arguments.input}
    dims = dict(arguments.dim)
    buckets, inputs = _buckets(resolve_model(arguments.model), inputs, dims)
    folder = Path(arguments.output)
    if arguments.backend == "cpu":
        say_cpu()
        shapes = {name: array.shape for name, array in inputs.items()}
        graph = pick(buckets, shapes, name=arguments.bucket, dims=dims).graph
        outputs, name = evaluate(graph, inputs), "cpu (numpy reference)"
    else:
        with open_device(arguments.device) as device, TensorModels(device, buckets) as models:
            outputs = models.run(inputs, bucket=arguments.bucket, dims=dims)
            name = device.info.name
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for label, array in outputs.items():
        file = folder / (label.replace("/", "_").lstrip(".") + ".npy")
        if str(file) in files.values():
            raise UsageError(f"two outputs would both be written to {file}")
        files[label] = str(file)
        np.save(file, array)
    if arguments.json:
        print_json({"device": name, "outputs": files})
        return 0
    for label, path in files.items():
        shape = ", ".join(map(str, outputs[label].shape))
        print(f"{label}: {outputs[label].dtype} [{shape}] in {path}")
    return 0


def _buckets(
    path: Path, inputs: dict[str, Any], dims: dict[str, int]
) -> tuple[list[Bucket], dict[str, Any]]:
    """The graphs of a package, or of an ONNX model bound to these inputs, and what they take."""
    from hornito.importers.onnx_generic import bind_to
    from hornito.package import is_package
    from hornito.tensor.buckets import Bucket
    from hornito.tensor.package import load_buckets

    parsed = None if is_package(path) else parsed_source(path)
    if parsed is None:
        return load_buckets(path), inputs
    graph = bind_to(parsed, inputs, dims).graph
    taken = {n: a for n, a in inputs.items() if n in graph.inputs}
    return [Bucket(path.stem, dims, graph, {name: name for name in graph.constants})], taken
