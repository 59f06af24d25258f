"""What a device can do, as one frozen record.

`Caps.parse` reads a plain mapping of Vulkan member names, so tests build devices that they do not
have; `probe.py` fills the same mapping from a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hornito.vk import api

_SUBGROUP_OPS = {
    api.VK_SUBGROUP_FEATURE_BASIC_BIT: "basic",
    api.VK_SUBGROUP_FEATURE_VOTE_BIT: "vote",
    api.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT: "arithmetic",
    api.VK_SUBGROUP_FEATURE_BALLOT_BIT: "ballot",
    api.VK_SUBGROUP_FEATURE_SHUFFLE_BIT: "shuffle",
    api.VK_SUBGROUP_FEATURE_SHUFFLE_RELATIVE_BIT: "shuffle_relative",
    api.VK_SUBGROUP_FEATURE_CLUSTERED_BIT: "clustered",
    api.VK_SUBGROUP_FEATURE_QUAD_BIT: "quad",
}

_KINDS = {
    api.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: "discrete",
    api.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: "integrated",
    api.VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: "virtual",
    api.VK_PHYSICAL_DEVICE_TYPE_CPU: "software",
}

_COMPONENTS = {
    api.VK_COMPONENT_TYPE_FLOAT16_KHR: "f16",
    api.VK_COMPONENT_TYPE_FLOAT32_KHR: "f32",
    api.VK_COMPONENT_TYPE_FLOAT64_KHR: "f64",
    api.VK_COMPONENT_TYPE_SINT8_KHR: "s8",
    api.VK_COMPONENT_TYPE_SINT16_KHR: "s16",
    api.VK_COMPONENT_TYPE_SINT32_KHR: "s32",
    api.VK_COMPONENT_TYPE_SINT64_KHR: "s64",
    api.VK_COMPONENT_TYPE_UINT8_KHR: "u8",
    api.VK_COMPONENT_TYPE_UINT16_KHR: "u16",
    api.VK_COMPONENT_TYPE_UINT32_KHR: "u32",
    api.VK_COMPONENT_TYPE_UINT64_KHR: "u64",
}

# maxMemoryAllocationSize and maxBufferSize when a driver does not tell (the guaranteed minimum).
_DEFAULT_ALLOCATION = 1 << 30


def device_kind(device_type: int) -> str:
    """`discrete`, `integrated`, `virtual`, `software` or `other` for a VkPhysicalDeviceType."""
    return _KINDS.get(device_type, "other")


@dataclass(frozen=True, slots=True)
class CoopMat:
    """A cooperative-matrix shape at subgroup scope: C[m, n] += A[m, k] B[k, n].

    Types are 'f16', 'f32', 's8', 'u8', 's32', ... or 'vkNNN' for one that is not known here.
    """

    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    c_type: str
    result_type: str
    saturating: bool


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits and features of a device, after quirks.

    A feature counts only when Hornito also enables it. Sizes are bytes unless named otherwise.
    A driver that reports subgroup size 0 or 1 has subgroup_size 1 and no subgroup operations.
    """

    vendor_id: int
    device_kind: str
    api_version: int
    subgroup_size: int
    subgroup_min: int
    subgroup_max: int
    subgroup_ops: frozenset[str]
    subgroup_in_compute: bool
    max_workgroup_invocations: int
    max_workgroup_size: tuple[int, int, int]
    max_workgroup_count: tuple[int, int, int]
    shared_memory_bytes: int
    max_push_constants: int
    max_allocation_bytes: int
    min_storage_alignment: int
    non_coherent_atom: int
    timestamp_period_ns: float
    timestamp_bits: int
    has_float16: bool
    has_storage16: bool
    has_storage8: bool
    has_int8: bool
    has_int16: bool
    has_int64: bool
    has_scalar_layout: bool
    has_memory_budget: bool
    has_subgroup_size_control: bool
    has_full_subgroups: bool
    has_dot_product: bool
    coopmat: tuple[CoopMat, ...]
    device_local_bytes: int
    unified_memory: bool
    quirks: frozenset[str] = frozenset()
    has_fast_dot_product: bool = False

    def optional_features(self) -> dict[str, bool]:
        """Optional features by name, and whether they are there."""
        return {
            "float16": self.has_float16,
            "storage16": self.has_storage16,
            "int8": self.has_int8,
            "int64": self.has_int64,
            "dot_product": self.has_dot_product,
            "subgroup_arithmetic": "arithmetic" in self.subgroup_ops,
            "subgroup_size_control": self.has_subgroup_size_control,
            "cooperative_matrix": bool(self.coopmat),
            "memory_budget": self.has_memory_budget,
            "timestamps": self.timestamp_bits > 0,
        }

    def features(self) -> list[str]:
        """Names of the optional features that are there."""
        return [name for name, there in self.optional_features().items() if there]

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Caps:
        """Build the record from Vulkan member names.

        `record` holds members of the properties, limits and feature structs by name, and
        `extensions` (names), `timestampValidBits`, `cooperativeMatrices` (tuples m, n, k, a, b, c,
        result, saturating, scope), `deviceLocalBytes`. What is missing counts as not offered.
        """
        get = record.get
        size, ops = _subgroup(record)
        kind = device_kind(int(get("deviceType", api.VK_PHYSICAL_DEVICE_TYPE_OTHER)))
        control = bool(get("subgroupSizeControl")) and size > 1
        low, high = size, size
        if control:
            low = int(get("minSubgroupSize", size)) or size
            high = max(int(get("maxSubgroupSize", size)) or size, low)
        allocation = min(
            int(get("maxMemoryAllocationSize", 0)) or _DEFAULT_ALLOCATION,
            int(get("maxBufferSize", 0)) or (1 << 63),
        )
        invocations = int(get("maxComputeWorkGroupInvocations", 128))
        return cls(
            vendor_id=int(get("vendorID", 0)),
            device_kind=kind,
            api_version=int(get("apiVersion", 0)),
            subgroup_size=size,
            subgroup_min=low,
            subgroup_max=high,
            subgroup_ops=ops,
            subgroup_in_compute=bool(ops),
            max_workgroup_invocations=invocations,
            max_workgroup_size=_triple(get("maxComputeWorkGroupSize", (128, 128, 64))),
            max_workgroup_count=_triple(get("maxComputeWorkGroupCount", (65535, 65535, 65535))),
            shared_memory_bytes=int(get("maxComputeSharedMemorySize", 16384)),
            max_push_constants=int(get("maxPushConstantsSize", 128)),
            max_allocation_bytes=allocation,
            min_storage_alignment=max(int(get("minStorageBufferOffsetAlignment", 256)), 1),
            non_coherent_atom=max(int(get("nonCoherentAtomSize", 256)), 1),
            timestamp_period_ns=float(get("timestampPeriod", 0.0)),
            timestamp_bits=int(get("timestampValidBits", 0)),
            has_float16=bool(get("shaderFloat16")),
            has_storage16=bool(get("storageBuffer16BitAccess")),
            has_storage8=bool(get("storageBuffer8BitAccess")),
            has_int8=bool(get("shaderInt8")),
            has_int16=bool(get("shaderInt16")),
            has_int64=bool(get("shaderInt64")),
            has_scalar_layout=bool(get("scalarBlockLayout")),
            has_memory_budget=api.VK_EXT_MEMORY_BUDGET_EXTENSION_NAME in get("extensions", ()),
            has_subgroup_size_control=control,
            has_full_subgroups=bool(get("computeFullSubgroups")) and size > 1,
            has_dot_product=bool(get("shaderIntegerDotProduct")),
            coopmat=_coopmat(record),
            device_local_bytes=int(get("deviceLocalBytes", 0)),
            unified_memory=kind in ("integrated", "software"),
            has_fast_dot_product=bool(get("shaderIntegerDotProduct"))
            and bool(get("integerDotProduct4x8BitPackedSignedAccelerated")),
        )


