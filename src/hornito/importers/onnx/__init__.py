"""ONNX decoders: exports of optimum, of torch's dynamo, of ONNX Runtime GenAI and others.

The file is evaluated once over symbols (`lift`), raised to Hornito's ops by small matchers
(`match`), and given the names that the model builders use (`naming`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hornito.errors import UnsupportedError
from hornito.importers.onnx.blocks import kept_and_lost
from hornito.importers.onnx.embedding import with_embedding
from hornito.importers.onnx.facts import completed, described, model_type, restore
from hornito.importers.onnx.finish import Lifted, finish
from hornito.importers.onnx.folder import (
    Place,
    find_model,
    genai_config,
    has_onnx,
    json_object,
    with_genai,
)
from hornito.importers.onnx.lift import Lift
from hornito.importers.onnx.reader import Model, read_model
from hornito.importers.onnx.roles import find_roles
from hornito.importers.safetensors import folder_texts
from hornito.importers.source import Source
from hornito.progress import NullProgress, Progress
from hornito.support import UnsupportedNodesError

__all__ = ["UnsupportedNodesError", "has_onnx", "lift_file", "open_onnx"]


def lift_file(
    path: Path, progress: Progress, *, allow_no_past: bool = False
) -> tuple[Model, Lift, Lifted]:
    """Read one file and raise the decoder in it.

    Raises:
        UsageError: the `onnx` package is missing.
        FormatError: the file is malformed.
        UnsupportedError: it is no decoder with a past, or nodes have no counterpart.
    """
    model = with_embedding(read_model(path))
    cx = Lift(model, find_roles(model, allow_no_past=allow_no_past))
    progress.start(f"reading {path.name}", len(model.nodes))
    try:
        cx.run(progress)
        return model, cx, finish(cx)
    finally:
        progress.finish()


def _lift_place(place: Place, progress: Progress) -> tuple[Model, Lift, Lifted]:
    """The decoder of a directory; of a pair, the twin when the one with past is not usable."""
    try:
        return lift_file(place.model, progress)
    except UnsupportedError:
        if place.twin is None:
            raise
        model, cx, lifted = lift_file(place.twin, progress, allow_no_past=True)
        lifted.warnings.append(
            f"{place.model.name} is right for single steps only; {place.twin.name} was taken, "
            "which is the same decoder"
        )
        return model, cx, lifted


def open_onnx(path: Path, progress: Progress | None = None) -> Source:
    """Open an ONNX file, or a directory that holds one, as a source with a graph of its own.

    Config, generation config and tokenizer are taken from the directory.

    Raises:
        UsageError: the `onnx` package is missing.
        FormatError: the file is malformed; names the file and tensor or node.
        UnsupportedError: not a decoder that Hornito can run; names every node at fault.
    """
    place = find_model(path)
    model, cx, lifted = _lift_place(place, progress or NullProgress())
    folder = place.folder
    raw = with_genai(json_object(folder / "config.json"), genai_config(folder))
    if isinstance(raw.get("text_config"), dict) and "hidden_size" not in raw:
        raw = {**raw, **raw["text_config"]}
    config: dict[str, Any] = completed(raw, folder, len(lifted.attentions()))
    restored = restore(lifted, config)
    config = described(lifted, cx, config)
    texts = folder_texts(folder, config)
    names = [
        name
        for name, value in model.constants.items()
        if (value.size > 1 and value.array.dtype.kind in "fu") or value.bf16
    ]
    dag, labels = lifted.dag, lifted.names.weights
    stored, lost = kept_and_lost({labels[n]: d for n, d in dag.weights.items() if n in labels})
    if lost:
        lifted.warnings.append(
            f"{len(lost)} quantised matrices are dequantised, as their scales are no fp16 numbers "
            f"or their blocks no runs of 32 along the rows: {', '.join(lost[:4])}"
            + (", ..." if len(lost) > 4 else "")
        )
    known = raw.get("model_type")
    title = raw.get("_name_or_path") or folder.resolve().name or model.path.stem
    licence = raw.get("license")
    return Source(
        model_type=known if isinstance(known, str) else model_type(lifted),
        config=config,
        tensors={},
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        generation_config=texts.generation_config,
        eos_ids=texts.eos_ids,
        bos_id=texts.bos_id,
        add_bos=texts.add_bos,
        format="onnx",
        path=str(path),
        name=title if isinstance(title, str) else None,
        licence=licence if isinstance(licence, str) else None,
        file_tensor_names=tuple(names),
        warnings=[*texts.warnings, *lifted.warnings, *restored],
        token_strings=texts.token_strings,
        builder=lifted.build,
        nodes=lifted.source_nodes(model.source_nodes),
        patterns=lifted.patterns,
        stored=stored,
    )
