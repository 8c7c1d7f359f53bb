"""Streams of random numbers: one equal on the tensor ranks, one of each rank's own, one for initial weights.

PyTorch's default generators carry the replicated stream. The tracker keeps the others and lends them to the default
generators for a while (`fork`), since dropout and initialisers take no generator. A stream is one state for the CPU
and, once CUDA is in use, one for the current CUDA device.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from megatron.mpu.initialize import (
    get_data_parallel_rank,
    get_pipeline_model_parallel_rank,
    get_tensor_model_parallel_rank,
)

MODEL_PARALLEL_STREAM = "model-parallel-rng"
PARAMETER_STREAM = "parameter-init-rng"
_CUDA = "@cuda"  # ends the name of a stream's CUDA state in `get_states`
_STREAM = "stream:"  # begins the name of a tracker's state in `rng_state`


def derive_seed(*parts: int | str) -> int:
    """63 bits of SHA-256 over `parts`: seeds of different roles are unrelated, unlike sums of a seed and a rank."""
    digest = hashlib.sha256("\0".join(repr(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _default_states() -> dict[str, torch.Tensor]:
    """State of PyTorch's default generators: "" for the CPU, "@cuda" for the current CUDA device where it is in use."""
    states = {"": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[_CUDA] = torch.cuda.get_rng_state()
    return states


def _set_default_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states[""])
    if _CUDA in states:
        torch.cuda.set_rng_state(states[_CUDA])


class _Lent(NamedTuple):
    """A stream that the default generators of `devices` ("" and "@cuda") draw from at present."""

    name: str
    devices: tuple[str, ...]


class RngTracker:
    """Named streams beside the default generators. See the top of the file."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, torch.Tensor]] = {}
        self._active: tuple[_Lent, ...] = ()  # one for each fork that is open, the innermost last

    def reset(self) -> None:
        """Forget all streams."""
        self._streams = {}

    def add(self, name: str, seed: int) -> None:
        """Begin the stream `name` at `seed`; the default generators are left as they are.

        Raises:
            ValueError: there is a stream of that name.
        """
        if name in self._streams:
            raise ValueError(f"random stream {name!r} exists already: reset the tracker first, or take another name")
        self._streams[name] = {"": torch.Generator().manual_seed(seed).get_state()}
        if self._active and self._active[-1].name == name:  # it was forgotten inside its own fork
            self._lend()

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream `name` inside the block, and from where the default generators were after it.

        Before anything was seeded, the two streams of this file are the default generators themselves, so that layers
        work alone. Forks may be nested: a stream goes on where it was, also one that is forked to further out.

        Raises:
            ValueError: there is no such stream.
        """
        unseeded = not self._streams and name in (MODEL_PARALLEL_STREAM, PARAMETER_STREAM)
        if unseeded or (self._active and self._active[-1].name == name):
            yield
            return
        if name not in self._streams:
            there = ", ".join(self._streams) or "none yet (call mpu.model_parallel_manual_seed)"
            raise ValueError(f"random stream {name!r}: the streams are {there}")
        self._take_back()
        outside, active = _default_states(), self._active
        _set_default_states(self._stream_states(name, outside))
        self._active = (*active, _Lent(name, tuple(outside)))
        try:
            yield
        finally:
            self._take_back()
            self._active = active
            _set_default_states(outside)
            self._lend()  # the stream of the fork around this one may have been drawn from inside

    def _take_back(self) -> None:
        """Keep what the innermost fork's stream has come to; a state of a device that was not in use stays as it is."""
        if self._active and self._active[-1].name in self._streams:
            now = _default_states()
            name, devices = self._active[-1]
            self._streams[name] |= {device: now[device] for device in devices}

    def _lend(self) -> None:
        """Let the default generators draw from the innermost fork's stream, from where that is."""
        if self._active and self._active[-1].name in self._streams:
            _set_default_states(self._stream_states(*self._active[-1]))

    def _stream_states(self, name: str, devices: Iterable[str]) -> dict[str, torch.Tensor]:
        """The stream's state for each of `devices`; a CUDA state begins at the seed of the CPU's."""
        states = self._streams[name]
        if _CUDA in devices and _CUDA not in states:
            seed = torch.Generator()
            seed.set_state(states[""])
            states[_CUDA] = torch.Generator("cuda").manual_seed(seed.initial_seed()).get_state()
        return {device: states[device] for device in devices}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Copies of all states, uint8: the name of a stream for the CPU, with "@cuda" behind it for CUDA."""
        self._take_back()
        return {
            name + device: state.clone() for name, states in self._streams.items() for device, state in states.items()
        }

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all streams by what `get_states` gave; inside a fork, what is drawn next comes from the new state."""
        self._replace(states)
        self._lend()

    def _replace(self, states: Mapping[str, torch.Tensor]) -> None:
        streams: dict[str, dict[str, torch.Tensor]] = {}
        for key, state in states.items():
            name = key.removesuffix(_CUDA)
            streams.setdefault(name, {})[key[len(name) :]] = state.clone()
        for name, parts in streams.items():
            if "" not in parts:
                raise ValueError(f"random stream {name!r}: it has a CUDA state and no CPU state")
        self._streams = streams

    def check_no_fork(self, what: str) -> None:
        """`RuntimeError` inside a fork, where the default generators are not themselves."""
        if self._active:
            raise RuntimeError(
                f"{what} inside a fork of random stream {self._active[-1].name!r}: call it outside of it"
            )

    def snapshot(self) -> tuple[dict[str, torch.Tensor], tuple[_Lent, ...]]:
        """All that `restore` needs to draw again what is drawn from here on."""
        return self.get_states(), self._active

    def restore(self, snapshot: tuple[dict[str, torch.Tensor], tuple[_Lent, ...]]) -> None:
        """Go back to a `snapshot`. The default generators are not part of it."""
        self._replace(snapshot[0])
        self._active = snapshot[1]


