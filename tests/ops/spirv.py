"""Reads what tests need to know out of SPIR-V words: no library, no device.

Opcodes and enumerants are those of the SPIR-V specification, version 1.5, section 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MAGIC = 0x07230203

_MEMBER_NAME = 6
_EXECUTION_MODE = 16
_CAPABILITY = 17
_TYPE_INT = 21
_TYPE_FLOAT = 22
_TYPE_VECTOR = 23
_TYPE_ARRAY = 28
_TYPE_STRUCT = 30
_TYPE_POINTER = 32
_CONSTANT = 43
_SPEC_CONSTANTS = (48, 49, 50)  # true, false, scalar
_SPEC_CONSTANT_OP = 52
_ARITHMETIC = {
    128: lambda a, b: a + b,
    130: lambda a, b: a - b,
    132: lambda a, b: a * b,
    134: lambda a, b: a // b,
}  # unsigned
_VARIABLE = 59
_DECORATE = 71
_MEMBER_DECORATE = 72
_FORWARD_POINTER = 39

_SPEC_ID = 1
_OFFSET = 35
_LOCAL_SIZE = 17
_PUSH_CONSTANT = 9
_WORKGROUP = 4
_PHYSICAL_STORAGE = 5349

CAPABILITIES = {
    1: "Shader",
    9: "Float16",
    10: "Float64",
    11: "Int64",
    22: "Int16",
    39: "Int8",
    61: "GroupNonUniform",
    62: "GroupNonUniformVote",
    63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot",
    65: "GroupNonUniformShuffle",
    66: "GroupNonUniformShuffleRelative",
    67: "GroupNonUniformClustered",
    68: "GroupNonUniformQuad",
    4433: "StorageBuffer16BitAccess",
    4448: "StorageBuffer8BitAccess",
    5345: "VulkanMemoryModel",
    5347: "PhysicalStorageBufferAddresses",
    6018: "DotProductInput4x8BitPacked",
    6019: "DotProduct",
    6022: "CooperativeMatrixKHR",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the push-constant block: `kind` is u64, u32, i32 or f32, as in `Push`."""

    name: str
    kind: str
    offset: int


@dataclass(slots=True)
class Module:
    """The facts of one module, specialised."""

    capabilities: set[str] = field(default_factory=set)
    local_size: tuple[int, int, int] = (0, 0, 0)
    spec_ids: set[int] = field(default_factory=set)
    float_widths: set[int] = field(default_factory=set)
    push: list[Member] = field(default_factory=list)
    shared_bytes: int = 0  # where each variable begins at a multiple of 16
    spec_sized_arrays: bool = False
    spec_arithmetic: bool = False


