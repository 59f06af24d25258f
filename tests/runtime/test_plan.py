"""Plans on devices that nobody has at hand: no Vulkan is needed to know every byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_samples import HF
from hornito.compiler import build_graph
from hornito.errors import FormatError
from hornito.graph.graph import Graph
from hornito.importers import open_source
from hornito.models import llama
from hornito.ops.base import Dispatch
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.runtime.memory import memory_plan
from hornito.vk.caps import Caps
from hornito.vk.memory import plan_chunks

SMALL: dict[str, Any] = {
    "vendorID": 0x10005,
    "deviceType": 1,
    "subgroupSize": 8,
    "subgroupSupportedStages": 0x20,
    "subgroupSupportedOperations": 0xFF,
    "maxComputeWorkGroupCount": [65535, 65535, 65535],
    "maxComputeWorkGroupInvocations": 128,
    "maxComputeSharedMemorySize": 16384,
    "maxMemoryAllocationSize": 128 << 20,
    "maxBufferSize": 128 << 20,
}
DEVICES = {
    "small": SMALL,
    "no subgroups": {**SMALL, "subgroupSize": 0},
    "software": {**SMALL, "deviceType": 4},
    "software without subgroups": {**SMALL, "deviceType": 4, "subgroupSize": 1},
    "discrete": {**SMALL, "deviceType": 2, "subgroupSize": 32, "maxBufferSize": 1 << 40},
    "wide": {**SMALL, "deviceType": 2, "subgroupSize": 128},
}


class Shape:
    """A source tensor of which only the shape is asked."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def rows(self, start: int, stop: int) -> Any:
        raise AssertionError("planning read weights")


