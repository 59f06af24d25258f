"""Many clients at once: fair, complete, apart from each other; and those who leave."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

import hornito
from faults import lose
from hornito.compiler import compile_source
from hornito.errors import DeviceLostError, HornitoError, NoDeviceError
from hornito.runtime import engine as engine_module
from hornito.runtime.results import Chunk
from hornito.runtime.sampler import SamplingParams
from hornito.serve import scheduler as scheduler_module
from hornito.serve.scheduler import Scheduler
from hornito.serve.work import BusyError, Event, Group, Job, Queue, UnavailableError, Work
from hornito.vk.device import open_device
from serving import NAME, Live, live, parse_events, texts, wait
from tiny import spoil, write_llama

pytestmark = pytest.mark.gpu


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def open_stream(server: Live, **body: Any) -> socket.socket:
    """A raw connection that has asked for a stream and read its first event."""
    place = urlsplit(server.url)
    made = socket.create_connection((place.hostname, place.port), timeout=60)
    data = httpx.Request("POST", server.url, json={"model": NAME, "stream": True, **body}).content
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    made.sendall(head.encode() + data)
    found = b""
    while b"data: " not in found:
        found += made.recv(4096)
    assert b"200 OK" in found
    return made


def test_two_hundred_requests_of_sixteen_clients(server: Live) -> None:
    """Mixed lengths, a third cancelled: none lost, none mixed up, memory back to the start."""
    rng = random.Random(11)
    lengths = [2, 9, 33, 70, 140]
    asked = [(ids_of(i % 30, lengths[i % 5]), rng.randrange(1, 24)) for i in range(200)]
    base = server.used_blocks()
    allocated = server.llm.engine.device.allocated_bytes
    want: dict[tuple[int, ...], Any] = {}

    def alone() -> None:
        prompts = [ids for ids, _ in asked[:30]]
        for ids, one in zip(
            prompts, server.llm.generate(prompts, max_tokens=24, ignore_eos=True), strict=True
        ):
            want[tuple(ids)] = one.token_ids

    server.scheduler.call(alone)
    tokenizer = server.llm.tokenizer

    def ask(index: int) -> str:
        ids, count = asked[index]
        body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        if index % 3 == 0:
            with open_stream(server, **{**body, "max_tokens": 200}):
                return "left"
        if index % 3 == 1:
            events = server.events("/v1/completions", model=NAME, **body)
            text, reason = texts(events), events[-2]["choices"][0]["finish_reason"]
        else:
            (choice,) = server.complete(ids, **{k: v for k, v in body.items() if k != "prompt"})[
                "choices"
            ]
            text, reason = choice["text"], choice["finish_reason"]
        assert reason == "length"
        expected = tokenizer.decode(want[tuple(ids)][:count], skip_special=True)
        return "right" if text == expected else f"{text!r} for {expected!r}"

    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(ask, range(200)))
    assert {outcome: found.count(outcome) for outcome in set(found)} == {"left": 67, "right": 133}
    server.wait_idle()
    assert server.used_blocks() == base == [0]
    assert server.llm.engine.free_slots == 4
    assert server.llm.engine.device.allocated_bytes == allocated


def test_sampling_settings_share_a_call(server: Live) -> None:
    """Rows of one submission have settings of their own, and seeds hold."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1, "seed": 6, "top_k": 4, "frequency_penalty": 1.5},
        {"temperature": 0, "repetition_penalty": 3.0, "logprobs": 3},
    ]
    more = {"max_tokens": 30, "ignore_eos": True}
    alone = [server.complete(ids_of(1, 20), **one, **more)["choices"] for one in settings]
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.complete, ids_of(1, 20), **s, **more) for s in settings]
        for mine, want in zip(asked, alone, strict=True):
            (got,), (expected,) = mine.result()["choices"], want
            assert got["text"] == expected["text"]
            if expected["logprobs"]:
                np.testing.assert_allclose(
                    got["logprobs"]["token_logprobs"],
                    expected["logprobs"]["token_logprobs"],
                    rtol=0,
                    atol=1e-3,
                )


