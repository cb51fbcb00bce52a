"""A headless Chromium for tests of pages: one process, spoken to over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 60.0  # against hanging, not a measure of speed
_OURS, _THEIRS = 3, 4  # the browser reads commands from 3 and answers on 4


def find_chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@dataclass(kw_only=True, eq=False)
class Page:
    """One page of the browser. `requests`: addresses that it asked for; `errors`: what its scripts raised."""

    commands: int
    answers: int
    session: str | None = None
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _number: int = 0
    _rest: bytes = b""
    _loaded: bool = False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file at a width, in one of both themes, until its scripts have run."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._loaded:
            assert time.monotonic() < deadline, f"{path} never finished loading"
            self._receive()

    def value(self, expression: str) -> Any:
        """The value of an expression of the page's language."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **text,
            )

    def screenshot(self, path: Path) -> None:
        """Write the whole page, as long as it is, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium did not answer"
            part = os.read(self.answers, 2**16)
            assert part, "Chromium ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        match answer.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
        return answer


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page of a new browser, which ends with the block. `profile`: an empty directory."""
    program = find_chromium()
    assert program is not None, "apt-get install chromium"
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    # A shell places the ends where the browser looks for them, whatever numbers they have here.
    launch = f'exec "$0" "$@" {_OURS}<&{command_read} {_THEIRS}>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", launch, program, *arguments],
        pass_fds=[command_read, answer_write],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        page = Page(commands=command_write, answers=answer_read)
        targets = page.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.kill()
        process.wait(timeout=ANSWER_SECONDS)
        os.close(command_write)
        os.close(answer_read)
