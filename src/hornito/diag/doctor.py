"""`hornito doctor`: everything between Hornito and a GPU, checked from the bottom up."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hornito.diag.environment import (
    Loader,
    Manifest,
    Node,
    Surroundings,
    cache_sizes,
    driver_manifests,
    find_loader,
    render_nodes,
    surroundings,
    versions,
)
from hornito.errors import HornitoError
from hornito.vk.caps import Caps
from hornito.vk.loader import VariableAtFault, variable_at_fault

RUNS = 100
_KERNELS = "python tools/build_kernels.py"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device and how it fared.

    Attributes:
        index, name, kind, usable, reason, driver, api_version, uuid, pci: what it is.
        limits: numbers that decide what fits.
        features: optional features that are there.
        missing: those that are not.
        quirks: faults that are worked around, with their link.
        dispatch: result of the real dispatches; '' when none was made.
        problem: what failed; '' when nothing did.
        dropped: kernels that failed their self-test here and are not used, and why.
    """

    index: int
    name: str
    kind: str
    usable: bool
    reason: str
    driver: str
    api_version: str
    uuid: str
    pci: str | None
    limits: dict[str, int | str] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    quirks: list[str] = field(default_factory=list)
    dispatch: str = ""
    problem: str = ""
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found; `judge` turns it into a verdict.

    Attributes:
        device_error: why there is no list of devices; '' when there is one.
        selected: the value of HORNITO_DEVICE, or ''.
        fault: the loader's variable that hides the drivers, when there is no usable device.
    """

    versions: dict[str, str]
    loader: Loader
    manifests: Sequence[Manifest]
    nodes: Sequence[Node]
    machine: Surroundings
    devices: Sequence[DeviceReport]
    device_error: str
    cache: str
    cache_bytes: dict[str, int]
    platform: str = "linux"
    selected: str = ""
    fault: VariableAtFault | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the report.

    Attributes:
        exit_code: 0 all is well, 1 a device computes wrong, 4 no device.
        text: one sentence.
        next: the one command to run now.
        warnings: what is not in the way but should be known.
    """

    exit_code: int
    text: str
    next: str
    warnings: list[str]


def examine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Facts:
    """Look at everything; takes a second or two."""
    from hornito.vk.pipeline import cache_directory

    environ = os.environ if environ is None else environ
    loader = find_loader()
    devices, error = ([], loader.problem) if loader.problem else examine_devices()
    linux = sys.platform.startswith("linux")
    return Facts(
        versions=versions(),
        loader=loader,
        manifests=driver_manifests(root, environ) if linux else [],
        nodes=render_nodes(root) if linux else [],
        machine=surroundings(root, environ),
        devices=devices,
        device_error=error,
        cache=str(cache_directory()),
        cache_bytes=cache_sizes(cache_directory()),
        platform="linux" if linux else sys.platform,
        selected=environ.get("HORNITO_DEVICE", ""),
        fault=None
        if any(device.usable for device in devices)
        else variable_at_fault(environ, None if root == Path("/") else root),
    )


def examine_devices() -> tuple[list[DeviceReport], str]:
    """Every device with the result of real dispatches, and why there is no list."""
    from hornito.vk import api
    from hornito.vk.device import list_devices

    try:
        infos = list_devices()
    except HornitoError as error:
        return [], str(error)
    reports = []
    for info in infos:
        report = DeviceReport(
            index=info.index,
            name=info.name,
            kind=info.kind,
            usable=info.usable,
            reason=info.reason,
            driver=f"{info.driver_name} {info.driver_info}".strip(),
            api_version=api.version_text(info.api_version),
            uuid=info.uuid,
            pci=info.pci,
        )
        reports.append(_opened(report) if info.usable else report)
    return reports, ""


def _opened(report: DeviceReport) -> DeviceReport:
    from hornito.diag.dispatch import check_dispatch
    from hornito.plan.records import DeviceRecords, failed_kernels
    from hornito.vk.device import open_device

    try:
        with open_device(report.index) as device:
            limits, features, missing = describe_caps(device.caps)
            available, total = device.heap_budget()
            limits = {"memory_bytes": total, "memory_free_bytes": available, **limits}
            quirks = [f"{quirk.reason} ({quirk.link})" for quirk in device.quirks]
            records = DeviceRecords.load(device.info)
            report = replace(
                report,
                limits=limits,
                features=features,
                missing=missing,
                quirks=quirks,
                dropped=failed_kernels(records),
            )
            checks = check_dispatch(device, records, RUNS)
    except HornitoError as error:
        return replace(report, problem=str(error))
    bad = [check for check in checks if not check.passed]
    lines = [
        f"{check.kernel}, {check.rows} row{'' if check.rows == 1 else 's'}: {check.runs} runs, "
        f"{check.different} with other bits, error {check.error:.1e}"
        for check in (bad or checks)
    ]
    problem = f"wrong results: {'; '.join(lines)}" if bad else ""
    return replace(report, dispatch="; ".join(lines), problem=problem)