def _subgroup(record: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """The subgroup size and the operations that compute shaders may use."""
    size = int(record.get("subgroupSize", 0))
    stages = int(record.get("subgroupSupportedStages", 0))
    bits = int(record.get("subgroupSupportedOperations", 0))
    if size < 2 or size & (size - 1):
        return 1, frozenset()
    if not stages & api.VK_SHADER_STAGE_COMPUTE_BIT:
        return size, frozenset()
    return size, frozenset(name for bit, name in _SUBGROUP_OPS.items() if bits & bit)


def _coopmat(record: Mapping[str, Any]) -> tuple[CoopMat, ...]:
    if not record.get("cooperativeMatrix"):
        return ()
    found = []
    for m, n, k, a, b, c, result, saturating, scope in record.get("cooperativeMatrices", ()):
        if scope == api.VK_SCOPE_SUBGROUP_KHR:
            found.append(
                CoopMat(
                    *(int(m), int(n), int(k)),
                    *(_component(a), _component(b), _component(c), _component(result)),
                    saturating=bool(saturating),
                )
            )
    return tuple(found)


def _component(kind: int) -> str:
    return _COMPONENTS.get(kind, f"vk{kind}")


def _triple(values: Any) -> tuple[int, int, int]:
    x, y, z = (int(value) for value in values)
    return x, y, z
