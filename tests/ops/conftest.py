"""One device per file of op tests; the validation layer's objections are raised at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hornito.vk.device import open_device
from ops.harness import Bench
from tree import own_cache


@pytest.fixture(scope="module")
def bench(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A device that the tests of a file share, pipelines and all; a software one computes several
    workgroups at a time, so that those which race show."""
    with own_cache(tmp_path_factory), pytest.MonkeyPatch.context() as patch:
        patch.delenv("LP_NUM_THREADS")
        with open_device(os.environ.get("HORNITO_DEVICE")) as device:
            yield Bench(device)
