"""The model of a package that is to be run: its graph, checked against facts and stored tensors."""

from __future__ import annotations

from hornito.errors import FormatError, PackageError
from hornito.graph.checks import check_model, check_tensors
from hornito.graph.graph import Graph
from hornito.package.reader import Package


def model_graph(package: Package) -> Graph:
    """The graph of a package, once all that running it counts on is checked.

    Raises:
        PackageError: a part of the manifest is malformed, contradicts another, or does not fit the
            stored tensors; names the file and the part.
        UnsupportedError: it has an op or a storage type that is unknown here, or is a graph of
            tensor ops.
    """
    try:
        graph = Graph.from_json(package.manifest.graph)
        check_model(graph, package.manifest.facts)
        check_tensors(graph, package.tensors)
    except FormatError as error:
        raise PackageError(f"{package.path}: {error}") from error
    return graph
