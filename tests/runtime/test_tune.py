"""Tuning: measured variants, the margin, what is kept, and that tuned equals default."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hornito.cli.main import main
from hornito.graph.graph import Graph
from hornito.ops.variants import Choices, Variant, pick
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.plan.records import WRONG, DeviceRecords, Verdict, verdict_key
from hornito.plan.stand import Stand
from hornito.plan.tune import MARGIN, REPEATS
from hornito.plan.units import Unit, units
from hornito.runtime import engine as engine_module
from hornito.runtime import settle
from hornito.runtime.settle import KernelPolicy
from hornito.vk import timing
from hornito.vk.caps import Caps
from hornito.vk.device import Device, open_device
from hornito.vk.record import Recorder
from tiny import Compiled, assert_same_tokens, forced_logits, golden, open_engine

SMALL: dict[str, Any] = {"context": 128, "chunk_rows": (16,)}


@pytest.fixture
def own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: None) -> Iterator[Device]:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    with open_device("software") as opened:
        yield opened


class Clock:
    """Stands in for the device's clock: every variant takes what `ns` says of its kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ns: dict[str, float]) -> None:
        self.measured: list[str] = []

        def nanoseconds(
            stand: Stand, unit: Unit, layout: Any, dispatches: Any, repeats: int
        ) -> list[float]:
            names = [d.kernel for d in dispatches]
            self.measured += names
            found = [ns[name] for name in names if name in ns]
            return [found[0] if found else 1000.0] * repeats

        monkeypatch.setattr(Stand, "nanoseconds", nanoseconds)


@pytest.mark.gpu
@pytest.mark.software
def test_a_tuned_plan_equals_the_default_plan(own_device: Device, compiled: Compiled) -> None:
    """Whatever the measurements say, the tokens are the same."""
    wanted = golden("llama-tiny")
    ids = wanted.prompt + wanted.tokens
    package = compiled("llama-tiny")
    full = KernelPolicy(tune="full")
    with open_engine(own_device, package, **SMALL) as engine:
        usual = forced_logits(engine, ids)
    with open_engine(own_device, package, policy=full, **SMALL) as engine:
        assert_same_tokens(forced_logits(engine, ids), usual)
    records = DeviceRecords.load(own_device.info)
    assert records.winners
    assert all(w.nanoseconds > 0 for w in records.winners.values())


@pytest.mark.gpu
@pytest.mark.software
def test_winners_are_kept_and_used(
    own_device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = golden("llama-tiny")
    package = compiled("llama-tiny")
    clock = Clock(monkeypatch, {"linear/broadcast.f32": 900.0, "linear/lane_row.f32": 500.0})
    with open_engine(own_device, package, policy=KernelPolicy(tune="full"), **SMALL) as engine:
        kernels = {d.kernel for d in engine.plan.distinct()}
        assert "linear/lane_row.f32" in kernels and "linear/broadcast.f32" not in kernels
        logits = forced_logits(engine, wanted.prompt)
    measured = len(clock.measured)
    # A later load uses them without measuring; `fast` has nothing to measure; `off` ignores them.
    for tune, used in ((None, True), ("fast", True), ("off", False)):
        with open_engine(own_device, package, policy=KernelPolicy(tune=tune), **SMALL) as engine:
            found = {d.kernel for d in engine.plan.distinct()}
            assert ("linear/lane_row.f32" in found) == used, tune
            if not used:
                assert_same_tokens(logits, forced_logits(engine, wanted.prompt))
    assert len(clock.measured) == measured


@pytest.mark.gpu
@pytest.mark.software
@pytest.mark.parametrize(("gain", "displaced"), [(MARGIN - 0.01, False), (MARGIN + 0.01, True)])
def test_a_margin_is_asked_for(
    own_device: Device,
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    displaced: bool,
) -> None:
    clock = Clock(
        monkeypatch, {"linear/broadcast.f32": 1000.0, "linear/lane_row.f32": 1000.0 * (1 - gain)}
    )
    full = KernelPolicy(tune="full")
    with open_engine(own_device, compiled("llama-tiny"), policy=full, **SMALL) as engine:
        kernels = {d.kernel for d in engine.plan.distinct()}
    assert ("linear/lane_row.f32" in kernels) == displaced
    assert clock.measured


@pytest.mark.gpu
@pytest.mark.software
def test_on_the_command_line(
    compiled: Compiled, own_device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(compiled("llama-tiny")), "--fast"]) == 0
    assert "shapes measured" in capsys.readouterr().out
    assert DeviceRecords.load(own_device.info).winners
    assert main(["tune", str(compiled("llama-tiny")), "--text", "x"]) == 2


