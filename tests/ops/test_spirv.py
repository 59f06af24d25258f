"""Every kernel's SPIR-V against the lowering that launches it, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hornito.diag.divergence import Operands, comparison
from hornito.graph.graph import Graph
from hornito.ops import digits, linear
from hornito.ops.base import HALF_INPUTS, HALF_RESULTS, Dispatch, Operand, Push, Tail
from hornito.ops.kernels import kernel_names, load_spirv
from hornito.vk import api
from hornito.vk.caps import Caps
from ops import cases
from ops.harness import Call, lower, rows_of
from ops.kv_pool import KvPool
from ops.spirv import Member, parse
from tensor import cases as tensor_cases

pytestmark = pytest.mark.usefixtures("kernels")

BASELINE = {"Shader", "PhysicalStorageBufferAddresses"}
SUBGROUP = {
    "software": {"GroupNonUniform", "GroupNonUniformBallot"},
    "gpu": {"GroupNonUniform", "GroupNonUniformShuffle"},
    "dot_gpu": {
        "GroupNonUniform",
        "GroupNonUniformShuffle",
        "DotProduct",
        "DotProductInput4x8BitPacked",
    },
    "matrix_gpu": {
        "GroupNonUniform",
        "GroupNonUniformShuffle",
        "Float16",
        "VulkanMemoryModel",
        "CooperativeMatrixKHR",
    },
}
SHARED_LIMIT, MATRIX_SHARED_LIMIT = 16 * 1024, 48 * 1024


def small_caps() -> Caps:
    """A device with the least that Vulkan guarantees, and full subgroups of 8."""
    operations = (
        api.VK_SUBGROUP_FEATURE_BASIC_BIT
        | api.VK_SUBGROUP_FEATURE_BALLOT_BIT
        | api.VK_SUBGROUP_FEATURE_SHUFFLE_BIT
    )
    return Caps.parse(
        {
            "deviceType": api.VK_PHYSICAL_DEVICE_TYPE_CPU,
            "subgroupSize": 8,
            "computeFullSubgroups": 1,
            "subgroupSupportedStages": api.VK_SHADER_STAGE_COMPUTE_BIT,
            "subgroupSupportedOperations": operations,
        }
    )


def matrix_call(graph: Graph, rows: int = 64) -> Call:
    """A call with enough rows for cooperative matrices, where they are allowed."""
    return Call(graph=graph, rows=rows_of(range(rows)), device="matrix_gpu", half_operands=True)


def calls() -> Iterator[Call]:
    """Calls that, together, launch every kernel there is."""
    for dtype in ("fp32", "fp16"):
        for rows in (1, 16, 64):
            for device in ("software", "plain", "gpu", "bare_gpu"):
                records = rows_of(range(rows))
                yield Call(graph=cases.linear(24, 16, dtype), rows=records, device=device)
                yield Call(graph=cases.gated_linear(24, 16, dtype), rows=records, device=device)
                for graph in (cases.linear(24, 32, "int8"), cases.gated_linear(24, 32, "int8")):
                    yield Call(graph=graph, rows=records, device=device)
        for graph in (cases.linear(24, 32, "int8"), cases.gated_linear(24, 32, "int8")):
            yield matrix_call(graph)
        yield matrix_call(cases.linear(24, 16, "fp16"))
        yield matrix_call(cases.gated_linear(24, 16, "fp16"))
        for stored in ("fp16", "int8"):  # tiles by shape; few of them share a long K
            shapes = ((64, 24, 4096), (512, 1024, 1024), (512, 9728, 896), (1024, 8192, 4096))
            for rows, n, k in shapes:
                yield matrix_call(cases.linear(n, k, stored, norm=True), rows)
                yield matrix_call(cases.linear(n, k, stored), rows)
                yield matrix_call(cases.gated_linear(n // 2, k, stored, norm=True), rows)
        yield Call(graph=cases.embedding(10, 8, dtype), rows=rows_of([0]))
        yield Call(graph=cases.position_embedding(64, 8, dtype), rows=rows_of([0]))
    yield Call(graph=cases.embedding(10, 32, "int8"), rows=rows_of([0]))
    for graph in (
        cases.add(8),
        cases.activation(8, "silu"),
        cases.layer_norm(8),
        cases.gated_activation(8, "silu"),
        cases.rms_norm(8),
        cases.rope(1, 8, 4),
    ):
        yield Call(graph=graph, rows=rows_of([0]))
    for select in (cases.rms_norm(8, select=True), cases.select_rows(8)):
        yield Call(graph=select, rows=rows_of([0]), selection=(0,))
    for half in (False, True):
        pool = KvPool(1, 8, half=half)
        for graph in (
            cases.kv_append(1, 8),
            cases.rope_append(2, 1, 8, 4),
            cases.rope_append(2, 1, 8, 4, norms=True),
        ):
            yield Call(graph=graph, rows=rows_of([0]), kv=pool)
        for stored in ("fp32", "fp16", "int8"):
            graph = cases.qkv_append(2, 1, 8, 4, 32, stored)
            for device in ("gpu", "bare_gpu"):
                yield Call(graph=graph, rows=rows_of([0]), kv=pool, device=device)
        for rows in (1, 16):
            yield Call(graph=cases.attention(2, 1, 8), rows=rows_of(range(rows)), kv=pool)
        for device in ("gpu", "bare_gpu"):
            graph = cases.attention(2, 1, 8)
            yield Call(graph=graph, rows=rows_of([0]), kv=pool, device=device)
    for head_dim in (64, 128, 256):
        call = matrix_call(cases.attention(2, 1, head_dim))
        yield replace(call, kv=KvPool(1, head_dim, half=True))
    for tail in ("argmax", "sample", "logits", "logprob"):
        call = Call(graph=cases.head(2000, 8), rows=rows_of([0]), selection=(0,), tail=Tail(tail))
        yield call


@cache
def dispatches() -> tuple[Dispatch, ...]:
    found: list[Dispatch] = []
    for call in calls():
        found += lower(call, small_caps()).dispatches
    found += tensor_cases.dispatches(small_caps())
    return (*found, *large_tiles(), *of_digits(), *comparison_of_logits())


def large_tiles() -> list[Dispatch]:
    """What linears launch whose grid is large, without a large matrix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "LARGE_TILE_GROUPS", 1)
        found: list[Dispatch] = []
        for dtype in ("fp32", "fp16", "int8"):
            for graph in (cases.linear(24, 32, dtype), cases.gated_linear(24, 32, dtype)):
                call = Call(graph=graph, rows=rows_of(range(64)), device="gpu")
                found += lower(call, small_caps()).dispatches
    return found


