"""How close a model comes to a reference on a text: perplexity, divergence, agreement.

The text is cut into windows as llama.cpp's perplexity tool does it: consecutive, of one length,
each evaluated from an empty cache. Where the model begins its texts with BOS, so does every window,
in the place of its first token. The second half of a window is scored, so that every scored token
has half a window before it. What is left at the end of the text is no window and is left out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hornito.diag.divergence import Comparer, RowComparison
from hornito.errors import UsageError
from hornito.graph.graph import Graph
from hornito.package import Package, open_package
from hornito.package.model import model_graph
from hornito.plan.plan import PlanOptions
from hornito.progress import Progress
from hornito.runtime.engine import Engine
from hornito.runtime.logit_rows import LogitRows, logit_rows
from hornito.runtime.session import Session
from hornito.text.tokenizer import package_tokenizer

if TYPE_CHECKING:
    from hornito.vk.device import Device

WINDOW = 512
MIN_WINDOW = 16
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Text:
    """A text as windows of token ids.

    Attributes:
        name: of its file.
        sha256: of its UTF-8 bytes.
        tokens: of the whole text, with BOS.
        windows: of `window` ids each.
    """

    name: str
    sha256: str
    tokens: int
    window: int
    windows: tuple[tuple[int, ...], ...]

    @property
    def evaluated(self) -> int:
        """Tokens of the windows."""
        return self.window * len(self.windows)

    @property
    def scored(self) -> int:
        """Tokens whose probability counts."""
        return (self.window - 1 - self.window // 2) * len(self.windows)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a model is worth beside a reference.

    Attributes:
        perplexity, reference_perplexity: exp of the mean negative log-probability of scored tokens.
        kl_mean, kl_p99, kl_max: divergence of the model from the reference in nats: mean, 99th
            percentile and largest over the scored tokens.
        top1: part of the scored tokens where both find the same one most likely.
    """

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """The row of one model.

    Attributes:
        weights: the storage choice that it was compiled with.
        bytes: of the package.
        bits: of a weight, over all weights.
        label: what the package's manifest says, see `label`.
        same_values: whether it holds the very blocks that the reference was made of, so that no
            difference but that of the arithmetic can be.
    """

    model: str
    path: str
    weights: str
    bytes: int
    bits: float
    quality: Quality
    label: dict[str, Any]
    same_values: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def read_text(path: str | Path, package: Package, *, window: int, tokens: int | None) -> Text:
    """A text file as windows of a package's tokens.

    Args:
        window: tokens of a window.
        tokens: take no more than this many from the start; None for all.

    Raises:
        UsageError: the package has no tokenizer, or the text does not fill one window.
    """
    most = package.manifest.facts["context_length"]
    if not MIN_WINDOW <= window <= most:
        raise UsageError(
            f"a window must have {MIN_WINDOW} to {most} tokens (the model's context), not {window}"
        )
    try:
        raw = Path(path).read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"can't read the text {path}: {error.strerror or error}") from error
    tokenizer = package_tokenizer(package)
    ids = tokenizer.encode(text)
    taken = ids if tokens is None else ids[:tokens]
    if len(taken) < window:
        raise UsageError(
            f"{path} has {len(taken)} tokens to evaluate, and a window takes {window}; give a "
            "longer text or a smaller --window"
        )
    windows = []
    for start in range(0, len(taken) - window + 1, window):
        own = taken[start : start + window]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            own[0] = tokenizer.bos_id
        windows.append(tuple(own))
    name, digest = Path(path).name, hashlib.sha256(raw).hexdigest()
    return Text(name, digest, len(ids), window, tuple(windows))


@contextmanager
def loaded(
    device: Device, package: Package, *, window: int, precision: str, kv: str, progress: Progress
) -> Iterator[Engine]:
    """An engine for windows of a text, freed at the end of the block.

    Raises:
        DeviceMemoryError: it does not fit beside what is loaded already.
    """
    options = PlanOptions(
        context=window,
        kv_half=kv == "fp16",
        half_operands=precision != "high",
        half_values=precision == "low",
    )
    graph = model_graph(package)
    eos_ids = package.manifest.facts["eos_ids"]
    engine = Engine(device, package, graph, options, eos_ids, progress, precision=precision)
    try:
        yield engine
    finally:
        engine.close()


def check_same_model(reference: Package, model: Package) -> None:
    """Raise UsageError when two packages can't be of one model: sizes or tokenizer differ."""
    facts = ("model_type", "layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size")
    ours, theirs = model.manifest, reference.manifest
    different = [
        f"{name} is {ours.facts.get(name)}, not {theirs.facts.get(name)}"
        for name in facts
        if ours.facts.get(name) != theirs.facts.get(name)
    ]
    tokenizer = "blob:tokenizer.json"
    if ours.sha256.get(tokenizer) != theirs.sha256.get(tokenizer):
        different.append("its tokenizer is another")
    if different:
        raise UsageError(
            f"{model.path} is no form of the reference {reference.path}: {', '.join(different)}"
        )


def measure(reference: Engine, model: Engine, text: Text, progress: Progress) -> Quality:
    """Evaluate the text with both models and compare them at every scored token."""
    first = text.window // 2
    rows: list[RowComparison] = []
    progress.start("comparing", 2 * text.evaluated)  # each model's tokens

    def counted(parts: Iterator[LogitRows]) -> Iterator[LogitRows]:
        for part in parts:
            # The rows before those that are scored are done with the first of these.
            progress.advance(part.count if part.first > first else first + part.count)
            yield part
        progress.advance()  # the last token is only asked for

    try:
        with (
            Comparer(reference, model) as comparer,
            Session(reference) as ours,
            Session(model) as theirs,
        ):
            for ids in text.windows:
                ours.rewind(0)
                theirs.rewind(0)
                pairs = zip(
                    counted(logit_rows(ours, ids[:-1], skip=first)),
                    counted(logit_rows(theirs, ids[:-1], skip=first)),
                    strict=True,
                )
                for mine, other in pairs:
                    following = ids[mine.first + 1 : mine.first + 1 + mine.count]
                    rows += comparer.compare(mine, other, following)
    finally:
        progress.finish()
    return summarise(rows)