def describe_caps(caps: Caps) -> tuple[dict[str, int | str], list[str], list[str]]:
    """(limits, optional features that are there, those that are not) of a `Caps`."""
    low, high = caps.subgroup_min, caps.subgroup_max
    limits: dict[str, int | str] = {
        "max_allocation_bytes": caps.max_allocation_bytes,
        "shared_memory_bytes": caps.shared_memory_bytes,
        "max_workgroup_invocations": caps.max_workgroup_invocations,
        "max_push_constants": caps.max_push_constants,
        "subgroup_size": caps.subgroup_size if low == high else f"{low} to {high}",
        "timestamp_period_ns": f"{caps.timestamp_period_ns:g}" if caps.timestamp_bits else "none",
    }
    missing = [name for name, there in caps.optional_features().items() if not there]
    return limits, caps.features(), missing


# -- the verdict ------------------------------------------------------------------------------


def judge(facts: Facts) -> Verdict:
    """What all of it means, and what to do about it."""
    warnings = _warnings(facts)
    if facts.loader.problem:
        return Verdict(4, "No Vulkan loader is installed.", _install(facts, "loader"), warnings)
    usable = [device for device in facts.devices if device.usable]
    if not usable:
        if facts.fault is not None:
            text = f"No Vulkan driver was loaded: {facts.fault.text}."
            return Verdict(4, text, facts.fault.fix, warnings)
        if facts.devices:
            reasons = "; ".join(f"{d.name}: {d.reason}" for d in facts.devices)
            return Verdict(
                4, f"No device can run Hornito: {reasons}.", _install(facts, "driver"), warnings
            )
        text = f"No Vulkan driver offers a device: {facts.device_error}."
        return Verdict(4, text, _access(facts), warnings)
    broken = [device for device in usable if device.problem]
    good = [device for device in usable if not device.problem]
    if broken:
        names = ", ".join(device.name for device in broken)
        text = f"{names} can't be trusted: {broken[0].problem}."
        if good:
            command = f"export HORNITO_DEVICE={good[0].index}   # {good[0].name}"
        elif _KERNELS in broken[0].problem:  # a source tree that was never built
            text, command = f"Hornito is not complete: {broken[0].problem}.", _KERNELS
        else:
            command = _install(facts, "newer")
        return Verdict(1, text, command, warnings)
    if all(device.kind == "software" for device in good):
        text = f"Hornito works, but only on the software device {good[0].name}, which is slow."
        if not _gpu_there(facts):
            return Verdict(0, text + " No GPU was found.", _first_run(), warnings)
        return Verdict(0, text, _access(facts), warnings)
    best = good[0]
    return Verdict(0, f"Hornito works on {best.name} ({best.kind}).", _first_run(), warnings)


def _first_run() -> str:
    return 'hornito run MODEL "Hello"   # MODEL: a .gguf file, a model folder or a .vxm package'


def _gpu_there(facts: Facts) -> bool:
    machine = facts.machine
    return bool(machine.gpus or machine.nvidia_device or facts.nodes or machine.wsl)


def _access(facts: Facts) -> str:
    """The command that most likely makes a GPU appear."""
    machine = facts.machine
    closed = [node for node in facts.nodes if node.problem]
    if closed:
        return closed[0].fix
    nvidia = machine.nvidia_device or any(gpu.startswith("NVIDIA") for gpu in machine.gpus)
    working = [m.path.lower() for m in facts.manifests if not m.problem]
    if machine.container and machine.nvidia_device and not any("nvidia" in p for p in working):
        # The driver's graphics part, which has its Vulkan, is mounted only when asked for.
        return "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ..."
    if machine.container and not facts.nodes:
        if nvidia:
            return "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ..."
        return "docker run --device /dev/dri ..."
    return _install(facts, "driver")


