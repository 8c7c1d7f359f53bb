"""The process behind one rank: waits for calls, runs each in a fresh process group, reports how it went."""

import dataclasses
import datetime
import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Call:
    """What a worker is asked to run, and as which rank of which group."""

    module: str
    qualname: str
    arguments: bytes
    rank: int
    world_size: int
    rendezvous: str
    timeout: float


@dataclasses.dataclass(frozen=True)
class Report:
    """How a call ended on one rank: a pickled result, or the traceback and the moment of the error."""

    result: bytes | None
    error: str = ""
    moment: float = 0.0


def serve(connection: Connection, stack_file: str) -> None:
    """Run calls from `connection` until it closes; a worker outlives neither its parent nor a closed connection.

    After a call has succeeded, the worker keeps its group until it is told that every rank is done: a rank that
    leaves early would break the connections of those still at work. SIGUSR1 writes all stacks to `stack_file`.
    """
    torch.set_num_threads(1)
    _end_with_parent()
    with open(stack_file, "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send("ready")
        while True:
            try:
                call: Call = connection.recv()
            except EOFError:
                return
            connection.send(_run(call))
            connection.recv()
            _clean_up()
            connection.send("clean")


def _end_with_parent() -> None:
    """Leave when the test process is gone, even in the middle of a collective."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(call: Call) -> Report:
    try:
        _fresh_state()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.rendezvous}",
            rank=call.rank,
            world_size=call.world_size,
            timeout=datetime.timedelta(seconds=call.timeout),
        )
        function = _find(call.module, call.qualname)
        result = function(call.rank, call.world_size, *pickle.loads(call.arguments))
        return Report(pickle.dumps(result))
    except BaseException:
        return Report(None, traceback.format_exc(), time.monotonic())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _fresh_state() -> None:
    """What a new process would have: nothing that an earlier call left may show."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)


def _find(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _clean_up() -> None:
    """Drop model-parallel groups and random streams, then every process group."""
    mpu: Any = sys.modules.get("megatron.mpu")
    if mpu is not None:
        mpu.destroy_model_parallel()
        mpu.get_rng_tracker().reset()
    if dist.is_initialized():
        dist.destroy_process_group()
