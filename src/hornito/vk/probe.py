"""Asks a physical device what it is and what it offers, and builds the features to enable."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hornito.vk import api
from hornito.vk.caps import device_kind
from hornito.vk.instance import Instance, enumerate_structs

BASELINE = api.make_version(1, 2)

# Features to enable when offered; bufferDeviceAddress and timelineSemaphore are required.
REQUIRED_FEATURES = ("bufferDeviceAddress", "timelineSemaphore")
_WANTED_10 = ("shaderInt16", "shaderInt64")
_WANTED_11 = ("storageBuffer16BitAccess", "uniformAndStorageBuffer16BitAccess")
_WANTED_12 = (
    *REQUIRED_FEATURES,
    "shaderFloat16",
    "shaderInt8",
    "storageBuffer8BitAccess",
    "uniformAndStorageBuffer8BitAccess",
    "scalarBlockLayout",
)
_WANTED_13 = (
    "subgroupSizeControl",
    "computeFullSubgroups",
    "shaderIntegerDotProduct",
    "maintenance4",
)
_MEMORY_MODEL = ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope")  # with cooperative matrices

_OPTIONAL_EXTENSIONS = (
    api.VK_EXT_MEMORY_BUDGET_EXTENSION_NAME,
    api.VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME,
    api.VK_KHR_PORTABILITY_SUBSET_EXTENSION_NAME,
)
# Extensions whose features are core in Vulkan 1.3: (extension, struct, its features).
_BEFORE_13 = (
    (
        api.VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME,
        api.VkPhysicalDeviceSubgroupSizeControlFeatures,
        ("subgroupSizeControl", "computeFullSubgroups"),
    ),
    (
        api.VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME,
        api.VkPhysicalDeviceShaderIntegerDotProductFeatures,
        ("shaderIntegerDotProduct",),
    ),
)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One physical device, as a user sees it.

    Attributes:
        index: place in `list_devices()`; what `--device N` takes.
        kind: 'discrete', 'integrated', 'virtual', 'software' or 'other'.
        uuid: 32 hex digits, the same for every process and boot.
        pci: '0000:01:00.0' where the driver tells.
        api_version, driver_version: Vulkan version numbers (driver's own packing for the latter).
        usable: whether Hornito can run on it; `reason` says why not.
    """

    index: int
    name: str
    vendor_id: int
    device_id: int
    kind: str
    uuid: str
    pci: str | None
    driver_name: str
    driver_info: str
    driver_version: int
    api_version: int
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What a physical device answered.

    Attributes:
        info: index is the loader's place until the list is sorted.
        record: input of `Caps.parse`.
        queue_family: of compute work; -1 when there is none.
        memory: VkPhysicalDeviceMemoryProperties.
    """

    handle: Any
    info: DeviceInfo
    record: dict[str, Any]
    queue_family: int
    memory: Any


def chain(*structs: Any) -> Any:
    """Link structs through pNext and return the first one."""
    for first, second in pairwise(structs):
        first.pNext = ctypes.addressof(second)
    return structs[0]


def _members(struct: Any) -> dict[str, Any]:
    """The plain members of a struct; arrays become lists."""
    result = {}
    for entry in struct._fields_:
        value = getattr(struct, entry[0])
        if isinstance(value, ctypes.Array):
            value = list(value)
        if entry[0] not in ("sType", "pNext") and not isinstance(value, ctypes.Structure):
            result[entry[0]] = value
    return result


def probe(instance: Instance, handle: Any, index: int) -> Probe:
    """Read everything about one physical device."""
    vk = instance.vk
    basic = api.VkPhysicalDeviceProperties()
    vk.vkGetPhysicalDeviceProperties(handle, ctypes.byref(basic))
    version = min(int(basic.apiVersion), instance.version)
    record: dict[str, Any] = {**_members(basic.limits), **_members(basic)}
    if version < BASELINE:
        reason = f"Vulkan {api.version_text(int(basic.apiVersion))}, Hornito needs 1.2"
        info = _info(index, basic, None, None, None, reason)
        return Probe(handle, info, record, -1, api.VkPhysicalDeviceMemoryProperties())
    offered = enumerate_structs(
        vk.vkEnumerateDeviceExtensionProperties, api.VkExtensionProperties, handle, None
    )
    extensions = {item.extensionName.decode() for item in offered}
    pci, driver, identity = _properties(vk, handle, version, extensions, record)
    _features(vk, handle, version, extensions, record)
    family, bits = _queue_family(vk, handle)
    memory = api.VkPhysicalDeviceMemoryProperties2()
    vk.vkGetPhysicalDeviceMemoryProperties2(handle, ctypes.byref(memory))
    heaps = memory.memoryProperties.memoryHeaps[: memory.memoryProperties.memoryHeapCount]
    local = [int(h.size) for h in heaps if h.flags & api.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT]
    record.update(
        apiVersion=version,
        extensions=frozenset(extensions),
        timestampValidBits=bits,
        deviceLocalBytes=max(local, default=0),
    )
    record["cooperativeMatrices"] = _cooperative_matrices(vk, handle, record)
    missing = [name for name in REQUIRED_FEATURES if not record.get(name)]
    reason = f"the driver lacks {' and '.join(missing)}" if missing else ""
    if family < 0:
        reason = "no queue that takes compute work"
    info = _info(index, basic, pci, driver, identity, reason)
    return Probe(handle, info, record, family, memory.memoryProperties)


def _info(index: int, basic: Any, pci: Any, driver: Any, identity: Any, reason: str) -> DeviceInfo:
    address = None
    if pci is not None:
        address = f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction:x}"
    uuid = bytes(identity.deviceUUID) if identity is not None else bytes(basic.pipelineCacheUUID)
    return DeviceInfo(
        index=index,
        name=basic.deviceName.decode("utf-8", "replace"),
        vendor_id=int(basic.vendorID),
        device_id=int(basic.deviceID),
        kind=device_kind(int(basic.deviceType)),
        uuid=uuid.hex(),
        pci=address,
        driver_name=driver.driverName.decode("utf-8", "replace") if driver is not None else "",
        driver_info=driver.driverInfo.decode("utf-8", "replace") if driver is not None else "",
        driver_version=int(basic.driverVersion),
        api_version=int(basic.apiVersion),
        usable=not reason,
        reason=reason,
    )


def _properties(
    vk: Any, handle: Any, version: int, extensions: set[str], record: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Add the property structs to the record; returns (PCI or None, 1.2 and 1.1 properties)."""
    first = api.VkPhysicalDeviceProperties2()
    v11 = api.VkPhysicalDeviceVulkan11Properties()
    v12 = api.VkPhysicalDeviceVulkan12Properties()
    structs = [first, v11, v12]
    if version >= api.make_version(1, 3):
        structs.append(api.VkPhysicalDeviceVulkan13Properties())
    else:
        if api.VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME in extensions:
            structs.append(api.VkPhysicalDeviceSubgroupSizeControlProperties())
        if api.VK_KHR_MAINTENANCE_4_EXTENSION_NAME in extensions:
            structs.append(api.VkPhysicalDeviceMaintenance4Properties())
    pci = None
    if api.VK_EXT_PCI_BUS_INFO_EXTENSION_NAME in extensions:
        pci = api.VkPhysicalDevicePCIBusInfoPropertiesEXT()
        structs.append(pci)
    vk.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(chain(*structs)))
    for struct in structs[1:]:
        record.update(_members(struct))
    return pci, v12, v11


