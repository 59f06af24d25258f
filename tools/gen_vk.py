"""Generate src/hornito/vk/api.py from the Khronos registry.

    python tools/gen_vk.py            # write the module
    python tools/gen_vk.py --check    # exit 1 when the file on disk differs

The registry comes with the `vulkan-object` package (development only). Only what Hornito calls is
written: the commands below, every struct that they or the feature chains need, and a few enums.
The output depends on the registry alone, so two runs give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vulkan_object import get_vulkan_object

OUTPUT = Path(__file__).resolve().parent.parent / "src" / "hornito" / "vk" / "api.py"

GLOBAL_COMMANDS = (
    "vkEnumerateInstanceVersion",
    "vkEnumerateInstanceExtensionProperties",
    "vkEnumerateInstanceLayerProperties",
    "vkCreateInstance",
)

INSTANCE_COMMANDS = (
    "vkDestroyInstance",
    "vkEnumeratePhysicalDevices",
    "vkGetPhysicalDeviceProperties",
    "vkGetPhysicalDeviceProperties2",
    "vkGetPhysicalDeviceFeatures2",
    "vkGetPhysicalDeviceMemoryProperties2",
    "vkGetPhysicalDeviceQueueFamilyProperties2",
    "vkEnumerateDeviceExtensionProperties",
    "vkCreateDevice",
    "vkGetDeviceProcAddr",
    "vkCreateDebugUtilsMessengerEXT",
    "vkDestroyDebugUtilsMessengerEXT",
    "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR",
)

DEVICE_COMMANDS = (
    "vkDestroyDevice",
    "vkDeviceWaitIdle",
    "vkGetDeviceQueue",
    "vkQueueSubmit",
    "vkAllocateMemory",
    "vkFreeMemory",
    "vkMapMemory",
    "vkUnmapMemory",
    "vkCreateBuffer",
    "vkDestroyBuffer",
    "vkGetBufferMemoryRequirements",
    "vkBindBufferMemory",
    "vkGetBufferDeviceAddress",
    "vkCreateSemaphore",
    "vkDestroySemaphore",
    "vkGetSemaphoreCounterValue",
    "vkWaitSemaphores",
    "vkCreateQueryPool",
    "vkDestroyQueryPool",
    "vkGetQueryPoolResults",
    "vkCreateShaderModule",
    "vkDestroyShaderModule",
    "vkCreatePipelineCache",
    "vkDestroyPipelineCache",
    "vkGetPipelineCacheData",
    "vkCreatePipelineLayout",
    "vkDestroyPipelineLayout",
    "vkCreateComputePipelines",
    "vkDestroyPipeline",
    "vkCreateCommandPool",
    "vkDestroyCommandPool",
    "vkResetCommandPool",
    "vkAllocateCommandBuffers",
    "vkBeginCommandBuffer",
    "vkEndCommandBuffer",
    "vkCmdBindPipeline",
    "vkCmdPushConstants",
    "vkCmdDispatch",
    "vkCmdPipelineBarrier",
    "vkCmdCopyBuffer",
    "vkCmdUpdateBuffer",
    "vkCmdFillBuffer",
    "vkCmdWriteTimestamp",
    "vkCmdResetQueryPool",
    "vkSetDebugUtilsObjectNameEXT",
)

# Commands of optional extensions or features: absent entries load as None.
OPTIONAL_COMMANDS = (
    "vkCreateDebugUtilsMessengerEXT",
    "vkDestroyDebugUtilsMessengerEXT",
    "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR",
    "vkSetDebugUtilsObjectNameEXT",
    "vkEnumerateInstanceVersion",
)

# Structs that no command names: they hang on pNext chains.
CHAINED_STRUCTS = (
    "VkPhysicalDeviceVulkan11Features",
    "VkPhysicalDeviceVulkan12Features",
    "VkPhysicalDeviceVulkan13Features",
    "VkPhysicalDeviceVulkan11Properties",
    "VkPhysicalDeviceVulkan12Properties",
    "VkPhysicalDeviceVulkan13Properties",
    "VkPhysicalDeviceMaintenance4Properties",
    "VkPhysicalDeviceSubgroupSizeControlFeatures",
    "VkPhysicalDeviceSubgroupSizeControlProperties",
    "VkPhysicalDeviceShaderIntegerDotProductFeatures",
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
    "VkPhysicalDeviceMemoryBudgetPropertiesEXT",
    "VkPhysicalDevicePCIBusInfoPropertiesEXT",
    "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
    "VkSemaphoreTypeCreateInfo",
    "VkTimelineSemaphoreSubmitInfo",
    "VkMemoryAllocateFlagsInfo",
    "VkDebugUtilsMessengerCallbackDataEXT",
)

ENUMS = (
    "VkResult",
    "VkObjectType",
    "VkPhysicalDeviceType",
    "VkMemoryPropertyFlagBits",
    "VkMemoryHeapFlagBits",
    "VkMemoryAllocateFlagBits",
    "VkBufferUsageFlagBits",
    "VkQueueFlagBits",
    "VkSubgroupFeatureFlagBits",
    "VkPipelineBindPoint",
    "VkShaderStageFlagBits",
    "VkPipelineShaderStageCreateFlagBits",
    "VkCommandBufferLevel",
    "VkCommandBufferUsageFlagBits",
    "VkAccessFlagBits",
    "VkPipelineStageFlagBits",
    "VkQueryType",
    "VkQueryResultFlagBits",
    "VkSemaphoreType",
    "VkInstanceCreateFlagBits",
    "VkPipelineCacheHeaderVersion",
    "VkComponentTypeKHR",
    "VkScopeKHR",
    "VkDebugUtilsMessageSeverityFlagBitsEXT",
    "VkDebugUtilsMessageTypeFlagBitsEXT",
)

# Values of extensions that are wanted from the enums above (core values are always written).
EXTENSIONS = (
    "VK_EXT_debug_utils",
    "VK_KHR_cooperative_matrix",
    "VK_KHR_portability_enumeration",
    "VK_KHR_portability_subset",
    "VK_EXT_subgroup_size_control",
    "VK_EXT_memory_budget",
    "VK_EXT_pci_bus_info",
    "VK_KHR_maintenance4",
    "VK_KHR_shader_integer_dot_product",
)

CONSTANTS = ("VK_WHOLE_SIZE",)

# C scalar types, as the short ctypes names of the generated module.
SCALARS = {
    "void": "None",
    "char": "c_char",
    "float": "c_float",
    "double": "c_double",
    "int8_t": "c_int8",
    "uint8_t": "c_uint8",
    "int16_t": "c_int16",
    "uint16_t": "c_uint16",
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
    "size_t": "c_size_t",
    "int": "c_int32",
    "VkBool32": "c_uint32",
    "VkDeviceSize": "c_uint64",
    "VkDeviceAddress": "c_uint64",
    "VkSampleMask": "c_uint32",
}

HEADER = '''\
"""Vulkan through ctypes. GENERATED by tools/gen_vk.py (registry {version}); do not edit."""
# fmt: off
# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import ctypes
import sys
from ctypes import (
    CFUNCTYPE, POINTER, Structure, Union, c_char, c_char_p, c_double, c_float, c_int32, c_int64,
    c_int8, c_size_t, c_uint16, c_uint32, c_uint64, c_uint8, c_void_p,
)
from typing import TYPE_CHECKING, Any

from hornito.errors import NoDeviceError, VulkanError

REGISTRY_VERSION = {version}


def make_version(major: int, minor: int, patch: int = 0) -> int:
    """A Vulkan version number (variant 0)."""
    return (major << 22) | (minor << 12) | patch


def version_text(version: int) -> str:
    """`1.3.274` for a Vulkan version number."""
    return f"{{(version >> 22) & 0x7F}}.{{(version >> 12) & 0x3FF}}.{{version & 0xFFF}}"


class _Typed(Structure):
    """A struct that starts with sType, which the constructor fills in."""

    _stype_ = 0

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.sType = self._stype_


def array_of(kind: Any, count: int) -> Any:
    """A ctypes array of structs with every sType filled in (ctypes runs no constructor there)."""
    result = (kind * count)()
    if issubclass(kind, _Typed):
        for item in result:
            item.sType = kind._stype_
    return result

'''

FOOTER = '''

_LIBRARIES = {
    "win32": ("vulkan-1.dll",),
    "darwin": ("libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"),
}


def load_library() -> Any:
    """Open the Vulkan loader; NoDeviceError names the package when there is none."""
    names = _LIBRARIES.get(sys.platform, ("libvulkan.so.1", "libvulkan.so"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NoDeviceError(
        f"no Vulkan loader found (tried {', '.join(names)}); install one, for example: "
        "apt-get install libvulkan1 mesa-vulkan-drivers"
    )


def _fill(table: Any, commands: dict[str, Any], lookup: Any, owner: Any) -> None:
    """Set one attribute per command; a command of an optional extension may be None."""
    for name, (result, arguments) in commands.items():
        address = lookup(owner, name.encode())
        if address:
            setattr(table, name, CFUNCTYPE(result, *arguments)(address))
        elif name in _OPTIONAL:
            setattr(table, name, None)
        else:
            raise VulkanError(f"the Vulkan driver has no {name}, which version 1.2 requires")


class GlobalFunctions:
    """Commands that need no instance, and the two lookup functions."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, library: Any) -> None:
        self.library = library
        get = library.vkGetInstanceProcAddr
        get.restype = c_void_p
        get.argtypes = (c_void_p, c_char_p)
        self.vkGetInstanceProcAddr = get
        _fill(self, _GLOBAL, get, None)


