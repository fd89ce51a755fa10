"""The page at /: its policy, and a headless Chromium that chats, stops, thinks, calls tools and reads the live board."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
from browser_support import CHROMIUM, DOWN, DRIVER, ENTER, ESCAPE, LEFT, Browser, browser
from http_support import THINKING, Live, Rig, served, until
from msgspec import structs
from process_support import engine, request

from tests.host.plans import SMOLLM2, machine
from tradewind.config.goals import Goals
from tradewind.config.plan import ClassPlan, Reason
from tradewind.config.resolve import resolve
from tradewind.contract.events import Event
from tradewind.observability.hub import Hub
from tradewind.observability.receipts import PARTS, BindingCause
from tradewind.observability.timeline import LETTERS
from tradewind.serving.http.app import make_app
from tradewind.serving.http.front import Options
from tradewind.serving.page import OPEN_PATHS, HomePage, page_routes

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver here (on Debian: apt-get install chromium chromium-driver)",
)

MARKDOWN = """Here it is:

```python
def backwards(items):
    return items[::-1]  # <b>not bold</b>
```

1. It makes a **new** list.
2. The old one stays: `items` is not changed."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich {old town}"}}\n</tool_call>'
TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
SAYS = {
    "rain at 12 degrees": "<think>The tool has answered.</think>Take an umbrella.",
    "umbrella": "<think>They want the weather. I have a tool for that.</think>" + CALL,
    "haiku": "<think>Five, seven, five. Wind from the east.</think>"
    "Steady eastern wind\nfills the sail beyond the cape —\nthe harbour grows small.",
    "reverse": MARKDOWN,
    "for ever": "and on " * 2000,
    "blue": "Sunlight is scattered by air, and blue light more than red. So blue reaches the eye from everywhere.",
}