def test_h3_a_client_that_leaves_stops_the_work(text_model: Path, device: str | None) -> None:
    """Streamed or not: the slot is free at once, and the device has nothing to do."""
    with live(text_model, device=device, slots=2, pause=0.01) as server:
        check_leaving(server)


def check_leaving(server: Live) -> None:
    with open_stream(server, prompt=ids_of(2, 5), max_tokens=5000, ignore_eos=True):
        assert server.scheduler.running == 1
    server.wait_idle(5)
    with open_stream(server, prompt=ids_of(2, 5), max_tokens=5000, ignore_eos=True) as half:
        half.shutdown(socket.SHUT_WR)  # which nothing tells from leaving
        server.wait_idle(5)
    place = urlsplit(server.url)
    data = httpx.Request(
        "POST", server.url, json={"model": NAME, "prompt": [7, 8], "max_tokens": 200, "n": 20}
    ).content
    with socket.create_connection((place.hostname, place.port)) as waiting:
        waiting.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
            b"\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        wait(lambda: len(server.scheduler.queue) > 0)
    server.wait_idle(5)
    before = server.llm.engine.counters.evaluated_tokens
    time.sleep(0.2)
    assert server.llm.engine.counters.evaluated_tokens == before
    assert server.llm.engine.free_slots == 2


def test_h4_leaving_the_queue_hurts_nobody(text_model: Path, device: str | None) -> None:
    """One slot: the second request leaves while it waits; the third is refused, kindly."""
    with live(text_model, device=device, slots=1, queue_limit=1, pause=0.01) as server:
        whole = server.complete([5, 6, 7], max_tokens=120, temperature=0, ignore_eos=True)
        body = {"prompt": [5, 6, 7], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        url, data = server.url + "/v1/completions", {"model": NAME, "stream": True, **body}
        with httpx.stream("POST", url, json=data, timeout=60) as active:
            pieces = active.iter_text()
            start = next(pieces)
            second = threading.Thread(target=lambda: leave_soon(server))
            second.start()
            wait(lambda: len(server.scheduler.queue) == 1)
            busy = server.post("/v1/completions", model=NAME, prompt=[1])
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
            assert busy.json()["error"]["code"] == "queue_full"
            second.join()
            wait(lambda: len(server.scheduler.queue) == 0)
            events = parse_events(start + "".join(pieces))
        assert texts(events) == whole["choices"][0]["text"]
        assert server.complete([9], max_tokens=2)["usage"]["completion_tokens"] == 2


def leave_soon(server: Live) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"model": NAME, "prompt": [1, 2], "max_tokens": 50},
            timeout=httpx.Timeout(5, read=0.3),
        )


def test_long_prompts_do_not_hold_up_streams(text_model: Path, device: str | None) -> None:
    """While a prompt is evaluated chunk by chunk, tokens of streams come in between."""
    with live(text_model, device=device, context=1024, slots=3) as server:
        seen: list[str] = []

        def watched(name: str) -> Any:
            def deliver(index: int, event: Event) -> None:
                seen.append(name if isinstance(event, Chunk) else f"{name} started")

            return deliver

        def work(ids: list[int], tokens: int) -> list[Work]:
            return [Work(ids, SamplingParams(), tokens, ignore_eos=True)]

        stream = server.scheduler.submit(work(ids_of(4, 4), 1000), watched("stream"))
        wait(lambda: seen.count("stream") > 20)
        server.scheduler.submit(work(ids_of(5, 900), 2), watched("long"))
        server.scheduler.submit(work(ids_of(6, 3), 2), watched("short"))
        wait(lambda: "long started" in seen, 120)
        between = seen[seen.index("short started") : seen.index("long started")]
        assert between.count("stream") >= 3
        # The long prompt came first, but has not kept the short one.
        assert seen.index("short started") < seen.index("long started")
        server.scheduler.cancel(stream)
        server.wait_idle()
        # Scores of a prompt of several chunks, which meet where the chunks do.
        ids = ids_of(7, 600)
        places = server.complete(ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]

        def scores() -> Any:
            with server.llm.session() as session:
                return session.logprobs(ids)

        want = server.scheduler.call(scores)
        np.testing.assert_allclose(places["token_logprobs"][1:], want[1:], rtol=0, atol=1e-3)


