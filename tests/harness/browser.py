"""A real browser for tests of a page: headless Chromium, spoken to in its DevTools protocol over two pipes."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
_QUIET = ("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update")


def find_browser() -> str | None:
    """The program, None where this machine has none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page that is open in the browser."""

    def __init__(self, to: IO[bytes], answers: IO[bytes]) -> None:
        self._to, self._answers, self._session = to, answers, ""
        self._sent = 0
        self._held = b""

    def open(self, url: str) -> None:
        """Show the page at `url`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a method of the protocol; events that come before are passed over."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        self._to.write(json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true, a minute at most."""
        poll = f"for (let n = 0; n < 1200 && !({expression}); n++) await new Promise((go) => setTimeout(go, 50));"
        assert self.value(f"(async () => {{ {poll} return Boolean({expression}); }})()"), expression

    def type(self, element: str, text: str) -> None:
        """Type into the element of this id, in place of what is in it."""
        self.value(f"document.getElementById('{element}').select()")
        self.call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """Click with the mouse on the element of this id."""
        box = f"document.getElementById('{element}').getBoundingClientRect()"
        x, y = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._answers.fileno(), 1 << 16)
            assert part, "the browser has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextlib.contextmanager
def browsing(program: str) -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    (our_in, their_out), (their_in, our_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [program, *_FLAGS, *_QUIET, f"--user-data-dir={profile}", "about:blank"]
        # It reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "browser", *words]
        process = subprocess.Popen(shell, pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL)
        os.close(their_in)
        os.close(their_out)
        try:
            with os.fdopen(our_out, "wb") as to, os.fdopen(our_in, "rb", buffering=0) as answers:
                page = Page(to, answers)
                yield page
        finally:
            process.terminate()
            process.wait(timeout=30)