def dot_calls() -> list[Call]:
    """One row where integer dot products are fast."""
    one = rows_of([0])
    graphs = (
        cases.linear(24, 32, "int8"),
        cases.linear(24, 8192, "int8"),
        cases.gated_linear(24, 32, "int8"),
    )
    found = [Call(graph=graph, rows=one, device="dot_gpu") for graph in graphs]
    for half in (False, True):
        graph, pool = cases.qkv_append(2, 1, 8, 4, 32, "int8"), KvPool(1, 8, half=half)
        found.append(Call(graph=graph, rows=one, kv=pool, device="dot_gpu"))
    return found


def of_digits() -> list[Dispatch]:
    """What those launch whose matrix is large, without a large matrix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "DIGIT_WEIGHTS", 0)
        return [d for call in dot_calls() for d in lower(call, small_caps()).dispatches]


def comparison_of_logits() -> list[Dispatch]:
    """What `hornito eval quality` launches, which is no node of a graph."""
    logits, words = Operand("logits", 0, 64), Operand("words", 0, 16)
    return comparison(Operands(logits, logits, words, words), 4, 2000)


def by_kernel(name: str) -> list[Dispatch]:
    found = [d for d in dispatches() if d.kernel == name]
    assert found, f"no call of this file launches {name}: add one to calls()"
    return found


def test_every_kernel_is_launched_by_some_lowering() -> None:
    assert set(kernel_names()) == {d.kernel for d in dispatches()}


def test_every_kernel_keeps_the_rules() -> None:
    """Push block, specialisation, workgroup, shared memory and features of each kernel."""
    assert kernel_names()
    for name in kernel_names():
        check_kernel(name)


def check_kernel(name: str) -> None:
    module = parse(load_spirv(name))
    launched = by_kernel(name)
    for dispatch in launched:
        assert module.push == members(dispatch.push), name
        assert module.spec_ids <= set(dispatch.spec), f"{name}: a specialisation is left out"
        assert len(dispatch.push.pack([0] * len(dispatch.push.fields))) == dispatch.push.size
    assert module.capabilities <= BASELINE.union(*SUBGROUP.values()), name
    x, y, z = module.local_size
    matrices = "CooperativeMatrixKHR" in module.capabilities
    asks = matrices or "DotProduct" in module.capabilities  # for so many (`threads>=`)
    assert x in ((128, 256) if asks else (8, 64, 128)) and (y, z) == (1, 1), name
    limit = MATRIX_SHARED_LIMIT if matrices else SHARED_LIMIT
    assert module.shared_bytes <= limit, f"{name}: {module.shared_bytes} bytes shared"
    halves = {16} if matrices else set()
    assert module.float_widths <= {32} | halves, f"{name}: floats of {module.float_widths} bits"
    dots = "DotProduct" in module.capabilities  # asks for what it takes, by shape
    assert module.spec_sized_arrays == dots, f"{name}: an array is sized by a specialisation"


def test_kernels_need_no_more_than_their_device_offers() -> None:
    """A device without subgroups gets baseline kernels only; others what they offer."""
    for call in calls():
        offered = BASELINE | SUBGROUP.get(call.device, set())
        for dispatch in lower(call, small_caps()).dispatches:
            module = parse(load_spirv(dispatch.kernel))
            assert module.capabilities <= offered, f"{dispatch.kernel} on {call.device}"


def test_c5_more_shared_memory_than_every_device_has_is_asked_for() -> None:
    """Kernels beyond 16 KiB, and those whose arrays grow with the shape, are offered only where
    there is as much as they use."""
    seen = set()
    for call in (*calls(), *dot_calls()):
        for site in lower(call, small_caps()).sites:
            for variant in site.admitted:
                module = parse(load_spirv(variant.kernel), variant.spec)
                shared = module.shared_bytes
                if shared <= SHARED_LIMIT and not module.spec_sized_arrays:
                    continue
                (asked,) = (n for n in variant.requires if n.startswith("shared>="))
                assert int(asked.removeprefix("shared>=")) >= shared, variant.name
                least = replace(small_caps(), shared_memory_bytes=shared - 1)
                assert not variant.admitted(least), variant.name
                seen.add(variant.kernel)
    modules = {name: parse(load_spirv(name)) for name in kernel_names()}
    assert seen == {
        name
        for name, module in modules.items()
        if module.shared_bytes > SHARED_LIMIT or module.spec_sized_arrays
    }


def members(push: Push) -> list[Member]:
    offsets = push.offsets()
    return [Member(name, kind, offsets[name]) for name, kind in push.fields]


def test_d21_kernels_are_few_and_small() -> None:
    """What the tests, and whoever starts on a software device, wait for: the driver's compiler."""
    sizes = {name: len(load_spirv(name)) for name in kernel_names()}
    assert len(sizes) <= 130
    assert max(sizes.values()) <= 96 * 1024, max(sizes, key=lambda name: sizes[name])
    assert sum(sizes.values()) <= 4 << 20


