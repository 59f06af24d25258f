"""The stored weights of a model against those of another file of it, row by row.

Rounding moves every row a little, and values behind it far; a row that is another one, or a damaged
matrix, is far off in itself. So what the loose tolerance of values of rounded weights hides shows
here, with the name of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hornito.diag.compare_numpy import Floats, StoredWeights
from hornito.diag.compare_values import Difference
from hornito.quant.formats import weight_format

WEIGHTS = "weights"
"""The run of a difference between stored weights."""

ROW_TOLERANCE = ((24, 1e-3), (11, 5e-3), (8, 0.1), (0, 0.6))
"""Largest relative error of a row, by the least bits of a weight on either side; another row is off
by about 1.4."""

_CHUNK = 1 << 22


def weight_differences(model: StoredWeights, reference: StoredWeights) -> Iterator[Difference]:
    """Every weight that both sides have by name and shape; a row of a vector is all of it.

    Biases of rounded models are left out: they take back the mean error of their matrix.
    """
    for name, weight in model.graph.weights.items():
        other = reference.graph.weights.get(name)
        if other is None or other.shape != weight.shape:
            continue
        bits = min(weight_format(w.dtype).bits for w in (weight, other))
        if name.endswith("bias") and not _plain(model, reference):
            continue
        most = next(tolerance for least, tolerance in ROW_TOLERANCE if bits >= least)
        yield _measure(name, model.read(name), reference.read(name), most)


def _plain(*sides: StoredWeights) -> bool:
    """Whether no side has rounded matrices."""
    formats = {w.dtype for side in sides for w in side.graph.weights.values()}
    return not any(weight_format(name).quantised for name in formats)


def _measure(name: str, got: Floats, want: Floats, most: float) -> Difference:
    a, b = (x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1) for x in (got, want))
    step = max(1, _CHUNK // max(1, a.shape[1]))
    apart, norms, sums, largest = [], [], np.zeros(3), 0.0
    for start in range(0, len(a), step):
        x, y = (side[start : start + step].astype(np.float64) for side in (a, b))
        off = np.nan_to_num(np.abs(x - y), nan=np.inf)
        largest = max(largest, float(off.max(initial=0.0)))
        apart.append(np.linalg.norm(off, axis=1))
        norms.append(np.linalg.norm(y, axis=1))
        sums += [float((x * y).sum()), float((x * x).sum()), float((y * y).sum())]
    size = np.concatenate(norms)
    # A row that is all but zero is measured against a thousandth of the usual one.
    floor = max(float(np.median(size)) * 1e-3, float(np.finfo(np.float32).tiny))
    relative = np.concatenate(apart) / np.maximum(size, floor)
    beyond = np.flatnonzero(~(relative <= most))
    length = math.sqrt(sums[1] * sums[2])
    return Difference(
        WEIGHTS,
        name,
        "weight",
        (),
        sums[0] / length if length else 1.0,
        largest,
        float(relative.max(initial=0.0)),
        int(relative.argmax()),
        int(beyond[0]) if len(beyond) else None,
    )
