"""Rounding the matrices of a graph that is about to be written, with what a text makes of them."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hornito.errors import HornitoError, NoDeviceError, UsageError, size_text
from hornito.graph.graph import Graph
from hornito.graph.storage import Storage
from hornito.package import open_package
from hornito.package.model import model_graph
from hornito.package.writer import check_space
from hornito.progress import Progress
from hornito.quant.choice import Quantisation
from hornito.quant.quantiser import Limits, Quantiser, to_round, total_bytes

if TYPE_CHECKING:
    from hornito.package.reader import Package
    from hornito.quant.calibrate import Activations
    from hornito.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rounding:
    """What was done: for the manifest, and what the user should know."""

    record: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def storage_of(weights: str, quantisation: Quantisation) -> Storage:
    """The storage types that a choice of weights and a quantisation ask for."""
    return Storage(weights, quantisation.group, quantisation.table, quantisation.outliers)


@contextmanager
def rounded(
    graph: Graph,
    storage: Storage,
    quantisation: Quantisation,
    plain: Callable[[Path], Path],
    beside: Path,
    progress: Progress,
) -> Iterator[Rounding]:
    """Round the matrices of a graph; inside the context their data can be written.

    Args:
        graph: after passes, with storage types assigned; its weights are changed.
        plain: gives a package of the same graph with weights that were not rounded, made in the
            folder that it is given, or not at all.
        beside: the file that is going to be written; temporary files lie in its folder.

    Raises:
        UsageError: there is no tokenizer for a calibration text that was asked for, or the target
            size can't be met.
        NoDeviceError: samples are wanted, and there is no device.
        HornitoError: the disk is full; says what is needed.
    """
    names = to_round(graph)
    if not names:
        yield Rounding()
        return
    parent = beside.absolute().parent
    total, more = total_bytes(graph, graph.weights), total_bytes(graph, names)
    check_space(beside, total, more)
    with (
        _told_when_full(beside, total, more),
        tempfile.TemporaryDirectory(prefix=".hornito-", dir=parent) as folder,
        tempfile.TemporaryFile(dir=parent) as kept,
        tempfile.TemporaryFile(dir=parent) as file,
    ):
        calibration = _Calibration(quantisation, storage.weights, progress)
        calibration.run(lambda: plain(Path(folder)), kept)
        limits = Limits(quantisation.error, quantisation.target_bytes)
        report = Quantiser(graph, calibration.activations, file).run(limits, progress)
        yield Rounding(
            {**calibration.record, **report.to_dict()}, calibration.warnings + report.warnings
        )


@contextmanager
def _told_when_full(target: Path, total: int, beside: int) -> Iterator[None]:
    """Let a full disk be told as the reason why a package of about `total` bytes, which asks for
    `beside` more until it is written, can't be made: temporary files have no names."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        parent = target.absolute().parent
        free = size_text(shutil.disk_usage(parent).free)
        raise HornitoError(
            f"can't write {target}: {parent} became full. It takes about {size_text(total)}, and "
            f"{size_text(beside)} more while it is made, with a calibration text an fp16 copy "
            f"besides (--quant-samples 0, samples=0, does without); {free} are free now"
        ) from error


class _Calibration:
    """What the matrices of a model read over a text, if that is wanted and can be had."""

    def __init__(self, quantisation: Quantisation, weights: str, progress: Progress) -> None:
        self._quantisation = quantisation
        self._count = quantisation.sequences(weights)
        self._progress = progress
        self.activations: Activations | None = None
        self.record: dict[str, Any] = {"samples": 0}
        self.warnings: list[str] = []

    def run(self, plain: Callable[[], Path], file: IO[bytes]) -> None:
        """Evaluate the text on a device, and keep what is read in a file."""
        if not self._count:
            return
        with open_package(plain()) as package:
            runs = self._runs(package)
            if runs:
                self._evaluate(package, runs, file)

    def _runs(self, package: Package) -> list[list[int]]:
        """Token ids of the sequences; none, with a warning, without a tokenizer."""
        from hornito.quant.calibrate import own_text, sequences
        from hornito.text.tokenizer import Tokenizer

        asked = self._quantisation
        if "tokenizer.json" not in package.blobs:
            if asked.samples or asked.text:
                raise UsageError(
                    "the model has no tokenizer, which a calibration text needs; "
                    "--quant-samples 0 (samples=0) rounds by the weights alone"
                )
            self.warnings.append(
                "the model has no tokenizer: matrices are rounded by their weights alone"
            )
            return []
        facts = package.manifest.facts
        tokenizer = Tokenizer(
            package.blob("tokenizer.json"),
            add_bos=facts["add_bos"],
            bos_id=facts["bos_id"],
            eos_ids=facts["eos_ids"],
        )
        bos = facts["bos_id"] if facts["add_bos"] else None
        if asked.text is not None:
            return sequences(tokenizer.encode(asked.text, add_bos=False), self._count, bos)
        ids = tokenizer.encode(own_text(), add_bos=False)
        return sequences(ids, self._count, bos, self._chats(package, tokenizer))

    def _chats(self, package: Package, tokenizer: Tokenizer) -> list[list[int]]:
        """Our own conversations as the model's chat template writes them, if it has one."""
        from hornito.quant.calibrate import own_chats
        from hornito.text.template import ChatTemplate, encode_chat

        if "chat_template.jinja" not in package.blobs:
            return []
        source = package.blob("chat_template.jinja").decode()
        template = ChatTemplate(source, package.manifest.facts["token_strings"])
        try:
            return [
                encode_chat(tokenizer, template, chat, add_generation_prompt=False)
                for chat in own_chats()
            ]
        except UsageError as error:
            self.warnings.append(f"calibrated without conversations: {error}")
            return []

    def _evaluate(self, package: Package, runs: list[list[int]], file: IO[bytes]) -> None:
        from hornito.quant.calibrate import calibrate
        from hornito.vk.device import open_device

        try:
            device = open_device(self._quantisation.device)
        except NoDeviceError as error:
            raise NoDeviceError(
                f"{error}. Four-bit weights are made with what a text makes of the model, on a "
                "device; --quant-samples 0 (samples=0) rounds by the weights alone"
            ) from error
        try:
            graph = model_graph(package)
            self.activations = calibrate(device, package, graph, runs, file, self._progress)
        finally:
            device.close()
        digest = hashlib.sha256(json.dumps(runs).encode()).hexdigest()
        self.record = {
            "samples": len(runs),
            "tokens": sum(len(run) for run in runs),
            "ids_sha256": digest,
        }