class Locked:
    """The hub for an engine in a thread of this process; behind `serve` all calls come from one thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._lock = hub, threading.Lock()

    def take(self, event: Event) -> None:
        with self._lock:
            self._hub.take(event)

    def board(self, tenant: str, **asked: Any) -> bytes:
        with self._lock:
            return self._hub.board.json(tenant, **asked)

    def receipts(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            return getattr(self._hub.receipts, method)(*arguments)

    def take_receipt(self, receipt: Any) -> None:
        with self._lock:
            self._hub.take_receipt(receipt)


@contextmanager
def live(*, plan: Any = None, drift: Callable[[], bytes] = lambda: b"null", **facts: Any) -> Iterator[Live]:
    """A scripted engine that thinks and calls tools, with the page in front of it."""
    rig = Rig(**{"says": SAYS, "step_s": 0.004, "max_context": 16384, "speech": THINKING, **facts})
    hub = Hub.for_server(
        model=rig.front.model,
        version="0.1.0",
        max_running=16,
        facts=rig.engine.stats,
        why_dead=lambda: rig.engine.why_dead,
        plan=plan,
    )
    listening = Locked(hub)
    rig.loop._sinks += (listening,)
    rig.front = replace(
        rig.front,
        more_routes=page_routes(board=listening.board, plan=lambda: hub.plan, drift=drift),
        open_paths=OPEN_PATHS,
        on_receipt=listening.take_receipt,
        receipts=lambda name, tenant: listening.receipts("json", name, tenant),
        slowest=lambda count, tenant: listening.receipts("slowest_json", count, tenant),
        metrics=hub.metrics.text,
    )
    app = make_app(rig.front)
    with rig.client.start(), served(app) as port:
        yield Live(port, rig, app)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture
def page(window: Browser) -> Iterator[tuple[Browser, Live]]:
    """The page, opened; at the end nothing may have gone wrong in it and nothing may have come from elsewhere."""
    with live() as server:
        window.size(1400, 900)
        window.open(server.url + "/")
        window.complaints()
        window.until("document.querySelector('#status').dataset.state === 'ok'", "the board must come alive")
        yield window, server
        assert window.complaints() == []
        assert all(name.startswith(server.url + "/") for name in window.requests())
        window.open("about:blank")


def ask(window: Browser, text: str) -> None:
    window.type("#prompt", text + ENTER)


def answered(window: Browser, count: int = 1) -> None:
    window.until(
        f"document.querySelectorAll('.said.assistant[aria-busy=false]').length === {count}",
        f"answer {count} must end",
        seconds=30,
    )


# -- without a browser ---------------------------------------------------------------------------------------------------


def test_the_document_is_whole_and_its_policy_fits() -> None:
    page = HomePage.read()
    text = page.body.decode()
    assert 'href="page.css"' not in text and 'src="' not in text, "nothing is fetched later"
    for kind in ("style", "script"):
        allowed = re.search(kind + r"-src ([^;]+)", page.policy)
        assert allowed is not None and "unsafe" not in allowed[1]
        bodies = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies}
        assert bodies and hashes == set(allowed[1].split())
    assert "default-src 'none'" in page.policy and "connect-src 'self'" in page.policy
    assert not re.search(r"\son\w+=|\sstyle=", text.split("<script>")[0]), "the policy would refuse it"
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}, (
        "names of XML spaces only, nothing is fetched"
    )
    assert "innerHTML" not in text and "eval(" not in text
    assert len(page.body) < 100_000


def test_anybody_may_read_the_page_but_not_the_board() -> None:
    with live(options=Options(api_keys=("k",))) as server:
        status, headers, body = server.send("GET", "/")
        assert status == 200 and body == HomePage.read().body
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["content-security-policy"] == HomePage.read().policy
        assert headers["x-content-type-options"] == "nosniff"
        status, again, body = server.send("GET", "/", headers={"If-None-Match": headers["etag"]})
        assert status == 304 and body == b"" and again["etag"] == headers["etag"]
        for path in ("/board", "/plan", "/drift"):
            assert server.send("GET", path)[0] == 401
            status, headers, body = server.send("GET", path, headers={"Authorization": "Bearer k"})
            assert status == 200 and headers["cache-control"] == "no-store"
            json.loads(body)
        assert server.send("POST", "/board", {}, headers={"Authorization": "Bearer k"})[0] == 405


def test_what_is_asked_of_the_board_is_checked() -> None:
    with live() as server:
        for query, said in (
            ("steps=x", "steps is 'x'"),
            ("steps=-1", "whole number"),
            ("steps=" + "9" * 16, "whole number"),
            ("ttft_ms=0", "over 0"),
            ("ttft_ms=nan", "ttft_ms is 'nan'"),
            ("e2e_ms=1e9", "e2e_ms"),
            ("tpot_ms=20000000", "up to 1e+07"),
            ("colour=red", "'colour' is not known here; /board takes steps, ttft_ms, tpot_ms, e2e_ms"),
        ):
            status, _, body = server.send("GET", "/board?" + query)
            assert status == 400 and said in json.loads(body)["error"]["message"]
        board = server.get("/board?steps=0&ttft_ms=500&tpot_ms=12.5")
        assert board["timeline"] == {"steps": [], "lanes": [], "more_lanes": 0}
        assert [metric["target_ms"] for metric in board["attainment"]["classes"][0]["metrics"]] == [500, 12.5, None]
        assert server.get("/board")["timeline"] is None


def test_the_board_tells_each_key_of_its_own_requests_only() -> None:
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("mine", "theirs")}
    with live(options=Options(api_keys=tuple(keys)), max_running=1, max_tokens_per_step=64) as server:
        bodies = []
        for name, text in (("theirs", "Go on for ever"), ("mine", "Why is the sky blue?")):
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 60}
            thread = threading.Thread(
                target=server.send, args=("POST", "/v1/chat/completions", asked), kwargs={"headers": keys[name]}
            )
            thread.start()
            bodies.append(thread)
            until(lambda: server.running() > 0, "it must run")
        for thread in bodies:
            thread.join()

        def seen(name: str) -> tuple[dict[str, Any], str]:
            body = server.send("GET", "/board?steps=0", headers=keys[name])[2]
            return json.loads(body)["timeline"], body.decode()

        until(
            lambda: all(lane["state"] == "length" for name in keys for lane in seen(name)[0]["lanes"]), "both must end"
        )
        mine, text = seen("mine")
        theirs, other = seen("theirs")
        (own,), (their,) = mine["lanes"], theirs["lanes"]
        assert own["id"] != their["id"] and own["id"] not in other and their["id"] not in text
        assert own["cells"].count("D") >= 55 and "s" in own["cells"]
        slot = next(wait for wait in own["waits"] if wait[0] == "s")
        assert slot[2] == "another key's request"
        assert {lane for row in mine["steps"] for lane, _ in row[11]} == {own["n"]}
        assert sum(row[13] for row in mine["steps"]) >= their["prompt"] - their["cached"], "as a sum only"
        slowest = json.loads(server.send("GET", "/v1/receipts?slowest=8", headers=keys["mine"])[2])["receipts"]
        assert [one["sequence"] for one in slowest] == [own["id"]]


def test_the_page_has_a_word_for_every_part_and_cause() -> None:
    text = HomePage.read().body.decode()
    parts = text[text.index("const PARTS = {") : text.index("const CAUSES = {")]
    causes = text[text.index("const CAUSES = {") : text.index("const LEGEND = {")]
    assert set(re.findall(r"(\w+): \[", parts)) == set(PARTS)
    assert set(re.findall(r"(\w+): \"", causes)) == set(get_args(BindingCause))
    waits = text[text.index("const WAITS = {") : text.index("const CELLS = {")]
    assert set(re.findall(r"(\w): \[", waits)) == {*LETTERS.values(), "q"}


def test_the_board_counts_what_the_server_did() -> None:
    with live(step_s=0.0) as server:
        server.chat("Why is the sky blue?")
        until(lambda: server.get("/board")["finished"] == 1, "the request must be counted")
        board = server.get("/board")
        assert board["model"] == "scripted" and board["status"] == "ok" and board["max_running"] == 16
        assert board["ttft"]["count"] == 1
        assert board["itl"]["count"] == len(SAYS["blue"]), "one gap after each of its bytes but the last token's"
        assert board["memory"]["kv_pages_total"] == 1024
        assert board["memory"]["front_bytes"] > 1e6


def test_the_reports_of_an_engine_process_are_counted_as_they_cross_the_border() -> None:
    """`RemoteClient(on_reports=...)` gives columns, not single events."""
    with engine(default={"answer": "x" * 40}, rules=[]) as remote:
        hub = Hub.for_server(
            model="m", version="0", max_running=8, facts=remote.client.stats, why_dead=lambda: remote.client.why_dead,
            engine_pid=lambda: remote.process.pid,
        )  # fmt: skip
        kinds: set[str] = set()

        def heard(reports: list[Any]) -> None:
            kinds.update(type(report).__name__ for report in reports)
            hub.take_reports(reports)

        remote.client._on_reports = heard
        remote.client.start()
        tokens = sum(
            len(handle.tokens) for handle in remote.client.run([request(f"r{n}", f"{n} hello") for n in range(4)])
        )
        remote.client.close()
    assert "StepTokens" in kinds
    text = hub.metrics.text()
    assert f'tradewind:generation_tokens_total{{model_name="m"}} {tokens}\n' in text
    assert 'tradewind:request_success_total{model_name="m",finished_reason="stop"} 4\n' in text
    assert json.loads(hub.board.json())["finished"] == 4


# -- with one ------------------------------------------------------------------------------------------------------------


@needs_browser
def test_a_chat_streams_and_says_what_it_cost(page: tuple[Browser, Live]) -> None:
    window, _ = page
    assert window.text("#model") == "scripted"
    ask(window, "Why is the sky blue?")
    window.until(
        "(t => t.length > 10 && t.length < 90)(document.querySelector('.said.assistant .body')?.innerText ?? '')",
        "it must stream",
    )
    answered(window)
    assert window.text(".said.user") == "Why is the sky blue?"
    assert window.text(".said.assistant .body") == SAYS["blue"]
    about = window.text(".said.assistant .about")
    assert re.search(rf"first token [\d.]+ m?s\s+{len(SAYS['blue']) + 1} tokens\s+[\d.]+ tok/s\s+prompt \d+", about), (
        about
    )
    window.until("document.querySelector('#cards').innerText.includes('1 ended')", "the board must count it")
    cards = window.text("#cards")
    assert (
        "Time to first token" in cards
        and "Time between tokens" in cards
        and "Throughput" in cards
        and "Memory" in cards
    )
    window.until("document.querySelector('.plot .one').getAttribute('d').startsWith('M')", "the chart must be drawn")
    label = window.run("return document.querySelector('.plot svg').getAttribute('aria-label')")
    assert re.fullmatch(r"Time to first token, the last two minutes\. p50 at last .+; p95 at last .+\.", label)


@needs_browser
def test_the_conversation_goes_on_and_can_begin_anew(page: tuple[Browser, Live]) -> None:
    window, server = page
    ask(window, "Why is the sky blue?")
    answered(window)
    ask(window, "Now a haiku")
    answered(window, 2)
    prompts = [bytes(t for t in enter.tokens if t < 256).decode() for enter in server.rig.device.entered]
    assert SAYS["blue"] in prompts[-1] and "Now a haiku" in prompts[-1], "earlier turns are sent again"
    window.until(
        "/hit|cache/.test(document.querySelectorAll('.about')[1].innerText)",
        "the second turn finds the first in the cache",
    )
    window.click("#clear")
    assert window.run("return document.querySelectorAll('.said').length") == 0
    ask(window, "Why blue?")
    answered(window)
    assert "haiku" not in bytes(t for t in server.rig.device.entered[-1].tokens if t < 256).decode()


@needs_browser
def test_stop_ends_the_answer_in_the_engine_too(page: tuple[Browser, Live]) -> None:
    window, server = page
    for number, way in enumerate(("button", "key"), start=1):
        ask(window, "Go on for ever")
        window.until(
            "[...document.querySelectorAll('.said.assistant .body')].at(-1)?.innerText.length > 20", "it must begin"
        )
        if way == "button":
            window.click("#stop")
        else:
            window.type("#prompt", ESCAPE)
        answered(window, number)
        assert "stopped" in window.run("return [...document.querySelectorAll('.about')].at(-1).innerText")
        until(lambda: server.running() == 0, "the slot must be free")


@needs_browser
def test_text_is_shown_never_run(page: tuple[Browser, Live]) -> None:
    window, _ = page
    ask(window, "Please reverse <img src=x onerror=alert(1)>")
    answered(window)
    assert "<b>not bold</b>" in window.text(".said.assistant pre")
    assert window.run("return document.querySelectorAll('.said img, .said pre b').length") == 0
    assert window.text(".said.assistant .block .head span") == "python"
    assert window.run("return [...document.querySelectorAll('.said ol li')].map(e => e.innerText)") == [
        "It makes a new list.",
        "The old one stays: items is not changed.",
    ]
    assert window.text(".said.user").endswith("<img src=x onerror=alert(1)>")


@needs_browser
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("1. a\n\n2. b", '<ol start="1"><li>a</li></ol><ol start="2"><li>b</li></ol>'),
        ("# Head\n- x\n- **y**", "<h3>Head</h3><ul><li>x</li><li><strong>y</strong></li></ul>"),
        ("a `<i>` b", "<p>a <code>&lt;i&gt;</code> b</p>"),
        ("2 * 3 * 4 and `open", "<p>2 * 3 * 4 and `open</p>"),
        ("```\na\n\nb", "<pre><code>a\n\nb</code></pre>"),
        ("", ""),
    ],
)
def test_marks_become_elements(page: tuple[Browser, Live], text: str, html: str) -> None:
    """The few marks that are known, whole or still being written."""
    window, _ = page
    shown = window.run(
        "const t = new Text(); for (let n = 0; n <= arguments[0].length; n++) t.show(arguments[0].slice(0, n));"
        "const parts = [...t.element.children].flatMap(e => [...e.children]);"
        "return parts.map(e => (e.querySelector('pre') ?? e).outerHTML).join('')",
        text,
    )
    assert shown == html


@needs_browser
def test_a_long_answer_does_not_slow_the_page_down(page: tuple[Browser, Live]) -> None:
    """Drawing the last of 400 paragraphs costs about what drawing the first did, not 400 times as much; measured 1.3 ms."""
    window, _ = page
    spent = window.run(
        "const a = new Answer(); document.querySelector('#log').append(a.element);"
        "a.content = 'A sentence of some length, as models write them.\\n\\n'.repeat(400); a.draw();"
        "const began = performance.now();"
        "for (let n = 0; n < 100; n++) { a.content += ' word'; a.draw(); }"
        "const spent = (performance.now() - began) / 100; a.element.remove(); return spent"
    )
    assert spent < 10


@needs_browser
def test_thoughts_and_tools_are_shown_and_a_result_goes_back(page: tuple[Browser, Live]) -> None:
    window, server = page
    window.click("#settings-button")
    window.type("#system", "Be brief.")
    window.run(
        "const t = document.querySelector('#tools'); t.value = arguments[0]; t.dispatchEvent(new Event('input', {bubbles: true}))",
        TOOLS,
    )
    window.click("#settings-button")
    ask(window, "Do I need an umbrella?")
    answered(window)
    assert re.match(r"Thought for [\d.]+ m?s", window.text(".thought summary"))
    assert (
        window.run("return document.querySelector('.thought div').textContent")
        == "They want the weather. I have a tool for that."
    )
    assert window.text(".call .head b") == "get_weather"
    assert '"city": "Zürich {old town}"' in window.text(".call pre")
    assert "calls a tool" in window.text(".about")
    assert window.run("return document.querySelector('#prompt').placeholder") == "Result of get_weather"
    ask(window, "rain at 12 degrees")
    answered(window, 2)
    last = window.run("return [...document.querySelectorAll('.said.assistant .body')].at(-1).innerText")
    assert last == "Take an umbrella."
    prompt = bytes(t for t in server.rig.device.entered[-1].tokens if t < 256).decode()
    assert "Be brief." in prompt and "rain at 12 degrees" in prompt


@needs_browser
def test_limits_and_mistakes_are_said(page: tuple[Browser, Live]) -> None:
    window, _ = page
    window.click("#settings-button")
    window.type("#max-tokens", "5")
    ask(window, "Why is the sky blue?")
    answered(window)
    assert "cut at the limit" in window.text(".about")
    window.type("#tools", "[{")
    ask(window, "Again")
    assert "no JSON" in window.text("#note")
    assert window.run("return document.querySelector('#prompt').value") == "Again", "what was typed is not lost"
    window.run("document.querySelector('#tools').value = ''; document.querySelector('#max-tokens').value = 99999")
    window.click("#send")
    answered(window, 2)
    assert "the limit is 16384" in window.text(".wrong")
    assert window.complaints(), "the refusal is in the console too; the fixture wants it read"


@needs_browser
def test_a_key_is_asked_for_and_then_used(window: Browser) -> None:
    with live(options=Options(api_keys=("open sesame",))) as server:
        window.open(server.url + "/")
        window.until(
            "document.querySelector('#status').innerText === 'API key needed'", "the page must say what is missing"
        )
        assert "API key" in window.text("#note")
        window.type("#key", "open sesame")
        window.until("document.querySelector('#status').dataset.state === 'ok'", "the key must open the board")
        ask(window, "Why is the sky blue?")
        answered(window)
        assert window.text(".said.assistant .body") == SAYS["blue"]
        window.run("sessionStorage.clear()")
        window.open("about:blank")
        window.complaints()


@needs_browser
def test_a_server_that_is_gone_is_said_and_its_return_too(window: Browser) -> None:
    with live() as server:
        window.open(server.url + "/")
        window.until("document.querySelector('#status').dataset.state === 'ok'", "the board must come alive")
    window.until("document.querySelector('#status').innerText === 'not reachable'", "the page must notice")
    ask(window, "Anybody?")
    answered(window)
    assert window.text(".wrong") == "The server cannot be reached."
    window.open("about:blank")
    window.complaints()


@needs_browser
def test_targets_are_set_and_attainment_is_shown(page: tuple[Browser, Live]) -> None:
    window, _ = page
    assert window.text("#targets-sum") == "no targets are set"
    ask(window, "Why is the sky blue?")
    answered(window)
    window.type("#target-ttft", "5000")
    window.type("#target-e2e", "1")
    window.until("document.querySelector('#targets-sum').innerText === 'all 0 %'", "no answer takes a millisecond")
    rows = window.run(
        "return [...document.querySelectorAll('#targets-body tbody tr')].map(row => row.innerText.split(/\\s*\\t\\s*/))"
    )
    assert [row[:3] for row in rows] == [
        ["First token", "5 s", "100 %"],
        ["Between tokens", "–", "–"],
        ["Whole answer", "1 ms", "0 %"],
    ]
    label = window.run("return document.querySelector('.interval').getAttribute('aria-label')")
    assert re.fullmatch(r"0 % met all targets; 95 % interval 0 % to [\d.]+ %", label)
    window.run("sessionStorage.clear()")


@needs_browser
def test_the_steps_are_drawn_and_can_be_walked_with_keys(page: tuple[Browser, Live]) -> None:
    window, server = page
    ask(window, "Why is the sky blue?")
    answered(window)
    window.click(".views button[data-to=board]")
    window.until(
        "timeline.columns > 110 && timeline.steps.length > 50 && timeline.rows?.length === 1", "all must be seen"
    )
    window.until("timeline.lanes.values().next().value.state === 'stop'", "to the end")
    for name in ("device", "in", "prompt", "answer"):
        assert window.run("return timeline.paths[arguments[0]].getAttribute('d')", name).startswith("M")
    assert re.match(
        r"\d+ steps up to number \d+\. 1 request is shown\.",
        window.run("return timeline.svg.getAttribute('aria-label')"),
    )
    window.type(".field-of-steps", DOWN)
    assert window.run("return timeline.paused") and window.text("#steps .tools button") == "Go on"
    assert "computed in vain, for it had ended" in window.text(".told"), (
        "the step that was decided before the end was known"
    )
    window.type(".field-of-steps", LEFT)
    told = window.text(".told")
    assert re.search(r"^Step \d+ at \d+ s: device [\d.]+ ms, host [\d.]+ ms", told)
    assert re.search(r"…\w{6} prompt \d+: its answer was computed\.", told), told
    step = window.run("return timeline.at.step")
    window.type(".field-of-steps", LEFT * 3)
    assert window.run("return timeline.at.step") == step - 3
    window.type(".field-of-steps", LEFT * 300)
    assert "its prompt was computed" in window.text(
        ".told"
    ) and f"prompts {server.rig.device.entered[0].prompt_tokens}" in window.text(".told")
    known = window.run("return timeline.steps.length")
    window.click(".views button[data-to=both]")
    ask(window, "Now a haiku")
    answered(window, 2)
    window.until("document.querySelector('#cards').innerText.includes('2 ended')", "the board goes on meanwhile")
    assert window.run("return timeline.steps.length") == known, "and the steps stand still"
    window.click("#steps .tools button")
    window.until("timeline.lanes.size === 2", "they go on")
    window.run("timeline.tableButton.click()")
    heads = window.run("return [...document.querySelectorAll('.spoken th[scope=col]')].map(e => e.innerText)")
    assert heads[:6] == ["request", "state", "prompt", "cached", "waited", "why"]
    assert window.run("return document.querySelectorAll('.spoken caption').length") == 2


@needs_browser
def test_the_slowest_requests_show_parts_that_sum(page: tuple[Browser, Live]) -> None:
    window, _ = page
    ask(window, "Why is the sky blue?")
    answered(window)
    window.until("document.querySelector('.receipt')", "its receipt must come")
    window.click(".receipt summary")
    window.until("document.querySelector('.receipt table')", "it must open")
    widths = window.run(
        "const sum = bar => [...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0);"
        "return [...document.querySelectorAll('.receipt[open] > .room .parts')].map(sum)"
    )
    assert len(widths) == 2 and all(abs(width - 100) < 0.1 for width in widths)
    text = window.text(".receipt")
    assert "Bound by" in text and "its own answer" in text and "Together" in text
    last = window.run("return [...document.querySelectorAll('.receipt tbody tr:last-child td')].map(e => e.innerText)")
    assert last[2] == "100 %" and last[1] == window.text(".receipt summary b")
    ask(window, "Now a haiku")
    answered(window, 2)
    window.until("document.querySelectorAll('.receipt').length === 2", "the next one must come")
    assert window.run("return document.querySelectorAll('.receipt[open]').length") == 1, "what was open stays open"


@needs_browser
def test_the_plan_is_told_with_what_was_rejected(window: Browser) -> None:
    classes = (ClassPlan(name="chat", ttft_s=0.5, tpot_s=0.05), ClassPlan(name="bulk"))
    reason = Reason(
        choice="max_running", value="64", why="it fits", rejected="more: no pages; fewer: slots stay empty", pinned=True
    )
    made = resolve(Goals(model="smollm2"), card=SMOLLM2, hardware=machine())
    made = structs.replace(made, reasons=(reason,), schedule=structs.replace(made.schedule, classes=classes))
    with live(plan=made) as server:
        window.size(1400, 900)
        window.open(server.url + "/")
        window.until("document.querySelector('#plan-body dl')", "the plan must come")
        window.click("#plan summary")
        text = window.text("#plan")
        assert "Class chat" in text and "first token 500 ms, between tokens 50 ms" in text and "no targets" in text
        assert window.run("return [...document.querySelectorAll('.rejected li')].map(e => e.innerText)") == [
            "more: no pages",
            "fewer: slots stay empty",
        ]
        assert window.text("#targets-sum") == "nothing with a target has ended yet"
        assert window.run("return [...document.querySelectorAll('#targets-body h3')].map(e => e.innerText)") == [
            "chat",
            "bulk",
        ]
        window.open("about:blank")


@needs_browser
def test_the_plan_panel_says_that_traffic_has_changed_and_what_was_done(window: Browser) -> None:
    now: dict[str, Any] = {
        "mode": "apply", "state": "learning", "says": None, "learnt": 12, "learnt_of": 1000, "usual": None, "drift": None,
        "proposal": None, "changes": {"applied": 0, "failed": 0, "kept": 0, "put off": 0, "undone": 0}, "history": [],
    }  # fmt: skip
    made = resolve(Goals(model="smollm2"), card=SMOLLM2, hardware=machine())
    with live(plan=made, drift=lambda: json.dumps(now).encode()) as server:
        window.size(1400, 900)
        window.open(server.url + "/")
        window.until("document.querySelector('#drift-body p')", "the drift must be told", seconds=30)
        window.click("#plan summary")
        assert "Learning what is usual: 12 of 1 000 requests." in window.text("#plan").replace("\u2009", " ")
        assert window.text("#plan-sum") == ""
        says = "rate went from 8.03 requests/s as planned to 38.9, 4.85 times, noticed 3 s after it began"
        tries = [
            {"name": "as it is", "attained": 0.413, "ttft_p90_s": 2.5, "tpot_p90_s": 0.08},
            {"name": "max_running 64", "attained": 0.985, "ttft_p90_s": None, "tpot_p90_s": 0.06},
        ]
        now["drift"] = {"what": "rate", "planned": 8.03, "now": 38.9, "says": says}
        now["proposal"] = {
            "changed": True, "differs": ["max_running 16 -> 64"], "why": "", "tries": tries, "step_times": "step times: made up",
        }  # fmt: skip
        now["changes"]["applied"] = 1
        now["history"] = [
            {"at": 1e9, "what": "learnt", "says": "usual"},
            {"at": 1e9, "what": "drift", "says": f"traffic has left: {says}"},
            {"at": 1e9, "what": "applied", "says": "the new plan is in force"},
        ]
        now["state"], now["says"] = "watching", says
        window.until("document.querySelector('#plan-sum').textContent", "the change must be told", seconds=30)
        assert window.text("#plan-sum") == "traffic has changed"
        text = window.text("#plan")
        assert f"Traffic has changed: {says}" in text and "of the newest traffic better: max_running 16 -> 64." in text
        assert "41.3 %" in text and "2.5 s" in text and "98.5 %" in text and "–" in text
        assert window.run("return [...document.querySelectorAll('#drift-body li b')].map(e => e.innerText)") == [
            "applied",
            "drift",
        ]
        assert window.run("return document.querySelector('#plan dl') !== null"), "the plan is still told"
        assert window.complaints() == []
        window.open("about:blank")


@needs_browser
def test_it_fits_a_phone_and_a_dark_room(page: tuple[Browser, Live]) -> None:
    window, _ = page
    ask(window, "Please reverse this and write a haiku")
    answered(window)
    light = window.screenshot()
    window.dark(True)
    dark = window.screenshot()
    assert light != dark
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert window.run(ground) == "rgb(13, 20, 19)"
    window.size(375, 700, phone=True)
    assert not window.run("return document.querySelector('.board').checkVisibility()"), "one thing at a time"
    window.click(".views button[data-to=board]")
    assert window.run("return document.querySelector('.board').checkVisibility()")
    for view in ("board", "chat"):
        window.click(f".views button[data-to={view}]")
        wide = window.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], f"the {view} is wider than the phone"
    window.dark(False)


@needs_browser
def test_everything_has_a_name_for_those_who_hear_it(page: tuple[Browser, Live]) -> None:
    window, _ = page
    window.click("#settings-button")
    nameless = window.run(
        "const all = document.querySelectorAll('button, input, textarea, [role=meter], [role=img], [tabindex], summary');"
        "const named = e => e.getAttribute('aria-label') || e.labels?.length || e.innerText?.trim();"
        "return [...all].filter(e => e.checkVisibility() && !named(e)).map(e => e.outerHTML)"
    )
    assert nameless == []
    tree = window.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in tree if not node["ignored"]}
    assert {"log", "main", "banner", "meter", "status"} <= roles
