"""Models of tensors, not text: binding their dims, compiling them, running them on .npy files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.cli.output import megabytes, print_json
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.importers.onnx_generic import Binding, Parsed
    from hornito.tensor.graph import TensorGraph


def add_binding(parser: argparse.ArgumentParser) -> None:
    """Adds --dim, --shape and --value."""
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_dim,
        metavar="NAME=N",
        help="number of a named dim of an ONNX model that is no decoder; may be repeated",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=_shape,
        metavar="INPUT=AxBxC",
        help="whole shape of one of its inputs",
    )
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        type=_pair,
        metavar="INPUT=FILE.npy",
        help="fix an input that shapes depend on",
    )


def add_tensors(parser: argparse.ArgumentParser) -> None:
    """Adds --input and --output."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=FILE.npy",
        help="input of a model of tensors (an ONNX model that is no decoder); may be repeated",
    )
    parser.add_argument("--output", metavar="DIR", help="write its outputs to DIR/NAME.npy")


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name, value


def _dim(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    if not value.isascii() or not value.isdigit():
        raise argparse.ArgumentTypeError(f"'{value}' is no number")
    return name, int(value)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, value = _pair(text)
    dims = value.split("x")
    if not all(d.isascii() and d.isdigit() for d in dims):
        raise argparse.ArgumentTypeError(f"'{value}' is not of the form 1x128")
    return name, tuple(int(d) for d in dims)


def binding_of(arguments: argparse.Namespace) -> Binding:
    """What the options of `add_binding` say."""
    from hornito.importers.onnx_generic import Binding

    values = {name: load_array(path) for name, path in arguments.value}
    return Binding(dict(arguments.dim), dict(arguments.shape), values)


def parsed_source(source: str | Path) -> Parsed | None:
    """The ONNX model at a path, unless it is a decoder or no ONNX at all."""
    from hornito.importers.onnx_generic import parse
    from hornito.importers.onnx_generic.detect import generic_file

    found = generic_file(Path(source))
    return None if found is None else parse(*found)


def compile_source(arguments: argparse.Namespace) -> int | None:
    """Compiles when the source is a model of tensors; None when it is not."""
    parsed = parsed_source(arguments.source)
    if parsed is None:
        if arguments.dim or arguments.shape or arguments.value or arguments.list_dims:
            raise UsageError(
                f"{arguments.source} is no ONNX model of tensors: its shapes need no --dim, "
                "--shape, --value or --list-dims"
            )
        return None
    if arguments.list_dims:
        return _list_dims(parsed, arguments.json)
    from hornito.progress import TerminalProgress
    from hornito.tensor.package import compile_parsed

    if arguments.out is None:
        raise UsageError("OUT.vxm is missing: the package to write")
    with TerminalProgress() as progress:
        report = compile_parsed(parsed, binding_of(arguments), arguments.out, progress)
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
    for label, values in (("input", report.inputs), ("output", report.outputs)):
        for name, (dtype, shape) in values.items():
            print(f"{label} {name}: {dtype} [{', '.join(map(str, shape))}]")
    summary = report.support["summary"]
    print(
        f"source nodes: {summary['source_nodes']}, {summary['raised']} of them run on Vulkan,"
        f" {summary['folded']} folded at import"
    )
    return 0


def _list_dims(parsed: Parsed, as_json: bool) -> int:
    from hornito.importers.onnx_generic import symbolic_dims

    found = symbolic_dims(parsed)
    if as_json:
        print_json(found)
        return 0
    for dim, places in found.items():
        print(f"{dim}: {', '.join(places)}")
    if not found:
        print("every dim is a number")
    return 0


def load_array(path: str) -> Any:
    """The array of a .npy file.

    Raises:
        UsageError: there is none, or it is no array of numbers.
    """
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read {path} as .npy: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise UsageError(f"{path} holds no array of numbers")
    return array


def run(arguments: argparse.Namespace) -> int:
    """Runs a package or an ONNX model on the arrays of --input."""
    import numpy as np

    from hornito.cache import resolve_model
    from hornito.tensor.model import TensorModel
    from hornito.vk.device import open_device

    if arguments.prompt is not None or arguments.prompt_file or arguments.ids:
        raise UsageError("--input and --output are for models of tensors, which take no prompt")
    if not arguments.output:
        raise UsageError("--output DIR is missing: where the outputs go")
    inputs = {name: load_array(path) for name, path in arguments.input}
    graph, inputs = _graph(resolve_model(arguments.model), inputs)
    folder = Path(arguments.output)
    with open_device(arguments.device) as device, TensorModel(device, graph) as model:
        outputs = model.run(inputs)
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


def _graph(path: Path, inputs: dict[str, Any]) -> tuple[TensorGraph, dict[str, Any]]:
    """The graph of a package, or of an ONNX model bound to these inputs, and what it takes."""
    from hornito.importers.onnx_generic import bind_to
    from hornito.tensor.package import load_tensor_graph

    parsed = None if path.suffix == ".vxm" else parsed_source(path)
    if parsed is None:
        return load_tensor_graph(path), inputs
    model = bind_to(parsed, inputs)
    return model.graph, {n: a for n, a in inputs.items() if n in model.graph.inputs}
