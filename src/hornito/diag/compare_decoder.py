"""The sides of a decoder's comparison, and the one on the device, bucket by bucket.

A side gives every value of the graph at every position of a sequence, and what each layer's cache
holds there, as `NAME.keys` and `NAME.values` of its cache token NAME.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hornito.diag.compare_values import Trace
from hornito.errors import UsageError
from hornito.graph.graph import CACHE, FLOAT, Graph, Node
from hornito.graph.shapes import S
from hornito.ops.base import BLOCK_POSITIONS, ROW_IGNORE_EOS, ROW_LIVE, Array
from hornito.runtime.rows import RowUpdate, row_bytes, words
from hornito.runtime.session import Session

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine
    from hornito.runtime.kv_cache import SequenceBlocks


@dataclass(frozen=True, slots=True)
class Run:
    """A schedule: the bucket of the prompt's rows and that of the steps behind it.

    `prompt` and `step` are rows of a chunk bucket, 1 for the batch bucket of one row, 0 for what
    `Session` would take. With `batch` every token is a step of that batch bucket instead, in which
    each slot has the same sequence.
    """

    label: str
    prompt: int
    step: int
    batch: int = 0


class Side(Protocol):
    """One side of a comparison."""

    graph: Graph

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """The most likely tokens behind a prompt."""
        ...

    def trace(self, run: Run, ids: Sequence[int], prompt: int) -> Trace:
        """Every value along `ids`, the first `prompt` of which are the prompt."""
        ...


def value_names(graph: Graph) -> list[str]:
    """What a trace of the graph holds, in graph order."""
    names = []
    for node in graph:
        for name in node.outputs:
            cached = graph.values[name].dtype == CACHE
            names += [f"{name}.keys", f"{name}.values"] if cached else [name]
    return names


def makers(graph: Graph) -> dict[str, Node]:
    """The node that makes each value of `value_names`."""
    found: dict[str, Node] = {}
    for node in graph:
        for name in node.outputs:
            found |= {name: node, f"{name}.keys": node, f"{name}.values": node}
    return found


def joined(graph: Graph, reference: Graph) -> dict[str, tuple[str, ...]]:
    """Projections to q, k and v in one, by the pass `merge_qkv`: the value's name, and the names of
    the three in a reference that has them apart."""
    appends = {node.name: node for node in reference if node.op == "kv_append"}
    readers = {node.inputs[1]: node for node in reference if node.op == "attention"}
    makes = {name: node for node in reference for name in node.outputs}

    def projection(name: str) -> str:
        """What comes out of the projection, before norm and RoPE."""
        while name in makes and makes[name].op in ("rms_norm", "rope"):
            name = makes[name].inputs[0]
        return name

    found = {}
    for node in graph:
        append = appends.get(node.name) if node.op == "rope_append" else None
        if append is not None:
            q = readers[append.outputs[0]].inputs[0]
            found[node.inputs[0]] = (projection(q), *map(projection, append.inputs))
    return found


def with_joined(graph: Graph, reference: Graph, trace: Trace) -> Trace:
    """The reference's trace, with the results that `graph` has joined."""
    more = {
        name: np.concatenate([trace.values[part] for part in parts], axis=1)
        for name, parts in joined(graph, reference).items()
    }
    return replace(trace, values={**trace.values, **more})