_tracker = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_manual_seed(seed: int) -> None:
    """Seed every stream of this rank; call it after `initialize_model_parallel`.

    The default generators, for what is computed alike on all tensor ranks, differ by data rank and pipeline stage; the
    stream "model-parallel-rng" differs by tensor rank too; "parameter-init-rng" is the same on every rank.
    `RuntimeError` inside a `fork`.
    """
    _tracker.check_no_fork("model_parallel_manual_seed")
    data, stage, tensor = (
        get_data_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_tensor_model_parallel_rank(),
    )
    torch.manual_seed(derive_seed(seed, "replicated", data, stage))
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL_STREAM, derive_seed(seed, "tensor", data, stage, tensor))
    _tracker.add(PARAMETER_STREAM, derive_seed(seed, "init"))


def rng_state() -> dict[str, torch.Tensor]:
    """Every generator state of this rank as uint8 tensors, for checkpoints: "cpu", "cuda" where in use, "stream:...".

    `RuntimeError` inside a `fork`.
    """
    _tracker.check_no_fork("rng_state")
    states = {{"": "cpu", _CUDA: "cuda"}[device]: state for device, state in _default_states().items()}
    return states | {_STREAM + name: state for name, state in _tracker.get_states().items()}


def set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    """Put back what `rng_state` gave. A CUDA state is left out, with a warning, where there is no CUDA.

    Raises:
        ValueError: a name that `rng_state` does not give, or no "cpu" state.
        RuntimeError: inside a `fork`.
    """
    _tracker.check_no_fork("set_rng_state")
    unknown = [name for name in states if name not in ("cpu", "cuda") and not name.startswith(_STREAM)]
    if unknown or "cpu" not in states:
        raise ValueError(f"random states {', '.join(states)}: accepted are cpu (needed), cuda and {_STREAM}NAME")
    _tracker.set_states({name.removeprefix(_STREAM): x for name, x in states.items() if name.startswith(_STREAM)})
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        else:
            warnings.warn("the random state of a CUDA device was not restored: there is no CUDA here", stacklevel=2)
