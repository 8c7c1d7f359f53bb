"""The factor that lifts FP16's gradients out of the range where they would vanish: constant or found by trial."""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron.optimizer.precision import PrecisionConfig


class LossScaler(Protocol):
    """What the loss is multiplied by before backward, and its gradients are divided by after it."""

    @property
    def scale(self) -> float:
        """The factor of the step that comes."""

    def update(self, overflow: bool) -> None:
        """Take note of a step: `overflow` where some gradient was not finite, and the step was skipped."""

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs to go on in the same way, as plain values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` of any scaler has given."""


class StaticLossScaler:
    """A constant factor."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, Any]:
        """Nothing: the factor is a flag."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing is taken: the factor is a flag."""


class DynamicLossScaler:
    """A factor that falls after overflows and rises while there are none, by the rule of Megatron-LM 2.5.

    An overflow ends the present run of clean steps and takes one from the patience of `hysteresis`; where none is left
    it halves the scale, down to `min_loss_scale`, and so does every overflow after it. `loss_scale_window` clean steps
    on end double the scale, and they alone give the patience back.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self._scale = config.initial_loss_scale
        self._clean_steps = 0
        self._patience = config.hysteresis

    @property
    def scale(self) -> float:
        """The factor of the step that comes."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Take note of a step that overflowed, or of a clean one."""
        if overflow:
            self._clean_steps = 0
            self._patience = max(self._patience - 1, 0)
            if self._patience == 0:
                self._scale = max(self._scale / 2, self._config.min_loss_scale)
            return
        self._clean_steps += 1
        if self._clean_steps >= self._config.loss_scale_window:
            self._clean_steps = 0
            self._patience = self._config.hysteresis
            self._scale *= 2

    def state(self) -> dict[str, Any]:
        """The scale, the clean steps since it changed or overflowed, and the patience that is left."""
        return {"scale": self._scale, "clean_steps": self._clean_steps, "patience": self._patience}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, within the present bounds; what another kind of scaler gave says nothing."""
        if state:
            self._scale = max(float(state["scale"]), self._config.min_loss_scale)
            self._clean_steps = int(state["clean_steps"])
            self._patience = min(int(state["patience"]), self._config.hysteresis)


def make_loss_scaler(config: PrecisionConfig) -> LossScaler:
    """The scaler that `config` asks for: constant 1 unless it is FP16."""
    if not config.fp16:
        return StaticLossScaler(1.0)
    return DynamicLossScaler(config) if config.loss_scale is None else StaticLossScaler(config.loss_scale)
