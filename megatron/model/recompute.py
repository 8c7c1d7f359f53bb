"""What of a layer is forgotten in the forward pass and computed again in the backward pass."""

import dataclasses
from collections.abc import Sequence

from megatron.base.config import Config, choice_problems, flag, minimum_problems


@dataclasses.dataclass(frozen=True)
class RecomputeConfig(Config):
    """Activation recomputation; raises `ConfigError` with all that contradicts itself when it is made."""

    recompute_granularity: str | None = flag(
        None,
        "full: keep the input of layers alone; selective: forget the attention matrices alone; nothing by default",
        choices=(None, "full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "of full recomputation. uniform (the default): keep the input of each --recompute-num-layers layers; "
        "block: recompute the first --recompute-num-layers layers of a stage one by one and keep all of the others",
        choices=(None, "uniform", "block"),
    )
    recompute_num_layers: int = flag(
        1,
        "layers that are recomputed together (uniform), or number of a stage's layers that are recomputed (block)",
        aliases=["checkpoint-num-layers"],
    )
    distribute_saved_activations: bool = flag(
        False,
        "each tensor-parallel rank keeps its share of an input saved by full recomputation",
        aliases=["distribute-checkpointed-activations"],
    )
    checkpoint_activations: bool = flag(False, "the older name of --recompute-granularity full")

    @property
    def granularity(self) -> str | None:
        """None, "full" or "selective", whichever flag said so."""
        return "full" if self.checkpoint_activations else self.recompute_granularity

    @property
    def method(self) -> str:
        """ "uniform" or "block", of full recomputation."""
        return self.recompute_method or "uniform"

    def problems(self) -> list[str]:
        """One sentence for each value that is not accepted, and each flag that only full recomputation obeys."""
        problems = choice_problems(self) + minimum_problems(self, 1, "recompute_num_layers")
        if self.checkpoint_activations and self.recompute_granularity == "selective":
            problems.append("--checkpoint-activations: it means full, --recompute-granularity says selective")
        if problems or self.granularity == "full":
            return problems
        given = {
            f"--recompute-method {self.recompute_method}": self.recompute_method is not None,
            f"--recompute-num-layers {self.recompute_num_layers}": self.recompute_num_layers != 1,
            "--distribute-saved-activations": self.distribute_saved_activations,
        }
        return [f"{words}: it needs --recompute-granularity full" for words, there in given.items() if there]

    def layout_problems(self, layers: int, tensor_parallel_size: int, sequence_parallel: bool) -> list[str]:
        """One sentence for each thing that does not fit stages of up to `layers` layers on that many tensor ranks.

        A stage of fewer than `--recompute-num-layers` recomputes what it has.
        """
        problems = []
        if self.recompute_num_layers > layers:
            most = f"it must be at most {layers}, no stage has more layers"
            problems.append(f"--recompute-num-layers {self.recompute_num_layers}: {most}")
        if self.distribute_saved_activations and tensor_parallel_size == 1:
            problems.append("--distribute-saved-activations: it needs --tensor-model-parallel-size above 1")
        elif self.distribute_saved_activations and sequence_parallel:
            problems.append(
                "--distribute-saved-activations: with --sequence-parallel a rank keeps its share already; "
                "leave one of the two out"
            )
        return problems

    def groups(self, layers: Sequence[str]) -> list[tuple[list[str], bool]]:
        """The names of a stage's layers in groups that run as one, in order, and whether each group is recomputed."""
        names = list(layers)
        if self.granularity != "full":
            return [(names, False)]
        n = self.recompute_num_layers
        if self.method == "block":
            return [([name], True) for name in names[:n]] + [(names[n:], False)]
        return [(names[start : start + n], True) for start in range(0, len(names), n)]
