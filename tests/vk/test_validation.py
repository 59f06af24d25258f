"""The validation layer's messages become exceptions; a machine without Vulkan gets one line."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from hornito.errors import UsageError, VulkanError
from hornito.vk import api, instance
from hornito.vk.device import Device, open_device

pytestmark = pytest.mark.gpu


def _break_a_rule(device: Device) -> None:
    """A buffer of size 0, which the driver takes and the layer objects to."""
    info = api.VkBufferCreateInfo()
    info.usage = api.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    handle = ctypes.c_uint64()
    device.vk.vkCreateBuffer(device.handle, ctypes.byref(info), None, ctypes.byref(handle))
    if handle.value:
        device.vk.vkDestroyBuffer(device.handle, handle, None)


@pytest.fixture
def validated() -> Device:
    try:
        return open_device(0, validate=True)
    except UsageError as error:
        pytest.skip(str(error))


def test_d14_the_tests_run_under_validation(device: Device) -> None:
    """Where the layer is installed; what it says is an error of the test that made it say so."""
    if os.environ.get("HORNITO_VALIDATE") != "1":
        pytest.skip("the validation layer is not installed, or switched off")
    assert device.validating


def test_message_is_raised_by_the_next_call(validated: Device) -> None:
    with validated as device:
        _break_a_rule(device)
        with pytest.raises(VulkanError, match=r"VUID-VkBufferCreateInfo-size-00912") as caught:
            device.allocate(16, "device", "after")
        assert caught.value.code == 0
        assert device.allocate(16, "device", "after").size == 16  # reported once


def test_message_is_raised_at_close(validated: Device) -> None:
    _break_a_rule(validated)
    with pytest.raises(VulkanError, match="VUID-VkBufferCreateInfo-size-00912"):
        validated.close()
    assert True not in instance._shared  # closed all the same
    validated.close()


def test_leaked_object_is_reported_at_close(validated: Device) -> None:
    info = api.VkBufferCreateInfo()
    info.size = 16
    info.usage = api.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    handle = ctypes.c_uint64()
    validated.vk.vkCreateBuffer(validated.handle, ctypes.byref(info), None, ctypes.byref(handle))
    with pytest.raises(VulkanError, match="has not been destroyed"):
        validated.close()


def test_without_validation_nothing_is_collected() -> None:
    with open_device(0, validate=False) as device:
        assert device._instance.log is None
        assert device.allocate(16, "device", "plain").size == 16


def test_missing_layer_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "LAYER", "VK_LAYER_that_is_not_there")
    assert True not in instance._shared
    with pytest.raises(UsageError, match="apt-get install vulkan-validationlayers"):
        open_device(0, validate=True)


def _in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120
    )


_CODE = """
import sys
from hornito.errors import HornitoError
from hornito.vk import device
try:
    device.{call}
except HornitoError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("call", ["list_devices()", "open_device()", "open_device('software')"])
def test_no_driver_is_one_line_and_exit_code_4(call: str) -> None:
    nowhere = {"VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}
    done = _in_new_process(_CODE.format(call=call), **nowhere, HORNITO_VALIDATE="0")
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("NoDeviceError ") and done.stdout.count("\n") == 1
    assert "unset VK_DRIVER_FILES" in done.stdout  # what is at fault here is the variable


def test_unclosed_device_is_closed_at_exit() -> None:
    code = (
        "from hornito.vk.device import open_device; d = open_device(0); d.allocate(64, 'host', 'x')"
    )
    done = _in_new_process(code)
    assert (done.returncode, done.stderr) == (0, "")
