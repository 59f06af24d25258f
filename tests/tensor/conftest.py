"""A device for the tests of tensor graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hornito.vk.device import Device, open_device
from tree import own_cache


@pytest.fixture(scope="module")
def device(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """An open device that the tests of a file share."""
    with own_cache(tmp_path_factory), open_device(os.environ.get("HORNITO_DEVICE")) as opened:
        yield opened
