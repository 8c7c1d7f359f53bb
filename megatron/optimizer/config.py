"""What the optimizer is told: weight decay, Adam's constants, clipping."""

import dataclasses

from megatron.base.config import Config, flag, minimum_problems, range_problems


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Config):
    """AdamW's constants and the clipping of gradients; raises `ConfigError` with all that is wrong when it is made."""

    weight_decay: float = flag(0.01, "decoupled weight decay of matrices; biases and norms are not decayed")
    adam_beta1: float = flag(0.9, "share of the old mean that Adam keeps at each step")
    adam_beta2: float = flag(0.999, "share of the old mean square that Adam keeps at each step")
    adam_eps: float = flag(1e-8, "what Adam adds to the root of the mean square")
    clip_grad: float = flag(1.0, "largest global gradient norm, larger ones are scaled down to it; 0 for no clipping")

    def problems(self) -> list[str]:
        """One sentence for each number that is out of its range."""
        return minimum_problems(self, 0, "weight_decay", "adam_eps", "clip_grad") + range_problems(
            self, 0, 1, "adam_beta1", "adam_beta2"
        )