def _features(
    vk: Any, handle: Any, version: int, extensions: set[str], record: dict[str, Any]
) -> None:
    """Add the feature structs to the record."""
    first, structs = feature_structs(version, extensions)
    vk.vkGetPhysicalDeviceFeatures2(handle, ctypes.byref(chain(first, *structs)))
    record.update(_members(first.features))
    for struct in structs:
        record.update(_members(struct))


def feature_structs(version: int, extensions: set[str] | frozenset[str]) -> tuple[Any, list[Any]]:
    """Empty feature structs that may be chained on this device."""
    structs = [api.VkPhysicalDeviceVulkan11Features(), api.VkPhysicalDeviceVulkan12Features()]
    if version >= api.make_version(1, 3):
        structs.append(api.VkPhysicalDeviceVulkan13Features())
    else:
        structs += [struct() for name, struct, _ in _BEFORE_13 if name in extensions]
    if api.VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME in extensions:
        structs.append(api.VkPhysicalDeviceCooperativeMatrixFeaturesKHR())
    return api.VkPhysicalDeviceFeatures2(), structs


def enabled_features(record: dict[str, Any]) -> tuple[Any, list[str]]:
    """The feature chain and the extensions to create the device with.

    The caller keeps the returned object alive until vkCreateDevice returns.
    """
    version, offered = int(record["apiVersion"]), record["extensions"]
    extensions = [name for name in _OPTIONAL_EXTENSIONS if name in offered]
    if not record.get("cooperativeMatrix") and _OPTIONAL_EXTENSIONS[1] in extensions:
        extensions.remove(_OPTIONAL_EXTENSIONS[1])
    wanted = {*_WANTED_11, *_WANTED_12, *_WANTED_13}
    if _OPTIONAL_EXTENSIONS[1] in extensions:
        wanted.update(_MEMORY_MODEL, ("cooperativeMatrix",))
    if version < api.make_version(1, 3):
        extensions += [name for name, _, _ in _BEFORE_13 if name in offered]
    first, structs = feature_structs(version, frozenset(extensions))
    for name in _WANTED_10:
        setattr(first.features, name, record.get(name, 0))
    for struct in structs:
        for entry in struct._fields_:
            if entry[0] in wanted:
                setattr(struct, entry[0], record.get(entry[0], 0))
    chain(first, *structs)
    first.keep = structs  # the chain holds addresses only
    return first, extensions


def _queue_family(vk: Any, handle: Any) -> tuple[int, int]:
    """(family, timestamp bits) for compute: one with graphics where there is one.

    The graphics queue is the one that drivers test most, and that compositors preempt best.
    """
    count = ctypes.c_uint32()
    vk.vkGetPhysicalDeviceQueueFamilyProperties2(handle, ctypes.byref(count), None)
    families = api.array_of(api.VkQueueFamilyProperties2, count.value)
    vk.vkGetPhysicalDeviceQueueFamilyProperties2(handle, ctypes.byref(count), families)
    best, best_bits, best_rank = -1, 0, -1
    for index in range(count.value):
        properties = families[index].queueFamilyProperties
        if not properties.queueFlags & api.VK_QUEUE_COMPUTE_BIT:
            continue
        graphics = bool(properties.queueFlags & api.VK_QUEUE_GRAPHICS_BIT)
        rank = 2 * bool(properties.timestampValidBits) + graphics
        if rank > best_rank:
            best, best_bits, best_rank = index, int(properties.timestampValidBits), rank
    return best, best_bits


def _cooperative_matrices(vk: Any, handle: Any, record: dict[str, Any]) -> list[tuple[int, ...]]:
    command = vk.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR
    if not record.get("cooperativeMatrix") or command is None:
        return []
    found = enumerate_structs(command, api.VkCooperativeMatrixPropertiesKHR, handle)
    return [
        (
            int(item.MSize), int(item.NSize), int(item.KSize), int(item.AType), int(item.BType),
            int(item.CType), int(item.ResultType), int(item.saturatingAccumulation),
            int(item.scope),
        )
        for item in found
    ]  # fmt: skip
