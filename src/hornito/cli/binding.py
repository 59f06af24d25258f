"""Options that fix the shapes of models of tensors: --dim, --shape, --value, --bucket, --graph."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.importers.onnx_generic import Binding, Parsed
    from hornito.tensor.package import GraphSpec


@dataclass(slots=True)
class Numbers:
    """Numbers of dims, whole shapes, and files of values, as given."""

    dims: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def over(self, other: Numbers) -> Numbers:
        """Both; these win."""
        return Numbers(
            {**other.dims, **self.dims},
            {**other.shapes, **self.shapes},
            {**other.values, **self.values},
        )

    def binding(self) -> Binding:
        """For the importer, with the values read."""
        from hornito.importers.onnx_generic import Binding

        values = {name: load_array(path) for name, path in self.values.items()}
        return Binding(self.dims, self.shapes, values)


@dataclass(frozen=True, slots=True)
class GraphOption:
    """A `--graph`: a file, its shapes, and a name for it (`""`: made of them)."""

    file: str
    numbers: Numbers
    name: str


def add_dim(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds --dim."""
    parser.add_argument(
        "--dim", action="append", default=[], type=dim_value, metavar="NAME=N", help=help
    )


def add_binding(parser: argparse.ArgumentParser) -> None:
    """Adds --dim, --shape and --value."""
    add_dim(parser, "number of a named dim of an ONNX model that is no decoder; may be repeated")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        type=shape_value,
        metavar="INPUT=AxBxC",
        help="whole shape of one of its inputs",
    )
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        type=pair_value,
        metavar="INPUT=FILE.npy",
        help="fix an input that shapes depend on",
    )


def add_buckets(parser: argparse.ArgumentParser) -> None:
    """Adds --bucket and --graph."""
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        type=_bucket,
        metavar="NAME=N[,NAME=N]",
        help="one of several sets of shapes (INPUT=AxB is a whole shape), with those of --dim and "
        "--shape in common; `run` takes the one that fits its inputs",
    )
    parser.add_argument(
        "--graph",
        action="append",
        default=[],
        type=_graph,
        metavar="'FILE;dim:NAME=N;...'",
        help="a graph of the package: a file with its own dim:NAME=N, shape:INPUT=AxB, "
        "value:INPUT=FILE.npy, and name:TEXT; with --graph, SRC may be left out",
    )


def pair_value(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name, value


def dim_value(text: str) -> tuple[str, int]:
    """NAME=N."""
    name, value = pair_value(text)
    if not value.isascii() or not value.isdigit():
        raise argparse.ArgumentTypeError(f"'{value}' is no number")
    return name, int(value)


def shape_value(text: str) -> tuple[str, tuple[int, ...]]:
    """INPUT=AxBxC."""
    name, value = pair_value(text)
    dims = value.split("x")
    if not all(d.isascii() and d.isdigit() for d in dims):
        raise argparse.ArgumentTypeError(f"'{value}' is not of the form 1x128")
    return name, tuple(int(d) for d in dims)


def _bucket(text: str) -> Numbers:
    numbers = Numbers()
    for part in text.split(","):
        if "x" in part.partition("=")[2]:
            name, shape = shape_value(part)
            _once(name, numbers.dims, numbers.shapes)
            numbers.shapes[name] = shape
        else:
            dim, number = dim_value(part)
            _once(dim, numbers.dims, numbers.shapes)
            numbers.dims[dim] = number
    return numbers


def _graph(text: str) -> GraphOption:
    file, *parts = (part.strip() for part in text.split(";"))
    if not file:
        raise argparse.ArgumentTypeError(f"'{text}' names no file")
    numbers, name = Numbers(), ""
    for part in filter(None, parts):
        kind, sign, rest = part.partition(":")
        if kind == "dim" and sign:
            dim, number = dim_value(rest)
            _once(dim, numbers.dims)
            numbers.dims[dim] = number
        elif kind == "shape" and sign:
            label, shape = shape_value(rest)
            _once(label, numbers.shapes)
            numbers.shapes[label] = shape
        elif kind == "value" and sign:
            label, path = pair_value(rest)
            _once(label, numbers.values)
            numbers.values[label] = path
        elif kind == "name" and rest:
            name = rest
        else:
            raise argparse.ArgumentTypeError(
                f"'{part}' is none of dim:NAME=N, shape:INPUT=AxB, value:INPUT=FILE.npy, name:TEXT"
            )
    return GraphOption(file, numbers, name)


def _once(name: str, *known: dict[str, Any]) -> None:
    if any(name in names for names in known):
        raise argparse.ArgumentTypeError(f"'{name}' is given twice")


def common(arguments: argparse.Namespace) -> Numbers:
    """What --dim, --shape and --value say."""
    return Numbers(dict(arguments.dim), dict(arguments.shape), dict(arguments.value))


def parsed_source(source: str | Path) -> Parsed | None:
    """The ONNX model at a path, unless it is a decoder or no ONNX at all."""
    from hornito.importers.onnx_generic import parse
    from hornito.importers.onnx_generic.detect import generic_file

    found = generic_file(Path(source))
    return None if found is None else parse(*found)


def graph_specs(parsed: Parsed | None, arguments: argparse.Namespace) -> list[GraphSpec]:
    """The graphs to compile: SRC at each --bucket (or once), then every --graph.

    Raises:
        UsageError: a --graph names no model of tensors.
    """
    from hornito.tensor.package import GraphSpec

    found = []
    if parsed is not None:
        shared = common(arguments)
        for bucket in arguments.bucket or [Numbers()]:
            found.append(GraphSpec(parsed, bucket.over(shared).binding()))
    files: dict[str, Parsed] = {}
    for option in arguments.graph:
        if option.file not in files:
            other = parsed_source(option.file)
            if other is None:
                raise UsageError(
                    f"--graph {option.file}: it is no ONNX model of tensors (a decoder is compiled "
                    "alone, and needs no shapes), or no such file"
                )
            files[option.file] = other
        found.append(GraphSpec(files[option.file], option.numbers.binding(), option.name))
    return found


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
