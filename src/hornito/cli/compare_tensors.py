"""`hornito compare` on a model of tensors."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.cli.binding import load_array, parsed_source
from hornito.cli.model import check_tensor_precision
from hornito.cli.output import print_json
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.tensor.graph import TensorGraph

_OF_DECODERS = ("prompt", "ids", "bisect", "disable_pass", "fp32_tensors", "weights", "ref_weights")


def is_tensors(arguments: argparse.Namespace) -> bool:
    """Whether MODEL is an ONNX model that is no decoder, or its package."""
    from hornito.cache import resolve_model
    from hornito.package import is_package, open_package
    from hornito.tensor.package import is_tensor_package

    path = resolve_model(arguments.model, arguments.weights)
    if not is_package(path):
        return parsed_source(path) is not None
    with open_package(path) as package:
        return is_tensor_package(package)


def run_tensors(arguments: argparse.Namespace) -> int:
    """Compares, prints what was found, and returns 0 when all is equal, else 1."""
    from hornito.cache import resolve_model
    from hornito.cli.compare import DIFFERS, print_end, print_values
    from hornito.cli.cpu import say_cpu
    from hornito.diag.compare_bench import CPU, VULKAN
    from hornito.diag.compare_tensors import compare_tensors, made_up
    from hornito.diag.compare_values import PRECISION_TOLERANCE, dump
    from hornito.plan.pins import matching
    from hornito.vk.device import open_device

    check_tensor_precision(arguments)
    used = [n for n in _OF_DECODERS if getattr(arguments, n) not in (None, False, [])]
    if used:
        flags = ", ".join(n if n == "prompt" else f"--{n.replace('_', '-')}" for n in used)
        raise UsageError(f"{arguments.model} is a model of tensors: it takes no {flags}")
    if arguments.ref == CPU and arguments.ref_backend != CPU:
        raise UsageError("--ref cpu runs on the numpy evaluator; --ref FILE may do without")
    given = {name: load_array(path) for name, path in arguments.input}
    graph = _graph(arguments, resolve_model(arguments.model), given)
    inputs = made_up(graph, given)
    unknown = sorted(set(given) - set(graph.inputs))
    inputs = {name: inputs[name] for name in graph.inputs}
    reference = graph
    if arguments.ref != CPU:
        reference = _graph(arguments, resolve_model(arguments.ref), {**given, **inputs})
    usual = PRECISION_TOLERANCE["high"]
    tolerance = usual.with_choice(arguments.tolerance, arguments.min_cosine)
    if arguments.backend == CPU:
        say_cpu()
    with ExitStack() as stack:
        device = None
        if VULKAN in (arguments.backend, arguments.ref_backend):
            features = tuple(arguments.disable_feature or ())
            device = stack.enter_context(open_device(arguments.device, disable_features=features))
        found = compare_tensors(
            graph,
            reference,
            inputs,
            device if arguments.backend == VULKAN else None,
            device if arguments.ref_backend == VULKAN else None,
            tolerance,
        )
        name = device.info.name if device and arguments.backend == VULKAN else CPU
    found.inputs = {n: "given" if n in given else "made up" for n in inputs}
    for pattern, folder in arguments.dump:
        names = matching([pattern], found.model.values, "--dump")
        found.dumped += dump(folder, names, found.model, found.reference)
    for made in (n for n, how in found.inputs.items() if how == "made up"):
        print(f"hornito: input {made} is made up (--input {made}=FILE.npy)", file=sys.stderr)
    for fixed in unknown:
        print(f"hornito: input {fixed} is folded into the graph at these shapes", file=sys.stderr)
    if arguments.json:
        header: dict[str, Any] = {"model": arguments.model, "reference": arguments.ref}
        print_json({**header, "device": name, **found.to_dict()})
    else:
        print(f"{arguments.model} on {name} against {arguments.ref}")
        if not arguments.summary:
            print_values([found.values])
        print_end(found.first, tolerance, found.dumped)
    return 0 if found.first is None else DIFFERS


def _graph(arguments: argparse.Namespace, path: Path, given: dict[str, Any]) -> TensorGraph:
    """The graph of a package's bucket, or of an ONNX model bound to --dim and the inputs."""
    from hornito.importers.onnx_generic import Binding, bind_to, import_generic
    from hornito.package import is_package, open_package
    from hornito.tensor.buckets import pick
    from hornito.tensor.package import load_buckets

    dims = dict(arguments.dim)
    parsed = None if is_package(path) else parsed_source(path)
    if parsed is None:
        if arguments.verify:
            with open_package(path) as package:
                package.check()
        buckets = load_buckets(path)
        shapes = {name: array.shape for name, array in given.items()}
        return pick(buckets, shapes, name=arguments.bucket, dims=dims, some=True).graph
    if set(parsed.inputs) <= set(given):
        return bind_to(parsed, {n: given[n] for n in parsed.inputs}, dims).graph
    shapes = {name: tuple(array.shape) for name, array in given.items() if name in parsed.inputs}
    return import_generic(parsed, Binding(dims, shapes)).graph
