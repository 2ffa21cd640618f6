"""TensorBoard on loopback, its answers, and what a browser without a window shows of it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_S = 60.0
TEXTS = """(() => {
  const found = [];
  const walk = (root) => {
    for (const node of root.childNodes) {
      if (node.nodeType === 3 && node.data.trim()) found.push(node.data.trim());
      if (["STYLE", "SCRIPT", "TEMPLATE"].includes(node.nodeName)) continue;
      if (node.shadowRoot) walk(node.shadowRoot);
      walk(node);
    }
  };
  walk(document.body || document.createElement("p"));
  return found;
})()"""
"""Every text on the page, those within TensorBoard's components too, which a dump leaves out."""


class Page:
    """One page; every question is answered before the next."""

    def __init__(self, to: int, answers: int) -> None:
        self.to, self.answers, self.number, self.left = to, answers, 0, b""
        self.session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the browser's debugging protocol, and its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.left:
                if not (part := os.read(self.answers, 1 << 16)):
                    raise EOFError("the browser is gone")
                self.left += part
            line, _, self.left = self.left.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str) -> None:
        """Go there."""
        self.ask("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression."""
        found = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return found["result"].get("value")

    def texts(self, until: Callable[[list[str]], bool]) -> list[str]:
        """All that is to be read there, once it is what was waited for."""
        end = time.monotonic() + PATIENCE_S
        while True:
            shown = self.evaluate(TEXTS) or []
            if until(shown) or time.monotonic() > end:
                return list(shown)
            self.evaluate("new Promise(done => setTimeout(done, 200))")

    def picture(self, path: Path) -> None:
        """A screenshot."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the context."""
    assert CHROMIUM is not None
    (theirs_in, to), (answers, theirs_out) = os.pipe(), os.pipe()
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,1400",
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
    ]  # fmt: skip
    # the browser reads from 3 and writes to 4, whatever our numbers are
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "-", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(to, answers)
    finally:
        os.close(to)
        os.close(answers)
        _end(process)


class Server:
    """A running TensorBoard."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, body: Any = None) -> Any:
        """What it answers, parsed."""
        return json.loads(self.raw(path, None if body is None else json.dumps(body).encode()))

    def raw(self, path: str, body: bytes | None = None) -> bytes:
        """The same, as it is."""
        connection = HTTPConnection(self.address.removeprefix("http://"), timeout=PATIENCE_S)
        try:
            how = "GET" if body is None else "POST"
            connection.request(how, f"/data/{path}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, (path, answer.status)
            return answer.read()
        finally:
            connection.close()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of HParams."""
        statuses = [f"STATUS_{s}" for s in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
        body = {
            "experimentName": "", "allowedStatuses": statuses, "colParams": [], "startIndex": 0,
            "sliceSize": 100,
        }  # fmt: skip
        return list(self.get("plugin/hparams/session_groups", body)["sessionGroups"])

    def columns(self) -> dict[str, Any]:
        """The columns of HParams."""
        return dict(self.get("plugin/hparams/experiment", {"experimentName": ""}))


@contextmanager
def tensorboard(folder: Path, runs: int, *flags: str) -> Iterator[Server]:
    """TensorBoard on a folder, once it has read so many runs."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0",
               "--host", "127.0.0.1", *flags]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                break
        else:
            raise AssertionError("".join(said))
        server = Server(found[0])
        end = time.monotonic() + PATIENCE_S
        while len(server.get("runs")) < runs and time.monotonic() < end:
            pass
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """With all that it started, and at once where it does not go."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
