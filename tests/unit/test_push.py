"""Push-constant blocks, operands and the checks of a lowering."""

from __future__ import annotations

import importlib
import struct

import pytest

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import CACHE, FLOAT, Graph, Node, Weight
from hornito.graph.shapes import S, T
from hornito.ops import registry
from hornito.ops.base import Lowering, Operand, Push, Tail, ceil_div, present
from hornito.vk.caps import Caps


def test_layout_and_bytes() -> None:
    push = Push("x:u64 y:u64 n:u32 shift:i32 eps:f32")
    assert push.size == 28
    assert push.offsets() == {"x": 0, "y": 8, "n": 16, "shift": 20, "eps": 24}
    packed = push.pack([1 << 63, 2, 0xFFFFFFFF, -5, 0.5])
    assert packed == struct.pack("<QQIif", 1 << 63, 2, 0xFFFFFFFF, -5, 0.5)
    assert len(packed) == push.size


def test_bad_blocks() -> None:
    with pytest.raises(ValueError, match="64-bit fields must come first"):
        Push("n:u32 x:u64")
    with pytest.raises(ValueError, match="136 bytes"):
        Push(" ".join(f"a{i}:u64" for i in range(17)))
    with pytest.raises(struct.error):
        Push("n:u32").pack([1 << 32])
    with pytest.raises(struct.error):
        Push("n:u32").pack([-1])


def test_blocks_of_all_ops_fit_in_128_bytes() -> None:
    blocks: dict[tuple[str, str], Push] = {}
    for name in registry.names():
        module = importlib.import_module(f"hornito.ops.{name}")
        blocks |= {(name, key): v for key, v in vars(module).items() if isinstance(v, Push)}
    assert len(blocks) >= len(registry.names()) - 1  # gated_linear uses linear's
    assert max(block.size for block in blocks.values()) <= 128


def test_registry() -> None:
    assert "linear" in registry.names() and "base" not in registry.names()
    for name in registry.names():
        module = registry.op(name)
        assert callable(module.infer) and callable(module.reference) and callable(module.lower)
    with pytest.raises(
        UnsupportedError, match="no op named 'conv'; there are: activation, add, att"
    ):
        registry.op("conv")


def test_operand_parts() -> None:
    whole = Operand("w", 100, 50)
    assert whole.part(10, 40) == Operand("w", 110, 40)
    assert whole.part(50, 0) == Operand("w", 150, 0)
    for offset, size in ((-1, 5), (0, 51), (50, 1), (10, -1)):
        with pytest.raises(ValueError, match="lies outside 50"):
            whole.part(offset, size)


def lowering(graph: Graph, tail: str = "none") -> Lowering:
    return Lowering(
        graph,
        Caps.parse({}),
        kind="batch",
        rows=3,
        selected=2,
        kv={},
        table_blocks=4,
        weight_bytes={"w": 24},
        tail=Tail(tail, eos_count=2, ring=5),
        prefix="p",
    )


def small_graph() -> Graph:
    graph = Graph()
    graph.add_input("x", FLOAT, (T, 4))
    graph.add_input("s", FLOAT, (S, T * 2 + 1))
    graph.add_input("c", CACHE, ())
    graph.add_weight("w", Weight((3, 2), "fp32"))
    return graph


def test_buffers_of_a_lowering() -> None:
    low = lowering(small_graph(), "argmax")
    assert low.operand("x") == Operand("p/x", 0, 3 * 4 * 4)
    assert low.operand("s") == Operand("p/s@argmax", 0, 2 * 7 * 4)
    assert low.operand("w") == Operand("w", 0, 24)
    assert (low.live_word("x"), low.live_word("s")) == (0, 1)
    assert low.shape("s") == (2, 7)
    with pytest.raises(ValueError, match="c is a cache token"):
        low.operand("c")
    node = Node("add", "n", (), ())
    assert low.scratch(node, "t", 8) == Operand("p/n:t", 0, 8)
    with pytest.raises(ValueError, match="12 bytes, declared as 8"):
        low.scratch(node, "t", 12)
    head = Node("head", "h", (), ())
    assert low.scratch(head, "t", 8).name == "p/h:t@argmax"
    assert low.buffers == {"p/x": 48, "p/s@argmax": 56, "p/n:t": 8, "p/h:t@argmax": 8}
    assert (low.row_records.size, low.selection.size, low.next_ids.size) == (96, 8, 8)
    assert (low.eos.size, low.records.size, low.given_logprob.size) == (8, 2 * 5 * 16, 8)
    assert low.table_stride == 4


def test_emit_checks_arguments_and_grid() -> None:
    low = lowering(small_graph())
    node, push = Node("add", "n", (), ()), Push("n:u32")
    with pytest.raises(ValueError, match="2 arguments for 1 fields"):
        low.emit(node, "k", push, (1, 2), (1, 1, 1), reads=(), writes=())
    for groups in ((65536, 1, 1), (1, 65536, 1), (1, 1, 65536), (0, 1, 1)):
        with pytest.raises(FormatError, match=r"node n: k needs .* workgroups; the device allows"):
            low.emit(node, "k", push, (1,), groups, reads=(), writes=())
    low.emit(node, "k", push, (1,), (65535, 1, 1), reads=(), writes=())
    assert [d.kernel for d in low.dispatches] == ["k"]


def test_helpers() -> None:
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="among the first 1 is absent"):
        present([None], 1)
