"""The routes of the server. The only file that needs `starlette` and `uvicorn`, which are optional."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from megatron.tasks.serving.completion import Completion, RequestError, Served, choice, read_completion
from megatron.tasks.serving.schedule import Closed, Full, Hear, Scheduler, Update
from megatron.tasks.text_files import parse_json

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ValueError('serving needs the packages starlette and uvicorn: pip install "megatron[serve]"') from None

_BODY_SECONDS = 30.0  # in which the body of a request must have come
# The page holds its own script and style, asks this server alone, and is shown in no other page.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_Updates = asyncio.Queue[tuple[int, Update]]


class App:
    """What the routes share.

    Args:
        served: the model.
        scheduler: takes the texts in.
        max_body_bytes: of a request.
        hosts: names by which clients may call this server; a page that has its own name lead here is turned away. Any
            name where it is empty.
    """

    def __init__(self, served: Served, scheduler: Scheduler, max_body_bytes: int, hosts: frozenset[str]) -> None:
        self._served, self._scheduler, self._hosts = served, scheduler, hosts
        self._max_body_bytes = max_body_bytes
        self._page = importlib.resources.files("megatron.tasks.serving").joinpath("page.html").read_text("utf-8")

    def asgi(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            RequestError: _refusal,
            HTTPException: _refusal,
            ClientDisconnect: _refusal,
            Exception: _refusal,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        """The page to type into."""
        headers = {"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"}
        return HTMLResponse(self._page, headers=headers)

    async def health(self, request: Request) -> Response:
        """That the server is there, and how much it has to do."""
        running, waiting = self._scheduler.counts
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "megatron"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Continue prompts: at once, or as server-sent events."""
        if self._hosts and (request.url.hostname or "") not in self._hosts:
            raise RequestError(403, f"this server is not {request.url.hostname!r:.80}")
        body = await self._body(request)
        completion = await asyncio.to_thread(lambda: read_completion(_parsed(body), self._served))
        updates: _Updates = asyncio.Queue()
        try:
            numbers = self._scheduler.submit(completion.prompts, completion.stop, _hearers(completion, updates))
        except Full:
            raise RequestError(429, "too many texts are waiting: try again later", code="queue_full") from None
        except Closed:
            raise RequestError(503, "the server is about to end") from None
        if completion.stream:
            return _Events(self._events(completion, updates), lambda: self._scheduler.cancel(numbers))
        try:
            return await self._whole(request, completion, updates)
        finally:
            self._scheduler.cancel(numbers)

    async def _body(self, request: Request) -> bytes:
        """The body of a request, read no further than is accepted."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":  # what a foreign page can send without asking is of other kinds
            raise RequestError(415, f"content-type {kind!r:.80}: it must be application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body_bytes:
                        raise RequestError(413, f"the body is longer than the {self._max_body_bytes} bytes accepted")
        except TimeoutError:
            raise RequestError(408, f"the body has not come in {_BODY_SECONDS:g} seconds") from None
        return bytes(body)

    async def _whole(self, request: Request, completion: Completion, updates: _Updates) -> Response:
        """All choices once they are written; nothing where the client has left before."""
        left = asyncio.ensure_future(_left(request))
        collected = asyncio.ensure_future(_collect(completion, updates))
        try:
            await asyncio.wait([left, collected], return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=499)
            choices, tokens = collected.result()
            return JSONResponse(completion.answer(self._served.name, choices, tokens))
        finally:
            left.cancel()
            collected.cancel()

    async def _events(self, completion: Completion, updates: _Updates) -> AsyncIterator[str]:
        """Server-sent events: the pieces of all choices as they come."""
        async for index, update in _until_all_ended(completion, updates):
            if update.finish == "failure":
                yield _event(_failure().body())
                return
            if update.text or update.finish:
                piece = choice(index, update.text, update.finish)
                yield _event(completion.answer(self._served.name, [piece]))
        yield "data: [DONE]\n\n"


class _Events(StreamingResponse):
    """Server-sent events; `ended` is called when all are sent, or the client has left, however early."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None


def _hearers(completion: Completion, updates: _Updates) -> list[Hear]:
    """For each choice what the model's thread calls; it puts the news into the queue of the server's thread."""
    loop = asyncio.get_running_loop()

    def hearer(index: int) -> Hear:
        def hear(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the server's thread has ended
                loop.call_soon_threadsafe(updates.put_nowait, (index, update))

        return hear

    return [hearer(index) for index in range(len(completion.prompts))]


async def _until_all_ended(completion: Completion, updates: _Updates) -> AsyncIterator[tuple[int, Update]]:
    """The news of each choice, by its number, until all have ended."""
    open_choices = len(completion.prompts)
    while open_choices:
        index, update = await updates.get()
        open_choices -= update.finish is not None
        yield index, update


async def _collect(completion: Completion, updates: _Updates) -> tuple[list[dict[str, Any]], int]:
    """The JSON of all choices, and how many tokens were added together."""
    texts, ends, tokens = [""] * len(completion.prompts), [""] * len(completion.prompts), 0
    async for index, update in _until_all_ended(completion, updates):
        if update.finish == "failure":
            raise _failure()
        texts[index] += update.text
        tokens += update.tokens
        ends[index] = update.finish or ""
    return [choice(at, text, end) for at, (text, end) in enumerate(zip(texts, ends, strict=True))], tokens


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure() -> RequestError:
    return RequestError(500, "the text could not be written: the server ends, or the model's weights are not sound")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _refusal(request: Request, error: Exception) -> Response:
    """Every error as JSON of one shape."""
    told, headers = RequestError(500, "something went wrong in the server; its log says what"), {}
    if isinstance(error, RequestError):
        told = error
    elif isinstance(error, HTTPException):
        told, headers = RequestError(error.status_code, str(error.detail)), dict(error.headers or {})
    elif isinstance(error, ClientDisconnect):
        told = RequestError(400, "the connection was closed")
    if told.status == 429:
        headers["retry-after"] = "1"
    return JSONResponse(told.body(), status_code=told.status, headers=headers)


class HttpServer:
    """The application on a socket that listens already; `run` returns after `stop`, in whichever thread it is."""

    def __init__(self, app: App, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app.asgi(),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        self._server, self._socket = uvicorn.Server(config), listening

    def run(self) -> None:
        """Answer requests."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run` return, once what was begun is answered."""
        self._server.should_exit = True
