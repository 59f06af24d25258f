"""A command whose load has no time for tests, so that kernels are proved while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hornito.plan.selftest import SelfTest
from hornito.runtime import settle
from hornito.runtime.idle import IdleProof

PATIENCE = 120.0


def prove_while_waiting(
    monkeypatch: pytest.MonkeyPatch, cache: Path, begun: Callable[[IdleProof], object]
) -> None:
    """Have the software device prove its kernels as a GPU does, and none of them at load.

    Args:
        cache: where verdicts go.
        begun: called with each idle proof when it is made.
    """
    begin = IdleProof.__init__

    def told(proof: IdleProof, *arguments: Any) -> None:
        begin(proof, *arguments)
        begun(proof)

    monkeypatch.setattr(IdleProof, "__init__", told)
    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    monkeypatch.setattr(SelfTest, "_time_left", lambda test: test._budget is None)
    monkeypatch.setenv("HORNITO_CACHE", str(cache))
    monkeypatch.setenv("HORNITO_DEVICE", "software")


def wait_for(proof: IdleProof) -> None:
    """Until it is done, or patience is at its end."""
    end = time.monotonic() + PATIENCE
    while not proof.done and time.monotonic() < end:
        time.sleep(0.005)