def test_a_request_that_fails_touches_no_other(tmp_path: Path, device: str | None) -> None:
    """A row whose logits are NaN ends with an error; the rows beside it go on."""
    table = np.random.default_rng(1).standard_normal((300, 32)).astype(np.float32)
    write_llama(tmp_path / "hf", vocabulary=300, tensors={"model.embed_tokens.weight": table})
    compile_source(tmp_path / "hf", tmp_path / "model.vxm", weights="fp32")
    spoil(tmp_path / "model.vxm", "model.embed_tokens.weight", 7, 3, np.nan)
    model = tmp_path / "model.vxm"
    with live(model, device=device, slots=3, weights=None) as server:
        good = [[9, 10, 11], [20, 21]]
        fine = {"max_tokens": 40, "temperature": 0, "logprobs": 0, "logit_bias": {"7": -100}}
        alone = [server.complete(ids, **fine) for ids in good]
        # Token 7 is drawn at the second step, and poisons the third.
        body = {**fine, "logit_bias": {"7": 100}, "prompt": [9, 10], "model": NAME, "stream": True}
        with ThreadPoolExecutor(3) as clients:
            streams = [clients.submit(server.complete, ids, **fine) for ids in good]
            bad = clients.submit(server.http.post, "/v1/completions", json=body)
            for found, want in zip(streams, alone, strict=True):
                got = found.result()["choices"][0]["logprobs"]["tokens"]
                assert got == want["choices"][0]["logprobs"]["tokens"]
            answer = bad.result()
        # H2: what goes wrong behind the headers is the last event of the stream.
        assert answer.status_code == 200
        events = parse_events(answer.text)
        assert "not finite" in events[-1]["error"]["message"] and len(events) > 1
        # Before them, it is a status.
        broken = server.post("/v1/completions", model=NAME, prompt=[9, 7])
        assert broken.status_code == 500 and "not finite" in broken.json()["error"]["message"]
        server.wait_idle()
        assert server.used_blocks() == [0]


