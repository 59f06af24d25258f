"""Every variant that an op lists: same numbers as its plain twin, rules that lists keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hornito.errors import UnsupportedError
from hornito.ops.kernels import load_spirv
from hornito.ops.variants import REQUIREMENTS, Choices, Site, Variant, meets, pick
from hornito.vk.caps import Caps
from ops import cases
from ops.harness import Bench, Call, assert_close, device_class, lower, rows_of
from ops.kv_pool import KvPool
from ops.spirv import parse

CLASSES = ("software", "plain", "gpu", "bare_gpu", "matrix_gpu", "small_grid")
SHAPES = ((1, 40, 96), (3, 72, 40), (20, 70, 136))
"""Rows, outputs and width."""

CAPS = Caps.parse(
    {
        "subgroupSize": 32,
        "minSubgroupSize": 32,
        "maxSubgroupSize": 32,
        "subgroupSizeControl": 1,
        "subgroupSupportedStages": 32,
        "subgroupSupportedOperations": 255,
        "computeFullSubgroups": 1,
        "shaderFloat16": 1,
        "maxComputeWorkGroupCount": (1 << 20, 65535, 65535),
        "maxComputeWorkGroupInvocations": 1024,
    }
)


def calls(device: str) -> Iterator[Call]:
    """Linear of few and many rows, and attention of both kinds."""
    rng = np.random.default_rng(3)
    for rows, n, k in SHAPES:
        # Storage types differ in how a weight is read alone; each has its own tests.
        for dtype in ("int4",) if k % 32 == 0 else ("fp16",):
            yield Call(
                graph=cases.linear(n, k, dtype, bias=True),
                rows=rows_of(range(rows)),
                inputs={"x": rng.standard_normal((rows, k)).astype(np.float32)},
                weights={
                    "w": rng.standard_normal((n, k)).astype(np.float32),
                    "b": rng.standard_normal(n).astype(np.float32),
                },
                device=device,
                half_operands=True,
            )
    for kind, rows in (("batch", 1), ("chunk", 20)):
        pool = KvPool(2, 16, half=False)
        for position in range(120):
            k, v = rng.standard_normal((2, 2, 16)).astype(np.float32)
            pool.put(0, position, k, v)
        yield Call(
            graph=cases.attention(4, 2, 16),
            rows=rows_of(range(100, 100 + rows)),
            inputs={"q": rng.standard_normal((rows, 64)).astype(np.float32)},
            kind=kind,
            kv=pool,
            device=device,
        )


def sites(call: Call, caps: Caps) -> list[Site]:
    return lower(call, caps).sites


@pytest.mark.gpu
@pytest.mark.parametrize("device", CLASSES)
def test_every_variant_equals_the_plain_twin(
    bench: Bench, device: str, request: pytest.FixtureRequest
) -> None:
    """Whatever this driver can run, chosen one after another by name: of those that are only taken
    where they measure faster every third, and all with --slow."""
    step = 1 if request.config.getoption("--slow") else 3
    ran = set()
    for call in calls(device):
        (site,) = sites(call, bench.device.caps)
        twin = bench.run(replace(call, choices=Choices(plain=True))).value("y")
        usual = [variant for variant in site.admitted if not variant.optional]
        optional = [variant for variant in site.admitted if variant.optional]
        for variant in (*usual, *optional[::step]):
            if not variant.admitted(bench.device.caps):
                continue  # the class offers what this device does not have
            chosen = bench.run(replace(call, choices=Choices(winners={site.key: variant.name})))
            assert variant.kernel in chosen.kernels
            bound = (3e-2 if variant.inexact else 1e-4) * np.abs(twin).max()
            assert_close(chosen.value("y"), twin.astype(np.float64), bound)
            ran.add(variant.kernel)
    assert len(ran) > 3


@pytest.mark.parametrize("device", CLASSES)
def test_lists_end_in_a_plain_twin(device: str) -> None:
    """What runs everywhere, with baseline capabilities alone; names are unique."""
    for call in calls(device):
        for site in sites(call, CAPS):
            names = [variant.name for variant in site.admitted]
            assert len(set(names)) == len(names)
            assert [v.plain for v in site.admitted].count(True) == 1
            last = site.admitted[-1]
            assert last.plain and not last.requires and not last.optional
            for variant in site.admitted:
                assert all(name in REQUIREMENTS or ">=" in name for name in variant.requires)


@pytest.mark.parametrize("device", ("software", "gpu", "matrix_gpu"))
def test_d11_kernels_that_count_on_subgroups_ask_for_full_ones(device: str) -> None:
    """And their workgroups are multiples of the subgroup; software devices choose by 8 lanes."""
    for call in calls(device):
        for site in sites(call, CAPS):
            for variant in site.admitted:
                module = parse(load_spirv(variant.kernel))
                uses = {c for c in module.capabilities if c.startswith("GroupNonUniform")}
                if not uses and "CooperativeMatrixKHR" not in module.capabilities:
                    assert not variant.full_subgroups
                    continue
                assert variant.requires, variant.name
                if device == "software":
                    assert module.local_size[0] % 8 == 0
                    continue
                assert variant.full_subgroups, variant.name
                size = device_class(CAPS, device).subgroup_size
                assert module.local_size[0] % size == 0


@pytest.mark.parametrize("device", ("gpu", "dot_gpu", "matrix_gpu"))
def test_d11_no_such_kernel_without_full_subgroups(device: str) -> None:
    """Those that a driver fills as it likes have no threads in a row."""
    partly = replace(CAPS, has_full_subgroups=False)
    for call in calls("gpu"):
        caps = replace(device_class(partly, device), has_full_subgroups=False)
        for site in sites(replace(call, device=device), CAPS):
            for variant in site.admitted:
                assert variant.admitted(caps) is not variant.full_subgroups, variant.name


def test_requirements() -> None:
    assert meets(CAPS, "shuffle") and meets(CAPS, "subgroup>=32")
    assert not meets(CAPS, "subgroup>=64") and not meets(CAPS, "coopmat_16")
    with pytest.raises(KeyError):
        meets(CAPS, "magic")


def test_what_is_left_when_kernels_are_dropped() -> None:
    many = (1 << 21, 1, 1)
    variants = [
        Variant("a/fast.x", requires=("shuffle",)),
        Variant("a/wide.x", groups=many),
        Variant("a/slow.x", {5: 1}),
        Variant("a/slow.x", {5: 2}, optional=True),
        Variant("a/plain.x", groups=many, plain=True),
    ]

    def taken(*dropped: str) -> str:
        choices = Choices(dropped=dict.fromkeys(dropped, "wrong: by far"))
        return pick("key", "node", variants, CAPS, choices).taken.name

    assert taken() == "a/fast.x"
    assert taken("a/fast.x") == "a/slow.x[5=1]"
    assert taken("a/fast.x", "a/slow.x") == "a/plain.x"
    with pytest.raises(UnsupportedError, match=r"no kernel is left for key.*wrong: by far"):
        taken("a/fast.x", "a/slow.x", "a/plain.x")
    assert pick("key", "n", variants, CAPS, Choices(plain=True)).taken.name == "a/plain.x"