def big_llama(vocabulary: int = 128_256, layers: int = 2) -> Graph:
    """Two layers of Llama 3.2 1B, untied, without any weights."""
    hidden, inner, heads, kv_heads, head_dim = 2048, 8192, 32, 8, 64
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": Shape(vocabulary, hidden),
        "lm_head.weight": Shape(vocabulary, hidden),
        "model.norm.weight": Shape(hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": Shape(hidden),
            f"{layer}.post_attention_layernorm.weight": Shape(hidden),
            f"{layer}.self_attn.q_proj.weight": Shape(heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": Shape(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": Shape(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": Shape(hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj.weight": Shape(inner, hidden),
            f"{layer}.mlp.up_proj.weight": Shape(inner, hidden),
            f"{layer}.mlp.down_proj.weight": Shape(hidden, inner),
        }
    config = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return llama.build(config, tensors, "fp16")


def tiny(weights: str = "fp32") -> Graph:
    return build_graph(open_source(HF / "llama-tiny"), weights)[0]


def dispatches(plan: Plan) -> Iterator[tuple[str, Dispatch]]:
    for bucket in plan.buckets.values():
        for name, program in (("body", bucket.body), *bucket.tails.items()):
            for dispatch in program.dispatches:
                yield f"{bucket.kind}{bucket.rows}.{name}", dispatch


@pytest.mark.parametrize("record", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("kv_half", [False, True])
def test_a_plan_needs_no_device(record: dict[str, Any], kv_half: bool) -> None:
    caps = Caps.parse(record)
    options = PlanOptions(context=4096, kv_half=kv_half, slots=4)
    plan = build_plan(big_llama(), caps, options)
    assert list(plan.buckets) == [
        ("batch", 1), ("batch", 2), ("batch", 4), ("chunk", 16), ("chunk", 64), ("chunk", 256),
    ]  # fmt: skip
    assert plan.vocabulary == 128_256 and plan.table_blocks == 64
    for where, dispatch in dispatches(plan):
        assert all(0 < n <= 65535 for n in dispatch.groups), (where, dispatch.kernel)
        for operand in (*dispatch.reads, *dispatch.writes):
            if operand.name in plan.arena.offsets:
                assert operand.offset + operand.size <= plan.arena.sizes[operand.name]
            elif operand.name in plan.weight_bytes:
                assert operand.offset + operand.size <= plan.weight_bytes[operand.name]
    memory = memory_plan(plan, options)
    assert memory.total == (
        memory.weights + memory.kv + memory.activations + memory.state + memory.readback
    )
    matrices = 2 * 128_256 * 2048 + 2 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192)
    vectors = 5 * 2048 + 32
    assert memory.weights == 2 * matrices + 4 * vectors + (-4 * 32 % 256)
    block = 2 * 2 * 8 * 64 * 64 * (2 if kv_half else 4)
    assert memory.kv % block == 0 and 4 * 64 * block <= memory.kv <= 4 * 66 * block


def test_kv_comes_in_chunks_of_the_largest_allocation() -> None:
    """16 layers, 32k positions, fp16: 1 GiB of KV where one allocation holds 128 MiB."""
    caps = Caps.parse(SMALL)
    plan = build_plan(big_llama(layers=16), caps, PlanOptions(context=32768, kv_half=True))
    (kind,) = plan.kinds
    chunks = plan_chunks([kind.block_bytes] * plan.table_blocks, caps.max_allocation_bytes, 256)
    assert sum(chunks.chunk_sizes) == 1 << 30 and max(chunks.chunk_sizes) <= 128 << 20
    assert len(chunks.chunk_sizes) == 8


def test_every_kernel_of_a_plan_was_built(kernels: None) -> None:
    from hornito.ops.kernels import load_spirv

    for record in DEVICES.values():
        for weights in ("fp32", "fp16"):
            for half in (False, True):
                plan = build_plan(tiny(weights), Caps.parse(record), PlanOptions(512, half))
                for kernel, _, push_size in plan.kernels():
                    assert load_spirv(kernel)[:4] == b"\x03\x02\x23\x07", kernel
                    assert push_size <= 128, kernel


def test_live_values_share_no_bytes() -> None:
    """Within a program no result may lie on an operand that is read later."""
    plan = build_plan(tiny(), Caps.parse(SMALL), PlanOptions(512, False, slots=4))

    def place(name: str) -> tuple[int, int]:
        start = plan.arena.offsets[name]
        return start, start + plan.arena.sizes[name]

    checked = 0
    for bucket in plan.buckets.values():
        for tail in bucket.tails.values():
            program = [*bucket.body.dispatches, *tail.dispatches]
            for i, dispatch in enumerate(program):
                for written in dispatch.writes:
                    if written.name not in plan.arena.offsets:
                        continue
                    made = {w.name for d in program[:i] for w in d.writes}
                    later = {r.name for d in program[i + 1 :] for r in d.reads}
                    for name in (made & later & plan.arena.offsets.keys()) - {written.name}:
                        a, b = place(written.name), place(name)
                        assert a[1] <= b[0] or b[1] <= a[0], (written.name, name)
                        checked += 1
    assert checked > 100


def test_the_arena_is_shared_over_time() -> None:
    """Packing by live range is worth its name: a 16-layer body needs hardly more than one layer."""
    caps, options = Caps.parse(SMALL), PlanOptions(512, False)
    one = build_plan(big_llama(layers=1), caps, options).arena.total
    many = build_plan(big_llama(layers=16), caps, options).arena.total
    assert many <= 1.25 * one
    guarded = build_plan(big_llama(layers=1), caps, replace(options, guard=256)).arena
    assert guarded.total > one


def test_memory_grows_with_context_and_slots() -> None:
    caps = Caps.parse(SMALL)

    def kv(context: int, slots: int) -> int:
        options = PlanOptions(context, False, slots=slots)
        return memory_plan(build_plan(tiny(), caps, options), options).kv

    block = 3 * 2 * 3 * 64 * 8 * 4
    assert kv(64, 1) - kv(1, 1) == 0
    assert kv(65, 1) - kv(64, 1) == block
    assert kv(512, 1) - kv(64, 1) == 7 * block
    assert kv(512, 4) == 4 * kv(512, 1)


def test_a_grid_beyond_the_device_is_refused() -> None:
    caps = Caps.parse({**SMALL, "maxComputeWorkGroupCount": [16, 16, 16]})
    with pytest.raises(FormatError, match=r"node \S+: \S+ needs \(.*\) workgroups; the device"):
        build_plan(big_llama(), caps, PlanOptions(512, False))


def test_planning_is_quick_and_repeatable() -> None:
    caps, options = Caps.parse(SMALL), PlanOptions(4096, True, slots=4)
    first, second = (build_plan(big_llama(layers=4), caps, options) for _ in range(2))
    assert first.arena == second.arena
    assert [(w, d.kernel, d.groups, d.reads) for w, d in dispatches(first)] == [
        (w, d.kernel, d.groups, d.reads) for w, d in dispatches(second)
    ]


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    tied = build_plan(tiny(), Caps.parse(SMALL), PlanOptions(512, False))
    assert "lm_head.weight" not in tied.weight_bytes
    assert tied.weight_bytes["model.embed_tokens.weight"] == 512 * 72 * 4
    readers = {
        dispatch.kernel
        for _, dispatch in dispatches(tied)
        for operand in dispatch.reads
        if operand.name == "model.embed_tokens.weight"
    }
    assert any("embedding" in kernel for kernel in readers) and len(readers) >= 2
    sizes = open_source(HF / "llama-tiny").tensors
    stored = sum(int(np.prod(tensor.shape)) * 4 for tensor in sizes.values())
    assert sum(tied.weight_bytes.values()) == stored + tied.weight_bytes["rope.inv_freq"]
