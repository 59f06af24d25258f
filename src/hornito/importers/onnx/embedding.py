"""Decoders whose input is embeddings: their table lies in a file of its own, `embed_tokens.onnx`,
so that other embeddings (of images) can be put among those of tokens. Both become one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hornito.errors import UnsupportedError
from hornito.importers.onnx.folder import PREFERRED, genai_embedding
from hornito.importers.onnx.reader import Branch, Model, OpNode, read_model, sorted_nodes
from hornito.importers.onnx.roles import EMBEDS, IDS

NAME = "embed_tokens"


def with_embedding(model: Model) -> Model:
    """The model, with the file of its embedding in front when it takes embeddings.

    Raises:
        UnsupportedError: that file is missing, or holds more than an embedding of tokens.
    """
    if IDS in model.inputs or EMBEDS not in model.inputs:
        return model
    path = _file(model.path)
    table = read_model(path)
    if list(table.inputs) != [IDS] or len(table.outputs) != 1:
        raise UnsupportedError(
            f"{path}: an embedding of tokens takes {IDS} and gives one output; this one takes "
            f"{', '.join(table.inputs) or 'nothing'} and gives {', '.join(table.outputs)}"
        )
    prefix = f"{path.name}/"
    kept = {IDS: IDS, table.outputs[0]: EMBEDS, "": ""}
    nodes = [_renamed(path, node, prefix, kept) for node in table.nodes]
    constants = {prefix + name: value for name, value in table.constants.items()}
    known = {*model.inputs, *model.constants, *constants, IDS} - {EMBEDS}
    return replace(
        model,
        nodes=sorted_nodes(model.path, [*nodes, *model.nodes], known),
        constants={**constants, **model.constants},
        inputs={**table.inputs, **{n: d for n, d in model.inputs.items() if n != EMBEDS}},
        files=model.files | table.files | {path.name},
        source_nodes=[*((prefix + n, op) for n, op in table.source_nodes), *model.source_nodes],
    )


def _file(model: Path) -> Path:
    """The embedding's file: as genai_config.json says, else of the name that exporters give it."""
    named = genai_embedding(model.parent)
    stems = [Path(name).stem for name in PREFERRED]
    variant = next((model.stem.removeprefix(s) for s in stems if model.stem.startswith(s)), "")
    places = [model.with_name(f"{NAME}{variant}.onnx"), model.with_name(f"{NAME}.onnx")]
    for place in ([named] if named else []) + places:
        if place.is_file():
            return place
    raise UnsupportedError(
        f"{model}: it takes {EMBEDS} instead of {IDS}, and the file of its embedding is not beside "
        f"it: {' or '.join(dict.fromkeys(p.name for p in places))}. Export it, too, or export the "
        f"decoder with its embedding ({IDS})"
    )


def _renamed(path: Path, node: OpNode, prefix: str, kept: dict[str, str]) -> OpNode:
    """A node whose values and name can't be taken for the decoder's."""
    if any(isinstance(value, Branch) for value in node.attrs.values()):
        raise UnsupportedError(f"{path}: node {node.name}: an embedding with branches")
    return replace(
        node,
        name=prefix + node.name,
        source=prefix + node.source,
        inputs=tuple(kept.get(name, prefix + name) for name in node.inputs),
        outputs=tuple(kept.get(name, prefix + name) for name in node.outputs),
    )
