"""The server of completions: answers, many at once, wrong requests, clients that leave, and the page."""

import http.client
import itertools
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model import CachedRows
from megatron.tasks.generation import Chosen, Finish, Prompt
from megatron.tasks.serving.schedule import Scheduler
from tests.harness.browser import NAMES, browsing, find_browser
from tests.harness.counting_model import CountingModel
from tests.harness.http_server import NAME, Stream, ask, serving


class Gated(CountingModel):
    """Takes a step only while its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()

    def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
        assert self.gate.wait(60)
        return super().logits(tokens, cache)


class Endless(CountingModel):
    """Never ends a document, as far as 9 ends one; what it counts is of no interest."""

    def __init__(self) -> None:
        super().__init__(context=100_000, counted=False)

    def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
        logits = super().logits(tokens, cache)
        assert logits is not None
        return logits.index_fill(1, torch.tensor([9]), -math.inf)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(CountingModel(context=16, counted=False)) as (number, _):
        yield number


def eventually(true: Callable[[], bool]) -> None:
    """Wait until something is true; a test that never sees it fails."""
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def counted(prompt: int, tokens: int) -> str:
    """What comes after a number."""
    return "".join(f" {(prompt + 1 + n) % 10}" for n in range(tokens))


def test_an_answer_has_the_shape_of_the_api(port: int) -> None:
    body = {"model": NAME, "prompt": "1 2", "max_tokens": 3, "temperature": 0, "user": "me", "echo": False}
    status, answer = ask(port, body)
    assert status == 200
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == NAME
    assert answer["choices"] == [{"index": 0, "text": " 3 4 5", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert abs(answer["created"] - time.time()) < 600
    assert ask(port, path="/v1/models")[1]["data"][0]["id"] == NAME
    assert ask(port, path="/health") == (200, {"status": "ok", "running": 0, "waiting": 0})


@pytest.mark.parametrize(
    ("prompt", "numbers"), [(["1", "4 5"], [1, 5]), ([3, 4], [4]), ([[3], [1, 2], [4]], [3, 2, 4]), ("7", [7])]
)
def test_prompts_of_every_form_n_times_each(port: int, prompt: Any, numbers: list[int]) -> None:
    status, answer = ask(port, {"prompt": prompt, "n": 2, "max_tokens": 1, "temperature": 0})
    assert status == 200
    assert [one["text"] for one in answer["choices"]] == [counted(n, 1) for n in numbers for _ in range(2)]
    assert [one["index"] for one in answer["choices"]] == list(range(2 * len(numbers)))


def test_texts_end_by_the_end_of_a_document_stops_and_the_context(port: int) -> None:
    def end(prompt: str, **more: Any) -> tuple[str, str, int]:
        answer = ask(port, {"prompt": prompt, "temperature": 0, "max_tokens": 12} | more)[1]
        one = answer["choices"][0]
        return one["text"], one["finish_reason"], answer["usage"]["completion_tokens"]

    assert end("6") == (" 7 8", "stop", 3)  # 9 ends a document
    assert end("1", stop="4 5") == (" 2 3 ", "stop", 4)
    assert end("1", stop=["x", "3"]) == (" 2 ", "stop", 2)
    assert end("1", stop_token_ids=[4]) == (" 2 3", "stop", 3)
    assert end("0 1 2 3 4 5 6 7 8 9 0 1 2 3") == (" 4 5 6", "length", 3)


def test_a_seed_repeats_its_texts(port: int) -> None:
    def texts(**more: Any) -> list[str]:
        body = {"prompt": ["1", "2"], "n": 3, "max_tokens": 12, "temperature": 5, "seed": 7} | more
        return [one["text"] for one in ask(port, body)[1]["choices"]]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: texts(), range(8)))
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) > 3
    assert texts(seed=8) != found[0] != texts(seed=None)
    assert (
        texts(top_k=1, n=1)
        == texts(top_p=1e-9, n=1)
        == texts(top_p=0, n=1)
        == texts(temperature=0, n=1)
        == [counted(1, 7), counted(2, 6)]
    )


def test_a_stream_gives_the_pieces_of_all_choices(port: int) -> None:
    body = {"prompt": ["1", "5"], "max_tokens": 6, "temperature": 0, "stop": "5 6"}
    with Stream(port, body) as events:
        pieces = list(events)
    assert pieces.pop() is None
    assert len({piece["id"] for piece in pieces}) == 1
    choices = [piece["choices"][0] for piece in pieces]
    texts = ["".join(one["text"] for one in choices if one["index"] == index) for index in range(2)]
    assert texts == [" 2 3 4 ", " 6 7 8"]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop", "stop"]
    assert len(choices) > 5


def test_fifty_at_once_are_all_answered(port: int) -> None:
    def one(n: int) -> tuple[int, Any]:
        return ask(port, {"prompt": str(n % 8), "max_tokens": 1 + n % 5, "temperature": 0, "stop_token_ids": [9]})

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(one, range(50)))
    assert [status for status, _ in answers] == [200] * 50
    for n, (_, answer) in enumerate(answers):
        assert counted(n % 8, 1 + n % 5).startswith(answer["choices"][0]["text"])
        assert answer["choices"][0]["finish_reason"] == ("length" if n % 8 + 1 + n % 5 < 9 else "stop")


def test_what_waits_together_is_continued_together() -> None:
    model = Gated()
    with serving(model, rows=4) as (port, scheduler), ThreadPoolExecutor(9) as pool:
        model.gate.clear()
        answers = [pool.submit(ask, port, {"prompt": "1", "max_tokens": 3, "temperature": 0}) for _ in range(9)]
        eventually(lambda: sum(scheduler.counts) == 9)
        model.gate.set()
        assert all(answer.result()[1]["choices"][0]["text"] == " 2 3 4" for answer in answers)
    assert len(max(model.asked, key=len)) >= 3  # the first may have been alone
    assert len(model.asked) < 9 * 3


REFUSED: list[tuple[Any, int, str]] = [
    (b"", 400, "the body is not JSON"),
    (b'{"prompt": "1"', 400, "the body is not JSON"),
    (b'{"prompt": "\xff"}', 400, "the body is not JSON"),
    (b"[" * 3000, 400, "the body is not JSON"),
    ([1], 400, "must be a JSON object"),
    ({}, 400, "prompt: it is missing"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": []}, 400, "a text, a list of texts"),
    ({"prompt": ["1", 2]}, 400, "a text, a list of texts"),
    ({"prompt": [True]}, 400, "a text, a list of texts"),
    ({"prompt": {"text": "1"}}, 400, "a text, a list of texts"),
    ({"prompt": "one"}, 400, "not 'one'"),
    ({"prompt": "\ud800"}, 400, "half of a letter"),
    ({"prompt": "1", "\udfff": 1}, 400, "half of a letter"),
    ({"prompt": "1", "stop": ["\ud800"]}, 400, "half of a letter"),
    ({"prompt": [10]}, 400, "token 10: the vocabulary has ids 0 to 9"),
    ({"prompt": [-1]}, 400, "token -1"),
    ({"prompt": " ".join("1" * 17)}, 400, "the prompt has 17 tokens: the model takes 16 at most"),
    ({"prompt": ["1"] * 9}, 400, "prompt: there are 9, and 8 are accepted"),
    ({"prompt": ["1"] * 3, "n": 3}, 400, "this server writes 8 texts a request"),
    ({"prompt": "1", "n": 0}, 400, "n 0: it must be a whole number from 1 to 8"),
    ({"prompt": "1", "n": True}, 400, "n True"),
    ({"prompt": "1", "max_tokens": 17}, 400, "max_tokens 17: it must be a whole number from 1 to 16"),
    ({"prompt": "1", "max_tokens": 1.5}, 400, "max_tokens 1.5"),
    ({"prompt": "1", "temperature": -1}, 400, "temperature -1"),
    ({"prompt": "1", "temperature": "hot"}, 400, "temperature 'hot'"),
    ({"prompt": "1", "temperature": math.nan}, 400, "temperature nan"),
    (b'{"prompt": "1", "temperature": 1e400}', 400, "temperature inf"),
    ({"prompt": "1", "temperature": 10**400}, 400, "temperature 1000"),
    ({"prompt": "1", "top_p": -(10**400)}, 400, "top_p -1000"),
    (b'{"prompt": "1", "seed": ' + b"9" * 4090 + b"}", 413, "longer than"),
    ({"prompt": "1", "top_p": 1.5}, 400, "top_p 1.5: it must be a number from 0 to 1"),
    ({"prompt": "1", "top_k": -1}, 400, "top_k -1"),
    ({"prompt": "1", "seed": 2**64}, 400, "seed 18446744073709551616"),
    ({"prompt": "1", "stop": ""}, 400, "none empty"),
    ({"prompt": "1", "stop": ["x"] * 17}, 400, "up to 16"),
    ({"prompt": "1", "stop_token_ids": [10]}, 400, "ids of the vocabulary, 0 to 9"),
    ({"prompt": "1", "stream": 1}, 400, "stream 1: it must be true or false"),
    ({"prompt": "1", "echo": True}, 400, "echo: this server does not have it"),
    ({"prompt": "1", "logprobs": 5}, 400, "logprobs: this server does not have it"),
    ({"prompt": "1", "maxtokens": 5}, 400, "'maxtokens' is no field of a completion"),
    ({"prompt": "1", "model": "gpt-9"}, 404, "model 'gpt-9': this server has 'counting'"),
    ({"prompt": "1 " * 3000}, 413, "longer than the 4096 bytes accepted"),
]


def test_wrong_requests_are_refused_in_a_sentence(port: int) -> None:
    for body, expected, sentence in REFUSED:
        status, answer = ask(port, body)
        assert (status, sentence in answer["error"]["message"]) == (expected, True), (body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    good = {"prompt": "1", "max_tokens": 1, "temperature": 0}
    assert ask(port, good, content_type="text/plain")[0] == 415
    assert ask(port, good, host="elsewhere.example")[0] == 403
    assert ask(port, path="/v1/chat/completions", method="POST")[0] == 404
    assert ask(port, path="/v1/completions")[0] == 405
    assert ask(port, good)[1]["choices"][0]["text"] == " 2"


def test_a_body_is_read_no_further_than_is_accepted(port: int) -> None:
    """One of a terabyte, by its header, of which the server sees a little."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: 1000000000000\r\n\r\n".encode() + b" " * 8192)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_what_is_no_http_ends_its_connection_alone(port: int) -> None:
    for said in (b"\x16\x03\x01 hello", b"GET", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(said)
    assert ask(port, path="/health")[0] == 200


def test_clients_that_leave_are_continued_no_further() -> None:
    """Before their answer, in the middle of a stream, and while they wait."""
    with serving(Endless(), rows=2) as (port, scheduler):
        endless = {"prompt": "0", "max_tokens": 90_000}
        first, second, third = (Stream(port, endless) for _ in range(3))
        eventually(lambda: scheduler.counts == (2, 1))
        assert [piece["choices"][0]["index"] for piece in itertools.islice(first, 3)] == [0, 0, 0]
        third.close()
        eventually(lambda: scheduler.counts == (2, 0))
        waiting = socket.create_connection(("127.0.0.1", port), timeout=30)
        data = b'{"prompt": "0", "max_tokens": 90000}'
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        waiting.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        eventually(lambda: scheduler.counts == (2, 1))
        first.close()
        eventually(lambda: scheduler.counts == (2, 0))
        second.close()
        waiting.close()
        eventually(lambda: scheduler.counts == (0, 0))
        assert ask(port, {"prompt": "1", "max_tokens": 2, "temperature": 0})[1]["choices"][0]["text"] == " 2 3"


def test_more_than_may_wait_are_told_to_come_again() -> None:
    model = Gated()
    with serving(model, rows=1, max_waiting=2) as (port, scheduler), ThreadPoolExecutor(3) as pool:
        model.gate.clear()
        body = {"prompt": "1", "max_tokens": 2, "temperature": 0}
        answers = []
        for n in range(3):
            answers.append(pool.submit(ask, port, body))
            eventually(lambda n=n: sum(scheduler.counts) == n + 1 and scheduler.counts[0] == 1)  # type: ignore[misc]
        status, answer = ask(port, body)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert ask(port, body | {"n": 2})[0] == 429
        model.gate.set()
        assert [one.result()[0] for one in answers] == [200] * 3
        assert ask(port, body)[0] == 200


def test_a_text_without_numbers_fails_alone() -> None:
    class Holed(Gated):
        """Knows nothing of what comes after 3."""

        def logits(self, tokens: Sequence[Sequence[int]], cache: CachedRows | None) -> Tensor | None:
            logits = super().logits(tokens, cache)
            assert logits is not None
            for row, ids in zip(logits, tokens, strict=True):
                row[ids[-1] == 3] = math.nan
            return logits

    model = Holed()
    with serving(model, rows=3) as (port, scheduler), ThreadPoolExecutor(5) as pool:
        model.gate.clear()
        bodies = [{"prompt": str(n), "max_tokens": 4, "temperature": 0} for n in (1, 5, 3, 4, 2)]
        answers = [pool.submit(ask, port, body) for body in bodies]
        eventually(lambda: sum(scheduler.counts) == 5)
        model.gate.set()
        told = [answer.result() for answer in answers]
        assert [status for status, _ in told] == [500, 200, 500, 200, 500]
        assert [told[n][1]["choices"][0]["text"] for n in (1, 3)] == [counted(5, 3), counted(4, 4)]
        assert scheduler.counts == (0, 0)


@pytest.mark.parametrize(("finish", "stop", "dropped"), [("length", (), []), (None, ("1",), [0])])
def test_a_text_that_ends_while_its_client_leaves_frees_one_place(
    finish: Finish | None, stop: tuple[str, ...], dropped: list[int]
) -> None:
    """By its last id, and by a string that stops it: the client leaves while that id is decoded."""

    class Leaving:
        def detokenize(self, ids: Sequence[int]) -> str:
            if ids:
                scheduler.cancel([0])
            return "".join(map(str, ids))

    def begun(room: int) -> tuple[list[int], list[int]]:
        told = scheduler.command(room)
        assert told is not None
        return told["drop"], [number for number, _ in told["begin"]]

    scheduler = Scheduler(Leaving(), 9)  # type: ignore[arg-type]
    for _ in range(3):
        scheduler.submit([Prompt((), 1)], stop, [lambda update: None])
    assert (begun(1), scheduler.counts) == (([], [0]), (1, 2))
    scheduler.heard([Chosen(0, 1, finish)])
    assert scheduler.counts == (0, 2)
    assert (begun(0 if dropped else 1), scheduler.counts) == ((dropped, [1]), (1, 1))


def test_a_model_that_gives_no_numbers_fails_its_requests_alone() -> None:
    model = CountingModel(sharpness=math.nan)
    with serving(model) as (port, _):
        status, answer = ask(port, {"prompt": ["1", "2"], "max_tokens": 2})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        with Stream(port, {"prompt": "1", "max_tokens": 2}) as events:
            assert "could not be written" in next(iter(events))["error"]["message"]
        model.sharpness = 5.0
        assert ask(port, {"prompt": "1", "max_tokens": 2, "temperature": 0})[0] == 200


def test_who_waits_when_the_server_ends_is_told() -> None:
    model = Gated()
    with ThreadPoolExecutor(1) as pool, serving(model) as (port, scheduler):
        model.gate.clear()
        answer = pool.submit(ask, port, {"prompt": "1", "max_tokens": 3, "temperature": 0})
        eventually(lambda: scheduler.counts[0] == 1)
        scheduler.close()
        assert ask(port, {"prompt": "1"})[0] == 503
        model.gate.set()
        assert answer.result()[0] == 500


def test_the_page_needs_nothing_from_elsewhere(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in (answer.headers["content-security-policy"] or "")
    assert "<textarea" in text
    assert not re.search(r"https?://|//[a-z]|src=|href=|@import", text.replace("// ", ""))


def test_the_page_in_a_real_browser(port: int) -> None:
    """Typed into and continued, twice; an error is shown; writing is stopped."""
    program = find_browser()
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(NAMES)} is on PATH, so the page was not tried")
    with browsing(program) as page, serving(Endless()) as (other, scheduler):
        page.open(f"http://127.0.0.1:{port}/")
        page.wait("document.getElementById('model').textContent === 'counting'")
        page.type("text", "1 2")
        page.type("max_tokens", "3")
        page.type("temperature", "0")
        for text in ("1 2 3 4 5", "1 2 3 4 5 6 7 8"):
            page.click("go")
            page.wait(f"document.getElementById('text').value === '{text}' && !document.getElementById('go').disabled")
        page.type("text", "one")
        page.click("go")
        page.wait("document.getElementById('status').textContent.includes(\"not 'one'\")")
        assert page.screenshot().startswith(b"\x89PNG")
        page.open(f"http://127.0.0.1:{other}/")
        page.type("text", "0")
        page.type("max_tokens", "90000")
        page.click("go")
        page.wait("document.getElementById('text').value.length > 20")
        page.click("stop")
        page.wait("document.getElementById('status').textContent === 'Stopped.'")
        eventually(lambda: scheduler.counts == (0, 0))
