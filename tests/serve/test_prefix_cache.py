"""What later requests start from: counted, the same result, within a budget."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from hornito.serve.prefix_cache import PrefixCache
from serving import NAME, Live, live
from text_model import write_text_model

pytestmark = pytest.mark.gpu

#: Like Qwen3's: the thinking of earlier answers is left out.
THINKING_TEMPLATE = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def talk(server: Live, turns: int, think: str = "") -> list[tuple[int, int, int]]:
    """(prompt tokens, cached tokens, evaluated tokens) of each turn of a conversation."""
    messages: list[dict[str, str]] = []
    found = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn}: hello"})
        server.wait_idle()
        before = server.llm.engine.counters.evaluated_tokens
        answer = server.chat(messages, max_tokens=1, temperature=0, ignore_eos=True)
        evaluated = server.llm.engine.counters.evaluated_tokens - before
        found.append((answer["usage"]["prompt_tokens"], cached(answer), evaluated))
        messages.append({"role": "assistant", "content": f"{think}answer {turn}"})
    return found


def test_e9_five_turns(server: Live) -> None:
    """Cached tokens grow each turn, and only the new ones are evaluated."""
    found = talk(server, 5)
    assert found[0][1] < found[0][0]
    for (before, *_), (prompt, reused, evaluated) in itertools.pairwise(found):
        # The template's own end of the turn before is common to both.
        assert before <= reused < prompt and evaluated == prompt - reused
    reuse = [reused for _, reused, _ in found]
    assert reuse == sorted(set(reuse))


def test_e9_thinking_that_the_template_removes(tmp_path: Path, device: str | None) -> None:
    """History that is rendered differently later is reused up to where it differs."""
    model = write_text_model(tmp_path / "m.gguf", template=THINKING_TEMPLATE)
    with live(model, device=device, context=512) as server:
        found = talk(server, 5, think="<think>let me see</think>")
        for (before, *_), (prompt, reused, evaluated) in itertools.pairwise(found):
            assert before <= reused < prompt and evaluated == prompt - reused


def test_answers_are_those_of_a_cold_start(server: Live) -> None:
    """However much of the prompt was held, and whoever left it."""
    ids = ids_of(1, 150)
    server.used_blocks()
    cold = server.complete(ids, max_tokens=20, temperature=0, logprobs=2, ignore_eos=True)
    assert cached(cold) == 0
    for shared in (0, 1, 63, 64, 65, 149):
        other = [*ids[:shared], *ids_of(2, 40)]
        server.complete(other, max_tokens=3, ignore_eos=True)
        again = server.complete(other, max_tokens=20, temperature=0, ignore_eos=True)
        assert cached(again) == len(other) - 1
        server.used_blocks()
        fresh = server.complete(other, max_tokens=20, temperature=0, ignore_eos=True)
        assert cached(fresh) == 0 and fresh["choices"] == again["choices"]
        server.complete(ids, max_tokens=1)
        part = server.complete(other, max_tokens=20, temperature=0, ignore_eos=True)
        assert part["choices"] == fresh["choices"]
    warm = server.complete(ids, max_tokens=20, temperature=0, logprobs=2, ignore_eos=True)
    assert cached(warm) == 149 and warm["choices"][0]["text"] == cold["choices"][0]["text"]


def test_f1_penalties_see_cached_prompts(server: Live) -> None:
    """Tokens that were not evaluated again count as the prompt's all the same."""

    def likely(prompt: list[int]) -> int:
        made = server.scheduler.call(lambda: server.llm.generate(prompt, max_tokens=1))
        return made.token_ids[0]

    def with_likely(prompt: list[int]) -> list[int]:
        return [*prompt[:9], likely(prompt), *prompt[10:]]

    # The most likely token stands in the cached part alone: only its count there can displace it.
    prompts = (with_likely(ids_of(seed, 70)) for seed in range(100))
    ids = next(p for p in prompts if likely(p) in p[:69] and likely(p) != p[69])
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    penalised = {**body, "repetition_penalty": 3.0}
    server.used_blocks()
    cold, warm = (server.complete(ids, **penalised) for _ in range(2))
    assert (cached(cold), cached(warm)) == (0, 69)
    free = server.complete(ids, **body)
    tokens = [a["choices"][0]["logprobs"]["tokens"] for a in (cold, warm, free)]
    assert tokens[0] == tokens[1] and tokens[1][0] != tokens[2][0]


