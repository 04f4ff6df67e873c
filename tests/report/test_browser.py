"""The page in a browser: it draws, searches, sorts and selects, and stays safe.

Skipped without Debian's Chromium, which is driven over its own pipe. At the end of each test no
page has raised an error, and the policy has refused nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlskip as rlskip_package
from rlskip._human import number
from rlskip.store import StepStore

Look = Callable[..., Any]


class Browser:
    """A headless Chromium without network, with one window, driven by the DevTools protocol."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # The protocol's pipe is file 3, to the browser, and file 4, from it.
        command = [
            "bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash", program, "--headless",
            "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=[theirs, ours], **quiet)  # type: ignore[call-overload]
        os.close(theirs)
        os.close(ours)
        self._buffer, self._number = b"", 0
        self._events: list[dict[str, Any]] = []
        self._window: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._window = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._window}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def show(self, file: Path, width: int, scheme: str) -> None:
        self._file = file
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.open("")

    def open(self, where: str) -> None:
        """Load the page at an address such as ``#0/1``."""
        for url in ("about:blank", self._file.resolve().as_uri() + where):
            self.call("Page.navigate", url=url)
            while not (loaded := self._said("Page.loadEventFired")):
                self._events.append(self._next())
            self._events.remove(loaded[0])
        self.wait("document.documentElement.dataset.ready")

    def go(self, where: str) -> None:
        """Go to an address within the page."""
        self.ask(f"location.hash = {json.dumps(where)}, 1")
        self.wait(f"document.documentElement.dataset.view === {json.dumps(where)}")

    def wait(self, condition: str) -> None:
        """Wait until an expression holds."""
        self.ask(
            f"new Promise(done => {{ const look = () => {condition} ? done(1)"
            " : setTimeout(look, 10); look(); })"
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                           returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of what is shown of a selector."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        texts: list[str] = self.ask(f"{found}.filter(e => e.offsetParent).map(e => e.textContent)")
        return texts

    def click(self, selector: str) -> None:
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, value: str) -> None:
        self.ask(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input')); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def press(self, key: str) -> None:
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        code = {"windowsVirtualKeyCode": 13} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        page = "document.documentElement"
        return int(self.ask(f"{page}.scrollWidth - {page}.clientWidth"))

    def _said(self, *methods: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("method") in methods]

    def check(self) -> None:
        """Nothing in the pages raised an error, and their policy refused nothing."""
        self.ask("1")  # what is under way comes before its answer
        said = self._said("Runtime.exceptionThrown", "Log.entryAdded")
        self._events.clear()
        assert not said, said

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Skips without Debian's package chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium here (Debian package chromium)")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """``look(file, width=1400, scheme="light")``: the page in the window, ready."""

    def show(file: Path, width: int = 1400, scheme: str = "light") -> Browser:
        browser.show(file, width, scheme)
        return browser

    yield show
    browser.check()


@pytest.fixture
def page(rlskip: Any, run_dir: Path, tmp_path: Path) -> Path:
    """Of the example's run: three steps of four groups, with two sessions each."""
    out = tmp_path / "page.html"
    assert rlskip("report", run_dir, "--html", out).code == 0
    return out


def groups(window: Any) -> list[str]:
    found: list[str] = window.texts("table[aria-label=groups] tbody td:first-child")
    return found


def test_the_first_screen_has_the_best_beside_the_worst_curves_and_the_figures_of_show(
    rlskip: Any, run_dir: Path, page: Path, look: Look
) -> None:
    for width in (390, 1400):
        window = look(page, width)
        top = window.ask("document.querySelector('.sample').getBoundingClientRect().top")
        assert top < 600, "without scrolling"
        rewards = [float(text.split()[-1]) for text in window.texts(".sample header span")
                   if text.startswith("reward")]  # fmt: skip
        assert len(rewards) == 2
        assert rewards[0] > rewards[1]
    assert window.texts("h1") == ["grpo_tiny/GBS4_N2_in6_out8"]
    captions = window.texts(".chart figcaption span")
    assert {"Reward", "Success", "Length", "No signal", "Time"} >= {*captions}
    assert captions[0] == "Reward"
    assert window.ask("document.querySelectorAll('.chart canvas').length") == len(captions)
    (shown,) = rlskip("show", 3, "-d", run_dir, "--json").json
    last = dict(zip(captions, window.texts(".chart figcaption strong"), strict=True))
    assert (last["Reward"], last["Length"]) == (
        number(shown["figures"]["reward"]), number(shown["figures"]["length"]),
    )  # fmt: skip


@pytest.fixture
def recorded(dumps: Path, job_of: Any) -> Callable[[str, float], Path]:
    """``recorded(name, loss)``: a job that trained on the rollouts of the example's run."""

    def make(name: str, loss: float) -> Path:
        def body(step: int) -> None:
            rows = {"prompt_ids": [[1, 2]] * 2, "completion_ids": [[3], [4, 5]]}
            rlskip_package.record("loss", loss / step)
            rlskip_package.record("metrics.actor/entropy", 0.0)
            rlskip_package.record("metrics.actor/kl", 0.5)
            rlskip_package.record("step", 10 * step)
            rlskip_package.record("advantages", np.array([1.0, -0.5]), rows=rows)

        directory: Path = job_of(name, body, steps=(1, 2, 3), root=dumps).directory
        return directory

    return make


def test_what_a_job_recorded_is_drawn_beside_that_of_another_and_what_is_zero_is_not(
    rlskip: Any, recorded: Any, tmp_path: Path, look: Look
) -> None:
    a, b = recorded("one", 2.0), recorded("other", 3.0)
    out = tmp_path / "page.html"
    assert rlskip("report", a, "--html", out).code == 0, "as compare takes it"
    window = look(out)
    assert window.texts(".chart figcaption span") == ["loss", "actor/kl", "step", "advantages"]
    assert window.texts(".chart figcaption strong") == ["0.6667", "0.5", "30", "0.25"]
    # Two jobs share a chart, and equal curves are one.
    assert rlskip("compare", a, b, "--html", out).code == 1
    window = look(out)
    assert window.texts(".chart figcaption span")[0] == "loss", "what differs comes first"
    said = dict(zip(window.texts(".chart figcaption span"), range(9), strict=False))
    strong = [
        window.texts(f".chart:nth-child({said[name] + 1}) figcaption strong")
        for name in ("loss", "actor/kl")
    ]
    assert strong == [["A 0.6667", "B 1"], ["A, B 0.5"]]


def test_groups_are_searched_filtered_and_sorted(page: Path, look: Look) -> None:
    window = look(page)
    window.go("#0/2")
    assert groups(window) == ["s2p0", "s2p1", "s2p2", "s2p3"]
    window.type("input.search", "S2P2")
    assert groups(window) == ["s2p2"]
    window.type("input.search", "")
    prompts = window.texts("table[aria-label=groups] td.wide")
    window.type("input.search", prompts[1])
    assert groups(window) == ["s2p1"]
    window.type("input.search", "no such prompt")
    assert groups(window) == []
    assert "No group passes the filters." in window.texts("main p")
    window.type("input.search", "")

    def column(k: int) -> list[float]:
        cells = window.texts(f"table[aria-label=groups] tbody td:nth-child({k})")
        return [float(cell) for cell in cells]

    for click in (sorted, lambda values: sorted(values, reverse=True)):
        window.click("table[aria-label=groups] th:nth-child(7) button")
        lengths = column(7)
        expected = click(lengths)
        assert lengths in (expected, expected[::-1])
    assert window.ask("document.querySelectorAll('th[aria-sort]').length") == 2


def test_a_session_is_reached_by_the_keyboard_and_by_its_address(
    run_dir: Path, page: Path, look: Look
) -> None:
    from rlskip.runs.opened import Run

    window = look(page)
    for key, view in [("j", "#"), ("j", "#"), ("Enter", "#0/2"), ("j", "#0/2"), ("Enter", "#0/2/0"),
                      ("j", "#0/2/1"), ("k", "#0/2/0"), ("u", "#0/2"), ("u", "#")]:  # fmt: skip
        window.press(key)
        window.wait(f"document.documentElement.dataset.view === '{view}'")
    window.go("#0/3")
    window.press("/")
    assert window.ask("document.activeElement.type") == "search"
    window.open("#0/3/1/1")
    one = list(Run(run_dir)[3].groups())[1].sessions[1]
    (row,) = one.turns
    assert window.texts("h1") == ["Session 1"]
    assert window.texts(".part.sampled .body") == [" ".join(map(str, row["response"])) + " "]
    window.press("t")
    window.wait("document.querySelectorAll('.part.sampled .body span').length > 0")
    titles = window.ask("[...document.querySelectorAll('.body span')].map(e => e.title)")
    assert titles == [
        f"token {i} ({token}): log-probs of the rollout {float(f'{value:.4g}'):.4g}"
        for i, (token, value) in enumerate(zip(row["response"], row["log_probs"], strict=True))
    ]


def test_two_runs_have_their_verdict_and_lead_to_each_other(
    rlskip: Any, dumps: Path, tmp_path: Path, look: Look
) -> None:
    out = tmp_path / "both.html"
    a, b = dumps / "grpo_tiny", dumps / "grpo-lr2_tiny"
    assert rlskip("compare", a, b, "--html", out).code == 1
    window = look(out)
    (verdict,) = window.texts(".verdict p")
    assert verdict.startswith("Differentthe rollouts differ first, at step 2: in 1 of 8 rows, ")
    assert window.texts("table[aria-label=steps] tbody td:first-child") == ["1", "2", "3"]
    window.click("table[aria-label=steps] tbody tr:nth-child(2)")
    window.wait("document.documentElement.dataset.view === '#0/2'")
    assert window.texts("main p a") == ["The same step of B"]
    window.click("main p a")
    window.wait("document.documentElement.dataset.view === '#1/2'")


HOSTILE = {
    "html": "</script><img src=x onerror=alert(1)><script>document.title='owned'</script>",
    "right to left": "abc \u202e evil \u2066 \u05d0\u05d1\u05d2",
    "control": "bell \x07 escape \x1b[31m null \x00 line\u2028end",
    "template": "${document.title='owned'} {{constructor}} %3Cscript%3E javascript:alert(1)",
    "long": "x" * (1 << 20),
    "surrogate": "half \ud83d",
}


def test_hostile_texts_are_shown_as_text(rlskip: Any, tmp_path: Path, look: Look) -> None:
    rows = [
        {"prompt": text, "uid": text[:200], "completions": [{"role": text[:50], "content": text}]}
        for text in HOSTILE.values()
    ]
    StepStore(tmp_path / "e_p" / "s").save(1, rows, info={"job": HOSTILE["html"]})
    out = tmp_path / "page.html"
    assert rlskip("report", tmp_path, "--html", out).code == 0
    window = look(out, width=390)
    elements = "document.querySelectorAll('img, iframe, object, script[src], [onerror]').length"
    for k, (name, text) in enumerate(HOSTILE.items()):
        window.go("#0/1")
        assert len(groups(window)) == len(HOSTILE)
        window.go(f"#0/1/{k}/0")
        assert window.overflow == 0, name
        assert window.ask(elements) == 0
        said = "".join(window.texts("main .body"))
        if name == "html":
            assert text in said
        elif name == "control":
            assert r"bell \u0007 escape \u001b[31m null \u0000 line\u2028end" in said
        elif name == "right to left":
            assert r"\u202e evil \u2066" in said
        elif name == "long":
            assert text in said
    assert window.ask("document.title") == "e_p/s"
    isolated = "getComputedStyle(document.querySelector('main .body')).unicodeBidi"
    assert window.ask(isolated) == "isolate"


def test_text_that_a_run_recorded_is_shown_where_tokens_are_numbers(
    rlskip: Any, tmp_path: Path, look: Look
) -> None:
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "prompt": "What is 6 x 7?"}
    said = [{"role": "assistant", "content": "<think> six </think> It is 42."}]
    StepStore(tmp_path / "e_p" / "s").save(1, [{**row, "completions": said}])
    rlskip("report", tmp_path, "--html", tmp_path / "page.html")
    window = look(tmp_path / "page.html")
    window.go("#0/1/0/0")
    for _ in range(2):  # as messages, as tokens, and again
        assert window.texts(".part .body") == ["What is 6 x 7?", said[0]["content"]]
        assert window.texts(".think") == ["<think> six </think>"]
        window.press("m")
        window.wait("document.querySelector('.part .body').textContent.trim() === '1'")
        assert window.texts(".part .body") == ["1 ", "2 3 "]
        window.press("m")
        window.wait("document.querySelector('.think')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_it_fits_the_window(page: Path, look: Look, width: int, scheme: str) -> None:
    window = look(page, width=width, scheme=scheme)
    for view in ("#", "#0/all", "#0/1", "#0/1/0", "#0/1/0/0"):
        window.go(view) if view != "#" else None
        assert window.overflow == 0, view
    dark = window.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(", "))) < 200) is (scheme == "dark")
