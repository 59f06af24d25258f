"""`hornito doctor --full`: a device's conformance, as a report that can go into an issue.

Models with random weights are generated, every kernel of their plans is tested at all shapes
against its plain twin and timed, and the tokens that they give are compared with the numpy
evaluator's. A model of the user's own is tested at its own shapes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hornito
from hornito.diag.compare_numpy import NumpySide, StoredWeights
from hornito.diag.profile import copy_bandwidth, moved_bytes
from hornito.diag.random_model import write_random_model
from hornito.errors import DeviceLostError, VulkanError
from hornito.ops.base import Dispatch
from hornito.package import Package, open_package
from hornito.package.model import model_graph
from hornito.plan.plan import PlanOptions
from hornito.plan.records import GOOD, DeviceRecords, Verdict
from hornito.plan.stand import Stand
from hornito.plan.units import Unit, units
from hornito.progress import Progress
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.runtime.settle import KernelPolicy
from hornito.vk import api
from hornito.vk.device import Device

if TYPE_CHECKING:
    from hornito.graph.graph import Graph

FORMAT = 1

TINY = ("fp32", "fp16", "int8", "int4")
"""Storage types that the tiny model is made in."""

LAYER = ("fp16", "int4")
"""Those of the model with one layer of 0.5 billion parameters' shapes; not on software devices,
where it takes minutes."""

PROMPT, TOKENS = 40, 24
MARGINS = {"high": 1e-3, "normal": 0.05}
"""Two best logits of the reference that are closer than this may change places."""

TIMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A kernel at one shape: its verdict, and its speed where the device has timestamps.

    Attributes:
        microseconds: median GPU time of the node's launches.
        gbps: bytes that the launches declare, over that time.
        tflops: of a matrix product; None for other kernels.
    """

    kernel: str
    shape: str
    verdict: str
    detail: str
    runs: int
    error: float
    microseconds: float | None = None
    gbps: float | None = None
    tflops: float | None = None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model: its kernels, and whether its tokens are the reference's.

    Attributes:
        tokens_equal: None where there is no reference (a model of the user's own).
        difference: the first step that differs, and by how much the reference preferred another.
        repeatable: whether a second run gave the same tokens.
        dropped: kernels that were not used, and why.
    """

    name: str
    weights: str
    precision: str
    tokens_equal: bool | None
    difference: str
    repeatable: bool
    dropped: Mapping[str, str]
    kernels: tuple[KernelReport, ...]

    @property
    def good(self) -> bool:
        """Whether tokens are right and the same, and no kernel failed."""
        right = self.tokens_equal is not False and self.repeatable
        return right and all(row.verdict == GOOD for row in self.kernels)


@dataclass(frozen=True, slots=True)
class Conformance:
    """The report of a device. `problem` says why it ends early; '' when it does not."""

    device: Mapping[str, Any]
    copy_gbps: float | None
    models: tuple[ModelReport, ...]
    problem: str

    @property
    def good(self) -> bool:
        """Whether everything passed, with no kernel dropped."""
        return not self.problem and all(model.good for model in self.models)

    @property
    def usable(self) -> bool:
        """Whether tokens are right and repeatable with the kernels that are left."""
        right = (m.tokens_equal is not False and m.repeatable for m in self.models)
        return not self.problem and all(right)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "report": "hornito conformance",
            "format": FORMAT,
            "hornito": hornito.__version__,
            "verdict": "pass" if self.good else "degraded" if self.usable else "fail",
            **asdict(self),
        }

    def to_text(self) -> str:
        """For people: a line a model, and every kernel that failed."""
        speed = f", copies run at {self.copy_gbps:.1f} GB/s" if self.copy_gbps else ""
        lines = [f"{self.device['name']} ({self.device['driver']}){speed}"]
        for model in self.models:
            tokens = {True: "equal the reference's", False: "DIFFER", None: "not compared"}
            proved = sum(row.verdict == GOOD for row in model.kernels)
            lines.append(
                f"  {model.name} {model.weights} ({model.precision}): {proved} of "
                f"{len(model.kernels)} kernel shapes good, tokens {tokens[model.tokens_equal]}"
                + (f" ({model.difference})" if model.difference else "")
                + ("" if model.repeatable else ", NOT REPEATABLE")
            )
            lines += [
                f"    {row.verdict}: {row.kernel}, {row.shape}: {row.detail}"
                for row in model.kernels
                if row.verdict != GOOD
            ]
        if self.problem:
            lines.append(f"  ended early: {self.problem}")
        verdict = "pass" if self.good else "degraded" if self.usable else "FAIL"
        return "\n".join([*lines, f"conformance: {verdict}"])


def examine_device(
    device: Device, progress: Progress, package: Package | None = None, context: int = 1024
) -> Conformance:
    """Test everything on a device. Verdicts are kept, so that later loads know them.

    They replace those of earlier tests, at shapes that are not tested here too: later loads test
    those again. Kernels that pass here have no strikes any more; one that ended the last such test
    is left out of this one.

    Args:
        package: a model of the user's own, tested at its own shapes too.
        context: positions of that model.
    """
    models: list[ModelReport] = []
    problem, speed = "", None
    records = DeviceRecords.load(device.info)
    records.forget_failures()
    records.save()
    try:
        if device.caps.timestamp_bits:
            speed = copy_bandwidth(device)
        for name, weights in _generated(device):
            with _random_package(name, weights) as made:
                models.append(_examine(device, made, name, weights, progress, context=256))
        if package is not None:
            stored = str(package.manifest.quant.get("weights"))
            models.append(
                _examine(device, package, package.path.name, stored, progress, context, False)
            )
    except (DeviceLostError, VulkanError) as error:
        problem = str(error)
    else:
        rows = [row for model in models for row in model.kernels]
        failed = {row.kernel for row in rows if row.verdict != GOOD}
        records = DeviceRecords.load(device.info)
        records.forgive_kernels({row.kernel for row in rows} - failed)
        records.allow_another_test()
        records.save()
    return Conformance(_device(device), speed, tuple(models), problem)


def _generated(device: Device) -> list[tuple[str, str]]:
    found = [("tiny", weights) for weights in TINY]
    if device.info.kind != "software":
        found += [("layer", weights) for weights in LAYER]
    return found


@contextmanager
def _random_package(shape: str, weights: str) -> Iterator[Package]:
    with tempfile.TemporaryDirectory(prefix="hornito-doctor-") as folder:
        path = Path(folder) / f"{shape}-{weights}.vxm"
        write_random_model(shape, path, weights=weights, context=512, deviation=0.1)
        with open_package(path) as package:
            yield package


def _examine(
    device: Device,
    package: Package,
    name: str,
    weights: str,
    progress: Progress,
    context: int,
    compare: bool = True,
) -> ModelReport:
    precision = "high" if weights == "fp32" else "normal"
    graph = model_graph(package)
    options = PlanOptions(
        context=context, kv_half=precision == "normal", half_operands=precision == "normal"
    )
    policy = KernelPolicy(tune="off", budget_s=None, thorough=True)
    engine = Engine(device, package, graph, options, (), progress, policy=policy)
    try:
        rows = _kernels(engine, progress)
        first, second = _tokens(engine), _tokens(engine)
    finally:
        engine.close()
    equal, difference = None, ""
    if compare:
        equal, difference = _compare(graph, package, first, context, MARGINS[precision])
    return ModelReport(
        *(name, weights, precision, equal, difference, first == second),
        dict(engine.trust.dropped),
        rows,
    )


def _prompt(vocabulary: int) -> list[int]:
    return [(3 + 17 * i) % vocabulary for i in range(PROMPT)]


def _tokens(engine: Engine) -> list[int]:
    with Session(engine) as session:
        session.prefill(_prompt(engine.vocabulary))
        tokens = [] if session.pending is None else [session.pending]
        for (new,) in decode([session], [TOKENS - 1], ignore_eos=True, steps=4):
            tokens += new
    return tokens


def _compare(
    graph: Graph, package: Package, tokens: Sequence[int], context: int, margin: float
) -> tuple[bool, str]:
    """Whether the evaluator, led along the device's tokens, chooses the same ones."""
    side = NumpySide(graph, StoredWeights(graph, package), context, keep=False)
    vocabulary = max(w.shape[0] for w in graph.weights.values())
    prompt = _prompt(vocabulary)
    logits = side.extend([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    for step, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        best = int(np.argmax(row))
        gap = float(row[best] - row[token])
        if token != best and gap >= margin:
            return False, f"step {step}: token {token}, the reference prefers {best} by {gap:.3g}"
    return True, ""


def _kernels(engine: Engine, progress: Progress) -> tuple[KernelReport, ...]:
    """Every verdict of the plan's kernels, those of dropped ones too, with speeds."""
    verdicts = engine.trust.verdicts
    rows = [_row(verdict, None, None) for verdict in verdicts.values() if verdict.verdict != GOOD]
    found = [unit for unit in units(engine.plan) if unit.title in verdicts]
    stand = Stand(
        engine.device,
        engine.plan,
        engine.pipelines,
        engine.weight_address,
        engine.options.slots,
    )
    timed = bool(engine.device.caps.timestamp_bits)
    progress.start("timing kernels", len(found))
    try:
        for unit in found:
            nanoseconds = None
            if timed:
                layout = stand.layout(unit, unit.dispatches)
                times = stand.nanoseconds(unit, layout, unit.dispatches, TIMED_RUNS)
                nanoseconds = statistics.median(times)
            rows.append(_row(verdicts[unit.title], unit, nanoseconds))
            progress.advance(1)
    finally:
        progress.finish()
        stand.free()
    return tuple(rows)


def _row(verdict: Verdict, unit: Unit | None, nanoseconds: float | None) -> KernelReport:
    plain = KernelReport(
        *(verdict.kernel, verdict.shape, verdict.verdict, verdict.detail),
        *(verdict.runs, verdict.error),
    )
    if unit is None or nanoseconds is None:
        return plain
    nanoseconds = max(nanoseconds, 1.0)
    work = sum(_operations(d) for d in unit.dispatches)
    return replace(
        plain,
        microseconds=nanoseconds / 1e3,
        gbps=sum(moved_bytes(d) for d in unit.dispatches) / nanoseconds,
        tflops=work / nanoseconds / 1e3 if work else None,
    )


def _operations(dispatch: Dispatch) -> int:
    """Multiplications and additions of a matrix product; 0 of anything else."""
    if not dispatch.kernel.startswith("linear/"):
        return 0
    numbers = dict(zip((name for name, _ in dispatch.push.fields), dispatch.args, strict=True))
    n, k = numbers.get("n"), numbers.get("k")
    if not isinstance(n, int) or not isinstance(k, int):
        return 0
    outputs = sum(operand.size for operand in dispatch.writes) // 4
    return 2 * outputs * k * (2 if "gated_" in dispatch.kernel else 1)


def _device(device: Device) -> dict[str, Any]:
    info, caps = device.info, device.caps
    return {
        "name": info.name,
        "kind": info.kind,
        "vendor_id": info.vendor_id,
        "device_id": info.device_id,
        "uuid": info.uuid,
        "driver": f"{info.driver_name} {info.driver_info}".strip(),
        "driver_version": info.driver_version,
        "api_version": api.version_text(info.api_version),
        "features": caps.features(),
        "subgroup_size": caps.subgroup_size,
        "subgroup_range": [caps.subgroup_min, caps.subgroup_max],
        "shared_memory_bytes": caps.shared_memory_bytes,
        "quirks": sorted(caps.quirks),
    }
