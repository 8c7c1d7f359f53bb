"""The server of completions in this process, with the model that counts, and a client that speaks plain HTTP."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

from megatron.tasks.control import Control
from megatron.tasks.generation import Continuations
from megatron.tasks.serving.app import App, HttpServer
from megatron.tasks.serving.completion import Served
from megatron.tasks.serving.loop import serve_commands
from megatron.tasks.serving.schedule import Scheduler
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from tests.harness.counting_model import CountingModel

NAME = "counting"


class Alone(Control):
    """The control of a single rank, without process groups."""

    def __init__(self) -> None:
        self.first, self._group = True, None


@contextlib.contextmanager
def serving(
    model: CountingModel, *, rows: int = 4, max_waiting: int = 64, max_body_bytes: int = 4096, max_choices: int = 8
) -> Iterator[tuple[int, Scheduler]]:
    """The port of a server of `model` in other threads, and its scheduler."""
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    served = Served(NAME, tokenizer, model.context, model.context, max_choices)
    scheduler = Scheduler(tokenizer, max_waiting)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = HttpServer(App(served, scheduler, max_body_bytes, frozenset({"127.0.0.1"})), listening)
    texts = Continuations(model, rows)
    threads = [
        threading.Thread(target=server.run, daemon=True),
        threading.Thread(target=serve_commands, args=(texts, Alone(), scheduler), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield listening.getsockname()[1], scheduler
    finally:
        scheduler.close()
        server.stop()
        for thread in threads:
            thread.join(timeout=20)
        listening.close()
        assert not any(thread.is_alive() for thread in threads)


def ask(
    port: int, body: Any = None, path: str = "/v1/completions", method: str | None = None, **headers: str
) -> tuple[int, Any]:
    """The status and JSON of an answer; `body` is sent as it is where it is bytes, else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class Stream:
    """A streamed answer: an iterator of its events, parsed, [DONE] as None; leaving the block closes the connection."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        data, headers = json.dumps(body | {"stream": True}), {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", data, headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert (self._answer.headers["content-type"] or "").startswith("text/event-stream")

    def __iter__(self) -> Iterator[Any]:
        while line := self._answer.readline():
            if line != b"\n":
                assert line.startswith(b"data: ")
                yield None if line == b"data: [DONE]\n" else json.loads(line[6:])

    def close(self) -> None:
        """Leave, whether the answer has ended or not."""
        self._answer.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
