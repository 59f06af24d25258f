"""What was found out about a device, kept on disk: verdicts of self-tests, measured winners.

A file belongs to one device (UUID) with one driver version; its entries are keyed by the SPIR-V
that they are about, so that a new driver or a new kernel starts afresh.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.ops.kernels import kernel_names, load_spirv
from hornito.plan.attempts import left_behind
from hornito.vk.pipeline import cache_directory

if TYPE_CHECKING:
    from hornito.vk.probe import DeviceInfo

logger = logging.getLogger("hornito")

FORMAT = 1
"""Version of the file, and of what a self-test does."""

GOOD, WRONG, UNSTABLE, FAILED = "good", "wrong", "unstable", "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test of one kernel at one shape found.

    Attributes:
        kernel: `op/stem.variant`.
        shape: the call and the shapes that it ran at.
        verdict: `good`, `wrong` (other numbers than its plain twin's), `unstable` (other bits from
            run to run) or `failed` (no pipeline, or the device was lost).
        detail: the numbers, or the driver's words.
        runs: how often it ran.
        error: largest difference from the twin, see `hornito.plan.selftest.difference`.
    """

    kernel: str
    shape: str
    verdict: str
    detail: str
    runs: int
    error: float


@dataclass(frozen=True, slots=True)
class Winner:
    """The variant that was measured fastest at a site, and by how much.

    Attributes:
        variant: its name in the op's list.
        nanoseconds, default_nanoseconds: GPU time of a launch, and that of the default.
    """

    variant: str
    nanoseconds: float
    default_nanoseconds: float


STRIKES = 2
"""A kernel that so many processes ended with is not used: one may have ended for another reason."""


class DeviceRecords:
    """The entries of one device; `load` reads them, `save` writes what is new.

    Attributes:
        verdicts: by key (`verdict_key`).
        winners: by key (`winner_key`).
        strikes: by `spirv_hash`, how many processes ended while they made or tested a kernel, since
            it was last made or tested well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        self.winners: dict[str, Winner] = {}
        self.strikes: dict[str, int] = {}

    @classmethod
    def load(cls, info: DeviceInfo) -> DeviceRecords:
        """The records of a device; empty when there are none or the file is damaged.

        Notes that processes left behind when they ended become strikes.
        """
        records = cls(records_path(info))
        records._read()
        if ended := left_behind(records.path):
            for mark in ended:
                records.strikes[mark] = records.strikes.get(mark, 0) + 1
            records.save()
        return records

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                return
            verdicts = {key: Verdict(**entry) for key, entry in data["verdicts"].items()}
            winners = {key: Winner(**entry) for key, entry in data["winners"].items()}
            strikes = {str(key): int(count) for key, count in data.get("strikes", {}).items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("the kernel records %s are damaged and ignored: %s", self.path, error)
            return
        self.verdicts, self.winners, self.strikes = verdicts, winners, strikes

    def save(self) -> None:
        """Write the file in one step; a full disk is only a warning."""
        data = {
            "format": FORMAT,
            "verdicts": {key: asdict(entry) for key, entry in self.verdicts.items()},
            "winners": {key: asdict(entry) for key, entry in self.winners.items()},
            "strikes": self.strikes,
        }
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, delete=False
            ) as file:
                temporary = Path(file.name)
                json.dump(data, file, indent=1)
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            logger.warning("the kernel records %s can't be written: %s", self.path, error)

    def dropped(self, kernels: Iterable[str]) -> dict[str, str]:
        """Those of the kernels that failed a test here, whatever the shape, and why."""
        hashes = {spirv_hash(kernel): kernel for kernel in kernels}
        found: dict[str, str] = {}
        for key, verdict in self.verdicts.items():
            kernel = hashes.get(key.partition(":")[0])
            if kernel is not None and verdict.verdict != GOOD:
                found[kernel] = f"{verdict.verdict}: {verdict.detail}"
        return found

    def fatal(self, kernels: Iterable[str]) -> dict[str, str]:
        """Those of the kernels that ended processes here, and why they are not used."""
        worst = {mark for mark, count in self.strikes.items() if count >= STRIKES}
        return {
            kernel: f"{FAILED}: {self.strikes[mark]} processes ended while it was made or tested"
            for kernel in (kernels if worst else ())
            if (mark := spirv_hash(kernel)) in worst
        }

    def forgive(self, kernels: Iterable[str]) -> bool:
        """Strike out the strikes of kernels that were well; whether there were any."""
        if not self.strikes:
            return False
        before = len(self.strikes)
        for kernel in kernels:
            self.strikes.pop(spirv_hash(kernel), None)
        return len(self.strikes) < before


def records_path(info: DeviceInfo) -> Path:
    """The file of a device's records."""
    return cache_directory() / f"kernels-{info.uuid}-{info.driver_version:08x}.json"


def spirv_hash(kernel: str) -> str:
    """Of a kernel's SPIR-V, as keys begin with it."""
    return hashlib.sha256(load_spirv(kernel)).hexdigest()[:32]


def verdict_key(kernel: str, shape: str) -> str:
    """The key of a kernel's verdict at a shape."""
    return f"{spirv_hash(kernel)}:{hashlib.sha256(shape.encode()).hexdigest()[:16]}"


def winner_key(site: str, kernels: Iterable[str]) -> str:
    """The key of a site's winner among variants of these kernels."""
    hashes = ",".join(spirv_hash(kernel) for kernel in sorted(set(kernels)))
    return hashlib.sha256(f"{site}|{hashes}".encode()).hexdigest()[:32]


def failed_kernels(records: DeviceRecords) -> dict[str, str]:
    """Kernels that a device's records speak against, and why, for reports."""
    return {
        verdict.kernel: f"{verdict.verdict}: {verdict.detail}"
        for verdict in records.verdicts.values()
        if verdict.verdict != GOOD
    } | records.fatal(kernel_names())


def dropped_here() -> dict[str, str]:
    """Kernels of this version that failed their self-test on some device of this machine."""
    found: dict[str, str] = {}
    for path in sorted(cache_directory().glob("kernels-*.json")):
        records = DeviceRecords(path)
        records._read()
        names = set(failed_kernels(records)) & set(kernel_names())
        found |= records.dropped(names) | records.fatal(kernel_names())
    return found