class _Reader:
    def __init__(self, words: tuple[int, ...], spec: Mapping[int, int]) -> None:
        self.words = words
        self.spec = spec
        self.spec_of: dict[int, int] = {}  # id -> specialisation
        self.module = Module()
        self.member_names: dict[tuple[int, int], str] = {}
        self.member_offsets: dict[tuple[int, int], int] = {}
        self.types: dict[int, tuple[int, ...]] = {}  # id -> opcode, operands
        self.constants: dict[int, int] = {}
        self.spec_constants: set[int] = set()
        self.variables: list[tuple[int, int]] = []  # pointer type, storage class

    def instructions(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        at = 5
        while at < len(self.words):
            count, opcode = self.words[at] >> 16, self.words[at] & 0xFFFF
            if count == 0 or at + count > len(self.words):
                raise ValueError(f"broken instruction at word {at}")
            yield opcode, self.words[at + 1 : at + count]
            at += count

    def read(self) -> Module:
        for opcode, operands in self.instructions():
            self._note(opcode, operands)
        for pointer, storage in self.variables:
            target = self.types[pointer][2]
            if storage == _WORKGROUP:
                self.module.shared_bytes += -(-self._size(target) // 16) * 16
            elif storage == _PUSH_CONSTANT:
                self.module.push = self._members(target)
        return self.module

    def _note(self, opcode: int, operands: tuple[int, ...]) -> None:
        module = self.module
        if opcode == _CAPABILITY:
            module.capabilities.add(CAPABILITIES.get(operands[0], f"capability {operands[0]}"))
        elif opcode == _EXECUTION_MODE and operands[1] == _LOCAL_SIZE:
            module.local_size = (operands[2], operands[3], operands[4])
        elif opcode == _MEMBER_NAME:
            raw = struct.pack(f"<{len(operands) - 2}I", *operands[2:])
            self.member_names[operands[0], operands[1]] = raw.split(b"\0")[0].decode()
        elif opcode == _DECORATE and operands[1] == _SPEC_ID:
            module.spec_ids.add(operands[2])
            self.spec_of[operands[0]] = operands[2]
        elif opcode == _MEMBER_DECORATE and operands[2] == _OFFSET:
            self.member_offsets[operands[0], operands[1]] = operands[3]
        elif opcode in (
            _TYPE_INT,
            _TYPE_FLOAT,
            _TYPE_VECTOR,
            _TYPE_ARRAY,
            _TYPE_STRUCT,
            _TYPE_POINTER,
        ):
            self.types[operands[0]] = (opcode, *operands[1:])
            if opcode == _TYPE_FLOAT:
                module.float_widths.add(operands[1])
            if opcode == _TYPE_ARRAY and operands[2] in self.spec_constants:
                module.spec_sized_arrays = True
        elif opcode == _CONSTANT:
            self.constants[operands[1]] = operands[2]
        elif opcode in _SPEC_CONSTANTS or opcode == _SPEC_CONSTANT_OP:
            self.spec_constants.add(operands[1])
            module.spec_arithmetic |= opcode == _SPEC_CONSTANT_OP
            self._specialise(opcode, operands)
        elif opcode == _VARIABLE:
            self.variables.append((operands[0], operands[2]))

    def _specialise(self, opcode: int, operands: tuple[int, ...]) -> None:
        """Note the value of a scalar, and of arithmetic on integers."""
        result = operands[1]
        if opcode == _SPEC_CONSTANTS[2]:
            self.constants[result] = self.spec.get(self.spec_of.get(result, -1), operands[2])
        elif opcode == _SPEC_CONSTANT_OP and operands[2] in _ARITHMETIC:
            a, b = (self.constants.get(operand) for operand in operands[3:5])
            if a is not None and b:
                self.constants[result] = _ARITHMETIC[operands[2]](a, b)

    def _size(self, type_id: int) -> int:
        """Bytes of a type, tightly packed."""
        opcode, *operands = self.types[type_id]
        if opcode in (_TYPE_INT, _TYPE_FLOAT):
            return operands[0] // 8
        if opcode == _TYPE_VECTOR:
            return operands[1] * self._size(operands[0])
        if opcode == _TYPE_ARRAY:
            return self.constants[operands[1]] * self._size(operands[0])
        if opcode == _TYPE_STRUCT:
            return sum(self._size(member) for member in operands)
        raise ValueError(f"no size for opcode {opcode}")

    def _members(self, struct_id: int) -> list[Member]:
        members = []
        for i, type_id in enumerate(self.types[struct_id][1:]):
            name = self.member_names[struct_id, i]
            members.append(Member(name, self._kind(type_id), self.member_offsets[struct_id, i]))
        return members

    def _kind(self, type_id: int) -> str:
        opcode, *operands = self.types[type_id]
        if opcode == _TYPE_POINTER and operands[0] == _PHYSICAL_STORAGE:
            return "u64"
        if opcode == _TYPE_INT:
            return f"{'i' if operands[1] else 'u'}{operands[0]}"
        if opcode == _TYPE_FLOAT:
            return f"f{operands[0]}"
        return f"opcode {opcode}"


def parse(code: bytes, spec: Mapping[int, int] | None = None) -> Module:
    """The facts of a module.

    Args:
        spec: values of its specialisation constants; others have their defaults.

    Raises:
        ValueError: it is no SPIR-V.
    """
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    if len(code) % 4 or not words or words[0] != MAGIC:
        raise ValueError("not SPIR-V")
    return _Reader(words, spec or {}).read()
