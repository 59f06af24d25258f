"""KV blocks: who owns them, when they come and go, and what happens when there are none left."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hornito.errors import DeviceMemoryError, SessionError
from hornito.plan.plan import KvKind
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.kv_cache import BlockPool, BlockTables
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import Compiled, answer, leave, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

KIND = KvKind(window=0, kv_heads=3, head_dim=8, layers=(0, 1, 2), half=False)


def used(engine: Engine) -> list[int]:
    return [pool.used for pool in engine.pools]


def test_blocks_come_as_positions_grow(engine: Engine) -> None:
    assert used(engine) == [0]
    with Session(engine) as session:
        assert used(engine) == [0]
        for count, blocks in ((1, 1), (62, 1), (1, 1), (1, 2), (63, 2), (1, 3), (170, 5)):
            session.prefill(random_ids(count, seed=count))
            assert used(engine) == [blocks], session.position
    assert used(engine) == [0]


def test_decoding_takes_blocks_for_the_steps_in_flight(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(random_ids(60, seed=2))
        run = decode([session], [200], ignore_eos=True, steps=4)
        next(run)
        assert session.position == 64 and used(engine) == [2]
        leave(run)
        for _ in decode([session], [8], ignore_eos=True, steps=4):
            pass
        assert session.position == 72 and used(engine) == [2]
    assert used(engine) == [0]


def test_fifty_sessions_return_everything(shared: Engine) -> None:
    pool = shared.pools[0]
    want = answer(shared, random_ids(40, seed=3), 5).bits()
    for turn in range(50):
        with Session(shared) as a, Session(shared) as b:
            a.prefill(random_ids(1 + 5 * turn, seed=turn))
            b.prefill(random_ids(300 - 5 * turn, seed=turn))
            owned = shared.tables.entries[[a.slot, b.slot]]
            owned = owned[owned != 0]
            assert len(set(owned.tolist())) == len(owned) == pool.used
            if turn % 5 == 0:
                for _ in decode([a, b], [3, 3], ignore_eos=True):
                    pass
    assert pool.used == 0
    assert not shared.tables.entries.any()
    # Every block is to be had again.
    taken = {pool.take() for _ in range(pool.count)}
    assert taken == set(range(pool.count))
    for block in taken:
        pool.release(block, shared.last_ticket)
    assert pool.used == 0
    assert answer(shared, random_ids(40, seed=3), 5).bits() == want


def test_a_full_pool(device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in the error; who has blocks goes on; who waits gets those that come back."""
    monkeypatch.setattr("hornito.runtime.memory.pool_sizes", lambda *_, **__: [3])
    with open_engine(device, compiled("llama-tiny"), slots=2) as engine:
        size = engine.pools[0].bytes
        assert engine.memory.kv == size == 3 * 2 * 3 * 64 * 8 * 4 * 3
        want = answer(engine, random_ids(20, seed=4), 10)
        with Session(engine) as a:
            a.prefill(random_ids(128, seed=1))
            b = Session(engine)
            message = rf"the KV pool is full: all 3 blocks .* in use \({size:,} bytes\)\. Close"
            with pytest.raises(DeviceMemoryError, match=message) as caught:
                b.prefill(random_ids(65, seed=2))
            assert (caught.value.needed, caught.value.available) == (size // 3, 0)
            assert caught.value.exit_code == 5
            assert (b.position, b.pending) == (0, None)
            b.close()
            assert used(engine) == [2]
            a.step(pending(a))
            assert a.position == 129 and used(engine) == [3]
            with Session(engine) as b:
                with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                    b.step(5)
                a.close()
                b.prefill(random_ids(192, seed=3))
                with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                    list(decode([b], [5], ignore_eos=True))
                assert b.position == 192
        assert answer(engine, random_ids(20, seed=4), 10).bits() == want.bits()


class Clock:
    """A device whose submissions complete when the test says so."""

    def __init__(self, device: Device) -> None:
        self.done = 0
        self.waited: list[int] = []
        self.caps, self.info, self.allocate = device.caps, device.info, device.allocate

    def completed(self) -> int:
        return self.done

    def wait(self, ticket: int) -> None:
        self.waited.append(ticket)
        self.done = max(self.done, ticket)


@pytest.fixture
def clock(device: Device) -> Any:
    return Clock(device)


def test_a_freed_block_waits_for_its_last_reader(clock: Any) -> None:
    pool = BlockPool(cast(Device, clock), KIND, 2, "pool")
    first, second = pool.take(), pool.take()
    pool.release(first, ticket=7)
    pool.release(second, ticket=9)
    assert pool.used == 0
    assert pool.take() == first and clock.waited == [7]
    clock.done = 12
    assert pool.take() == second and clock.waited == [7]
    pool.free()


def test_owners_are_counted(clock: Any) -> None:
    pool = BlockPool(cast(Device, clock), KIND, 2, "pool")
    block = pool.take()
    pool.share(block)
    assert pool.owners(block) == 2
    pool.release(block, 0)
    assert pool.used == 1 and pool.take() != block
    pool.release(block, 0)
    with pytest.raises(SessionError, match=f"KV block {block} was released twice"):
        pool.release(block, 0)
    with pytest.raises(SessionError, match=f"KV block {block} has no owner"):
        pool.share(block)
    assert pool.take() == block
    pool.free()


def test_blocks_are_apart(clock: Any) -> None:
    """Addresses differ by a block at least and are aligned, in chunks as the device allows."""
    clock.caps = SimpleNamespace(max_allocation_bytes=3 * KIND.block_bytes + 100)
    pool = BlockPool(cast(Device, clock), KIND, 10, "pool")
    addresses = sorted(pool.address(b) for b in range(10))
    assert all(b - a >= KIND.block_bytes for a, b in pairwise(addresses))
    assert all(address % 256 == 0 for address in addresses)
    assert len({pool.place(b)[0].handle for b in range(10)}) == 4
    pool.free()


def test_tables_send_what_changed() -> None:
    tables = BlockTables(slots=2, kinds=2, blocks=8)
    assert tables.nbytes == 2 * 2 * 8 * 8 and tables.take_updates() == []
    tables.set(1, 0, 3, 0x1122334455667788)
    tables.set(1, 0, 5, 9)
    tables.set(0, 1, 0, 0)  # what it is already
    ((offset, data),) = tables.take_updates()
    assert offset == ((1 * 2 + 0) * 8 + 3) * 8
    assert data == b"".join(n.to_bytes(8, "little") for n in (0x1122334455667788, 0, 9))
    assert tables.take_updates() == []
