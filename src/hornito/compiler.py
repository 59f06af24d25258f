"""Compiling: a checkpoint becomes a graph, the graph a package."""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hornito.cache import DEFAULT as DEFAULT
from hornito.cache import models_directory, note_use, prepare_models_directory
from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.graph.checks import DTYPES
from hornito.graph.graph import Graph, Weight
from hornito.graph.passes import PassReport, run_passes
from hornito.graph.storage import KEEP, Storage, assign_formats, format_counts
from hornito.importers import Source, open_source
from hornito.ops.base import BLOCK_POSITIONS, head_ids
from hornito.ops.rope import original_max
from hornito.package import check_target, is_package, open_package, write_package
from hornito.package.reader import Package
from hornito.package.writer import TensorData
from hornito.parallel import Workers
from hornito.plan.plan import kv_kinds, weight_sizes
from hornito.progress import NullProgress, Progress
from hornito.provenance import remember_source, source_files, source_hash
from hornito.quant.choice import DEFAULT_QUANTISATION, Quantisation
from hornito.quant.formats import weight_format
from hornito.quant.ggml import is_quantised
from hornito.quant.storage import PackedData, pack
from hornito.rounding import rounded, storage_of
from hornito.support import support_report

DEFAULT_WEIGHTS = "fp16"
_CACHED_NAME_BYTES = 160


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What was compiled into what.

    Attributes:
        path, bytes: the package.
        tensors_in_file, tensors_used: of the source.
        nodes: of the graph after passes; every one has a kernel.
        nodes_before: of the graph as imported.
        passes: per pass, how many matches (None: switched off).
        seconds: wall time.
        warnings: what the user should know.
        support: the support report, node by node.
    """

    path: str
    bytes: int
    tensors_in_file: int
    tensors_used: int
    nodes: int
    nodes_before: int
    passes: dict[str, int | None]
    seconds: float
    warnings: list[str]
    support: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def build_graph(
    source: Source, weights: str | Storage, disabled_passes: Collection[str] = ()
) -> tuple[Graph, int, list[PassReport]]:
    """The graph of a source after passes, the node count before, and what the passes did.

    What the user should know of the storage types is added to the source's warnings.

    Raises:
        UsageError: an unknown weight type or pass.
        UnsupportedError: the model has something that Hornito does not run.
    """
    storage = Storage(weights) if isinstance(weights, str) else weights
    graph: Graph
    if source.builder is not None:
        graph = source.builder("fp32")
    else:
        module = importlib.import_module(f"hornito.models.{source.model_type}")
        graph = module.build(source.config, source.tensors, "fp32")
    source.warnings += assign_formats(graph, storage)
    graph.check()
    before = len(graph.nodes)
    reports = run_passes(graph, disabled_passes)
    return graph, before, reports


def compile_source(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    weights: str | None = None,
    quantisation: Quantisation = DEFAULT_QUANTISATION,
    disabled_passes: Collection[str] = (),
    progress: Progress | None = None,
) -> CompileReport:
    """Compile a checkpoint into a package. A device is needed for `int4` and `int4m` weights alone,
    and not for them when `quantisation` says 0 samples.

    Args:
        src: a GGUF file, a Hugging Face directory, an ONNX decoder (file or directory), or a
            package, whose matrices are stored anew.
        out: the package to write; a package of that name is replaced, no other file is.
        weights: how matrices are stored: `fp32`, `fp16`, `bf16`, `int8`, `int4`, `int4m`, or `keep`
            (as the source holds them); None is `keep` for a source with quantised tensors, else
            `fp16`. Vectors stay fp32.
        quantisation: how they are rounded to `int8`, `int4` and `int4m`.
        disabled_passes: graph passes to leave out, by name.
        progress: told about the bytes written.

    Raises:
        UsageError: `out` can't be written, or is a file that is no package.
        UsageError, UnsupportedError, FormatError: the source can't be compiled, and why.
        NoDeviceError: one is needed.
    """
    began = time.monotonic()
    progress = progress or NullProgress()
    check_target(out)
    if is_package(src):
        return _recompile(src, out, weights, quantisation, progress, began)
    source = open_source(src, progress=progress)
    storage = storage_of(weights or default_weights(source), quantisation)
    graph, before, passes = build_graph(source, storage, disabled_passes)
    used = _tensors_used(graph)
    left = sorted(set(source.tensors) - used)
    if left:
        raise UnsupportedError(
            f"{source.path}: {len(left)} tensors would be left out of the graph: "
            + ", ".join(left[:8])
        )

    origin = _provenance(source)  # reads all of it, once

    def plain(folder: Path) -> Path:
        """The same graph in fp16, for calibration."""
        said = list(source.warnings)
        twin, nodes, reports = build_graph(source, "fp16", disabled_passes)
        source.warnings[:] = said
        path = folder / "plain.vxm"
        write_graph(path, source, twin, "fp16", nodes, reports, progress, origin=origin)
        return path

    with rounded(graph, storage, quantisation, plain, Path(out), progress) as rounding:
        source.warnings += rounding.warnings
        size = write_graph(
            out,
            source,
            graph,
            storage.weights,
            before,
            passes,
            progress,
            rounding.record,
            origin=origin,
        )
    progress.finish()
    return CompileReport(
        path=str(out),
        bytes=size,
        tensors_in_file=len(source.file_tensor_names),
        tensors_used=len(used),
        nodes=len(graph.nodes),
        nodes_before=before,
        passes=_counts(passes),
        seconds=time.monotonic() - began,
        warnings=list(source.warnings),
        support=_support(graph, source, before, _counts(passes)),
    )


def source_support(src: str | os.PathLike[str]) -> dict[str, Any]:
    """The support report of a checkpoint; nothing is written and no weight is read.

    Raises:
        UsageError, UnsupportedError, FormatError: the source can't be compiled, and why.
    """
    source = open_source(src)
    graph, before, passes = build_graph(source, default_weights(source))
    return _support(graph, source, before, _counts(passes))


def write_graph(
    out: str | os.PathLike[str],
    source: Source,
    graph: Graph,
    weights: str,
    nodes_before: int,
    passes: Sequence[PassReport],
    progress: Progress | None = None,
    rounding: Mapping[str, Any] | None = None,
    *,
    origin: dict[str, Any] | None = None,
) -> int:
    """Write the package of a graph after passes, and return its size in bytes.

    Args:
        rounding: what the manifest says of how matrices were rounded.
        origin: what it says of the source; None to find out, which reads the source for its hash.
    """
    blobs = {}
    if source.tokenizer_json is not None:
        blobs["tokenizer.json"] = source.tokenizer_json
    if source.chat_template is not None:
        blobs["chat_template.jinja"] = source.chat_template.encode()
    with Workers() as workers:
        return write_package(
            out,
            graph.to_json(),
            model_facts(source, graph),
            [_tensor(name, weight, workers) for name, weight in graph.weights.items()],
            blobs,
            source.generation_config,
            _quant_record(graph, weights, rounding),
            _support(graph, source, nodes_before, _counts(passes)),
            _provenance(source) if origin is None else origin,
            progress,
        )


def _quant_record(graph: Graph, weights: str, rounding: Mapping[str, Any] | None) -> dict[str, Any]:
    record: dict[str, Any] = {"weights": weights, "formats": format_counts(graph)}
    return {**record, "rounding": dict(rounding)} if rounding else record


def compile_cached(
    src: str | os.PathLike[str],
    weights: str | None,
    progress: Progress | None = None,
    device: str | int | None = None,
) -> Path:
    """The package of a source in the cache, compiled when it is not there yet.

    The name holds the source's path, size and time, the weights (`default` for None) and Hornito's
    version. `device` is where 4-bit weights are calibrated.
    """
    import hornito

    path = Path(src).resolve()
    folder = path.is_dir()
    label = weights or DEFAULT
    facts = [str(path), label, hornito.__version__]
    for file in source_files(path):
        stat = file.stat()
        facts += [file.name, str(stat.st_size), str(stat.st_mtime_ns)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    name = path.name if folder else path.stem
    # A file system takes names of 255 bytes; the digest tells cut ones apart.
    name = os.fsencode(name)[:_CACHED_NAME_BYTES].decode(errors="ignore")
    out = models_directory() / f"{name}-{label}-{digest}.vxm"
    if not os.path.exists(out):
        prepare_models_directory()
        compile_source(
            path, out, weights=weights, quantisation=Quantisation(device=device), progress=progress
        )
    note_use(out, path)
    return out


def model_facts(source: Source, graph: Graph) -> dict[str, Any]:
    """What the manifest says about the model."""
    attention = [node for node in graph if node.op == "attention"]
    first = attention[0]
    vocabulary = head_ids(graph)
    if source.add_bos and source.bos_id is not None and source.bos_id >= vocabulary:
        raise FormatError(
            f"{source.path}: its tokenizer starts every text with token {source.bos_id}, but the "
            f"model has {vocabulary} tokens: these tokenizer files are not the model's"
        )
    return {
        "model_type": source.model_type,
        "name": source.name,
        "layers": len(attention),
        "heads": first.attr("heads"),
        "kv_heads": first.attr("kv_heads"),
        "head_dim": first.attr("head_dim"),
        "hidden_size": source.config["hidden_size"],
        "vocab_size": source.config["vocab_size"],
        "context_length": source.config["max_position_embeddings"],
        "rope_theta": source.config.get("rope_theta"),
        "rope_scaling": source.config.get("rope_scaling"),
        "rope_short_up_to": original_max(graph),
        "windows": sorted({node.attr("window") for node in attention}),
        "tied_head": bool(source.config["tie_word_embeddings"]),
        # A model can't choose an id that its head lacks.
        "eos_ids": [token for token in source.eos_ids if token < vocabulary],
        "bos_id": source.bos_id,
        "add_bos": source.add_bos,
        "token_strings": source.token_strings,
    }


def default_weights(source: Source) -> str:
    """How matrices are stored when the user does not say: `keep` where some are quantised."""
    kinds = {tensor.dtype for tensor in source.tensors.values()} | source.stored
    return KEEP if any(is_quantised(kind) for kind in kinds) else DEFAULT_WEIGHTS


def _tensor(
    name: str, weight: Weight, workers: Workers | None = None
) -> tuple[str, str, tuple[int, ...], TensorData]:
    """A weight as the writer takes it; a quantised one is plain bytes there."""
    data, stored = weight.data, weight_format(weight.dtype)
    if data is None:
        raise UsageError("a graph without weight data can't be written")
    try:
        size = stored.nbytes(weight.shape)
    except FormatError as error:
        raise FormatError(f"weight {name}: {error}") from error
    shape = (size,) if stored.quantised else weight.shape
    pieces = partial(pack, stored, data, workers)
    return name, DTYPES.get(stored.name, "U8"), shape, pieces


def _recompile(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    given_weights: str | None,
    quantisation: Quantisation,
    progress: Progress,
    began: float,
) -> CompileReport:
    """Store the matrices of a package anew; graph, files and facts stay.

    No matrix is given more bits than the package has for it.
    """
    weights = given_weights or DEFAULT_WEIGHTS
    storage = storage_of(weights, quantisation)
    if weights == KEEP:
        raise UsageError(f"{src} is a package: `keep` would copy it; name a storage type")
    with open_package(src) as package:
        manifest = package.manifest
        graph = Graph.from_json(manifest.graph)
        for name, weight in graph.weights.items():
            stored = weight_format(weight.dtype)
            data = PackedData(name, weight.shape, stored, partial(package.tensor, name))
            graph.weights[name] = replace(weight, data=data)
        before = manifest.quant.get("weights")
        stored_before = {name: weight.dtype for name, weight in graph.weights.items()}
        warnings = assign_formats(graph, storage)
        warnings += _without_gain(
            graph, stored_before, package, weights, asked=given_weights is not None
        )
        given = Path(src)
        with rounded(graph, storage, quantisation, lambda _: given, Path(out), progress) as done:
            warnings += done.warnings
            record = {**_quant_record(graph, weights, done.record), "from": before}
            size = write_package(
                out,
                graph.to_json(),
                manifest.facts,
                [_tensor(name, weight) for name, weight in graph.weights.items()],
                {name: package.blob(name) for name in package.blobs},
                manifest.generation,
                record,
                manifest.support,
                manifest.source,
                progress,
            )
        progress.finish()
        return CompileReport(
            path=str(out),
            bytes=size,
            tensors_in_file=len(package.tensors),
            tensors_used=len(graph.weights),
            nodes=len(graph.nodes),
            nodes_before=len(graph.nodes),
            passes={},
            seconds=time.monotonic() - began,
            warnings=warnings,
            support=manifest.support,
        )


def _without_gain(
    graph: Graph, before: Mapping[str, str], package: Package, weights: str, *, asked: bool
) -> list[str]:
    """Leave every matrix as the package has it that would not get smaller, and say so.

    Args:
        asked: whether the user named `weights`, which else are the default.

    Raises:
        UsageError: none would: the package has no more precision than it has.
    """
    left, changed = [], 0
    for name, weight in graph.weights.items():
        stored, wanted = weight_format(before[name]), weight_format(weight.dtype)
        if not weight.matrix or stored == wanted:
            continue
        if wanted.nbytes(weight.shape) >= stored.nbytes(weight.shape) and not (
            not stored.quantised and not wanted.quantised and stored.bits == wanted.bits
        ):
            graph.weights[name] = replace(weight, dtype=stored.name)
            left.append(name)
        else:
            changed += 1
    if not changed:
        smaller = ", ".join(_smaller_types(package)) or "none"
        if not asked:
            raise UsageError(
                f"{package.path} is a package, whose matrices are stored as {weights} unless "
                f"another type is asked for, but they have no more bits than {weights}. Types with "
                f"fewer: {smaller} (--weights TYPE); or compile the model's source"
            )
        raise UsageError(
            f"{package.path} holds {package.manifest.quant.get('weights')} weights, in no more "
            f"bits than {weights} has: {weights} would claim precision that is lost. Types with "
            f"fewer: {smaller}; or compile the model's source instead"
        )
    if not left:
        return []
    return [
        f"{len(left)} matrices stay as the package has them, in no more bits: "
        + ", ".join(left[:4])
        + (", ..." if len(left) > 4 else "")
    ]


def _smaller_types(package: Package) -> list[str]:
    """Names of storage types that take fewer bytes for some matrix than the package does."""
    found = []
    for name in ("bf16", "int8", "int4", "int4m"):
        graph = Graph.from_json(package.manifest.graph)
        before = {key: weight.dtype for key, weight in graph.weights.items()}
        assign_formats(graph, Storage(name))
        if any(
            weight.matrix
            and weight_format(weight.dtype).nbytes(weight.shape)
            < weight_format(before[key]).nbytes(weight.shape)
            for key, weight in graph.weights.items()
        ):
            found.append(name)
    return found


def _tensors_used(graph: Graph) -> set[str]:
    """Source tensors that some weight of the graph was made from."""
    return {
        name
        for weight in graph.weights.values()
        if weight.data is not None
        for name in weight.data.source_names
    }


def _counts(passes: Sequence[PassReport]) -> dict[str, int | None]:
    """Matches of each pass; None when it was switched off."""
    return {r.name: None if r.matched is None else len(r.matched) for r in passes}


def _support(
    graph: Graph, source: Source, before: int, passes: dict[str, int | None]
) -> dict[str, Any]:
    """The support report, with what was done with the tensors."""
    return {
        **support_report(
            graph, source.nodes, before=before, passes=passes, patterns=source.patterns
        ),
        "tensors_in_file": len(source.file_tensor_names),
        "tensors_used": len(_tensors_used(graph)),
        "memory": memory_facts(graph),
        "warnings": list(source.warnings),
    }


def memory_facts(graph: Graph) -> dict[str, Any]:
    """Bytes on a device that do not depend on it: weights, and KV by kind of layer. A kind with a
    window keeps about so many positions, whatever the context."""
    return {
        "weights": sum(weight_sizes(graph).values()),
        "kv": [
            {
                "layers": len(kind.layers),
                "window": kind.window,
                "bytes_per_position_fp16": kind.block_bytes // BLOCK_POSITIONS,
                "bytes_per_position_fp32": 2 * kind.block_bytes // BLOCK_POSITIONS,
            }
            for kind in kv_kinds(graph, half=True)
        ],
    }


def _provenance(source: Source) -> dict[str, Any]:
    path = Path(source.path)
    found = {
        "format": source.format,
        "file": path.name,
        "name": source.name,
        "licence": source.licence,
    }
    if path.exists():
        sha256 = source_hash(path)
        remember_source(sha256, path)
        found["sha256"] = sha256
    return found
