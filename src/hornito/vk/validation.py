"""Collects what the Khronos validation layer says, so that it can be raised as an exception.

The callback runs inside Vulkan calls and must not raise; it appends to a list which the device
checks at its next call.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hornito.errors import VulkanError
from hornito.vk import api

LAYER = "VK_LAYER_KHRONOS_validation"


class MessageLog:
    """Messages of one instance's debug-utils messenger, kept until `raise_pending`."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._callback = api.DebugUtilsCallback(self._receive)  # kept alive as long as the log

    def create_info(self) -> Any:
        """The messenger's create info: validation messages of level warning and error.

        Performance hints and the loader's general talk (drivers that it could not open) are no
        fault of a call that Hornito made, so they are not subscribed to.
        """
        info = api.VkDebugUtilsMessengerCreateInfoEXT()
        info.messageSeverity = (
            api.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT
            | api.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
        )
        info.messageType = api.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
        info.pfnUserCallback = ctypes.cast(self._callback, ctypes.c_void_p).value
        return info

    def _receive(self, severity: int, kinds: int, data: Any, user: Any) -> int:
        text = data.contents.pMessage or b"(no text)"
        self.messages.append(text.decode("utf-8", "replace"))
        return 0

    def raise_pending(self) -> None:
        """Raise VulkanError with every message that came since the last call."""
        if not self.messages:
            return
        messages, self.messages = self.messages, []
        more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
        raise VulkanError("Vulkan validation: " + messages[0] + more, code=0)
