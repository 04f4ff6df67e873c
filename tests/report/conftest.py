"""A browser for the pages: Debian's chromium over its own pipe, and a window to look through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """A headless Chromium without network, driven by the DevTools protocol."""

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
        self._input = os.fdopen(self._from, "rb")
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, event: str) -> None:
        """Wait for an event that was not waited for yet."""
        while not (found := [one for one in self.events if one.get("method") == event]):
            self.events.append(self._next())
        self.events.remove(found[0])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._to)
        self._input.close()


class Window:
    """A page in the browser."""

    def __init__(self, browser: Browser, file: Path, width: int, scheme: str) -> None:
        self._browser, self._file = browser, file
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.open("")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, where: str) -> None:
        """Load the page at an address such as ``#0/1``."""
        for url in ("about:blank", self._file.resolve().as_uri() + where):
            self.call("Page.navigate", url=url)
            self._browser.wait_for("Page.loadEventFired")
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

    def close(self) -> None:
        """Nothing in the page raised an error, and its policy refused nothing."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded")
        said = [event for event in self._browser.events if event.get("method") in bad]
        self._browser.events.clear()
        self.call("Page.close")
        assert not said, said


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
def look(browser: Browser) -> Iterator[Callable[..., Window]]:
    """``look(file, width=1400, scheme="light")``: the page in a window, ready."""
    windows: list[Window] = []

    def open_window(file: Path, width: int = 1400, scheme: str = "light") -> Window:
        windows.append(Window(browser, file, width, scheme))
        return windows[-1]

    yield open_window
    for window in windows:
        window.close()
