"""`hornito tune MODEL`: measures the variants of every kernel at the shapes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import hornito
from hornito.plan.plan import build_plan
from hornito.plan.records import DeviceRecords
from hornito.plan.tune import on_record

if TYPE_CHECKING:
    from hornito.progress import Progress


@dataclass(frozen=True, slots=True)
class TunedSite:
    """A choice among variants.

    Attributes:
        site: op, shapes and storage type.
        default, winner: variants by name.
        default_us, winner_us: GPU time of a launch, microseconds.
    """

    site: str
    default: str
    winner: str
    default_us: float
    winner_us: float

    @property
    def changed(self) -> bool:
        """Whether the default was displaced."""
        return self.winner != self.default


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was measured; later loads of the model on the device use it by themselves."""

    model: str
    device: str
    rows: tuple[TunedSite, ...]
    dropped: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def tune_kernels(
    model: str,
    *,
    device: str | None,
    weights: str | None,
    everything: bool,
    progress: Progress,
) -> TuneReport:
    """Load a model, measuring its kernels, and report what won.

    Args:
        everything: measure all buckets anew; else what is not on record, of single steps and the
            largest chunk.

    Raises:
        UnsupportedError: the device has no timestamps.
    """
    how = "full" if everything else "fast"
    with hornito.load(model, device=device, weights=weights, tune=how, progress=progress) as llm:
        engine = llm.engine
        choices = replace(engine.options.choices, winners={})
        usual = build_plan(
            engine.graph, engine.device.caps, replace(engine.options, choices=choices)
        )
        records = DeviceRecords.load(engine.device.info)
        rows = [
            TunedSite(
                site.key,
                site.taken.name,
                winner.variant,
                winner.default_nanoseconds / 1e3,
                winner.nanoseconds / 1e3,
            )
            for site, winner in on_record(usual, records)
        ]
        return TuneReport(model, llm.device_line, tuple(rows), dict(engine.trust.dropped))