@pytest.mark.gpu
@pytest.mark.software
def test_winners_stay_when_another_variant_was_dropped(
    own_device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on record for the variants that took part, without the one that is not used."""
    own_device.caps = replace(own_device.caps, device_kind="discrete")
    package = compiled("llama-tiny", "fp16")
    none = KernelPolicy(budget_s=0.0)
    with open_engine(own_device, package, policy=none, **SMALL) as engine:
        everything = replace(engine.options, choices=Choices())
        whole = build_plan(engine.graph, own_device.caps, everything)
        sites = [site for bucket in whole.buckets.values() for site in bucket.sites]
        (bad, *_), plain = next(
            ([v.kernel for v in site.admitted if not v.plain], site.admitted[-1].kernel)
            for site in sites
            if len({v.kernel for v in site.admitted}) > 2
        )
    records = DeviceRecords.load(own_device.info)
    records.verdicts[verdict_key(bad, "shape")] = Verdict(bad, "shape", WRONG, "by far", 20, 9.0)
    records.save()
    Clock(monkeypatch, {plain: 10.0})
    tune = KernelPolicy(tune="full", budget_s=0.0)
    with open_engine(own_device, package, policy=tune, **SMALL) as engine:
        winners = engine.options.choices.winners
        assert winners and bad in engine.trust.dropped
    with open_engine(own_device, package, policy=none, **SMALL) as engine:
        assert engine.options.choices.winners == winners


@pytest.mark.gpu
@pytest.mark.software
def test_records_that_change_nothing_cost_no_second_plan(
    own_device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = KernelPolicy(budget_s=None, thorough=True)
    with open_engine(own_device, compiled("llama-tiny"), policy=everything, **SMALL) as engine:
        assert engine.trust.verdicts
    built: list[PlanOptions] = []

    def counted(graph: Graph, caps: Caps, options: PlanOptions) -> Plan:
        built.append(options)
        return build_plan(graph, caps, options)

    for module in (settle, engine_module):
        monkeypatch.setattr(module, "build_plan", counted)
    with open_engine(own_device, compiled("llama-tiny"), **SMALL):
        assert len(built) == 1


@pytest.mark.gpu
@pytest.mark.software
@pytest.mark.parametrize("kind", ["software", "discrete"])
def test_a_gpu_is_kept_busy_before_a_variant_is_timed(
    own_device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With the variant's own launches; those runs don't count. A software device needs none."""
    monkeypatch.setattr(timing, "BUSY_SECONDS", 0.05)
    submitted: list[str] = []
    submit = Device.submit

    def counted(device: Device, recordings: Sequence[Recorder]) -> int:
        submitted.extend(recording.label for recording in recordings)
        return submit(device, recordings)

    none = KernelPolicy(budget_s=0.0)
    with open_engine(own_device, compiled("llama-tiny"), policy=none, **SMALL) as engine:
        own_device.caps = replace(own_device.caps, device_kind=kind)
        unit = next(unit for unit in units(engine.plan) if unit.kernel.startswith("linear/"))
        stand = Stand(own_device, engine.plan, engine.pipelines, engine.weight_address, slots=1)
        monkeypatch.setattr(Device, "submit", counted)
        began = time.perf_counter()
        try:
            found = stand.nanoseconds(
                unit, stand.layout(unit, unit.dispatches), unit.dispatches, REPEATS
            )
        finally:
            stand.free()
        seconds = time.perf_counter() - began
    runs = submitted.count("timing")
    assert len(found) == REPEATS and min(found) > 0
    if kind == "software":
        assert runs == 1 + REPEATS
    else:
        assert runs > 1 + REPEATS and seconds >= 0.05


def test_a_winner_that_is_gone_is_ignored() -> None:
    caps = Caps.parse({})
    variants = [Variant("a/b.c"), Variant("a/d.e", plain=True)]
    site = pick("key", "node", variants, caps, Choices(winners={"key": "a/x.y"}))
    assert site.taken.kernel == "a/b.c"
    site = pick("key", "node", variants, caps, Choices(winners={"key": "a/d.e"}))
    assert site.taken.kernel == "a/d.e"
    dropped = Choices(dropped={"a/b.c": "wrong"}, winners={"key": "a/b.c"})
    assert pick("key", "node", variants, caps, dropped).taken.kernel == "a/d.e"