def summarise(rows: Sequence[RowComparison]) -> Quality:
    """The numbers of a text from those of its tokens."""
    divergence: npt.NDArray[np.float64] = np.array([row.divergence for row in rows])
    return Quality(
        perplexity=math.exp(-math.fsum(row.logprob for row in rows) / len(rows)),
        reference_perplexity=math.exp(-math.fsum(r.reference_logprob for r in rows) / len(rows)),
        kl_mean=math.fsum(divergence) / len(rows),
        kl_p99=float(np.percentile(divergence, 99)),
        kl_max=float(divergence.max()),
        top1=sum(row.id == row.reference_id for row in rows) / len(rows),
    )


def label(
    quality: Quality, text: Text, reference: Package, *, precision: str, kv: str
) -> dict[str, Any]:
    """What a package says of its quality: the figures to six digits, and what they depend on."""
    figures = {name: float(f"{value:.{_DIGITS}g}") for name, value in asdict(quality).items()}
    return {
        **figures,
        "text": text.name,
        "text_sha256": text.sha256,
        "window": text.window,
        "tokens": text.evaluated,
        "scored": text.scored,
        "precision": precision,
        "kv": kv,
        "reference": {
            "weights": reference.manifest.quant.get("weights"),
            "sha256": reference.manifest.identity(),
        },
    }


def bits_a_weight(package: Package) -> float:
    """Bits that a weight takes, over all weights of a package."""
    graph = Graph.from_json(package.manifest.graph)
    count = sum(math.prod(weight.shape) for weight in graph.weights.values())
    return 8 * sum(info.nbytes for info in package.tensors.values()) / count


def evaluate(
    device: Device,
    reference: str | Path,
    models: Sequence[tuple[str, Path]],
    text_file: str | Path,
    *,
    window: int = WINDOW,
    tokens: int | None = None,
    precision: str = "high",
    kv: str = "fp32",
    progress: Progress,
    note: Callable[[str], object] = lambda line: None,
) -> tuple[Text, list[ModelQuality]]:
    """Compare packages with a reference, which is loaded once, at `high` with an fp32 cache.

    Args:
        reference: the package of the fp32 tier.
        models: a name and a package each.
        precision, kv: of the models.
        note: called with a line that says how much there is to do, before it is begun.

    Raises:
        UsageError: a package is of another checkpoint than the reference, or the text is too short.
        DeviceMemoryError: the reference and a model do not fit the device together.
    """
    found = []
    with open_package(reference) as base:
        text = read_text(text_file, base, window=window, tokens=tokens)
        for _, path in models:
            with open_package(path) as package:
                check_same_model(base, package)
        note(how_much(text, len(models), software=device.info.kind == "software"))
        with loaded(
            device, base, window=window, precision="high", kv="fp32", progress=progress
        ) as engine:
            for name, path in models:
                with (
                    open_package(path) as package,
                    loaded(
                        device,
                        package,
                        window=window,
                        precision=precision,
                        kv=kv,
                        progress=progress,
                    ) as other,
                ):
                    quality = measure(engine, other, text, progress)
                    found.append(
                        ModelQuality(
                            name,
                            str(path),
                            str(package.manifest.quant.get("weights")),
                            package.size,
                            bits_a_weight(package),
                            quality,
                            label(quality, text, base, precision=precision, kv=kv),
                            _same_values(base, package),
                        )
                    )
    return text, found


def how_much(text: Text, models: int, *, software: bool) -> str:
    """What lies ahead, for people who wait for it."""
    line = f"evaluates {text.evaluated:,} tokens of {text.name} with "
    line += "the model" if models == 1 else f"each of {models} models"
    line += " and with the reference"
    if software and text.evaluated > text.window:
        line += (
            " on a software device, which may take many minutes; "
            f"--tokens {text.window} evaluates one window"
        )
    return line


def _same_values(reference: Package, model: Package) -> bool:
    kept = model.manifest.quant.get("weights"), reference.manifest.quant.get("weights")
    source = model.manifest.source.get("sha256")
    same = source is not None and source == reference.manifest.source.get("sha256")
    return kept == ("keep", "fp32") and same


def to_markdown(text: Text, models: Sequence[ModelQuality], device: str) -> str:
    """A header line and a table with a row for each model."""
    first = models[0]
    reference = first.label["reference"]["weights"]
    lines = [
        f"{text.name}: {text.evaluated} of {text.tokens} tokens in windows of {text.window}, "
        f"{text.scored} scored; {first.label['precision']}, KV {first.label['kv']}, against "
        f"{reference} at high (perplexity {first.quality.reference_perplexity:.4f}); {device}",
        "",
        "| model | weights | MB | bits a weight | perplexity | mean KL | 99 % KL | top-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.model} | {m.weights} | {m.bytes / 1e6:.1f} | {m.bits:.2f} | "
        f"{m.quality.perplexity:.4f} | {m.quality.kl_mean:.3g} | {m.quality.kl_p99:.3g} | "
        f"{m.quality.top1:.2%} |"
        for m in models
    ]
    return "\n".join(lines)
