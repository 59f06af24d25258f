"""The page at / in a headless Chromium: streaming, stop, settings, figures, colours, keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Chromium, find_chromium
from serving import Live, live

pytestmark = [pytest.mark.gpu, pytest.mark.browser]

ENTER = ("Enter", "Enter", 13)
ESCAPE = ("Escape", "Escape", 27)
UP = ("ArrowUp", "ArrowUp", 38)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (HORNITO_TEST_CHROMIUM names one)")
    made = Chromium(path, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(browser: Chromium, server: Live) -> Chromium:
    browser.open(f"{server.url}/")
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.requests.clear()
    browser.problems.clear()
    browser.open(f"{server.url}/?fresh")
    browser.until("document.title.includes(' · Hornito')")
    return browser


def say(page: Chromium, text: str) -> None:
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press(*ENTER)


def answers(page: Chromium) -> list[dict[str, str]]:
    found = page.run(
        "JSON.stringify([...document.querySelectorAll('article.assistant')].map(card => ({"
        "text: card.querySelector('p').textContent,"
        "note: card.querySelector('small')?.textContent || '',"
        "bad: card.querySelector('.error') !== null})))"
    )
    parsed: list[dict[str, str]] = json.loads(found)
    return parsed


def set_field(page: Chromium, name: str, value: str) -> None:
    page.run(
        f"{{const box = document.getElementById('{name}'); box.value = {json.dumps(value)};"
        "box.dispatchEvent(new Event('input')); box.dispatchEvent(new Event('change'))}"
    )


def test_a_chat_of_two_turns(page: Chromium, server: Live) -> None:
    """Answers are the server's, with speed and cached tokens; nothing else is requested."""
    assert "tiny" in page.run("document.getElementById('about').textContent")
    for name, value in (("temperature", "0"), ("max_tokens", "12"), ("system", "be brief")):
        set_field(page, name, value)
    say(page, "hello world")
    page.until("document.querySelectorAll('small').length === 1")
    say(page, "and <b>now</b>?")
    page.until("document.querySelectorAll('small').length === 2")
    first, second = answers(page)
    assert page.run("document.querySelectorAll('article.user')[1].textContent") == "and <b>now</b>?"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello world"},
    ]
    expected = server.llm.chat(messages, max_tokens=12)
    assert first["text"] == expected.text
    assert re.search(r"[\d.]+ tok/s · 12 tokens · prompt \d+, \d+ cached", first["note"])
    assert "cut at the most tokens" in first["note"]
    cached = re.search(r"prompt (\d+), (\d+) cached", second["note"])
    assert cached and 20 < int(cached[2]) < int(cached[1])
    assert page.problems == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {
        server.url.split("/")[2]
    }


def test_stop_and_what_came_stays(page: Chromium, server: Live) -> None:
    set_field(page, "max_tokens", "100000")
    set_field(page, "temperature", "1")
    say(page, "go on and on")
    page.until("document.querySelector('article.assistant p')?.textContent.length > 5")
    assert page.run("document.getElementById('send').hidden")
    page.press(*ESCAPE)
    page.until("document.querySelectorAll('small').length === 1")
    (answer,) = answers(page)
    assert answer["note"] == "stopped" or "tok/s" in answer["note"]
    assert page.run("messages.length") == 2 and not page.run(
        "document.getElementById('send').hidden"
    )
    page.until("document.activeElement.id === 'text'")


def test_keys(page: Chromium) -> None:
    """Shift+Enter is a line; Up takes a message back; Alt+N, Alt+S and Alt+T."""
    set_field(page, "max_tokens", "3")
    page.run("document.getElementById('text').focus()")
    page.type("one")
    page.press(*ENTER, modifiers=8)
    page.type("two")
    page.press(*ENTER)
    page.until("document.querySelectorAll('small').length === 1")
    assert page.run("messages[0].content") == "one\ntwo"
    page.press(*UP)
    assert page.run("document.getElementById('text').value") == "one\ntwo"
    assert page.run("messages.length") == 0 and answers(page) == []
    page.press(*ENTER)
    page.until("document.querySelectorAll('small').length === 1")
    page.press("n", "KeyN", 78, modifiers=1)
    assert page.run("document.querySelectorAll('article').length") == 0
    page.press("s", "KeyS", 83, modifiers=1)
    assert page.run("document.activeElement.id") == "temperature"
    colours = []
    for _ in range(3):
        page.press("t", "KeyT", 84, modifiers=1)
        colours.append(page.run("getComputedStyle(document.body).backgroundColor"))
    assert page.run("document.getElementById('theme').textContent") == "Auto"
    assert colours[0] != colours[1]


def test_settings_are_kept_and_wrong_ones_are_errors(page: Chromium, server: Live) -> None:
    set_field(page, "temperature", "0.5")
    set_field(page, "top_p", "7")
    say(page, "hello")
    page.until("document.querySelectorAll('.error').length === 1")
    assert "top_p" in answers(page)[0]["note"]
    # The message is back in the box, to be sent again.
    assert page.run("document.getElementById('text').value") == "hello"
    assert page.run("messages.length") == 0
    page.open(f"{server.url}/?again")
    assert page.run("document.getElementById('temperature').value") == "0.5"


def test_a_server_with_a_key(
    browser: Chromium, text_model: Path, private_cache: Path, device: str | None
) -> None:
    with live(text_model, device=device, address={"api_key": "sesame"}) as server:
        browser.open(f"{server.url}/")
        browser.until("document.getElementById('about').textContent.includes('API key')")
        set_field(browser, "key", "sesame")
        browser.until("model !== null")
        set_field(browser, "max_tokens", "2")
        say(browser, "hello")
        browser.until("document.querySelectorAll('small').length === 1")
        assert not answers(browser)[0]["bad"]