def _install(facts: Facts, what: str) -> str:
    if facts.platform != "linux":
        return "install the Vulkan driver of your GPU's vendor, then run `hornito doctor` again"
    if what == "loader":
        return "sudo apt-get install libvulkan1 mesa-vulkan-drivers"
    if any(gpu.startswith("NVIDIA") for gpu in facts.machine.gpus) and not any(
        gpu.startswith(("AMD", "Intel")) for gpu in facts.machine.gpus
    ):
        return "sudo ubuntu-drivers install   # or your distribution's NVIDIA driver package"
    if what == "newer":
        return "sudo apt-get update && sudo apt-get install --only-upgrade mesa-vulkan-drivers"
    return "sudo apt-get install mesa-vulkan-drivers"


def _warnings(facts: Facts) -> list[str]:
    found = [f"driver manifest {m.path}: {m.problem}" for m in facts.manifests if m.problem]
    found += [f"{node.path}: {node.problem}" for node in facts.nodes if node.problem]
    machine = facts.machine
    if (
        machine.container
        and not facts.nodes
        and not machine.nvidia_device
        and facts.platform == ("linux")
    ):
        found.append(f"this is a container ({machine.container}) without /dev/dri: it sees no GPU")
    hardware = [d for d in facts.devices if d.usable and d.kind != "software"]
    if machine.gpus and not hardware:
        found.append(f"GPU without a Vulkan driver: {', '.join(machine.gpus)}")
    if any(d.kind == "software" for d in facts.devices) and not hardware:
        found.append("only a software device: fine for trying things out, tens of times slower")
    if facts.selected:
        found.append(f"HORNITO_DEVICE={facts.selected} chooses the device")
    return found


# -- the report -------------------------------------------------------------------------------


def to_dict(facts: Facts, verdict: Verdict) -> dict[str, Any]:
    """The whole report as plain JSON types."""
    return {**asdict(facts), "verdict": asdict(verdict)}


def to_text(facts: Facts, verdict: Verdict) -> str:
    """The whole report for a person."""
    loader = facts.loader
    lines = ["versions", *(f"  {name} {text}" for name, text in facts.versions.items())]
    lines += ["loader", f"  {loader.problem or f'{loader.path}, Vulkan {loader.version}'}"]
    lines.append("driver manifests")
    for manifest in facts.manifests:
        library = f" ({manifest.library})" if manifest.library else ""
        lines.append(f"  {manifest.path}: {manifest.problem or 'ok'}{library}")
    if not facts.manifests:
        lines.append("  none found")
    lines.append("device files")
    for node in facts.nodes:
        lines.append(f"  {node.path} (mode {node.mode}, {node.group}): {node.problem or 'ok'}")
    if not facts.nodes:
        lines.append("  no /dev/dri/renderD*")
    machine = facts.machine
    lines.append("machine")
    lines.append(f"  container: {machine.container or 'no'}{', WSL' if machine.wsl else ''}")
    lines.append(f"  GPUs on the bus: {', '.join(machine.gpus) or 'none seen'}")
    lines.append("devices")
    if facts.device_error:
        lines.append(f"  {facts.device_error}")
    for device in facts.devices:
        lines += _device_lines(device)
    sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in facts.cache_bytes.items())
    lines += ["cache", f"  {facts.cache}: {sizes}", ""]
    lines += [f"warning: {text}" for text in verdict.warnings]
    lines += [f"verdict: {verdict.text}", f"next: {verdict.next}"]
    return "\n".join(lines)


def _device_lines(device: DeviceReport) -> list[str]:
    lines = [
        f"  {device.index}: {device.name} ({device.kind}), {device.driver}, "
        f"Vulkan {device.api_version}",
        f"     uuid {device.uuid}" + (f", pci {device.pci}" if device.pci else ""),
    ]
    if not device.usable:
        return [*lines, f"     not usable: {device.reason}"]
    shown = ", ".join(f"{name} {value}" for name, value in device.limits.items())
    lines.append(f"     limits: {shown}")
    lines.append(f"     features: {', '.join(device.features) or 'none'}")
    lines.append(f"     without: {', '.join(device.missing) or 'nothing'}")
    lines += [f"     quirk: {quirk}" for quirk in device.quirks]
    lines += [f"     not used: kernel {name} ({why})" for name, why in device.dropped.items()]
    lines.append(f"     dispatch: {device.problem or f'ok: {device.dispatch}'}")
    return lines
