"""A headless Chromium for the tests, spoken to through two pipes: no driver and no port needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0  # seconds for anything the browser is asked; machines that test are busy


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page in a browser of its own; what it logs and asks of the network is collected."""

    def __init__(self, binary: str, profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", binary, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Errors and warnings of the console, and exceptions nobody caught."""
        self.requests: list[str] = []
        """Addresses asked for beside the page itself and what it holds."""
        self._loaded = 0
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.scheme("dark" if dark else "light")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask the browser for something and return its answer."""
        self._number += 1
        asked = self._number
        message: dict[str, Any] = {"id": asked, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            answer = self._read()
            if answer.get("id") == asked:
                assert "error" not in answer, answer["error"]
                return answer["result"]
        raise TimeoutError(method)

    def open(self, path: Path) -> None:
        """Load a file and wait until the page says that it is ready, or failed."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes' || document.querySelector('.failure[role=alert]')")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def choose(self, identifier: str, value: str) -> None:
        """Choose an option of a select, or type into a field, as a person would."""
        kind = "input" if self.value(f"document.getElementById('{identifier}').tagName") == "INPUT" else "change"
        self.value(
            f"(() => {{ const box = document.getElementById('{identifier}'); box.value = {json.dumps(value)}; "
            f"box.dispatchEvent(new Event('{kind}', {{bubbles: true}})); }})()"
        )
        time.sleep(0.3)

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int) -> None:
        """Make the window so wide and high."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def paper(self) -> None:
        """Show the page as it is when it is about to be printed, on A4."""
        self.value("dispatchEvent(new Event('beforeprint'))")
        self.call("Emulation.setEmulatedMedia", media="print")
        self.resize(718, 1000)

    def screen(self) -> None:
        """Go back from paper."""
        self.call("Emulation.setEmulatedMedia", media="")
        self.value("dispatchEvent(new Event('afterprint'))")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise ConnectionError("the browser ended")
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, said: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(said["entry"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))
        elif event == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.requests.append(said["request"]["url"])
