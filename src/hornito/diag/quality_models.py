"""From the names of models to their quality: finds packages and the reference, measures, stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hornito.cache import resolve_model
from hornito.compiler import compile_cached
from hornito.diag.quality import WINDOW, ModelQuality, Text, evaluate
from hornito.errors import UsageError
from hornito.package import is_package, open_package, store_quality
from hornito.progress import Progress
from hornito.provenance import find_source
from hornito.vk.device import open_device


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """How models are measured.

    Attributes:
        text: the file.
        window: tokens of a window.
        tokens: evaluate no more than this many from the start; None for all.
        precision, kv: of the models; the reference runs at `high` with fp32.
        device: as `hornito.load` takes it.
        store: write the figures into the packages.
    """

    text: str
    window: int = WINDOW
    tokens: int | None = None
    precision: str = "high"
    kv: str = "fp32"
    device: str | None = None
    store: bool = True


def measure_models(
    models: Sequence[str],
    reference: str | None,
    options: QualityOptions,
    progress: Progress,
    *,
    weights: str | None = None,
    verify: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> tuple[Text, list[ModelQuality], str]:
    """The quality of each model beside a reference, and the device in one line.

    Args:
        models: packages, sources, or names from the cache.
        reference: a package or source; by default the fp32 tier of the models' source.
        weights: how a source among the models is compiled.
        verify: check every byte of the packages first.
        note: called with a line that says how much there is to do, before it is begun.

    Raises:
        UsageError: a model has no reference, or can't be written.
        UnsupportedError, PackageError, FormatError, DeviceMemoryError: as for `hornito.load`.
    """
    paths = [package_of(name, weights, progress) for name in models]
    for path in paths:
        if options.store and not os.access(path.resolve().parent, os.W_OK):
            raise UsageError(f"{path} can't be written; --no-store only prints its quality")
        if verify:
            with open_package(path) as package:
                package.check(progress)
    base = _reference(models, paths, reference, progress)
    with open_device(options.device) as device:
        text, found = evaluate(
            device,
            base,
            list(zip(models, paths, strict=True)),
            options.text,
            window=options.window,
            tokens=options.tokens,
            precision=options.precision,
            kv=options.kv,
            progress=progress,
            note=note,
        )
        line = f"{device.info.name} ({device.info.kind}), {device.info.driver_name}"
    if options.store:
        for one in found:
            store_quality(one.path, one.label)
    return text, found, line


def package_of(model: str, weights: str | None, progress: Progress) -> Path:
    """The package that a MODEL argument means; a source is compiled into the cache.

    Raises:
        UsageError: there is no such model, or a package holds other weights.
    """
    path = resolve_model(model, weights)
    if not is_package(path):
        return compile_cached(path, weights, progress)
    if weights is not None:
        with open_package(path) as package:
            stored = package.manifest.quant.get("weights")
        if weights != stored:
            raise UsageError(
                f"{model} holds {stored} weights; compile its source again for {weights}"
            )
    return path


def _reference(
    models: Sequence[str], paths: Sequence[Path], given: str | None, progress: Progress
) -> Path:
    if given is not None:
        path = resolve_model(given, "fp32")
        return path if is_package(path) else compile_cached(path, "fp32", progress)
    found: dict[Path, str] = {}
    for name, path in zip(models, paths, strict=True):
        source = resolve_model(name)
        found[_source_of(path) if is_package(source) else source.resolve()] = name
    if len(found) > 1:
        raise UsageError(
            f"{' and '.join(found.values())} have different sources; name one reference with --ref"
        )
    return compile_cached(next(iter(found)), "fp32", progress)


def _source_of(path: Path) -> Path:
    with open_package(path) as package:
        source = package.manifest.source
    found = find_source(source, [path.resolve().parent, Path.cwd()])
    if found is None:
        name = source.get("file")
        raise UsageError(
            f"{path} is compared with the fp32 tier of its source"
            + (f" {name}, which is not on this machine any more, or has changed" if name else "")
            + "; name the source, or a package of it with fp32 weights, with --ref"
        )
    return found.resolve()
