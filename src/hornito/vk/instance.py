"""The shared VkInstance: one per process and validation setting, released with its last user."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from hornito.errors import NoDeviceError, UsageError, VulkanError
from hornito.vk import api
from hornito.vk.loader import explain
from hornito.vk.validation import LAYER, MessageLog

# Newest version whose features Hornito knows; a device with less is used through extensions.
WANTED_VERSION = api.make_version(1, 3)

_lock = threading.Lock()
_shared: dict[bool, Instance] = {}


def result_text(code: int) -> str:
    """`VK_ERROR_DEVICE_LOST (-4)` for a VkResult."""
    return f"{api.RESULT_NAMES.get(code, 'unknown VkResult')} ({code})"


def check(code: int, what: str) -> None:
    """Raise VulkanError unless the result is a success code."""
    if code < 0:
        raise VulkanError(f"{what} failed: {result_text(code)}", code=code)


def names_array(names: list[str]) -> Any:
    """A C array of strings."""
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


def enumerate_structs(function: Any, kind: Any, *leading: Any) -> list[Any]:
    """Call a two-step vkEnumerate or vkGet command and return its structs."""
    count = ctypes.c_uint32()
    while True:
        check(function(*leading, ctypes.byref(count), None) or 0, "Vulkan enumeration")
        items = api.array_of(kind, count.value)
        code = function(*leading, ctypes.byref(count), items) or 0
        if code != api.VK_INCOMPLETE:  # the list may grow between the two calls
            check(code, "Vulkan enumeration")
            return list(items[: count.value])


class Instance:
    """A VkInstance with its commands and, with validation on, its message log."""

    def __init__(self, validate: bool) -> None:
        self.validate = validate
        self.users = 0
        self.log = MessageLog() if validate else None
        self._messenger: int = 0
        self.globals = api.GlobalFunctions(api.load_library())
        self.version = self._loader_version()
        self.handle = ctypes.c_void_p()
        self._create()
        self.vk = api.InstanceFunctions(self.globals, self.handle)
        if self.log is not None:
            messenger = ctypes.c_uint64()
            info = self.log.create_info()
            code = self.vk.vkCreateDebugUtilsMessengerEXT(
                self.handle, ctypes.byref(info), None, ctypes.byref(messenger)
            )
            check(code, "vkCreateDebugUtilsMessengerEXT")
            self._messenger = messenger.value

    def _loader_version(self) -> int:
        if self.globals.vkEnumerateInstanceVersion is None:
            return api.make_version(1, 0)
        version = ctypes.c_uint32()
        check(
            self.globals.vkEnumerateInstanceVersion(ctypes.byref(version)),
            "vkEnumerateInstanceVersion",
        )
        return min(version.value, WANTED_VERSION)

    def _create(self) -> None:
        if self.version < api.make_version(1, 1):
            raise NoDeviceError(
                "the Vulkan loader is version 1.0, Hornito needs 1.1 or newer; "
                "update it, for example: apt-get install libvulkan1"
            )
        extensions, layers, flags = self._extensions_and_layers()
        application = api.VkApplicationInfo()
        application.pApplicationName = b"hornito"
        application.pEngineName = b"hornito"
        application.apiVersion = self.version
        info = api.VkInstanceCreateInfo()
        info.flags = flags
        info.pApplicationInfo = ctypes.pointer(application)
        info.enabledExtensionCount = len(extensions)
        info.ppEnabledExtensionNames = names_array(extensions)
        info.enabledLayerCount = len(layers)
        info.ppEnabledLayerNames = names_array(layers)
        # The create info in the chain reports what goes wrong in create and destroy themselves.
        messenger = self.log.create_info() if self.log is not None else None
        if messenger is not None:
            info.pNext = ctypes.addressof(messenger)
        code = self.globals.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(self.handle))
        if code == api.VK_ERROR_INCOMPATIBLE_DRIVER:
            raise NoDeviceError(
                explain(
                    "the Vulkan loader found no driver; install one, for example: "
                    "apt-get install mesa-vulkan-drivers"
                )
            )
        check(code, "vkCreateInstance")

    def _extensions_and_layers(self) -> tuple[list[str], list[str], int]:
        """What to enable, and the instance flags."""
        offered = self._extension_names(None)
        extensions: list[str] = []
        layers: list[str] = []
        flags = 0
        portability = api.VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME
        if portability in offered:  # MoltenVK hides its devices without this
            extensions.append(portability)
            flags |= api.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
        if self.validate:
            found = enumerate_structs(
                self.globals.vkEnumerateInstanceLayerProperties, api.VkLayerProperties
            )
            if LAYER not in {layer.layerName.decode() for layer in found}:
                raise UsageError(
                    f"validation was asked for, but the layer {LAYER} is not installed; "
                    "install it (apt-get install vulkan-validationlayers) or unset HORNITO_VALIDATE"
                )
            layers.append(LAYER)
            extensions.append(api.VK_EXT_DEBUG_UTILS_EXTENSION_NAME)
        return extensions, layers, flags

    def _extension_names(self, layer: bytes | None) -> set[str]:
        found = enumerate_structs(
            self.globals.vkEnumerateInstanceExtensionProperties, api.VkExtensionProperties, layer
        )
        return {item.extensionName.decode() for item in found}

    def physical_devices(self) -> list[Any]:
        """Handles of every physical device, in the loader's order."""
        count = ctypes.c_uint32()
        check(
            self.vk.vkEnumeratePhysicalDevices(self.handle, ctypes.byref(count), None),
            "vkEnumeratePhysicalDevices",
        )
        handles = (ctypes.c_void_p * count.value)()
        check(
            self.vk.vkEnumeratePhysicalDevices(self.handle, ctypes.byref(count), handles),
            "vkEnumeratePhysicalDevices",
        )
        return [ctypes.c_void_p(handle) for handle in handles[: count.value]]

    def destroy(self) -> None:
        """Release the instance."""
        if self._messenger:
            self.vk.vkDestroyDebugUtilsMessengerEXT(self.handle, self._messenger, None)
            self._messenger = 0
        if self.handle:
            self.vk.vkDestroyInstance(self.handle, None)
            self.handle = ctypes.c_void_p()


def acquire_instance(validate: bool) -> Instance:
    """The shared instance of this validation setting, created for its first user."""
    with _lock:
        instance = _shared.get(validate)
        if instance is None:
            instance = Instance(validate)
            _shared[validate] = instance
        instance.users += 1
        return instance


def release_instance(instance: Instance) -> None:
    """Give an instance back; the last user destroys it. Raises what validation had to say."""
    with _lock:
        instance.users -= 1
        if instance.users == 0:
            del _shared[instance.validate]
            instance.destroy()
    if instance.log is not None:
        instance.log.raise_pending()