class DeviceSide:
    """A model on the device, whose plan keeps every value (`PlanOptions.keep_values`).

    Args:
        engine: all of its slots are free.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.graph = engine.graph
        self._body: list[str] = []
        self._tail: list[str] = []
        for node in self.graph:
            for name in node.outputs:
                value = self.graph.values[name]
                if value.dtype == FLOAT:
                    (self._tail if value.shape[0] == S else self._body).append(name)
        self._layers = {
            name: node.attr("layer")
            for node in self.graph
            for name in node.outputs
            if self.graph.values[name].dtype == CACHE
        }

    def runs(self) -> list[Run]:
        """Every schedule there is: single steps, each chunk and batch bucket, and what a session
        does."""
        chunks = [rows for kind, rows in self.engine.plan.buckets if kind == "chunk"]
        batches = [rows for kind, rows in self.engine.plan.buckets if kind == "batch" and rows > 1]
        return [
            Run("step", 1, 1),
            *(Run(f"chunk {rows}", rows, rows) for rows in chunks),
            *(Run(f"batch {rows}", 1, 1, rows) for rows in batches),
            Run("prefill, step", 0, 1),
        ]

    def kernels_with_twins(self, run: Run) -> tuple[set[str], list[str]]:
        """Of the kernels that a plain twin can replace: those that a run launches, and all that the
        device offers it."""
        taken: set[str] = set()
        offered: dict[str, None] = {}
        for (kind, rows), bucket in self.engine.plan.buckets.items():
            if self._takes(run, kind, rows):
                for site in bucket.sites:
                    if any(variant.plain for variant in site.admitted):
                        twins = [v.kernel for v in site.admitted if not v.plain]
                        offered |= dict.fromkeys(twins)
                        taken |= {site.taken.kernel} & set(twins)
        return taken, list(offered)

    def _takes(self, run: Run, kind: str, rows: int) -> bool:
        """Whether a run may use a bucket."""
        if run.batch:
            return (kind, rows) == ("batch", run.batch)
        wanted = (run.prompt, run.step)
        if kind == "batch":
            return rows == 1 and bool({0, 1} & {*wanted})
        return 0 in wanted or rows in wanted

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """The most likely tokens behind a prompt."""
        found: list[int] = []
        with Session(self.engine) as session:
            session.prefill(prompt)
            while len(found) < steps and session.pending is not None:
                found.append(session.pending)
                if len(found) < steps:
                    session.step(found[-1])
        return found

    def trace(self, run: Run, ids: Sequence[int], prompt: int) -> Trace:
        """Every value along `ids`, the first `prompt` of which go through the prompt's bucket."""
        # What a kernel leaves unwritten shows as NaN.
        self.engine.poison_activations()
        pieces: list[dict[str, Array]] = []
        buckets: dict[tuple[str, int], None] = {}
        with ExitStack() as stack:
            count = min(run.batch, self.engine.options.slots) or 1
            sessions = [stack.enter_context(Session(self.engine)) for _ in range(count)]
            if run.batch:
                buckets["batch", run.batch] = None
                pieces = [self._together(sessions, token, run.batch) for token in ids]
            else:
                for start, stop, rows in self._calls(run, len(ids), prompt):
                    buckets["batch" if rows == 1 else "chunk", rows] = None
                    pieces.append(self._call(sessions[0], ids[start:stop], rows))
        values = {
            name: np.concatenate([piece[name] for piece in pieces])
            for name in value_names(self.graph)
        }
        return Trace(run.label, values, self._kernels(buckets))

    def _calls(self, run: Run, count: int, prompt: int) -> Iterator[tuple[int, int, int]]:
        """(first id, end, bucket rows) of each call; chunks end at multiples of their size."""
        buckets = sorted({1, *(rows for kind, rows in self.engine.plan.buckets if kind == "chunk")})
        for at, end, wanted in ((0, prompt, run.prompt), (prompt, count, run.step)):
            most = wanted or buckets[-1]
            while at < end:
                stop = min(end, (at // most + 1) * most)
                yield at, stop, wanted or next(r for r in buckets if r >= stop - at)
                at = stop

    def _call(self, session: Session, ids: Sequence[int], rows: int) -> dict[str, Array]:
        """Evaluate one call; its values and what it left in the caches, a row for each id."""
        start, live = session.position, len(ids)
        session.reserve(start + live)
        rows_of = [self._row(session, token, start + r) for r, token in enumerate(ids)]
        values = self._evaluate("batch" if rows == 1 else "chunk", rows, rows_of)
        session.ids += ids
        return values | self._cached(session, start, live)

    def _together(self, sessions: Sequence[Session], token: int, rows: int) -> dict[str, Array]:
        """A step of all sessions, which are at one position; the row of one of them, which is
        another at each position."""
        position = sessions[0].position
        for session in sessions:
            session.reserve(position + 1)
        values = self._evaluate(
            "batch", rows, [self._row(session, token, position) for session in sessions]
        )
        for session in sessions:
            session.ids.append(token)
        turn = position % len(sessions)
        own = {name: array[turn : turn + 1] for name, array in values.items()}
        return own | self._cached(sessions[turn], position, 1)

    def _row(self, session: Session, token: int, position: int) -> RowUpdate:
        flags = ROW_LIVE | ROW_IGNORE_EOS
        return RowUpdate(token, position, session.slot, flags, self.engine.context + 1, 0)

    def _evaluate(self, kind: str, rows: int, records: Sequence[RowUpdate]) -> dict[str, Array]:
        """Run body and logits of a bucket over some rows; every value, a row for each of them."""
        engine, live = self.engine, len(records)
        engine.claim_batch()
        changes = [
            (f"{kind}.rows", 0, row_bytes(records, rows)),
            (f"{kind}.call", 0, words(live, 0, 0, 0)),
        ]
        engine.wait(engine.submit(changes, engine.recording(kind, rows, "body")))
        values: dict[str, Array] = {n: engine.value(kind, rows, n, live) for n in self._body}
        selected = engine.plan.buckets[kind, rows].selected["logits"]
        tails = [
            self._selected(kind, rows, live, range(first, min(first + selected, live)))
            for first in range(0, live, selected)
        ]
        return values | {n: np.concatenate([tail[n] for tail in tails]) for n in self._tail}

    def _selected(self, kind: str, rows: int, live: int, picked: range) -> dict[str, Array]:
        """The values of the tail for some rows of the newest call."""
        engine = self.engine
        changes = [(f"{kind}.call", 0, words(live, len(picked), 0, 0))]
        if kind == "chunk":
            changes.append((f"{kind}.selection", 0, words(*picked)))
        engine.wait(engine.submit(changes, engine.recording(kind, rows, "logits")))
        return {name: engine.value(kind, rows, name, len(picked)) for name in self._tail}

    def _cached(self, session: Session, start: int, live: int) -> dict[str, Array]:
        """Keys and values `[live, kv_heads * head_dim]` of every layer at the newest positions."""
        return {
            f"{name}.{label}": rows
            for name, layer in self._layers.items()
            for label, rows in self._layer(session.blocks, layer, start, live).items()
        }

    def _layer(self, blocks: SequenceBlocks, layer: int, start: int, live: int) -> dict[str, Array]:
        engine = self.engine
        index, kind = next(
            (i, kind) for i, kind in enumerate(engine.plan.kinds) if layer in kind.layers
        )
        size = kind.block_bytes // len(kind.layers)
        dtype = np.float16 if kind.half else np.float32
        parts = []
        for at in range(start // BLOCK_POSITIONS, (start + live - 1) // BLOCK_POSITIONS + 1):
            block = blocks.of_kind(index)[at]
            if block is None:
                raise UsageError(f"layer {layer}: the cache of positions {at * 64}.. was freed")
            buffer, offset = engine.pools[index].place(block)
            offset += kind.layers.index(layer) * size
            data = np.frombuffer(engine.device.download(buffer, offset, size), dtype)
            shape = (2, kind.kv_heads, BLOCK_POSITIONS, kind.head_dim)
            parts.append(data.reshape(shape).astype(np.float32))
        whole = np.concatenate(parts, axis=2)  # [K V, kv_heads, positions, head_dim]
        first = start % BLOCK_POSITIONS
        rows = whole[:, :, first : first + live].transpose(0, 2, 1, 3).reshape(2, live, -1)
        return {"keys": rows[0], "values": rows[1]}

    def _kernels(self, buckets: Iterable[tuple[str, int]]) -> dict[str, tuple[str, ...]]:
        """The kernels of each node in some buckets."""
        found: dict[str, dict[str, None]] = {}
        for key in buckets:
            bucket = self.engine.plan.buckets[key]
            for program in (bucket.body, bucket.tails["logits"]):
                for dispatch in program.dispatches:
                    found.setdefault(dispatch.node, {})[dispatch.kernel] = None
        return {name: tuple(used) for name, used in found.items()}
