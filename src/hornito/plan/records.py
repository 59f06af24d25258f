"""What was found out about a device, kept on disk: verdicts of self-tests, measured winners.

A file belongs to one device (UUID) with one driver version; its entries are keyed by the SPIR-V
that they are about, so that a new driver or a new kernel starts afresh. Several processes may write
it: each brings in what it found.

A process that ends in an act with a kernel (making a pipeline, testing it at a shape), or a device
that is lost in a test, is a strike against the act. When the act goes well, its strikes are gone;
with STRIKES of them the kernel is not used. `hornito doctor --full` tries it all the same; when it
ends the doctor too, the next report leaves it out, and the one after tries it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hornito.ops.kernels import kernel_names, load_spirv
from hornito.plan.attempts import left_behind
from hornito.processes import lock
from hornito.vk.pipeline import cache_directory

if TYPE_CHECKING:
    from hornito.ops.base import Dispatch
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
"""A kernel with so many against one act is not used: one may have had another reason."""

Entry = TypeVar("Entry", Verdict, Winner)
Value = TypeVar("Value")


class DeviceRecords:
    """The entries of one device; `load` reads them, `save` brings what is new into the file.

    Attributes:
        verdicts: by key (`verdict_key`).
        winners: by key (`winner_key`).
        strikes: by act (`pipeline_mark`, `verdict_key`), since it last went well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._take({}, {}, {})

    def _take(
        self, verdicts: dict[str, Verdict], winners: dict[str, Winner], strikes: dict[str, int]
    ) -> None:
        """These are the entries, and those of the file too."""
        self.verdicts, self.winners, self.strikes = verdicts, winners, strikes
        self._filed = (dict(verdicts), dict(winners), dict(strikes))

    @classmethod
    def load(cls, info: DeviceInfo) -> DeviceRecords:
        """The records of a device; empty when there are none or the file is damaged.

        Notes that processes left behind when they ended become strikes.
        """
        records = cls(records_path(info))
        records._read()
        if ended := left_behind(records.path):
            for mark in ended:
                records.strike(mark)
            records.save()
        return records

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                return
            verdicts = {key: _entry(Verdict, entry) for key, entry in data["verdicts"].items()}
            winners = {key: _entry(Winner, entry) for key, entry in data["winners"].items()}
            strikes = {key: count for key, count in data.get("strikes", {}).items()}
            if not all(isinstance(count, int) for count in strikes.values()):
                raise TypeError("strikes are whole numbers")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.warning("the kernel records %s are damaged and ignored: %s", self.path, error)
            return
        self._take(verdicts, winners, strikes)

    def save(self) -> None:
        """Bring what changed since the last read or save into the file, in one step.

        What others wrote meanwhile stays, and is here too from then on. A full disk is only a
        warning.
        """
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.path):
                self._merge()
                data = {
                    "format": FORMAT,
                    "verdicts": {key: asdict(entry) for key, entry in self.verdicts.items()},
                    "winners": {key: asdict(entry) for key, entry in self.winners.items()},
                    "strikes": self.strikes,
                }
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

    def _merge(self) -> None:
        theirs = DeviceRecords(self.path)
        theirs._read()
        verdicts, winners, strikes = self._filed
        self._take(
            _merged(self.verdicts, verdicts, theirs.verdicts),
            _merged(self.winners, winners, theirs.winners),
            _merged(self.strikes, strikes, theirs.strikes),
        )

    def dropped(self, kernels: Iterable[str]) -> dict[str, str]:
        """Those of the kernels that failed a test here, whatever the shape, and why."""
        hashes = {spirv_hash(kernel): kernel for kernel in kernels}
        found: dict[str, str] = {}
        for key, verdict in self.verdicts.items():
            kernel = hashes.get(key.partition(":")[0])
            if kernel is not None and verdict.verdict != GOOD:
                found[kernel] = f"{verdict.verdict}: {verdict.detail}"
        return found

    def fatal(self, kernels: Iterable[str], strikes: int = STRIKES) -> dict[str, str]:
        """Those of the kernels with so many strikes against one act, and why they are not used."""
        worst: dict[str, int] = {}
        for mark, count in self.strikes.items():
            if count >= strikes:
                kernel = mark.partition(":")[0]
                worst[kernel] = max(count, worst.get(kernel, 0))
        return {
            kernel: f"{FAILED}: {worst[spirv]} processes ended, or lost the device, while it was "
            "made or tested; `hornito doctor --full` tries it again"
            for kernel in (kernels if worst else ())
            if (spirv := spirv_hash(kernel)) in worst
        }

    def strike(self, mark: str) -> None:
        """An act ended a process, or lost the device."""
        self.strikes[mark] = self.strikes.get(mark, 0) + 1

    def forgive(self, marks: Iterable[str]) -> bool:
        """Strike out the strikes against acts that went well; whether there were any."""
        before = len(self.strikes)
        for mark in marks if self.strikes else ():
            self.strikes.pop(mark, None)
        return len(self.strikes) < before

    def forgive_kernels(self, kernels: Iterable[str]) -> None:
        """Strike out everything against kernels that passed a full test."""
        well = {spirv_hash(kernel) for kernel in kernels}
        self.forgive([mark for mark in self.strikes if mark.partition(":")[0] in well])

    def allow_another_test(self) -> None:
        """Have the next full test try what this one left out."""
        self.strikes = {mark: min(count, STRIKES) for mark, count in self.strikes.items()}

    def forget_failures(self) -> None:
        """Have every kernel that failed a test tested again before it is used, whatever the shape.

        What counted strikes keeps them.
        """
        self.verdicts = {key: v for key, v in self.verdicts.items() if v.verdict == GOOD}


def _entry(kind: type[Entry], data: Mapping[str, Any]) -> Entry:
    """An entry of the file.

    Raises:
        TypeError: it is none.
    """
    made = kind(**data)
    types: dict[Any, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int)}
    for field in fields(kind):
        if not isinstance(getattr(made, field.name), types[field.type]):
            raise TypeError(f"{field.name} is no {field.type}")
    return made


def _merged(
    mine: dict[str, Value], filed: dict[str, Value], theirs: dict[str, Value]
) -> dict[str, Value]:
    """What the file holds, with what changed here since it held `filed`."""
    left = {key: value for key, value in theirs.items() if key in mine or key not in filed}
    new = {key: value for key, value in mine.items() if filed.get(key) != value}
    return {**left, **new}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process writes the file meanwhile, where the file system has locks."""
    with path.with_name(f".{path.stem}.lock").open("w") as file:
        try:
            lock(file, wait=True)
        except OSError as error:
            logger.debug("the kernel records %s can't be locked: %s", path, error)
        yield


def records_path(info: DeviceInfo) -> Path:
    """The file of a device's records."""
    return cache_directory() / f"kernels-{info.uuid}-{info.driver_version:08x}.json"


def spirv_hash(kernel: str) -> str:
    """Of a kernel's SPIR-V, as keys begin with it."""
    return hashlib.sha256(load_spirv(kernel)).hexdigest()[:32]


def pipeline_mark(dispatch: Dispatch) -> str:
    """Of making a dispatch's pipeline, as an act that may end the process."""
    kernel, constants = dispatch.pipeline_key
    return f"{spirv_hash(kernel)}:{hashlib.sha256(repr(constants).encode()).hexdigest()[:16]}"


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
