"""A headless Chromium for tests of pages, driven by the DevTools protocol: WebSocket by hand, so that nothing is needed
besides the browser."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PATIENCE = 60.0


def find() -> str:
    """The browser; without one the test is skipped, which is a failure where CI=true (tests/conftest.py)."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium here, so nobody looked at the page: install chromium (Debian), as `make setup` does")


class Socket:
    """A WebSocket of text messages."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.bytes = b""
        while b"\r\n\r\n" not in self.bytes:
            self.bytes += self.socket.recv(4096)
        head, self.bytes = self.bytes.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 101"), head

    def send(self, text: str) -> None:
        payload, mask = text.encode(), os.urandom(4)
        size = len(payload)
        head = b"\x81"
        if size < 126:
            head += struct.pack("!B", 0x80 | size)
        elif size < 1 << 16:
            head += struct.pack("!BH", 0x80 | 126, size)
        else:
            head += struct.pack("!BQ", 0x80 | 127, size)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self.socket.sendall(head + mask + masked)

    def take(self, count: int) -> bytes:
        while len(self.bytes) < count:
            more = self.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("Chromium has hung up")
            self.bytes += more
        taken, self.bytes = self.bytes[:count], self.bytes[count:]
        return taken

    def receive(self, timeout: float) -> str:
        """The next message; TimeoutError if none begins within `timeout` seconds."""
        message = b""
        self.socket.settimeout(timeout)
        while True:
            first, second = self.take(2)
            self.socket.settimeout(PATIENCE)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self.take(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.take(8))
            message += self.take(size)
            if first & 0x80:
                return message.decode()


class Browser:
    """One browser with one tab. Everything that the tab asked for and complained about is kept."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--window-size={width},{height}",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.log = (profile.parent / f"{profile.name}.log").open("w")
        self.process = subprocess.Popen([find(), *arguments], stdout=self.log, stderr=self.log)
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.numbers = itertools.count(1)
        self.session: str | None = None
        try:
            port, path = self.port_file(profile).split("\n")[:2]
            self.socket = Socket(f"ws://127.0.0.1:{port}{path}")
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.size(width, height)
        except BaseException:
            self.close()
            raise

    def port_file(self, profile: Path) -> str:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            path = profile / "DevToolsActivePort"
            if path.exists() and "\n" in (text := path.read_text()):
                return text
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"Chromium does not start: {Path(self.log.name).read_text()[-2000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, timeout: float) -> dict[str, Any]:
        message = json.loads(self.socket.receive(timeout))
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"] + " " + parameters["entry"].get("url", ""))
        return message

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = self.take(PATIENCE)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """What the system prefers: "dark" or "light"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str, patience: float = PATIENCE) -> Any:
        """Until the expression is true."""
        end = time.monotonic() + patience
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; the page says: {self.text()[:1500]}"
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def screenshot(self, path: Path, width: int, height: int) -> None:
        self.size(width, height)
        time.sleep(0.5)
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