def test_several_answers_share_one_prompt(server: Live) -> None:
    """`n` answers evaluate their prompt once."""
    ids = ids_of(4, 120)
    server.used_blocks()
    before = server.llm.engine.counters.evaluated_tokens
    answer = server.complete(ids, n=4, max_tokens=1, ignore_eos=True)
    assert server.llm.engine.counters.evaluated_tokens - before == 120 + 3
    assert answer["usage"]["prompt_tokens"] == 120 and cached(answer) == 0


def test_a_budget_keeps_the_latest(text_model: Path, device: str | None) -> None:
    """The least recently used gives way; a budget of 0 keeps nothing."""
    prompts = [ids_of(10 + i, 100) for i in range(4)]
    with live(text_model, device=device, slots=1, cache_bytes=1) as server:
        block = server.llm.engine.pools[0].kind.block_bytes
        cache: PrefixCache = server.scheduler.cache
        assert cached(server.complete(prompts[0], max_tokens=2)) == 0
        assert cached(server.complete(prompts[0], max_tokens=2)) == 0  # larger than the budget
        cache.budget = 6 * block
        for ids in prompts[:3]:
            server.complete(ids, max_tokens=2)
        server.wait_idle()
        assert cache.nbytes == 6 * block and len(cache) == 3
        assert cached(server.complete(prompts[0], max_tokens=2)) == 99  # used again
        server.complete(prompts[3], max_tokens=2)  # in place of prompts[1]
        server.wait_idle()
        assert cache.nbytes <= 6 * block
        assert cached(server.complete(prompts[0], max_tokens=2)) == 99
        assert cached(server.complete(prompts[1], max_tokens=2)) == 0
    with live(text_model, device=device, slots=1, cache_bytes=0) as server:
        for _ in range(2):
            assert cached(server.complete(prompts[0], max_tokens=2)) == 0
        server.wait_idle()
        assert server.scheduler.call(lambda: [p.used for p in server.llm.engine.pools]) == [0]


def test_running_answers_come_first(text_model: Path, device: str | None) -> None:
    """Kept prefixes fill the pool, and leave it to whoever needs the blocks."""
    with live(text_model, device=device, slots=2) as server:
        pool = server.llm.engine.pools[0]
        for i in range(10):
            server.complete(ids_of(50 + i, 200), max_tokens=2)
        server.wait_idle()
        assert pool.used > pool.count // 2
        answer = server.complete([ids_of(90, 200), ids_of(91, 200)], max_tokens=50, ignore_eos=True)
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


def test_sliding_windows(tmp_path: Path, device: str | None) -> None:
    """Prompts start from the end of an earlier prompt or answer; nothing is evaluated twice."""
    model = write_text_model(tmp_path / "m.gguf", name="gemma3-tiny")
    with live(model, device=device, context=512) as server:
        assert any(pool.kind.window for pool in server.llm.engine.pools)
        assert server.scheduler.cache.keeps_prompts
        found = talk(server, 5)
        for (before, *_), (prompt, reused, evaluated) in itertools.pairwise(found):
            assert before <= reused < prompt and evaluated == prompt - reused
        first = ids_of(5, 260)
        cold = server.complete(first, max_tokens=40, temperature=0, ignore_eos=True)
        # Longer than the window and its budget: only a whole prompt or answer is a start.
        more = [*first, *ids_of(6, 9)]
        again = server.complete(more, max_tokens=8, temperature=0, ignore_eos=True)
        assert cached(again) == 260
        server.used_blocks()
        fresh = server.complete(more, max_tokens=8, temperature=0, ignore_eos=True)
        assert cached(fresh) == 0 and fresh["choices"] == again["choices"]
        assert cold["usage"]["completion_tokens"] == 40
        assert server.post("/tokenize", model=NAME, prompt="x").status_code == 200
