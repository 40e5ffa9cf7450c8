"""The planner's page: its API, mounting, and the page itself driven in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from importlib import resources

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from headrace.plan.deployment import Inputs
from headrace.plan.fit import fit
from headrace.plan.web import app

QUERY = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80", "context": "8192"}


@pytest.fixture(scope="module")
def client():
    return TestClient(app())


def test_options(client):
    found = client.get("/api/options").json()
    assert "llama-3.1-8b" in found["models"]
    assert {"vllm", "sglang", "tensorrt-llm", "llama-cpp", "headrace"} <= set(found["engines"])
    assert len(found["gpus"]) >= 20


def test_fit_is_the_planners_own(client):
    found = client.get("/api/fit", params=QUERY).json()["fit"]
    own = fit(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", max_model_len=8192), 8192)
    assert found["kv_pool_bytes"] == own.kv_pool_bytes
    assert found["max_users"] == own.max_users


@pytest.mark.parametrize(
    "name", ["RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic", "unsloth/Llama-3.1-8B-Instruct-bnb-4bit"]
)
def test_a_checkpoint_that_names_its_format_is_planned_as_on_the_command_line(client, name):
    found = client.get("/api/fit", params=QUERY | {"model": name}).json()["fit"]
    assert found["weights_bytes"] == fit(Inputs(model=name, gpu="h100-sxm-80"), 8192).weights_bytes
    plain = client.get("/api/fit", params=QUERY | {"model": name, "weights": "bf16"}).json()["fit"]
    assert plain["weights_bytes"] > 1.5 * found["weights_bytes"]


def test_perf_has_a_series(client):
    found = client.get("/api/perf", params=QUERY | {"concurrency": "8", "isl": "512", "osl": "128"}).json()
    loads = [s["load"] for s in found["series"]]
    assert loads == sorted(loads)
    assert found["perf"]["tpot_ms"]["grade"] == "fitted"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpu": "h900"}, "gpu"),
        ({"model": "nope"}, "model"),
        ({"n_gpus": "two"}, "n_gpus"),
        ({"n_gpus": "0"}, "n_gpus"),
        ({"context": "99999999999"}, "context"),
        ({"weights": "int3"}, "precision"),
        ({"price": "free"}, "price"),
        ({"model": "/etc/passwd"}, "model"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(client, change, field):
    answer = client.get("/api/fit", params=QUERY | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == field


def test_it_can_be_mounted():
    mounted = TestClient(Starlette(routes=[Mount("/plan", app())]))
    assert "Headrace planner" in mounted.get("/plan/").text
    assert mounted.get("/plan/api/fit", params=QUERY).status_code == 200


def test_the_page_needs_nothing_from_outside():
    page = resources.files("headrace.plan.web").joinpath("page.html").read_text()
    assert re.findall(r"https?://[^\"' ]+", page) == ["http://www.w3.org/2000/svg"]
    assert 'name="viewport"' in page


# ------------------------------------------------------------------------------------------------------- browser


class Browser:
    """A few commands of the WebDriver protocol, spoken to chromedriver."""

    def __init__(self, driver: str, session: str) -> None:
        self.base = f"{driver}/session/{session}"

    @staticmethod
    def call(method: str, url: str, body: dict | None = None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def go(self, url: str) -> None:
        self.call("POST", f"{self.base}/url", {"url": url})

    def run(self, script: str):
        return self.call("POST", f"{self.base}/execute/sync", {"script": script, "args": []})

    def keys(self, text: str) -> None:
        presses = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": presses}]
        self.call("POST", f"{self.base}/actions", {"actions": actions})

    def resize(self, width: int, height: int) -> None:
        self.call("POST", f"{self.base}/window/rect", {"width": width, "height": height})

    def until(self, script: str, seconds: float = 20.0):
        """Wait for a script to return something true; AssertionError with the page's verdict otherwise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.05)
        raise AssertionError(
            f"never true: {script}; verdict: {self.run('return document.body.innerText.slice(0, 400)')}"
        )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def site():
    import uvicorn

    port = _free_port()
    server = uvicorn.Server(uvicorn.Config(app(), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no Chromium with chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    port = _free_port()
    process = subprocess.Popen([chromedriver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    driver = f"http://127.0.0.1:{port}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
    options = {"alwaysMatch": {"goog:chromeOptions": {"args": flags, "binary": chromium}}}
    session = None
    try:
        end = time.monotonic() + 30
        while session is None:
            try:
                session = Browser.call("POST", f"{driver}/session", {"capabilities": options})["sessionId"]
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end or process.poll() is not None:
                    pytest.skip("chromedriver does not start a browser on this machine")
                time.sleep(0.2)
        yield Browser(driver, session)
    finally:
        if session is not None:
            Browser.call("DELETE", f"{driver}/session/{session}")
        process.terminate()
        process.wait(20)


READY = "return document.body.dataset.state === 'ready'"
TAB, SPACE, DOWN = "\ue004", "\ue00d", "\ue015"


@pytest.mark.browser
def test_figures_and_charts_appear(browser, site):
    browser.resize(1280, 1400)
    browser.go(site + "?model=llama-3.1-70b&gpu=h100-sxm-80&n_gpus=4")
    browser.until(READY)
    assert browser.run("return document.querySelectorAll('svg').length") == 4
    assert browser.run("return document.querySelectorAll('.tile').length") == 6
    assert browser.run("return document.getElementById('verdict').textContent").startswith("Fits")
    assert browser.run("return performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")


@pytest.mark.browser
def test_the_link_is_the_plan(browser, site):
    browser.go(site + "?model=mistral-7b&gpu=l4-24&context=4096&kv=fp8")
    browser.until(READY)
    assert browser.run("return document.getElementById('kv').value") == "fp8"
    shared = browser.run("return location.href")
    verdict = browser.run("return document.getElementById('verdict').textContent")
    browser.go("about:blank")
    browser.go(shared)
    browser.until(READY)
    assert browser.run("return document.getElementById('verdict').textContent") == verdict


@pytest.mark.browser
def test_it_works_by_keyboard_alone(browser, site):
    browser.go(site)
    browser.until(READY)
    before = browser.run("return document.getElementById('verdict').textContent")
    browser.keys(TAB)
    assert browser.run("return document.activeElement.id") == "model"
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    browser.keys(TAB + TAB)
    assert browser.run("return document.activeElement.id") == "n_gpus"
    browser.run("document.body.dataset.state = ''")
    browser.keys("\ue013")  # arrow up: one GPU more
    browser.until(READY)
    assert browser.run("return document.getElementById('n_gpus').value") == "2"
    assert browser.run("return document.getElementById('verdict').textContent") != before
    reached = []
    for _ in range(24):
        browser.keys(TAB)
        reached.append(browser.run("return document.activeElement.id || document.activeElement.tagName"))
    assert {"engine", "weights", "kv", "context", "isl", "osl", "preset", "ttft", "tpot", "price", "share"} <= set(
        reached
    )
    assert "SUMMARY" in reached


@pytest.mark.browser
def test_it_fits_a_phone(browser, site):
    browser.resize(390, 844)
    browser.go(site)
    browser.until(READY)
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    small = browser.run(
        "return [...document.querySelectorAll('input,select,button')].filter(e => e.offsetHeight < 36).map(e => e.id)"
    )
    assert small == []


@pytest.mark.browser
def test_an_error_marks_its_field(browser, site):
    browser.resize(1280, 1000)
    browser.go(site + "?model=no-such-model&gpu=h100-sxm-80")
    browser.until("return document.body.dataset.state === 'error'")
    assert browser.run("return document.getElementById('model').getAttribute('aria-invalid')") == "true"
    assert "no-such-model" in browser.run("return document.getElementById('verdict').textContent")