def test_push_sizes_fit_the_baseline() -> None:
    assert max(d.push.size for d in dispatches()) <= 128


def test_parser_rejects_what_is_no_spirv() -> None:
    for code in (b"", b"\0" * 20, load_spirv("add/add.default")[:-3]):
        with pytest.raises(ValueError):
            parse(code)


def test_parser_reads_a_known_kernel() -> None:
    """The parser itself, against what the source of gemv says."""
    module = parse(load_spirv("linear/gemv.gated_f16"))
    assert module.local_size == (128, 1, 1)
    halves = {HALF_INPUTS, HALF_RESULTS}
    assert (
        {0, 1, 2, 3, 4, 5, 6, 10, 11} | halves >= module.spec_ids >= {0, 3, 4, 5, 10, 11} | halves
    )
    assert module.push[0] == Member("x", "u64", 0)
    assert module.push[-1] == Member("eps", "f32", 76)
    assert module.shared_bytes % 128 == 0 and module.shared_bytes > 0
    assert module.capabilities == BASELINE | SUBGROUP["gpu"]
    assert np.uint32(0x07230203).tobytes() == load_spirv("linear/gemv.gated_f16")[:4]


def test_gemma_sized_head_fits_the_smallest_grid() -> None:
    """262,144 ids at 65,535 workgroups: every device class has a grid for it."""
    for device in ("software", "plain", "gpu"):
        for rows in (1, 4, 16):
            graph: Graph = cases.head(262144, 640, "fp16")
            call = Call(
                graph=graph,
                rows=rows_of(range(rows)),
                selection=range(rows),
                tail=Tail("argmax"),
                device=device,
            )
            assert lower(call, small_caps()).dispatches
