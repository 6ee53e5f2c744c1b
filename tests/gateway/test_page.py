"""The pages for people: what is sent, and what a person sees of it in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import AsyncIterator

import numpy as np
import pytest

from common.errors import Overloaded
from common.wire.messages import ModelFacts
from gateway.status import Readiness
from tests.browser import Browser, Tab
from tests.gateway.conftest import Running, Serve, vector
from tests.gateway.wire import ask, embed

PATHS = ["/", "/docs"]

ERROR = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}

# A little of everything that an OpenAPI 3.1 document may say of a body.
OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "Hedgerow", "version": "9.8.7", "description": "First paragraph.\n\nA `second` <b>one</b>."},
    "tags": [{"name": "OpenAI", "description": "For its clients."}, {"name": "Operations"}],
    "security": [{}, {"bearer": []}],
    "paths": {
        "/v1/embeddings": {
            "post": {
                "tags": ["OpenAI"],
                "summary": "Embed texts.",
                "parameters": [{"$ref": "#/components/parameters/Timeout"}],
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {"$ref": "#/components/schemas/Embedding~1Request"},
                            "example": {"input": "it's a text"},
                        }
                    }
                },
                "responses": {
                    "200": {
                        "description": "The vectors.",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Tree"}}},
                    },
                    "400": {"$ref": "#/components/responses/Refused"},
                    "413": {"description": "Too large.", "content": ERROR},
                    "503": {"description": "Not now; see `Retry-After`.", "content": ERROR},
                },
            }
        },
        "/v1/models/{id}": {"get": {"tags": ["Operations"], "responses": {"200": {"description": "A model."}}}},
        "/health": {"get": {"responses": {"200": {"description": "Alive."}}}},
    },
    "components": {
        "parameters": {
            "Timeout": {
                "name": "X-Request-Timeout-Ms",
                "in": "header",
                "schema": {"type": "integer", "minimum": 1, "maximum": 600000},
            }
        },
        "responses": {"Refused": {"description": "Something is wrong with it."}},
        "schemas": {
            "Embedding/Request": {
                "type": "object",
                "required": ["input"],
                "properties": {
                    "encoding_format": {"enum": ["float", "base64"], "default": "float"},
                    "input": {
                        "anyOf": [
                            {"type": "string", "minLength": 1},
                            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2048},
                        ],
                        "description": "What to embed.",
                    },
                    "dimensions": {"type": ["integer", "null"], "minimum": 1, "default": None},
                },
            },
            "Tree": {  # contains itself
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"items": {"$ref": "#/components/schemas/Tree"}},
                },
            },
        },
    },
}


@pytest.fixture
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    """A tab that is found, at the end, to have asked 127.0.0.1 alone and to have had no complaint.

    A test that provokes one takes it away.
    """
    tab = await browser.tab()
    yield tab
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("http://127.0.0.1:", "data:image/svg+xml,"))] == []


def home(running: Running) -> str:
    return f"http://127.0.0.1:{running.port}/"


async def open_home(tab: Tab, running: Running, name: str = "tiny") -> None:
    """The status page, once it knows the model."""
    await tab.open(home(running))
    await tab.until(f"document.querySelector('h1').innerText === {json.dumps(name)}")


# --- what is sent ---


@pytest.mark.parametrize("path", [*PATHS, "/docs/"])
async def test_a_page_is_html_that_is_asked_for_again_each_time(server: Running, path: str) -> None:
    answer = await ask(server.port, "GET", path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.body.startswith(b"<!doctype html>")


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_may_run_its_own_scripts_and_ask_its_own_server_alone(server: Running, path: str) -> None:
    answer = await ask(server.port, "GET", path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": hashes(rb"<script>(.*?)</script>", answer.body),
        "style-src": hashes(rb"<style>(.*?)</style>", answer.body),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def hashes(pattern: bytes, body: bytes) -> str:
    found = re.findall(pattern, body, re.DOTALL)
    assert found
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_is_one_answer(server: Running, path: str) -> None:
    answer = await ask(server.port, "GET", path)
    markup = re.sub(rb"<script>.*?</script>", b"", answer.body, flags=re.DOTALL)
    named = re.findall(rb"""(?:src|href)=["']([^"']*)""", markup)
    assert [url for url in named if not url.startswith((b"/", b"#", b"data:")) or url.startswith(b"//")] == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_is_only_read_and_head_tells_its_size(server: Running, path: str) -> None:
    answer = await ask(server.port, "PUT", path, b"{}")
    assert answer.status == 405
    # What is posted to the root is for the model, as at text-embeddings-inference.
    assert answer.headers["allow"] == ("GET, HEAD, POST" if path == "/" else "GET, HEAD")
    got = await ask(server.port, "GET", path)
    told = await ask(server.port, "HEAD", path)
    assert (told.status, told.body) == (200, b"")
    assert told.headers["content-length"] == str(len(got.body))


# --- the status page ---


@pytest.mark.slow
async def test_the_page_tells_what_is_served(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    assert await tab.texts("#state") == ["Ready, 1 of 1 workers"]
    facts = dict(zip(await tab.texts("#facts dt"), await tab.texts("#facts dd"), strict=True))
    assert facts["Dimensions"] == "12"
    assert facts["Longest input"] == "16 tokens"
    assert facts["Pooling"] == "mean, normalised"
    assert await tab.run("document.title") == "tiny · Hedgerow"


@pytest.mark.slow
async def test_the_page_shows_what_the_model_can_do(serve: Serve, scoring: ModelFacts, tab: Tab) -> None:
    await open_home(tab, await serve())
    shown = "['embed', 'score', 'nothing-to-try'].filter((id) => document.getElementById(id).checkVisibility())"
    assert await tab.run(shown) == ["embed"]
    await open_home(tab, await serve(served=scoring))
    assert await tab.run(shown) == ["score"]
    await open_home(tab, await serve(served=dataclasses.replace(scoring, name="spl", tasks=["sparse"])), "spl")
    assert await tab.run(shown) == ["nothing-to-try"]


@pytest.mark.slow
async def test_a_text_shows_the_vector_that_the_api_gives(server: Running, tab: Tab) -> None:
    answer = await embed(server.port, {"input": "w1 w2 w3"})
    await open_home(tab, server)
    await tab.fill("#text", "w1 w2 w3")
    await tab.click("#text-form button")
    await tab.until("document.querySelector('#vector-head')")
    head = [float(text) for text in await tab.texts("#vector-head li")]
    assert head == answer.json["data"][0]["embedding"][:8]
    measures = (await tab.texts("#text-outcome .measures"))[0]
    assert "12 dimensions" in measures
    assert "5 tokens" in measures
    assert "2.50 ms in the model" in measures


@pytest.mark.slow
async def test_a_prompt_of_the_model_can_be_chosen(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    assert await tab.texts("#prompt option") == ["none", "document", "query"]
    await tab.run("document.getElementById('prompt').value = 'query'")
    await tab.fill("#text", "w3")
    await tab.click("#text-form button")
    await tab.until("document.querySelector('#vector-head')")
    assert server.stub.submitted[-1]["sequences"] == [[1, 5, 6, 7, 2]]


@pytest.mark.slow
async def test_sentences_are_compared_by_the_cosines_of_their_vectors(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    await tab.fill("#sentences", "w1\n\n  w2 w3  \nw4\n")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix')")
    rows = np.stack([vector([1, 5, 2]), vector([1, 6, 7, 2]), vector([1, 8, 2])]).astype(np.float64)
    shown = np.array(await tab.texts("#matrix tbody td"), dtype=np.float64).reshape(3, 3)
    np.testing.assert_allclose(shown, rows @ rows.T, atol=0.0051)  # two digits are shown
    assert await tab.texts("#matrix tbody th") == ["1 w1", "2 w2 w3", "3 w4"]


@pytest.mark.slow
async def test_documents_are_ranked_by_their_scores(serve: Serve, scoring: ModelFacts, tab: Tab) -> None:
    running = await serve(served=scoring)
    running.stub.logit_of = lambda ids: float(ids[-2] - 10)  # of the document's last word: w7 is 11
    await open_home(tab, running)
    await tab.fill("#query", "w1")
    await tab.fill("#documents", "w5\nw20 w7\nw6")
    await tab.click("#rerank-form button")
    await tab.until("document.querySelector('#ranking')")
    assert await tab.texts("#ranking .text") == ["w20 w7", "w6", "w5"]
    assert await tab.texts("#ranking .score") == ["0.7311", "0.5000", "0.2689"]  # sigmoids of 1, 0 and -1


@pytest.mark.slow
async def test_what_the_server_refuses_is_shown_in_its_words(serve: Serve, tab: Tab) -> None:
    running = await serve()
    too_long = " ".join(["w1"] * 30)
    refusal = (await embed(running.port, {"input": too_long})).error
    await open_home(tab, running)
    await tab.fill("#text", too_long)
    await tab.click("#text-form button")
    await tab.until("document.querySelector('#text-error').innerText")
    assert await tab.texts("#text-error") == [f"{refusal['message']} {refusal['code']}"]
    running.stub.error = Overloaded("Too much waits. Try again.", retry_after_s=1)
    await tab.fill("#sentences", "w1\nw2")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#compare-error').innerText")
    assert await tab.texts("#compare-error") == ["Too much waits. Try again. overloaded"]
    running.stub.error = None
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix')")
    assert await tab.texts("#compare-error") == [""]
    assert [re.sub(r".*status of (\d+).*", r"\1", text) for text in tab.complaints] == ["400", "429"]
    tab.complaints.clear()


@pytest.mark.slow
async def test_markup_in_a_text_is_text(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    await tab.fill("#sentences", "<img src=x onerror=alert(1)>\n<script>alert(2)</script>")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix')")
    assert (await tab.texts("#matrix tbody th"))[1] == "2 <script>alert(2)</script>"
    assert await tab.run("document.querySelectorAll('main img').length") == 0


@pytest.mark.slow
async def test_a_key_is_asked_for_and_sent(serve: Serve, tab: Tab) -> None:
    running = await serve(api_key="sesame")
    await open_home(tab, running, "This server asks for a key")
    assert await tab.run("document.getElementById('key').open")
    await tab.fill("#key-field", "sesame")
    await tab.press("Enter")
    await tab.until("document.querySelector('h1').innerText === 'tiny'")
    await tab.click("#text-form button")
    await tab.until("document.querySelector('#vector-head')")
    assert "sesame" not in await tab.run("document.documentElement.outerHTML")
    assert '-H "Authorization: Bearer $HEDGEROW_API_KEY"' in await tab.run(
        "document.querySelector('#text-outcome code').textContent"
    )
    assert ["401" in text for text in tab.complaints] == [True]
    tab.complaints.clear()


@pytest.mark.slow
async def test_after_a_wrong_key_nothing_is_asked_or_said_again_until_there_is_another(serve: Serve, tab: Tab) -> None:
    running = await serve(api_key="sesame")
    await open_home(tab, running, "This server asks for a key")
    await tab.fill("#key-field", "wrong")
    await tab.press("Enter")
    await tab.until(
        "document.querySelector('#live-error').innerText && document.querySelector('#info-error').innerText"
    )
    await tab.until("document.getElementById('key').open")
    await tab.run(
        "document.getElementById('key').open = false; window.numChanges = 0; new MutationObserver(() => numChanges++)"
        ".observe(document.getElementById('main'), {childList: true, subtree: true, characterData: true}); 0"
    )
    num_requests = len([url for url in tab.requests if not url.endswith("/ready")])
    for _ in range(3):
        await tab.run("tick()")
    assert len([url for url in tab.requests if not url.endswith("/ready")]) == num_requests
    assert await tab.run("numChanges") == 0
    assert not await tab.run("document.getElementById('key').open")
    await tab.run("showError(document.getElementById('live-error'), new Refusal('Another.', 'code', 401))")
    assert await tab.texts("#live-error") == ["Another. code"]
    assert not await tab.run("document.getElementById('key').open")
    await tab.run("document.getElementById('key').open = true")
    await tab.fill("#key-field", "sesame")
    await tab.press("Enter")
    await tab.until("document.querySelector('h1').innerText === 'tiny'")
    await tab.run("tick()")
    assert await tab.texts("#live-error, #info-error") == ["", ""]
    assert all("401" in text for text in tab.complaints)
    tab.complaints.clear()


@pytest.mark.slow
async def test_a_key_that_no_header_can_hold_is_refused_by_the_page(serve: Serve, tab: Tab) -> None:
    running = await serve(api_key="sesame")
    for page in ("", "docs"):
        await tab.open(home(running) + page)
        await tab.run("document.getElementById('key').open = true")
        await tab.fill("#key-field", "schl\u00fcssel")
        await tab.press("Enter")
        assert await tab.run("document.querySelector('#key-field:invalid').title") == (
            "A key must consist of printable ASCII characters."
        )
        assert await tab.run("document.getElementById('key').open && sessionStorage.length === 0")
    await tab.fill("#key-field", "sesame")
    await tab.press("Enter")
    assert await tab.run("sessionStorage.length") == 1
    assert all("401" in text for text in tab.complaints)
    tab.complaints.clear()


@pytest.mark.slow
async def test_the_page_follows_the_servers_state(serve: Serve, facts: ModelFacts, tab: Tab) -> None:
    running = await serve(served=None)
    running.stub.status = Readiness("starting", 0, 2, "Two workers load.")
    await open_home(tab, running, "No model yet")
    assert await tab.texts("#state") == ["Starting, 0 of 2 workers. Two workers load."]
    running.stub.facts = facts
    running.stub.on_facts(facts)
    running.stub.status = Readiness("ready", 2, 2, "")
    await tab.until("document.querySelector('h1').innerText === 'tiny'")
    assert await tab.texts("#state") == ["Ready, 2 of 2 workers"]
    assert all("503" in text for text in tab.complaints)
    tab.complaints.clear()


@pytest.mark.slow
async def test_latencies_are_interpolated_between_the_bounds_of_the_histogram(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    before = "new Map([[0.1, 5], [0.2, 5], [Infinity, 5]])"
    for after, shares in {
        # Ten more requests: four up to 0.1 s, four up to 0.2 s, two longer ones.
        "new Map([[0.1, 9], [0.2, 13], [Infinity, 15]])": {0.2: 0.05, 0.4: 0.1, 0.5: 0.125, 0.8: 0.2, 0.99: 0.2},
        "new Map([[0.1, 5], [0.2, 5], [Infinity, 5]])": {0.5: None},
    }.items():
        for share, seconds in shares.items():
            assert await tab.run(f"quantile({share}, {before}, {after})") == pytest.approx(seconds)


@pytest.mark.slow
async def test_what_watches_the_server_is_no_load(server: Running, tab: Tab) -> None:
    text = """
# HELP hedgerow_requests_total HTTP requests answered, by route and status
# TYPE hedgerow_requests_total counter
hedgerow_requests_total{route="/v1/embeddings",status="200"} 30.0
hedgerow_requests_total{route="/v1/embeddings",status="400"} 2.0
hedgerow_requests_total{route="/v1/rerank",status="200"} 1.0
hedgerow_requests_total{route="/metrics",status="200"} 1e+06
hedgerow_requests_total{route="unknown",status="404"} 500.0
hedgerow_input_tokens_total 1234.0
hedgerow_queued_tokens 77.0
hedgerow_queued_sequences 3.0
hedgerow_request_seconds_bucket{le="0.1",route="/v1/embeddings"} 20.0
hedgerow_request_seconds_bucket{le="+Inf",route="/v1/embeddings"} 32.0
hedgerow_request_seconds_bucket{le="+Inf",route="/v1/rerank"} 1.0
hedgerow_request_seconds_bucket{le="+Inf",route="/metrics"} 1000.0
"""
    await open_home(tab, server)
    sample = f"readSample({json.dumps(text)}, {{workers: {{ready: 1, total: 2}}}})"
    assert await tab.run(f"(({{requests, tokens}}) => [requests, tokens])({sample})") == [33, 1234]
    assert await tab.run(f"(({{waitingTokens, waitingSequences}}) => [waitingTokens, waitingSequences])({sample})") == [
        77,
        3,
    ]
    assert await tab.run(f"[...{sample}.buckets].map(([bound, count]) => [String(bound), count])") == [
        ["0.1", 20],
        ["Infinity", 33],
    ]


# --- the API page ---


async def open_docs(tab: Tab, running: Running) -> None:
    await tab.open(f"{home(running)}docs")
    await tab.until("document.querySelector('.operation')")


@pytest.mark.slow
async def test_the_api_page_explains_a_document(server: Running, tab: Tab) -> None:
    await tab.answer_instead("/openapi.json", json.dumps(OPENAPI).encode())
    await open_docs(tab, server)
    assert await tab.texts("main h1") == ["Hedgerow"]
    assert await tab.texts("#about p") == [
        "First paragraph.",
        "A second <b>one</b>.",
        "Version 9.8.7, made of /openapi.json",
    ]
    assert await tab.texts(".group > h2") == ["OpenAI", "Operations", "Other"]
    assert await tab.texts(".operation > h3 a") == ["/v1/embeddings", "/v1/models/{id}", "/health"]
    [parameters, body, *_] = await tab.run(
        "[...document.querySelectorAll('#post-v1-embeddings > .fields')].map((list) => [...list.children].map("
        "(row) => [...row.querySelectorAll('dt, dd > p')].map((part) => part.innerText)))"
    )
    assert parameters == [["X-Request-Timeout-Ms (header)", "integer (1 to 600,000)"]]
    assert body == [
        ["input\nrequired", "string (at least 1 character) or list (1 to 2,048) of string", "What to embed."],
        ["encoding_format", '"float", "base64"; default "float"'],
        ["dimensions", "integer (at least 1) or null"],
    ]
    assert await tab.texts("#post-v1-embeddings .answers > li") == ["200The vectors.", "400Something is wrong with it."]
    assert await tab.texts("#post-v1-embeddings .errors dt") == ["413", "503"]
    assert await tab.texts("#post-v1-embeddings .errors dd") == ["Too large.", "Not now; see Retry-After."]
    assert await tab.texts("#post-v1-embeddings > details summary") == ["The body of an error"]
    assert await tab.run("document.querySelector('#post-v1-embeddings .shell code').textContent") == (
        f"curl -s 'http://127.0.0.1:{server.port}/v1/embeddings' \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        """  -d '{"input":"it'\\''s a text"}'"""
    )
    links = await tab.run("[...document.querySelectorAll('.contents a')].map((link) => link.getAttribute('href'))")
    assert links == ["#post-v1-embeddings", "#get-v1-models-id", "#get-health"]
    assert await tab.run("document.querySelectorAll(location.hash || '#post-v1-embeddings').length") == 1


@pytest.mark.slow
async def test_a_field_that_contains_its_own_kind_ends_somewhere(server: Running, tab: Tab) -> None:
    await tab.answer_instead("/openapi.json", json.dumps(OPENAPI).encode())
    await open_docs(tab, server)
    names = await tab.run(
        "[...document.querySelectorAll('#post-v1-embeddings .answers dt')].map((name) => name.textContent)"
    )
    assert names[:4] == ["body", "name", "children", "children[].name"]
    assert len(names) < 15


@pytest.mark.slow
async def test_the_api_page_lists_every_path_of_this_gateway(server: Running, tab: Tab) -> None:
    answer = await ask(server.port, "GET", "/openapi.json")
    expected = {(path, verb) for path, item in answer.json["paths"].items() for verb in item if verb in {"get", "post"}}
    await open_docs(tab, server)
    shown = await tab.run(
        "[...document.querySelectorAll('.operation')].map(({dataset}) => [dataset.path, dataset.verb])"
    )
    assert {tuple(operation) for operation in shown} == expected


# --- for everyone ---


@pytest.mark.slow
async def test_a_phone_scrolls_in_one_direction(serve: Serve, scoring: ModelFacts, tab: Tab) -> None:
    both = dataclasses.replace(scoring, tasks=["embed", "score"], dimensions=12, name="a-model-of-a-long-name" * 4)
    running = await serve(served=both)
    await tab.resize(360, 740)
    await tab.answer_instead("/openapi.json", json.dumps(OPENAPI).encode())
    await open_home(tab, running, both.name)
    await tab.fill("#sentences", "\n".join(f"w{index} and-a-word-without-end-{'x' * 60}" for index in range(14)))
    await tab.fill("#documents", "unbroken" * 20)
    await tab.click("#text-form button")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix') && document.querySelector('#vector-head')")
    await tab.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert await tab.texts("#compare-outcome .hint") == ["Only the first 12 are compared; 2 more were left out."]
    assert await tab.run("document.documentElement.scrollWidth") == 360
    await open_docs(tab, running)
    await tab.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert await tab.run("document.documentElement.scrollWidth") == 360


@pytest.mark.slow
async def test_the_keyboard_reaches_everything_in_the_order_of_the_page(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    visited = []
    for _ in range(11):
        await tab.press("Tab")
        visited.append(await tab.run("document.activeElement.id || document.activeElement.innerText.trim()"))
    assert visited == [
        *("Skip to the content", "Hedgerow", "Status", "API", "Metrics", "API key"),
        *("text", "prompt", "Embed", "sentences", "Compare"),
    ]
    await tab.press("Enter")
    await tab.until("document.querySelector('#matrix')")


@pytest.mark.slow
async def test_every_field_has_a_label(server: Running, tab: Tab) -> None:
    await open_home(tab, server)
    nameless = (
        "[...document.querySelectorAll('input, textarea, select')].filter((field) => !field.labels.length).length"
    )
    assert await tab.run(nameless) == 0


# The contrast of each text with the nearest ground below it. Source: WCAG 2.2, relative luminance and contrast ratio.
CONTRASTS = """(() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => rgba(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return rgba(colour)[3] === 255 || !element.parentElement ? colour : ground(element.parentElement);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!says || !element.checkVisibility()) continue;
    const [one, other] = [getComputedStyle(element).color, ground(element)].map(luminance);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_every_text_stands_out_from_its_ground(server: Running, tab: Tab, dark: bool) -> None:
    await tab.resize(1280, 900, dark=dark)
    await tab.answer_instead("/openapi.json", json.dumps(OPENAPI).encode())
    await open_home(tab, server)
    await tab.click("#text-form button")
    await tab.click("#compare-form button")
    await tab.until("document.querySelector('#matrix') && document.querySelector('#vector-head')")
    assert await tab.run(CONTRASTS) == []
    await open_docs(tab, server)
    assert await tab.run(CONTRASTS) == []
