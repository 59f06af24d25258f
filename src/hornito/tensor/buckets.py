"""Several tensor graphs of one package: one for each set of shapes, or for each file.

Shapes of a tensor graph are static; a model that is to run at several of them has a bucket for
each. Constants that buckets share are one array, in the package and on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hornito.errors import UsageError
from hornito.tensor.graph import TensorGraph

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A graph and what tells it from its neighbours.

    Attributes:
        name: unique in its package.
        dims: numbers of the file's named dims.
        graph: what to run.
        pooled: by name of a constant, the array of the package that holds it.
    """

    name: str
    dims: Mapping[str, int]
    graph: TensorGraph
    pooled: Mapping[str, str]

    def shapes(self) -> dict[str, Shape]:
        """Shapes of the inputs."""
        return {name: self.graph.values[name].shape for name in self.graph.inputs}


def pick(
    buckets: Sequence[Bucket],
    shapes: Mapping[str, Shape],
    *,
    name: str | None = None,
    dims: Mapping[str, int] | None = None,
    some: bool = False,
) -> Bucket:
    """The bucket whose inputs have these names and shapes.

    Args:
        name: take this one only.
        dims: numbers that named dims must have.
        some: `shapes` may lack inputs, and name others.

    Raises:
        UsageError: none fits, or several do; names those that there are.
    """
    found = [b for b in buckets if name is None or b.name == name]
    if not found:
        raise UsageError(f"no bucket named {name!r}; there are: {_listed(buckets)}")
    for dim, number in (dims or {}).items():
        known = sorted({b.dims[dim] for b in found if dim in b.dims})
        if not known:
            names = sorted({n for b in buckets for n in b.dims})
            raise UsageError(f"--dim {dim}: no such dim; there are: {', '.join(names) or 'none'}")
        if number not in known:
            raise UsageError(
                f"--dim {dim}={number}: the package was compiled for {dim} = "
                f"{', '.join(map(str, known))}; compile it again with --bucket {dim}={number}"
            )
        found = [b for b in found if b.dims.get(dim) == number]
    fitting = [b for b in found if _fits(b.shapes(), shapes, some)]
    if len(fitting) == 1:
        return fitting[0]
    given = _shapes(shapes) or "none"
    if fitting:
        raise UsageError(
            f"the inputs {given} fit several buckets; choose one with --bucket: "
            + ", ".join(b.name for b in fitting)
        )
    raise UsageError(
        f"no bucket takes the inputs {given}; there are: {_listed(found)}. Compile the model again "
        "with --bucket or --dim for these shapes"
    )


def _fits(own: Mapping[str, Shape], given: Mapping[str, Shape], some: bool) -> bool:
    if not some:
        return own == dict(given)
    return all(given[name] == shape for name, shape in own.items() if name in given)


def _shapes(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{n} [{', '.join(map(str, s))}]" for n, s in shapes.items())


def _listed(buckets: Sequence[Bucket]) -> str:
    return "; ".join(f"{b.name} ({_shapes(b.shapes())})" for b in buckets)
