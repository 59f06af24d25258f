"""Units: the dispatches of one node in one call, which can run alone against their plain twin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from hornito.ops.base import Dispatch, Operand
from hornito.ops.variants import Site
from hornito.plan.plan import BucketPlan, Plan, Program


@dataclass(frozen=True, slots=True)
class Unit:
    """A node of one bucket's body or tail whose kernel is no plain twin.

    Attributes:
        kind, rows: the bucket.
        part: `body` or the tail's name.
        selected: rows whose output is wanted.
        node: its name.
        site: the choice that was made there.
        dispatches: the node's launches in order.
    """

    kind: str
    rows: int
    part: str
    selected: int
    node: str
    site: Site
    dispatches: tuple[Dispatch, ...]

    @property
    def kernel(self) -> str:
        """The kernel to be proved."""
        return self.site.taken.kernel

    @property
    def shape(self) -> str:
        """What the unit computes, the same for the nodes of all layers alike."""
        return f"{self.kind} {self.rows} {self.part} {self.selected}: {_signature(self.dispatches)}"

    @property
    def title(self) -> str:
        """For people: `batch 1 body: linear 1x960x576 q4_1 (layers.0.qkv)`."""
        return f"{self.kind} {self.rows} {self.part}: {self.site.key} ({self.node})"


def units(plan: Plan) -> list[Unit]:
    """One unit of each shape in the plan, single steps first, then chunks from the largest down."""
    found: dict[tuple[str, str], Unit] = {}
    order = sorted(plan.buckets, key=lambda key: (key[0], key[1] if key[0] == "batch" else -key[1]))
    for key in order:
        for unit in _bucket_units(plan.buckets[key]):
            found.setdefault((unit.kernel, unit.shape), unit)
    return list(found.values())


def twin_dispatches(plain: Plan, unit: Unit) -> tuple[Dispatch, ...]:
    """The same node's launches in a plan of plain twins."""
    bucket = plain.buckets[unit.kind, unit.rows]
    program = bucket.body if unit.part == "body" else bucket.tails[unit.part]
    return tuple(d for d in program.dispatches if d.node == unit.node)


def _bucket_units(bucket: BucketPlan) -> Iterator[Unit]:
    parts: dict[str, Program] = {"body": bucket.body, **bucket.tails}
    sites: dict[tuple[str, str], Site] = {}
    for site in bucket.sites:
        if not site.taken.plain:
            sites.setdefault((site.node, site.taken.kernel), site)
    for part, program in parts.items():
        nodes: dict[str, list[Dispatch]] = {}
        for dispatch in program.dispatches:
            nodes.setdefault(dispatch.node, []).append(dispatch)
        for node, dispatches in nodes.items():
            for kernel in dict.fromkeys(d.kernel for d in dispatches):
                found = sites.get((node, kernel))
                if found is not None:
                    selected = bucket.selected.get(part, 1)
                    yield Unit(
                        *(bucket.kind, bucket.rows, part, selected, node, found), tuple(dispatches)
                    )


def _signature(dispatches: tuple[Dispatch, ...]) -> str:
    """Kernels, specialisation, grids, numbers and sizes; not which layer, slot count or address."""
    rows = []
    for d in dispatches:
        numbers = [
            arg.size if isinstance(arg, Operand) else arg
            for (name, _), arg in zip(d.push.fields, d.args, strict=True)
            if name not in ("layer", "table", "table_stride")
        ]
        rows.append([d.kernel, sorted(d.spec.items()), list(d.groups), numbers])
    return json.dumps(rows, separators=(",", ":"))
