"""`hornito.load`: from a model on disk to a model on a device."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hornito.api import LLM
from hornito.arguments import token_ids, whole
from hornito.cache import resolve_model
from hornito.compiler import compile_cached
from hornito.errors import UsageError
from hornito.package import Package, is_package, open_package
from hornito.precision import KV_TYPES, PRECISIONS, default_kv
from hornito.progress import Progress
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device, open_device
from hornito.vk.quirks import FEATURES

TUNE = ("off", "fast", "full")


def load(
    model: str | os.PathLike[str],
    *,
    device: str | int | None = None,
    context: int | None = None,
    precision: str = "normal",
    kv: str | None = None,
    weights: str | None = None,
    slots: int = 1,
    kv_bytes: int | None = None,
    rewind_budget: int = 64,
    verify: bool = False,
    tune: str | None = None,
    submission_ms: float | None = None,
    recover: bool = False,
    disable_features: Sequence[str] = (),
    fp32_tensors: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a model onto a Vulkan device; docs/api.md says more of each argument.

    Args:
        model: a `.vxm` package, or a GGUF file or Hugging Face directory, which is compiled once
            into the cache; or the name of a cached model (`hornito list`).
        device: index, part of the name, vendor, `pci:...`, UUID or `software`; the best by default.
        context: positions per session; by default the model's, shortened to what fits.
        precision: `high` keeps everything in fp32; `normal` may use fp16 operands in products;
            `low` also stores values in fp16 between ops.
        kv: KV cache type, `fp32` or `fp16`; by default fp32 with `high`, else fp16.
        weights: how matrices are stored when `model` is a source, as `compile_source` takes it.
        slots: sessions that may be open at once.
        kv_bytes: size of the KV pools; by default every slot can fill its context.
        rewind_budget: positions that sliding layers keep beyond their window.
        verify: check every tensor of the package against its sha256 first, which reads all of it.
        tune: measure kernels first: `fast` what never was, `full` all; `off` takes the defaults.
        submission_ms: most GPU time of one submission in milliseconds (200; discrete: no bound).
        recover: after a loss of the device open it again and go on, instead of DeviceLostError.
        disable_features: `float16`, `dot_product`, `cooperative_matrix`, `subgroups`.
        fp32_tensors: patterns (`*`, `?`) of what keeps fp32 operands with `normal`.
        eos_ids: ids that end an answer; by default the model's own.
        progress: told about compiling, pipelines and weights.

    Raises:
        UsageError, UnsupportedError, PackageError: the model or an argument is wrong.
        NoDeviceError, DeviceMemoryError: there is no device, or it is too small.
    """
    _check_choices(precision, kv, tune, disable_features, submission_ms)
    slots = whole("slots", slots, 1)
    context = None if context is None else whole("context", context, 1)
    kv_bytes = None if kv_bytes is None else whole("kv_bytes", kv_bytes, 1)
    rewind_budget = whole("rewind_budget", rewind_budget, 0)
    ends = None if eos_ids is None else token_ids("eos_ids", eos_ids)
    package = open_model(model, weights, progress, device)
    opened = _open_for(package, device, disable_features, progress, verify=verify)
    return LLM(
        package,
        opened,
        context=context,
        precision=precision,
        kv_half=(kv or default_kv(precision)) == "fp16",
        slots=slots,
        kv_bytes=kv_bytes,
        rewind_budget=rewind_budget,
        progress=progress,
        policy=KernelPolicy(tune=tune),
        submission_ms=submission_ms,
        recover=recover,
        fp32_tensors=fp32_tensors,
        eos_ids=ends,
    )


def _check_choices(
    precision: str,
    kv: str | None,
    tune: str | None,
    disable_features: Sequence[str],
    submission_ms: float | None,
) -> None:
    _one_of("precision", precision, PRECISIONS)
    if kv is not None:
        _one_of("kv", kv, KV_TYPES)
    if tune is not None:
        _one_of("tune", tune, TUNE)
    for feature in disable_features:
        _one_of("disable_features", feature, FEATURES)
    if submission_ms is not None and not submission_ms > 0:
        raise UsageError(f"submission_ms must be above 0, not {submission_ms}")


def _open_for(
    package: Package,
    device: str | int | None,
    disable_features: Sequence[str],
    progress: Progress | None,
    *,
    verify: bool,
) -> Device:
    """The device of a package, which is verified first where that is wanted, closed on errors."""
    try:
        if verify:
            package.check(progress)
        return open_device(device, disable_features=disable_features)
    except BaseException:
        package.close()
        raise


def open_model(
    model: str | os.PathLike[str],
    weights: str | None,
    progress: Progress | None,
    device: str | int | None = None,
) -> Package:
    """The package of a model, compiled into the cache where it is a source (4-bit weights with the
    help of the device).

    Raises:
        UsageError: it is a package whose weights are stored in another type.
    """
    path = resolve_model(model, weights)
    if is_package(path):
        package = open_package(path)
        stored = package.manifest.quant.get("weights")
        if weights is not None and weights != stored:
            package.close()
            raise UsageError(
                f"{model} holds {stored} weights; compile its source again for {weights}"
            )
        return package
    return open_package(compile_cached(path, weights, progress, device))


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
