"""What the optimizer is told: which one, its constants, clipping, and how data ranks share its work."""

import dataclasses

from megatron.base.apex import apex_problems
from megatron.base.config import Config, choice_problems, flag, minimum_problems, range_problems


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Config):
    """The optimizer's constants, clipping, and data parallelism; raises `ConfigError` with all that is wrong."""

    optimizer: str = flag("adam", "adam: AdamW; sgd: gradient descent with momentum", choices=("adam", "sgd"))
    weight_decay: float = flag(
        0.01,
        "weight decay of matrices, biases and norms are not decayed; adam: decoupled, each step takes "
        "lr * weight-decay of their value; sgd: weight-decay of their value is added to their gradient",
    )
    adam_beta1: float = flag(0.9, "share of the old mean that Adam keeps at each step")
    adam_beta2: float = flag(0.999, "share of the old mean square that Adam keeps at each step")
    adam_eps: float = flag(1e-8, "what Adam adds to the root of the mean square")
    sgd_momentum: float = flag(0.9, "share of the old direction that SGD keeps at each step")
    clip_grad: float = flag(1.0, "largest global gradient norm, larger ones are scaled down to it; 0 for no clipping")
    use_distributed_optimizer: bool = flag(
        False, "keep only a share of the optimizer's state on each data-parallel rank (ZeRO stage 1)"
    )
    overlap_grad_reduce: bool = flag(False, "sum gradients over the data-parallel ranks while backward goes on")
    overlap_param_gather: bool = flag(
        False, "gather updated parameters while the next forward begins; with --use-distributed-optimizer"
    )
    ddp_bucket_size: int = flag(40_000_000, "elements of the gradient buffers that are reduced at a time")

    def problems(self) -> list[str]:
        """One sentence for each number that is out of its range and for each flag that needs another."""
        found = choice_problems(self) + minimum_problems(self, 0, "weight_decay", "adam_eps", "clip_grad")
        found += minimum_problems(self, 1, "ddp_bucket_size")
        found += range_problems(self, 0, 1, "adam_beta1", "adam_beta2", "sgd_momentum")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            found.append("--overlap-param-gather: it needs --use-distributed-optimizer, without it nothing is gathered")
        return found

    def input_problems(self) -> list[str]:
        """Whether the package called apex, if there is one, is NVIDIA's."""
        return apex_problems()
