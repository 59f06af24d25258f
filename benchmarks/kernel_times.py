"""Times every variant of the kernels of one row and of the largest chunk, at the shapes of a model.

python benchmarks/kernel_times.py 7b int4 --layers 4 --only 'gemv|coopmat'

What `hornito tune` measures, told in full instead of the winners alone, of a model with random
weights, few layers and a small vocabulary. Keep enough layers for their weights to be larger than
the GPU's cache. Nothing is kept of what was measured.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

import hornito
from hornito.diag.random_model import SHAPES, write_random_model
from hornito.errors import DeviceMemoryError, VulkanError
from hornito.plan import tune
from hornito.plan.plan import Plan
from hornito.plan.records import Winner
from hornito.plan.stand import Stand
from hornito.plan.units import Unit

SHOWN = 12
"""Variants of a site that are printed, fastest first."""


class Times:
    """Stands in for the race of `hornito.plan.tune`: measures, prints, keeps the default."""

    def __init__(self, only: str) -> None:
        self._only = re.compile(only)

    def __call__(self, stand: Stand, unit: Unit, key: str, plans: list[Plan]) -> Winner:
        """Microseconds of a node by variant; `*` marks the default."""
        found: list[tuple[float, str]] = []
        for plan, variant in zip(plans, unit.site.admitted, strict=False):
            if not self._only.search(variant.name):
                continue
            dispatches, nodes = tune._dispatches(plan, unit)
            stand.plan = plan
            layout = stand.layout(unit, dispatches)
            try:
                measured = stand.nanoseconds(unit, layout, dispatches, tune.REPEATS)
            except (VulkanError, DeviceMemoryError) as error:
                print(f"{variant.name}: {error}")
                continue
            found.append((statistics.median(measured) / nodes / 1e3, variant.name))
        usual = unit.site.taken.name
        if found:
            print(f"\n{key}")
        for microseconds, name in sorted(found)[:SHOWN]:
            print(f"{microseconds:10.2f} us {'*' if name == usual else ' '} {name}", flush=True)
        return Winner(usual, 0.0, 0.0)


def main() -> None:
    """Make the model, load it as if it were tuned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("weights")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--only", default="", help="variants whose name has this regular expression"
    )
    arguments = parser.parse_args()
    hidden, inner, _, heads, kv_heads, _, _ = SHAPES[arguments.shape]
    few = (hidden, inner, arguments.layers, heads, kv_heads, arguments.vocabulary, True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HORNITO_CACHE"] = folder
        package = Path(folder) / "model.vxm"
        SHAPES["few"] = few
        write_random_model("few", package, weights=arguments.weights)
        tune._race = Times(arguments.only)
        hornito.load(package, context=2048, tune="fast").close()


if __name__ == "__main__":
    main()
