"""Comparing two models' logits on the device, row by row, without bringing them to the host.

Five dispatches a group of rows: the partial records of each model (the head's own kernel), the
divergence of each run of ids, and one that ends a row. 32 bytes a row are read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hornito.errors import HornitoError
from hornito.ops.base import RUN, Dispatch, Operand, Push, ceil_div
from hornito.ops.head import PARTIAL_PUSH
from hornito.plan.hazards import barriers
from hornito.plan.plan import LOGITS_ROWS, Program
from hornito.plan.recording import Pipelines, record
from hornito.runtime.engine import Engine
from hornito.runtime.logit_rows import LogitRows
from hornito.vk.memory import Arena
from hornito.vk.record import Recorder

DIVERGENCE_PUSH = Push(
    "reference:u64 logits:u64 reference_partial:u64 partial:u64 result:u64 call:u64 "
    "live_word:u32 width:u32 runs:u32"
)
ROWS_PUSH = Push(
    "reference_partial:u64 partial:u64 reference_given:u64 given:u64 divergence:u64 result:u64 "
    "call:u64 live_word:u32 runs:u32"
)
RESULT_WORDS = 8


class RowComparison(NamedTuple):
    """One row: natural logarithms, and the most likely ids.

    Attributes:
        divergence: KL(reference || model), in nats.
        reference_logprob, logprob: of the text's next token.
        reference_id, id: the most likely next tokens, the lowest ids on ties.
    """

    divergence: float
    reference_logprob: float
    logprob: float
    reference_id: int
    id: int


@dataclass(frozen=True, slots=True)
class Operands:
    """What one comparison reads and writes; `logits` are `[S, V]` fp32."""

    reference: Operand
    logits: Operand
    call: Operand
    next_ids: Operand


def scratch_sizes(rows: int, vocabulary: int) -> list[tuple[str, int]]:
    """Bytes of what lies between the dispatches."""
    runs = ceil_div(vocabulary, RUN)
    return [
        ("quality.reference_partial", rows * runs * 16),
        ("quality.partial", rows * runs * 16),
        ("quality.reference_given", rows * 4),
        ("quality.given", rows * 4),
        ("quality.divergence", rows * runs * 4),
    ]


def comparison(operands: Operands, rows: int, vocabulary: int) -> list[Dispatch]:
    """The dispatches that compare up to `rows` rows; word 1 of the call header counts them."""
    runs = ceil_div(vocabulary, RUN)
    scratch = {name: Operand(name, 0, size) for name, size in scratch_sizes(rows, vocabulary)}
    partials = [scratch["quality.reference_partial"], scratch["quality.partial"]]
    givens = [scratch["quality.reference_given"], scratch["quality.given"]]
    divergence = scratch["quality.divergence"]
    result = Operand("quality.result", 0, rows * RESULT_WORDS * 4)
    call, both = operands.call, (operands.reference, operands.logits)
    found = [
        Dispatch(
            "head/partial.default",
            PARTIAL_PUSH,
            (logits, operands.next_ids, partial, given, call, 1, vocabulary, 0, runs, 0),
            (runs, rows, 1),
            (logits, operands.next_ids, call),
            (partial, given),
            "quality",
            {0: 1},
        )
        for logits, partial, given in zip(both, partials, givens, strict=True)
    ]
    found.append(
        Dispatch(
            "quality/divergence.default",
            DIVERGENCE_PUSH,
            (*both, *partials, divergence, call, 1, vocabulary, runs),
            (runs, rows, 1),
            (*both, *partials, call),
            (divergence,),
            "quality",
        )
    )
    found.append(
        Dispatch(
            "quality/rows.default",
            ROWS_PUSH,
            (*partials, *givens, divergence, result, call, 1, runs),
            (rows, 1, 1),
            (*partials, *givens, divergence, call),
            (result,),
            "quality",
        )
    )
    return found


class Comparer:
    """Compares the logits of two engines on one device; ended by `close()` or `with`.

    Raises:
        HornitoError: the engines are on different devices, or their vocabularies differ.
    """

    def __init__(self, reference: Engine, model: Engine) -> None:
        if reference.device is not model.device or reference.vocabulary != model.vocabulary:
            raise HornitoError("two engines are compared on one device, with one vocabulary")
        self.reference = reference
        self.model = model
        device = reference.device
        self._pipelines = Pipelines(device)
        self._recordings: dict[tuple[str, int], list[Recorder]] = {}
        self._arenas: list[Arena] = []
        size = LOGITS_ROWS * RESULT_WORDS * 4
        try:
            items = scratch_sizes(LOGITS_ROWS, reference.vocabulary)
            self._arenas.append(Arena(device, "quality", items))
            self._arenas.append(Arena(device, "quality", [("quality.result", size)], kind="host"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Comparer:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def compare(
        self, reference: LogitRows, model: LogitRows, next_ids: Sequence[int]
    ) -> list[RowComparison]:
        """Compare the rows that both engines have just computed.

        Args:
            next_ids: the token of the text behind each row.

        Raises:
            HornitoError: a row holds a NaN or an infinity; names the model.
        """
        kind, rows, count = reference.kind, reference.rows, reference.count
        if (model.kind, model.rows, model.count) != (kind, rows, count) or count != len(next_ids):
            raise ValueError(f"{reference} and {model} with {len(next_ids)} ids are not one call")
        given = np.asarray(next_ids, np.uint32).tobytes()
        engine = self.reference
        ticket = engine.submit([(f"{kind}.next_ids", 0, given)], self._recording(reference, model))
        engine.wait(ticket)
        words = self._result(count)
        numbers = words.view(np.float32)
        for column, who in ((1, "the reference"), (2, "the model")):
            if not np.isfinite(numbers[:, column]).all():
                raise HornitoError(
                    f"the logits of {who} are not finite: a value overflowed or the weights are "
                    "damaged; run `hornito verify` on the package"
                )
        return [
            RowComparison(float(n[0]), float(n[1]), float(n[2]), int(w[3]), int(w[4]))
            for n, w in zip(numbers, words, strict=True)
        ]

    def _result(self, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
        buffer, offset = self._arenas[1]["quality.result"]
        view = buffer.view
        if view is None:
            raise HornitoError("the buffer of results is not visible to the host")
        size = count * RESULT_WORDS * 4
        found = np.frombuffer(view[offset : offset + size], np.uint32).copy()
        return found.reshape(count, RESULT_WORDS)

    def _recording(self, reference: LogitRows, model: LogitRows) -> list[Recorder]:
        kind, rows = reference.kind, reference.rows
        if (kind, rows) not in self._recordings:
            engine = self.reference
            most = engine.plan.buckets[kind, rows].selected["logits"]
            size = most * engine.vocabulary * 4
            call, next_ids = Operand("call", 0, 16), Operand("next_ids", 0, most * 4)
            mine = Operand("quality.logits", 0, size)
            theirs = Operand("quality.reference", 0, size)
            addresses = {
                mine.name: model.address,
                theirs.name: reference.address,
                call.name: engine.address(kind, call),
                next_ids.name: engine.address(kind, next_ids),
            }
            for arena in self._arenas:
                addresses |= {name: arena.address(name) for name in arena}
            found = comparison(Operands(theirs, mine, call, next_ids), most, engine.vocabulary)
            program = Program(tuple(found), barriers(found, _place))
            self._recordings[kind, rows] = record(
                engine.device,
                self._pipelines,
                program,
                lambda operand: addresses[operand.name] + operand.offset,
                f"quality.{kind}{rows}",
            )
        return self._recordings[kind, rows]

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        for recorders in self._recordings.values():
            for recorder in recorders:
                recorder.free()
        self._recordings.clear()
        while self._arenas:
            self._arenas.pop().free()


def _place(operand: Operand) -> tuple[str, int, int]:
    return operand.name, operand.offset, operand.offset + operand.size
