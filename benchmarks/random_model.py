"""Writes a package with random weights and a known model's shape; speed does not depend on them.

python benchmarks/random_model.py 0.5b out.vxm --weights fp16
"""

from __future__ import annotations

import argparse

from hornito.diag.random_model import SHAPES, write_random_model


def main() -> None:
    """Write the package and print its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out")
    parser.add_argument("--weights", default="fp16")
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    size = write_random_model(
        arguments.shape, arguments.out, weights=arguments.weights, context=arguments.context
    )
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
