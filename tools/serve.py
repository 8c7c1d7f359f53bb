"""Serve a trained GPT over HTTP: `torchrun --nproc-per-node N tools/serve.py --load DIR`, at 127.0.0.1 only by default.

`POST /v1/completions` takes the requests of the OpenAI API, `/v1/models` and `/health` answer, and `/` is a page to
type into. It needs the optional packages starlette and uvicorn: `pip install "megatron[serve]"`.
"""

import contextlib
import dataclasses
import importlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.base.config import Config, flag, minimum_problems, range_problems
from megatron.base.console import say
from megatron.tasks.control import Control
from megatron.tasks.generation import Continuations
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.serving.completion import Served
from megatron.tasks.serving.loop import serve_commands
from megatron.tasks.serving.schedule import Scheduler
from megatron.tasks.trained import Trained, TrainedRequest, opened, parse_request
from megatron.training.failure import user_errors
from megatron.training.launcher import Launch


@dataclasses.dataclass(frozen=True)
class ServeConfig(Config):
    """Where to serve, and how much at a time."""

    host: str = flag("127.0.0.1", "address to listen at; 0.0.0.0 lets everybody in who can reach this machine")
    port: int = flag(5000, "port to listen at; 0 for any that is free")
    served_model_name: str | None = flag(None, "name of the model in requests; that of --load's folder if not given")
    micro_batch_size: int = flag(16, "texts to continue at the same time", aliases=("batch-size",))
    max_waiting: int = flag(128, "texts that may wait for their turn; requests beyond them get status 429")
    max_choices: int = flag(64, "texts that one request may ask for, prompts times n")
    max_tokens: int | None = flag(None, "tokens that one request may ask for; the model's context if not given")
    max_body_bytes: int = flag(1 << 20, "longest body of a request, in bytes; longer ones get status 413")

    def problems(self) -> list[str]:
        names = ("micro_batch_size", "max_waiting", "max_choices", "max_tokens", "max_body_bytes")
        found = minimum_problems(self, 1, *names) + range_problems(self, 0, 2**16, "port")
        return found if self.host else [*found, "--host: it is empty, and 0.0.0.0 says that all addresses are meant"]

    @property
    def hosts(self) -> frozenset[str]:
        """The names that a client on this machine has for it; none where others may come too."""
        with contextlib.suppress(ValueError):
            if not ipaddress.ip_address(self.host).is_loopback:
                return frozenset()
        return frozenset({"127.0.0.1", "localhost", "::1", self.host.lower()})


@dataclasses.dataclass(frozen=True)
class Request(TrainedRequest):
    """Serve a trained GPT over HTTP."""

    serve: ServeConfig


def listen(config: ServeConfig) -> socket.socket:
    """A socket that listens. ValueError where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {config.host} --port {config.port}: {error}") from None


@contextlib.contextmanager
def answering(config: ServeConfig, name: str, trained: Trained, listening: socket.socket) -> Iterator[Scheduler]:
    """A scheduler that has the requests which come to a socket, until the block ends."""
    from megatron.tasks.serving.app import App, HttpServer  # of packages that are optional

    context = trained.model.config.max_position_embeddings
    served = Served(name, trained.tokenizer, context, min(config.max_tokens or context, context), config.max_choices)
    scheduler = Scheduler(trained.tokenizer, config.max_waiting)
    server = HttpServer(App(served, scheduler, config.max_body_bytes, config.hosts), listening)

    def answer() -> None:
        try:
            server.run()
        finally:
            scheduler.close()

    thread = threading.Thread(target=answer, name="http", daemon=True)
    thread.start()
    host = f"[{config.host}]" if ":" in config.host else config.host
    say(f"{name} is served at http://{host}:{listening.getsockname()[1]} (Ctrl-C ends)")
    try:
        yield scheduler
    finally:
        scheduler.close()
        server.stop()
        thread.join(timeout=10)


@contextlib.contextmanager
def ended_by_signals(scheduler: Scheduler | None) -> Iterator[None]:
    """In the block the first SIGINT or SIGTERM closes the scheduler, and a second one is what it was before.

    A rank without one waits for the first rank, which has been sent the signal too. Where that ends the block before
    the signal has come here, this process ignores it when it comes: it would end by it instead of by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    afterwards: dict[signal.Signals, Any] = before
    heard = False

    def note(number: int, frame: object) -> None:
        nonlocal heard
        heard = True
        signal.signal(number, before[signal.Signals(number)])
        if scheduler is not None:
            # Not here: the thread that was interrupted may hold the scheduler's lock.
            threading.Thread(target=scheduler.close).start()

    for number in before:
        signal.signal(number, note)
    try:
        yield
        if scheduler is None and not heard:
            afterwards = dict.fromkeys(before, signal.SIG_IGN)
    finally:
        for number, handler in afterwards.items():
            signal.signal(number, handler)


def serve(request: Request) -> None:
    """Serve until a signal ends it. Collective over all ranks, of which the first one listens."""
    config, load = request.serve, request.trained.load
    importlib.import_module("megatron.tasks.serving.app")  # whether the packages are there, before anything is loaded
    first = Launch.of_environment().rank == 0
    listening = listen(config) if first else None
    with listening or contextlib.nullcontext(), opened(request) as trained:
        control = Control()
        texts = Continuations(SplitGPT(trained.model, trained.world.device), config.micro_batch_size)
        name = config.served_model_name or Path(load).resolve().name
        with contextlib.ExitStack() as stack:
            scheduler = None
            if listening is not None:
                scheduler = stack.enter_context(answering(config, name, trained, listening))
            stack.enter_context(ended_by_signals(scheduler))
            serve_commands(texts, control, scheduler)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and serve; the user's mistakes end it with exit code 2."""
    with user_errors():
        serve(parse_request(Request, argv, prog="serve.py"))


if __name__ == "__main__":
    main()
