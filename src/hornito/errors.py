"""Every exception a user of Hornito can meet.

Each class carries the exit code that the command line ends with. A message says what failed, where
(file, tensor, op, device), the numbers, and what to do about it.
"""

from __future__ import annotations


def size_text(count: int) -> str:
    """A byte count for people: '6.44 GB', '812.6 MB', and bytes below a megabyte."""
    if count >= 1_000_000_000_000:
        return f"{count / 1e12:,.2f} TB"
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1_000_000 else f"{count:,} bytes"


class HornitoError(Exception):
    """Base of all errors that Hornito raises on purpose."""

    exit_code = 1


class UsageError(HornitoError):
    """An argument is wrong, out of range, or contradicts another."""

    exit_code = 2


class UnsupportedError(HornitoError):
    """The input is well formed, but Hornito can't run it; the message says what is supported."""

    exit_code = 2


class FormatError(HornitoError):
    """A file is truncated, inconsistent or not what it claims to be."""

    exit_code = 2


class PackageError(FormatError):
    """A `.vxm` package can't be read or was made for another format version."""


class NoDeviceError(HornitoError):
    """No Vulkan loader, no driver, or no device that matches the request."""

    exit_code = 4


class DeviceMemoryError(HornitoError):
    """Device memory is short.

    Attributes:
        needed: bytes that were asked for.
        available: bytes that the device had left, as far as it tells.
    """

    exit_code = 5

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class VulkanError(HornitoError):
    """A Vulkan call failed or the validation layer objected.

    Attributes:
        code: the VkResult, or 0 for a validation message.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceLostError(VulkanError):
    """The device was lost, or given up over work that did not end; every KV cache on it is gone."""


class SessionError(HornitoError):
    """A session, engine or device was used in a state that does not allow it."""


class ContextOverflowError(HornitoError):
    """A prompt or an answer does not fit the context.

    Attributes:
        tokens: positions that were needed.
        context: positions that the session has.
    """

    def __init__(self, message: str, *, tokens: int, context: int) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.context = context