class InstanceFunctions:
    """Commands of one VkInstance."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, library_functions: GlobalFunctions, instance: Any) -> None:
        _fill(self, _INSTANCE, library_functions.vkGetInstanceProcAddr, instance)


class DeviceFunctions:
    """Commands of one VkDevice, looked up past the loader's dispatch."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, instance_functions: Any, device: Any) -> None:
        lookup = instance_functions.vkGetDeviceProcAddr
        _fill(self, _DEVICE, lookup, device)
'''


class Writer:
    """Collects the module text; the registry object is `registry`."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self.lines: list[str] = []
        self.done: set[str] = set()

    def scalar(self, name: str) -> str:
        """The ctypes name of a type held by value; a struct is written first when it is new."""
        registry = self.registry
        if name in SCALARS:
            return SCALARS[name]
        if name in registry.flags:
            return "c_uint64" if registry.flags[name].bitWidth == 64 else "c_uint32"
        if name in registry.enums:
            return "c_int32"
        if name in registry.bitmasks:
            return "c_uint64" if registry.bitmasks[name].bitWidth == 64 else "c_uint32"
        if name in registry.handles:
            return "c_void_p" if registry.handles[name].dispatchable else "c_uint64"
        if name in registry.structs:
            self.struct(name)
            return name
        if name in registry.funcPointers:
            return "c_void_p"
        raise SystemExit(f"gen_vk: no ctypes type for {name}")

    def member(self, member: Any) -> str:
        """The ctypes expression of one struct member."""
        stars = member.fullType.count("*")
        if member.type.startswith("PFN_"):
            return "c_void_p"
        if stars == 0:
            text = self.scalar(member.type)
        elif member.type == "void" or stars > 2:
            text = "c_void_p"
        elif member.type == "char":
            text = "c_char_p"
            stars -= 1
            text = "POINTER(c_char_p)" if stars else text
        else:
            text = f"POINTER({self.scalar(member.type)})"
            text = f"POINTER({text})" if stars == 2 else text
        for length in reversed(member.fixedSizeArray):
            known = self.registry.constants.get(length)
            text = f"{text} * {known.value if known else int(length)}"
        return text

    def struct(self, name: str) -> None:
        """Write a struct after the structs that it needs."""
        if name in self.done:
            return
        self.done.add(name)
        struct = self.registry.structs[name]
        if any(member.bitFieldWidth for member in struct.members):
            raise SystemExit(f"gen_vk: bit fields in {name} are not supported")
        fields = [(member.name, self.member(member)) for member in struct.members]
        base = "Union" if struct.union else "_Typed" if struct.sType else "Structure"
        self.lines += ["", f"class {name}({base}):"]
        if struct.sType:
            value = self.enum_value("VkStructureType", struct.sType)
            self.lines.append(f"    _stype_ = {value}")
        self.lines.append("    _fields_ = [")
        self.lines += [f'        ("{field}", {text}),' for field, text in fields]
        self.lines += ["    ]", ""]

    def enum_value(self, enum: str, name: str) -> int:
        """The number of one enum field, by name or alias."""
        for field in self.registry.enums[enum].fields:
            if field.name == name or name in field.aliases:
                return int(field.value)
        raise SystemExit(f"gen_vk: {name} is not in {enum}")

    def enum(self, name: str) -> None:
        """Write the core values of an enum, and those of the extensions in use."""
        registry = self.registry
        fields = (
            registry.enums[name].fields if name in registry.enums else registry.bitmasks[name].flags
        )
        self.lines.append(f"# {name}")
        for field in fields:
            sources = set(field.definingRequirements)
            core = not field.extending or any(s.startswith("VK_VERSION_") for s in sources)
            if not (core or set(field.extensions) & set(EXTENSIONS) or name == "VkResult"):
                continue
            self.lines.append(f"{field.name} = {field.value}")
        self.lines.append("")

    def command(self, name: str) -> str:
        """One entry of a command table: result type and argument types."""
        command = self.registry.commands[name]
        result = "None" if command.returnType == "void" else self.scalar(command.returnType)
        arguments = []
        for parameter in command.params:
            if (
                parameter.type in self.registry.structs
                and parameter.type != "VkAllocationCallbacks"
            ):
                self.struct(parameter.type)
            # Every pointer is c_void_p: byref(), arrays, bytes and None all pass without a cast.
            pointer = "*" in parameter.fullType or parameter.fixedSizeArray
            arguments.append("c_void_p" if pointer else self.scalar(parameter.type))
        joined = ", ".join(arguments) + ("," if len(arguments) == 1 else "")
        return f'    "{name}": ({result}, ({joined})),'

    def module(self) -> str:
        """The whole text of api.py."""
        registry = self.registry
        for name in CONSTANTS:
            self.lines.append(f"{name} = {int(registry.constants[name].value)}")
        self.lines.append("")
        for name in EXTENSIONS:
            macro = registry.extensions[name].nameString
            self.lines.append(f'{macro} = "{name}"')
        self.lines.append("")
        for name in ENUMS:
            self.enum(name)
        self.lines += ["RESULT_NAMES = {"]
        for field in registry.enums["VkResult"].fields:
            self.lines.append(f'    {field.value}: "{field.name}",')
        self.lines += ["}", ""]
        for name in CHAINED_STRUCTS:
            self.struct(name)
        tables = [
            ("_GLOBAL", GLOBAL_COMMANDS),
            ("_INSTANCE", INSTANCE_COMMANDS),
            ("_DEVICE", DEVICE_COMMANDS),
        ]
        for table, commands in tables:
            rows = [self.command(name) for name in commands]
            self.lines += ["", f"{table}: dict[str, Any] = {{", *rows, "}"]
        self.lines += ["", f"_OPTIONAL = frozenset({list(OPTIONAL_COMMANDS)!r})"]
        self.lines += self.callback()
        return HEADER.format(version=registry.headerVersion) + "\n".join(self.lines) + FOOTER

    def callback(self) -> list[str]:
        """The function type of the debug messenger, the one callback in use."""
        return [
            "",
            "DebugUtilsCallback = CFUNCTYPE(",
            "    c_uint32, c_uint32, c_uint32,",
            "    POINTER(VkDebugUtilsMessengerCallbackDataEXT), c_void_p,",
            ")",
        ]


def generate() -> str:
    """The text of api.py for the installed registry."""
    return Writer(get_vulkan_object()).module()


def main() -> int:
    """Write the module, or compare it with `--check`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    text = generate()
    if arguments.check:
        same = OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == text
        print("api.py is up to date" if same else "api.py differs; run python tools/gen_vk.py")
        return 0 if same else 1
    OUTPUT.write_text(text, encoding="utf-8")
    print(f"wrote {OUTPUT.name}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
