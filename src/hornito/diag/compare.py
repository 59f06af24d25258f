"""A decoder on the device against a reference, value by value, for every bucket and step.

The same tokens go through each chunk bucket, through single steps and through the reference; each
value of the graph is compared at each position. A reference is the numpy evaluator on the model
itself (`cpu`), or another file of it. The passes are switched off in what the evaluator runs, where
there is a source to compile, so that a wrong pass shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.diag.compare_bench import CPU, VULKAN, Workbench
from hornito.diag.compare_decoder import (
    DeviceSide,
    Run,
    Side,
    joined,
    makers,
    value_names,
    with_joined,
)
from hornito.diag.compare_values import Difference, Tolerance, Trace, dump, measure, plain
from hornito.diag.compare_weights import weight_differences
from hornito.errors import UsageError
from hornito.graph.graph import Graph
from hornito.plan.pins import matching

if TYPE_CHECKING:
    from hornito.vk.device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """The most likely next token at one position, on either side.

    `margin` lies between the reference's two best logits, `relative` is the error of the row.
    """

    position: int
    token: int
    got: int
    want: int
    margin: float
    relative: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; what is not finite is null."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One schedule against the reference.

    Attributes:
        run: its label.
        values: every matched value, in graph order.
        steps: the next token at every position.
        from_steps: the value that is farthest from the same positions in single steps.
    """

    run: str
    values: tuple[Difference, ...]
    steps: tuple[Step, ...]
    from_steps: Difference | None = None


@dataclass(slots=True)
class Comparison:
    """What `compare` found; `stored` are the weights themselves, where REF has its own."""

    model: str
    weights: str
    reference: str
    reference_weights: str
    device: str
    tolerance: Tolerance
    ids: tuple[int, ...]
    prompt: int
    runs: list[RunReport] = field(default_factory=list)
    stored: list[Difference] = field(default_factory=list)
    only_model: list[str] = field(default_factory=list)
    only_reference: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    dumped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every weight, and every value of every run, lies within its tolerance."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first divergence: of the weights, else in graph order, then by position."""
        wrong = next((weight for weight in self.stored if not weight.equal), None)
        return wrong or first_divergence([run.values for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        first = self.first
        return {
            "model": self.model,
            "weights": self.weights,
            "reference": self.reference,
            "reference_weights": self.reference_weights,
            "device": self.device,
            "equal": self.equal,
            "relative_tolerance": self.tolerance.relative,
            "cosine_tolerance": self.tolerance.cosine,
            "ids": list(self.ids),
            "prompt_tokens": self.prompt,
            "first_divergence": None if first is None else first.to_dict(),
            "runs": [
                {
                    "run": run.run,
                    "values": [value.to_dict() for value in run.values],
                    "steps": [step.to_dict() for step in run.steps],
                    "farthest_from_steps": run.from_steps and run.from_steps.to_dict(),
                }
                for run in self.runs
            ],
            "stored_weights": [weight.to_dict() for weight in self.stored],
            "only_in_model": self.only_model,
            "only_in_reference": self.only_reference,
            "pinned": self.pinned,
            "dumped": self.dumped,
            "notes": self.notes,
        }


def first_divergence(runs: Sequence[Sequence[Difference]]) -> Difference | None:
    """Of values in graph order, one list a run: the first in order, then by position."""
    found = [
        (order, value.first, value)
        for values in runs
        for order, value in enumerate(values)
        if value.first is not None
    ]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def differences(
    side: Side, trace: Trace, reference: Trace, tolerance: Tolerance
) -> tuple[Difference, ...]:
    """Every value that both have, in the order of the side's graph.

    Raises:
        UsageError: a value has another shape in the reference.
    """
    nodes, found = makers(side.graph), []
    for name in value_names(side.graph):
        if name not in reference.values:
            continue
        got, want = trace.values[name], reference.values[name]
        if got.shape != want.shape:
            raise UsageError(
                f"{name} is {got.shape} in the model and {want.shape} in the reference: they are "
                "not the same model"
            )
        node = nodes[name]
        kernels = trace.kernels.get(node.name, ())
        found.append(measure(trace.run, name, got, want, tolerance, op=node.op, kernels=kernels))
    return tuple(found)


def trial(bench: Workbench, side: Side, run: Run) -> tuple[Trace, Trace]:
    """One schedule of a side, and the reference with its values under the side's names."""
    count = len(bench.prompt)
    trace = side.trace(run, bench.ids, count)
    reference = bench.reference.trace(run, bench.ids, count)
    return trace, with_joined(side.graph, bench.reference.graph, reference)


def compare(bench: Workbench) -> Comparison:
    """Run the model in every schedule against the reference.

    Raises:
        UsageError: a pattern matches nothing, or the two are not the same model.
    """
    settings = bench.settings
    with bench.side() as side:
        names = value_names(side.graph)
        together = joined(side.graph, bench.reference.graph)
        parts = {part for several in together.values() for part in several}
        others = [*value_names(bench.reference.graph), *together]
        shared = [name for name in names if name in set(others)]
        if not shared:
            raise UsageError("model and reference have no value in common")
        wanted = [
            (matching([pattern], [*shared, *set(names) ^ set(others)], "--dump"), folder)
            for pattern, folder in settings.dumps
        ]
        result = Comparison(
            str(bench.model),
            bench.weights,
            bench.reference_name,
            bench.reference_weights,
            _device_line(bench.device) if settings.backend == VULKAN else CPU,
            bench.tolerance,
            bench.ids,
            len(bench.prompt),
            only_model=[name for name in names if name not in set(others)],
            only_reference=[name for name in others if name not in parts.union(names)],
            pinned=bench.pinned,
            notes=list(bench.notes),
        )
        if bench.stored is not None:
            result.stored += weight_differences(*bench.stored)
        if isinstance(side, DeviceSide):
            for kernel, why in side.engine.trust.dropped.items():
                result.notes.append(f"kernel {kernel} is not used on this device: {why}")
        steps: Trace | None = None
        runs = bench.runs(side)
        bench.progress.start("comparing", len(runs))
        for run in runs:
            trace, reference = trial(bench, side, run)
            report = RunReport(
                run.label,
                differences(side, trace, reference, bench.tolerance),
                _steps(bench, side.graph, trace, reference),
                None if steps is None else _farthest(bench, side, trace, steps),
            )
            result.runs.append(report)
            for found, folder in wanted:
                result.dumped += dump(folder, found, trace, reference)
            steps = steps or trace
            bench.progress.advance(1)
        bench.progress.finish()
        result.dumped = list(dict.fromkeys(result.dumped))
        return result


def _farthest(bench: Workbench, side: Side, trace: Trace, steps: Trace) -> Difference:
    found = differences(side, trace, steps, bench.tolerance)
    return max(found, key=lambda value: value.relative)


def _steps(bench: Workbench, graph: Graph, trace: Trace, reference: Trace) -> tuple[Step, ...]:
    """The next token at each position, from the logits."""
    name = graph.outputs[0]
    if name not in reference.values:
        return ()
    found = []
    rows = zip(bench.ids, trace.values[name], reference.values[name], strict=True)
    for position, (token, got, want) in enumerate(rows):
        second, first = np.partition(want, -2)[-2:]
        with np.errstate(invalid="ignore"):
            error = np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30)
        best = int(np.argmax(got)), int(np.argmax(want))
        found.append(Step(position, token, *best, float(first - second), float(error)))
    return tuple(found)


def _device_line(device: Device | None) -> str:
    assert device is not None
    info = device.info
    return f"{info.name} ({info.kind}), {info.driver_name} {info.driver_info}".strip()
