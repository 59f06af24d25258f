"""Compute pipelines, and the cache of compiled ones on disk."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.errors import UnsupportedError, VulkanError
from hornito.vk import api
from hornito.vk.instance import result_text

if TYPE_CHECKING:
    from hornito.vk.device import Device

logger = logging.getLogger("hornito")

_HEADER = struct.Struct("<IIII16s")  # length, version, vendor, device, pipeline cache UUID


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A compute pipeline of one kernel variant.

    Attributes:
        handle, layout: Vulkan handles.
        push_size: bytes of the push-constant block.
        sha256: of the SPIR-V, hex.
        subgroup_size: the size that was required, or None.
    """

    handle: int
    layout: int
    name: str
    push_size: int
    sha256: str
    spec: tuple[tuple[int, int], ...]
    subgroup_size: int | None
    full_subgroups: bool


def cache_directory() -> Path:
    """Where Hornito keeps what it can rebuild: $HORNITO_CACHE, else the user's cache folder."""
    chosen = os.environ.get("HORNITO_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hornito"


def valid_cache_data(data: bytes, vendor_id: int, device_id: int, cache_uuid: bytes) -> bool:
    """Whether a file holds pipeline cache data of this very device and driver."""
    if len(data) < _HEADER.size:
        return False
    length, version, vendor, device, uuid = _HEADER.unpack_from(data)
    return bool(
        length >= _HEADER.size
        and length <= len(data)
        and version == api.VK_PIPELINE_CACHE_HEADER_VERSION_ONE
        and vendor == vendor_id
        and device == device_id
        and uuid == cache_uuid
    )


class PipelineStore:
    """Pipelines of one device, shared by everything that runs on it."""

    def __init__(self, device: Device, cache_uuid: bytes) -> None:
        self._device = device
        self._cache_uuid = cache_uuid
        self._pipelines: dict[tuple[Any, ...], Pipeline] = {}
        self._layouts: dict[int, int] = {}
        self._dirty = False
        self._lock = threading.Lock()
        self._cache = self._create_cache()

    def path(self) -> Path:
        """The cache file of this device and driver."""
        info = self._device.info
        return cache_directory() / f"pipelines-{info.uuid}-{info.driver_version:08x}.bin"

    def _create_cache(self) -> int:
        device = self._device
        path = self.path()
        data = b""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            logger.debug("no pipeline cache at %s yet", path)
        except OSError as error:
            logger.warning("the pipeline cache %s can't be read: %s", path, error)
        identity = (device.info.vendor_id, device.info.device_id, self._cache_uuid)
        if data and not valid_cache_data(data, *identity):
            logger.warning("the pipeline cache %s is damaged or of another driver; ignored", path)
            data = b""
        info = api.VkPipelineCacheCreateInfo()
        buffer = ctypes.create_string_buffer(data, len(data)) if data else None
        if buffer is not None:
            info.initialDataSize = len(data)
            info.pInitialData = ctypes.addressof(buffer)
        cache = ctypes.c_uint64()
        code = device.vk.vkCreatePipelineCache(
            device.handle, ctypes.byref(info), None, ctypes.byref(cache)
        )
        device.check(code, "vkCreatePipelineCache")
        return cache.value

    def save(self) -> None:
        """Write the cache when something was compiled since; a full disk is only a warning."""
        if not self._dirty:
            return
        data = self._cache_data()
        path = self.path()
        if not data:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.write(data)
                    file.flush()
                    os.replace(temporary, path)
                except OSError:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            logger.warning("the pipeline cache %s can't be written: %s", path, error)
        self._dirty = False

    def _cache_data(self) -> bytes:
        """What the driver's cache holds; raises nothing, as `Device.close` calls it."""
        device = self._device
        get = device.vk.vkGetPipelineCacheData
        size = ctypes.c_size_t()
        code = get(device.handle, self._cache, ctypes.byref(size), None)
        data = ctypes.create_string_buffer(max(size.value, 1))
        if code == 0:
            code = get(device.handle, self._cache, ctypes.byref(size), data)
        if code != 0:
            logger.warning("the pipeline cache can't be read back: %s", result_text(code))
            return b""
        return data.raw[: size.value]

    def get(
        self,
        spirv: bytes,
        name: str,
        spec: Mapping[int, int],
        push_size: int,
        subgroup_size: int | None,
        full_subgroups: bool,
    ) -> Pipeline:
        """The pipeline for these settings, compiled at first request."""
        digest = hashlib.sha256(spirv).hexdigest()
        constants = tuple(sorted(spec.items()))
        key = (digest, constants, push_size, subgroup_size, full_subgroups)
        with self._lock:
            pipeline = self._pipelines.get(key)
        if pipeline is not None:
            return pipeline
        self._check_request(name, push_size, subgroup_size, full_subgroups)
        layout = self._layout(push_size)
        # Outside the lock: several threads may compile at once.
        handle = self._compile(spirv, name, constants, layout, subgroup_size, full_subgroups)
        pipeline = Pipeline(
            handle, layout, name, push_size, digest, constants, subgroup_size, full_subgroups
        )
        with self._lock:
            first = self._pipelines.setdefault(key, pipeline)
            self._dirty = True
        if first is not pipeline:  # another thread was faster
            self._device.vk.vkDestroyPipeline(self._device.handle, handle, None)
            return first
        self._device.name_object(api.VK_OBJECT_TYPE_PIPELINE, handle, name)
        return pipeline

    def _check_request(
        self, name: str, push_size: int, subgroup_size: int | None, full_subgroups: bool
    ) -> None:
        caps = self._device.caps
        if push_size > caps.max_push_constants or push_size % 4:
            raise UnsupportedError(
                f"{name}: a push-constant block of {push_size} bytes; this device takes multiples "
                f"of 4 up to {caps.max_push_constants}"
            )
        control = caps.has_subgroup_size_control
        if subgroup_size is not None and not (
            control and caps.subgroup_min <= subgroup_size <= caps.subgroup_max
        ):
            raise UnsupportedError(
                f"{name}: subgroup size {subgroup_size} can't be required on "
                f"{self._device.info.name} (it offers {caps.subgroup_min} to "
                f"{caps.subgroup_max}, size control: {'yes' if control else 'no'})"
            )
        if full_subgroups and not caps.has_full_subgroups:
            raise UnsupportedError(
                f"{name}: {self._device.info.name} does not offer full subgroups in compute"
            )

    def _layout(self, push_size: int) -> int:
        with self._lock:
            if push_size not in self._layouts:
                self._layouts[push_size] = self._create_layout(push_size)
            return self._layouts[push_size]

    def _create_layout(self, push_size: int) -> int:
        device = self._device
        info = api.VkPipelineLayoutCreateInfo()
        if push_size:
            ranges = (api.VkPushConstantRange * 1)()
            ranges[0].stageFlags = api.VK_SHADER_STAGE_COMPUTE_BIT
            ranges[0].size = push_size
            info.pushConstantRangeCount = 1
            info.pPushConstantRanges = ranges
        layout = ctypes.c_uint64()
        code = device.vk.vkCreatePipelineLayout(
            device.handle, ctypes.byref(info), None, ctypes.byref(layout)
        )
        device.check(code, "vkCreatePipelineLayout")
        return layout.value

    def _module(self, spirv: bytes, name: str) -> int:
        if len(spirv) < 20 or len(spirv) % 4 or spirv[:4] != b"\x03\x02\x23\x07":
            raise VulkanError(f"{name}: not a SPIR-V module ({len(spirv)} bytes)")
        device = self._device
        words = (ctypes.c_uint32 * (len(spirv) // 4)).from_buffer_copy(spirv)
        info = api.VkShaderModuleCreateInfo()
        info.codeSize = len(spirv)
        info.pCode = words
        module = ctypes.c_uint64()
        code = device.vk.vkCreateShaderModule(
            device.handle, ctypes.byref(info), None, ctypes.byref(module)
        )
        device.check(code, f"vkCreateShaderModule of {name}")
        return module.value

    def _compile(
        self,
        spirv: bytes,
        name: str,
        constants: tuple[tuple[int, int], ...],
        layout: int,
        subgroup_size: int | None,
        full_subgroups: bool,
    ) -> int:
        device = self._device
        module = self._module(spirv, name)
        info = api.VkComputePipelineCreateInfo()
        info.layout = layout
        stage = info.stage
        stage.sType = api.VkPipelineShaderStageCreateInfo._stype_
        stage.stage = api.VK_SHADER_STAGE_COMPUTE_BIT
        stage.module = module
        stage.pName = b"main"
        required = api.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo()
        if subgroup_size is not None:
            required.requiredSubgroupSize = subgroup_size
            stage.pNext = ctypes.addressof(required)
        if full_subgroups:
            stage.flags = api.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
        specialization = _specialization(constants)
        if specialization is not None:
            stage.pSpecializationInfo = ctypes.pointer(specialization)
        handle = ctypes.c_uint64()
        try:
            code = device.vk.vkCreateComputePipelines(
                device.handle, self._cache, 1, ctypes.byref(info), None, ctypes.byref(handle)
            )
        finally:
            device.vk.vkDestroyShaderModule(device.handle, module, None)
        if code != 0:
            device.note_result(code)
            raise VulkanError(
                f"kernel {name}: {device.info.name} could not compile the pipeline: "
                f"{result_text(code)}",
                code=code,
            )
        return handle.value

    def destroy(self) -> None:
        """Release every object."""
        device = self._device
        for pipeline in self._pipelines.values():
            device.vk.vkDestroyPipeline(device.handle, pipeline.handle, None)
        for layout in self._layouts.values():
            device.vk.vkDestroyPipelineLayout(device.handle, layout, None)
        device.vk.vkDestroyPipelineCache(device.handle, self._cache, None)
        self._pipelines.clear()
        self._layouts.clear()


def _specialization(constants: tuple[tuple[int, int], ...]) -> Any:
    """VkSpecializationInfo of 32-bit constants, or None; ctypes keeps what it points to."""
    if not constants:
        return None
    count = len(constants)
    entries = (api.VkSpecializationMapEntry * count)()
    values = (ctypes.c_uint32 * count)()
    for index, (identifier, value) in enumerate(constants):
        entries[index].constantID = identifier
        entries[index].offset = 4 * index
        entries[index].size = 4
        values[index] = value & 0xFFFFFFFF
    info = api.VkSpecializationInfo()
    info.mapEntryCount = count
    info.pMapEntries = entries
    info.dataSize = 4 * count
    info.pData = ctypes.addressof(values)
    info.keep = values
    return info
