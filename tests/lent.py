"""Open devices that one load hands on to the next, so that a file's pipelines are made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from hornito.vk.device import Device, open_device


@contextmanager
def lent_devices(*modules: ModuleType) -> Iterator[None]:
    """What the modules open is lent: of two loads at a time each has a device of its own, and one
    that is closed goes to the next load that asks for the same. One that was lost or changed, or
    on which memory was left, is closed indeed."""
    idle: dict[tuple[Any, ...], list[Device]] = {}
    lending = True

    def lend(selector: str | int | None = None, **options: Any) -> Device:
        selector = os.environ.get("HORNITO_DEVICE") if selector is None else selector
        waiting = idle.setdefault((selector, *sorted(options.items())), [])
        if waiting:
            return waiting.pop()
        device = open_device(selector, **options)
        caps, calls = device.caps, dict(vars(device.vk))

        def hand_on() -> None:
            same = device.caps == caps and vars(device.vk) == calls
            if not lending or device.lost or device.allocated_bytes or not same:
                Device.close(device)
            elif device not in waiting:
                device._raise_validation()
                for recorder in list(device._recorders.values()):
                    recorder.free()
                waiting.append(device)

        device.close = hand_on  # type: ignore[method-assign]
        return device

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "open_device", lend)
        try:
            yield
        finally:
            lending = False
            for waiting in idle.values():
                for device in waiting:
                    device.close()