def test_d15_a_lost_device_comes_back(
    text_model: Path, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 for what runs and waits, an unhealthy /health, and then all is well again."""
    hold = threading.Event()
    tries: list[str] = []

    def open_again(*arguments: Any, **options: Any) -> Any:
        tries.append("opened")
        hold.wait(60)
        if len(tries) == 1:
            raise NoDeviceError("the driver is still busy with itself")
        if len(tries) == 2:
            raise OSError("what nobody expected")
        return open_device(*arguments, **options)

    monkeypatch.setattr(engine_module, "open_device", open_again)
    monkeypatch.setattr(scheduler_module, "RETRY_SECONDS", (0.0, 0.05))
    with live(text_model, device=device, slots=2, pause=0.005) as server:
        whole = server.complete([5, 6, 7], max_tokens=9, temperature=0)
        engine = server.llm.engine
        rows = max(rows for kind, rows in engine.plan.buckets if kind == "chunk")
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(
                    server.post, "/v1/completions", model=NAME, prompt=[i + 3], max_tokens=200, n=2
                )
                for i in range(3)
            ]
            wait(lambda: server.scheduler.running == 2 and len(server.scheduler.queue) > 1)
            lose(engine.device)
            answers = [one.result() for one in asked]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert answers[0].json()["error"]["code"] == "device_lost"
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "device lost"
        refused = server.post("/v1/completions", model=NAME, prompt=[1])
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert "hornito_up 0.0" in server.http.get("/metrics").text
        hold.set()
        wait(lambda: server.http.get("/health").status_code == 200)
        assert len(tries) == 3 and engine.generation > 0
        assert max(r for kind, r in engine.plan.buckets if kind == "chunk") < rows
        again = server.complete([5, 6, 7], max_tokens=9, temperature=0)
        assert again["choices"] == whole["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # Nobody has to ask the model for it: /health alone notices.
        hold.clear()
        lose(engine.device)
        assert server.http.get("/health").status_code == 503
        hold.set()
        wait(lambda: server.http.get("/health").status_code == 200)
        assert server.used_blocks() == [0] and engine.free_slots == 2


@pytest.mark.parametrize("how", ["cancelled", "ended"])
def test_a_loss_while_an_answer_leaves(text_model: Path, device: str | None, how: str) -> None:
    """One client goes, or has its answer, when the device does: the others are told, too."""
    with live(text_model, device=device, slots=2) as server:
        rounds, engine = server.scheduler._rounds, server.llm.engine
        submit = engine.device.vk.vkQueueSubmit

        def lose_amid(*arguments: Any) -> int:
            if len(rounds._rows) < 2:
                return int(submit(*arguments))
            leaving = rounds._rows[0]
            if how == "cancelled":
                server.scheduler.cancel(leaving.group)
            else:
                assert leaving.answer is not None
                leaving.answer.end("length")
                rounds._say_end(leaving)
            lose(engine.device)
            return int(engine.device.vk.vkQueueSubmit(*arguments))

        engine.device.vk.vkQueueSubmit = lose_amid
        deliveries: list[tuple[int, Event]] = []
        told = threading.Semaphore(0)

        def deliver_as(number: int) -> Callable[[int, Event], None]:
            def deliver(index: int, event: Event) -> None:
                deliveries.append((number, event))
                if isinstance(event, HornitoError) or getattr(event, "finish_reason", None):
                    told.release()

            return deliver

        for number in range(2):
            work = Work(ids_of(number, 20), SamplingParams(), 200, ignore_eos=True)
            server.scheduler.submit([work], deliver_as(number))
        for _ in range(1 if how == "cancelled" else 2):
            assert told.acquire(timeout=60)
        failed = [number for number, event in deliveries if isinstance(event, DeviceLostError)]
        assert len(failed) == 1
        assert deliveries[-1][0] == failed[0]
        wait(lambda: server.http.get("/health").status_code == 200)
        assert server.complete([5, 6, 7], max_tokens=9)["usage"]["completion_tokens"] > 0
        server.wait_idle()
        assert server.used_blocks() == [0] and engine.free_slots == 2


def test_h14_long_answers_outlive_idle_connections(text_model: Path, device: str | None) -> None:
    """The time that an idle connection is kept does not bound an answer."""
    with live(text_model, device=device, slots=1) as server:
        hold = threading.Thread(target=lambda: server.scheduler.call(lambda: time.sleep(5.5)))
        hold.start()
        began = time.monotonic()
        answer = server.complete([5, 6], max_tokens=3, ignore_eos=True)  # waits behind it
        assert answer["usage"]["completion_tokens"] == 3 and time.monotonic() - began > 5.2
        hold.join()


# -- the scheduler without HTTP ----------------------------------------------------------------


def test_what_nobody_expected(
    text_model: Path, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the request that met it; where it ends the thread itself, /health says so."""
    with live(text_model, device=device, slots=2) as server:
        rounds = server.scheduler._rounds
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "_evaluate", lambda job, size: 1 / 0)
            answer = server.post("/v1/completions", model=NAME, prompt=[5])
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "internal error: ZeroDivisionError"
        assert server.complete([5], max_tokens=2)["usage"]["prompt_tokens"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda arguments: None)
            patch.setattr(rounds, "round", lambda: 1 / 0)
            patch.setattr(rounds, "fail_all", lambda error: 1 / 0)
            answer = server.post("/v1/completions", model=NAME, prompt=[5])
            assert answer.status_code == 503
            server.scheduler._thread.join()
            with pytest.raises(UnavailableError, match="broken"):
                server.scheduler.call(lambda: None)
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert server.post("/v1/completions", model=NAME, prompt=[5]).status_code == 503
        server.llm.close()


