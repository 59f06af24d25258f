"""Which precision a model should run at on this device: the speed of each, and what it costs.

Half-precision operands win on some devices and lose on others. Nothing is switched by itself: the
report recommends, and `--precision` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import hornito
from hornito.diag.bench import bench, tests_of
from hornito.diag.bench_report import BenchRow
from hornito.diag.quality import Quality, evaluate
from hornito.precision import PRECISIONS, default_kv
from hornito.progress import Progress
from hornito.vk.device import open_device

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.vk.device import Device

MARGIN = 0.03
"""A tier must be that much faster before it displaces one that is closer to the reference."""

MOST_KL = 0.01
"""Mean divergence from `high`, in nats, up to which a faster tier is recommended."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured: tokens of a prompt, of an answer, and of a text in windows; runs of
    each in a round, and rounds."""

    prompt: int
    answer: int
    text: int
    window: int
    runs: int
    rounds: int


DEFAULT = Amounts(prompt=512, answer=64, text=1024, window=256, runs=2, rounds=3)
SOFTWARE = Amounts(prompt=64, answer=8, text=128, window=64, runs=1, rounds=3)


@dataclass(frozen=True, slots=True)
class Tier:
    """A precision on this device: tokens a second of each round, and how far it is from `high`.

    Attributes:
        quality: None for `high` itself.
    """

    precision: str
    kv: str
    prompts: tuple[float, ...]
    decodes: tuple[float, ...]
    quality: Quality | None

    @property
    def prompt(self) -> float:
        """The median of the rounds."""
        return median(self.prompts)

    @property
    def decode(self) -> float:
        """The median of the rounds."""
        return median(self.decodes)


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """The tiers, which one is recommended, and why."""

    model: str
    weights: str
    device: str
    tokens: int
    tiers: tuple[Tier, ...]
    recommended: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        tiers = [asdict(t) | {"prompt": t.prompt, "decode": t.decode} for t in self.tiers]
        return asdict(self) | {"tiers": tiers}


def tune_precision(
    package: Path,
    *,
    model: str,
    device: str | None,
    text: str | Path | None,
    progress: Progress,
    amounts: Amounts | None = None,
) -> PrecisionReport:
    """Measure the tiers in turn, several rounds of all, and recommend one.

    Args:
        package: the model.
        model: its name in the report.
        device: as `hornito.load` takes it.
        text: what the others are compared with `high` on; a text of our own by default.
        amounts: by default chosen by the kind of device.

    Raises:
        UsageError: the package has no tokenizer, or the text is too short.
        DeviceMemoryError: two copies of the model do not fit the device.
    """
    with open_device(device) as opened:
        usual = SOFTWARE if opened.caps.device_kind == "software" else DEFAULT
        amounts = amounts or usual
        # First, since a text that is too short is better refused at once.
        tokens, quality = _against_high(opened, package, text, amounts, progress)
    rows: dict[str, list[tuple[BenchRow, BenchRow]]] = {name: [] for name in PRECISIONS}
    line = weights = ""
    for _ in range(amounts.rounds):
        for name, found in rows.items():
            with hornito.load(package, device=device, precision=name, progress=progress) as llm:
                llm.prove()
                found.append(_speed(llm, model, amounts, progress))
                line, weights = llm.device_line, str(llm.package_manifest.quant.get("weights"))
    tiers = tuple(
        Tier(
            name,
            default_kv(name),
            tuple(prompt.median for prompt, _ in rows[name]),
            tuple(decode.median for _, decode in rows[name]),
            quality.get(name),
        )
        for name in PRECISIONS
    )
    recommended, reason = recommend(tiers)
    return PrecisionReport(model, weights, line, tokens, tiers, recommended, reason)


def _speed(llm: LLM, model: str, amounts: Amounts, progress: Progress) -> tuple[BenchRow, BenchRow]:
    prompt = min(amounts.prompt, llm.context)
    answer = min(amounts.answer, llm.context - 1)
    found = bench(
        llm,
        model=model,
        load_seconds=0.0,
        tests=tests_of([prompt], [answer], [0]),
        runs=amounts.runs,
        progress=progress,
    )
    return found.rows[0], found.rows[1]


def _against_high(
    device: Device,
    package: Path,
    text: str | Path | None,
    amounts: Amounts,
    progress: Progress,
) -> tuple[int, dict[str, Quality]]:
    """Scored tokens, and each other tier beside `high`."""
    found, scored = {}, 0
    own = resources.files("hornito") / "quant" / "calibration.txt"
    with resources.as_file(own) as default:
        for precision in PRECISIONS[1:]:
            read, (row,) = evaluate(
                device,
                package,
                [(precision, package)],
                text or default,
                window=amounts.window,
                tokens=amounts.text,
                precision=precision,
                kv=default_kv(precision),
                progress=progress,
            )
            found[precision], scored = row.quality, read.scored
    return scored, found


def recommend(tiers: Sequence[Tier]) -> tuple[str, str]:
    """The tier to run at, and why: what came of each beside the best of those before it, which are
    closer to the first."""
    best, why = tiers[0], []
    for tier in tiers[1:]:
        prompt, decode = _ratios(tier.prompts, best.prompts), _ratios(tier.decodes, best.decodes)
        speeds = (
            f"prompts at {median(prompt):.2f} and decoding at {median(decode):.2f} times the speed "
            f"of {best.precision}"
        )
        if tier.quality is None or not tier.quality.kl_mean <= MOST_KL:
            why.append(f"{tier.precision} changes too much (mean KL above {MOST_KL})")
        elif min(median(prompt), median(decode)) < 1 - MARGIN:
            why.append(f"{tier.precision} is slower at one: {speeds}")
        elif max(min(prompt), min(decode)) < 1 + MARGIN:
            why.append(f"{tier.precision} is not faster in every round: {speeds}")
        else:
            best = tier
            why.append(f"{tier.precision} is faster: {speeds}")
    return best.precision, "; ".join(why)


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each round."""
    return [speed / other for speed, other in zip(speeds, others, strict=True)]
