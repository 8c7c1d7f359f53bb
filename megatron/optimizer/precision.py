"""What the numbers of a run are kept in: parameters, gradients, master weights, and the loss scale of FP16."""

import dataclasses

import torch

from megatron.base.config import Config, choice_problems, flag, minimum_problems

_FULL = {"float32": torch.float32, "float64": torch.float64}

# The first compute capability of NVIDIA's devices whose arithmetic knows bfloat16 (Ampere).
_BFLOAT16_CAPABILITY = (8, 0)


@dataclasses.dataclass(frozen=True)
class PrecisionConfig(Config):
    """Number formats and the loss scale; raises `ConfigError` with all that is wrong when it is made."""

    params_dtype: str = flag(
        "float32",
        "number format of weights and arithmetic where neither --fp16 nor --bf16 is given",
        choices=tuple(_FULL),
    )
    fp16: bool = flag(False, "weights and arithmetic in float16, with float32 master weights and a loss scale")
    bf16: bool = flag(False, "weights and arithmetic in bfloat16, with float32 master weights and gradients")
    loss_scale: float | None = flag(None, "constant factor of the loss under --fp16; found as the run goes if absent")
    initial_loss_scale: float = flag(2.0**32, "the dynamic loss scale at the start")
    min_loss_scale: float = flag(1.0, "the smallest dynamic loss scale")
    loss_scale_window: int = flag(1000, "steps without overflow after which the dynamic loss scale is doubled")
    hysteresis: int = flag(2, "the dynamic loss scale is halved from the overflow of this number on")
    accumulate_allreduce_grads_in_fp32: bool | None = flag(
        None, "add up gradients, over micro-batches and ranks, in float32; always so with --bf16"
    )
    max_skipped_steps: int = flag(50, "steps skipped in a row, for overflow under --fp16, that end the run")

    def problems(self) -> list[str]:
        """One sentence for each number that is out of its range and for each contradiction."""
        found = choice_problems(self)
        found += minimum_problems(self, 1, "loss_scale_window", "hysteresis", "max_skipped_steps")
        found += self._format_problems() + self._scale_problems()
        return found

    def _format_problems(self) -> list[str]:
        found = []
        if self.fp16 and self.bf16:
            found.append("--fp16 and --bf16: give one of them")
        if self.params_dtype == "float64":
            low = {
                "--fp16": self.fp16,
                "--bf16": self.bf16,
                "--accumulate-allreduce-grads-in-fp32": self.accumulate_allreduce_grads_in_fp32,
            }
            found += [f"{name} and --params-dtype float64: give one of them" for name, given in low.items() if given]
        if self.bf16 and self.accumulate_allreduce_grads_in_fp32 is False:
            found.append(
                "--no-accumulate-allreduce-grads-in-fp32: with --bf16 gradients are always added up in float32"
            )
        return found

    def _scale_problems(self) -> list[str]:
        scales = {"--loss-scale": self.loss_scale, "--initial-loss-scale": self.initial_loss_scale}
        scales["--min-loss-scale"] = self.min_loss_scale
        found = [
            f"{name} {scale}: it must be above 0 and finite"
            for name, scale in scales.items()
            if scale is not None and not 0 < scale < float("inf")
        ]
        if self.min_loss_scale > self.initial_loss_scale:
            found.append(
                f"--min-loss-scale {self.min_loss_scale}: "
                f"it must not be above --initial-loss-scale {self.initial_loss_scale}"
            )
        if self.loss_scale is not None and not self.fp16:
            found.append(f"--loss-scale {self.loss_scale}: only --fp16 scales the loss")
        return found

    def device_problems(self, device_name: str, capability: tuple[int, int] | None) -> list[str]:
        """What a device cannot do of this, one sentence each.

        Args:
            device_name: as its driver says it.
            capability: compute capability of an NVIDIA device; None for any other, which can do all of it.
        """
        if not self.bf16 or capability is None or capability >= _BFLOAT16_CAPABILITY:
            return []
        return [
            f"--bf16: {device_name} (compute capability {capability[0]}.{capability[1]}) does not calculate in "
            "bfloat16, which needs 8.0 or above; --fp16 works there"
        ]

    @property
    def is_mixed(self) -> bool:
        """Whether parameters have 16 bits, so that the optimizer keeps master weights of its own."""
        return self.fp16 or self.bf16

    @property
    def format_flag(self) -> str:
        """The flag that asks for `dtype`."""
        if self.is_mixed:
            return "--fp16" if self.fp16 else "--bf16"
        return f"--params-dtype {self.params_dtype}"

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        if self.is_mixed:
            return torch.float16 if self.fp16 else torch.bfloat16
        return _FULL[self.params_dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the buffers in which gradients are added up over micro-batches and ranks."""
        if self.bf16 or self.accumulate_allreduce_grads_in_fp32:
            return torch.float32
        return self.dtype

    @property
    def main_dtype(self) -> torch.dtype:
        """Of master weights and moments."""
        return torch.float32 if self.is_mixed else self.dtype