def test_whatever_ends_the_thread_everyone_is_told(
    text_model: Path, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that run or wait, and calls that wait, end with an error."""
    # An answer that ended by itself would be told nothing.
    body: dict[str, Any] = {"model": NAME, "max_tokens": 200, "ignore_eos": True}
    with live(text_model, device=device, slots=2, pause=0.005) as server:
        scheduler, rounds = server.scheduler, server.scheduler._rounds
        usual = rounds.round

        def end() -> None:
            usual()
            if scheduler._calls:
                raise SystemExit  # what no handler takes for an error of a request

        monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
        monkeypatch.setattr(rounds, "round", end)
        with ThreadPoolExecutor(5) as clients:
            asked = [
                clients.submit(server.post, "/v1/completions", prompt=[i + 3], **body)
                for i in range(4)
            ]
            wait(lambda: scheduler.running == 2 and len(scheduler.queue) == 2)
            called = clients.submit(scheduler.call, lambda: time.sleep(3600))
            while scheduler._thread.is_alive() and not called.done():
                time.sleep(0.001)
            with pytest.raises(UnavailableError, match="broken"):
                called.result(60)
            assert [one.result(60).status_code for one in asked] == [503] * 4
        assert scheduler.running == 0 and scheduler.state == "failed"
    assert server.llm.engine.closed


def job(owner: object, number: int, ids: list[int] | None = None) -> Job:
    group = Group(lambda index, event: None, owner, number=number)
    made = Job(group, 0, Work(ids or [1, 2], SamplingParams(), 4))
    group.jobs.append(made)
    return made


def test_the_queue_is_fair() -> None:
    """Owners with fewer running go first, then the older request."""
    queue = Queue(10)
    many, few, other = object(), object(), object()
    queue.add([job(many, i) for i in range(4)])
    queue.add([job(few, 9)])
    queue.add([job(other, 10)])
    running: list[Job] = []
    order = []
    while (taken := queue.take(running)) is not None:
        running.append(taken)
        order.append(taken.group.number)
    assert order == [0, 9, 10, 1, 2, 3]
    queue.add([job(many, 1)] * 10)
    with pytest.raises(BusyError, match="10 answers are waiting"):
        queue.add([job(few, 2)])
    assert len(queue.drop(lambda one: True)) == 10 and queue.take([]) is None


def test_kv_pools_smaller_than_all_contexts(text_model: Path, device: str | None) -> None:
    """An answer that finds no block fails alone, with the numbers; kept prefixes give way first."""
    usual: dict[str, Any] = {"device": device, "weights": "fp32", "precision": "high"}
    with hornito.load(text_model, context=512, **usual) as llm:
        block = llm.engine.pools[0].kind.block_bytes
    llm = hornito.load(text_model, context=512, slots=3, kv_bytes=8 * block, **usual)
    scheduler = Scheduler(llm)
    try:
        events: dict[int, list[Event]] = {}
        ended = threading.Semaphore(0)

        def deliver(index: int, event: Event) -> None:
            events.setdefault(index, []).append(event)
            if isinstance(event, HornitoError) or getattr(event, "finish_reason", None):
                ended.release()

        # Six answers of one block each fit; two of five do not.
        for tokens, count in ((40, 6), (300, 2)):
            events.clear()
            works = [
                Work(ids_of(tokens + i, 10), SamplingParams(), tokens, ignore_eos=True)
                for i in range(count)
            ]
            scheduler.submit(works, deliver)
            for _ in range(count):
                assert ended.acquire(timeout=60)
            last = [events[index][-1] for index in range(count)]
            failed = [one for one in last if isinstance(one, HornitoError)]
            assert len(failed) == (1 if tokens == 300 else 0)
            assert all("all 8 blocks" in str(one) for one in failed)
        assert scheduler.call(lambda: scheduler.cache.clear()) is None
        assert scheduler.call(lambda: [pool.used for pool in llm.engine.pools]) == [0]
    finally:
        scheduler.close()
    assert llm.engine.closed
    with pytest.raises(HornitoError, match="the server is stopping"):
        scheduler.submit([Work([1], SamplingParams(), 1)], lambda index, event: None)
