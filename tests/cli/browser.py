"""A headless Chromium, driven over the two pipes of its DevTools protocol: nothing but the standard library."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_SECONDS = 60


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A headless browser with one page; use as `with Browser(path) as browser`."""

    def __init__(self, program: str, profile: Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        os.set_blocking(self._read, False)
        # The browser reads descriptor 3 and writes descriptor 4. For root, and in most containers, its sandbox is not
        # available.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *flags],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._events, self._id, self._session = b"", [], 0, None

    def __enter__(self) -> "Browser":
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _message(self, deadline: float) -> dict:
        """Reads the next message; a zero byte ends each message."""
        while b"\0" not in self._buffer:
            if time.monotonic() > deadline:
                raise TimeoutError("the browser does not answer")
            try:
                part = os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
                continue
            if not part:
                raise ConnectionError(f"the browser ended with {self._process.wait()}")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **parameters: object) -> dict:
        self._id += 1
        request = {"id": self._id, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._write, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            message = self._message(deadline)
            if message.get("id") == self._id:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message)

    def open(self, page: Path, width: int, dark: bool) -> None:
        """Loads a file into a window of this width and clears earlier complaints."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        self.media("screen", dark)
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message(deadline))

    def media(self, media: str, dark: bool) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def complaints(self) -> list[dict]:
        """The errors, warnings and exceptions in the browser's console."""
        self.evaluate("0")
        return [
            event
            for event in self._events
            if event.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        ]

    def evaluate(self, expression: str) -> object:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])
