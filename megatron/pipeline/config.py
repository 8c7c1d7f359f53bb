"""What the pipeline is told: how many stages, which layers they hold, in which order they work."""

import dataclasses

from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems
from megatron.base.words import micro_batches
from megatron.pipeline.actions import Schedule
from megatron.pipeline.nearest import nearest_words
from megatron.pipeline.schedules import SCHEDULES, build_schedule
from megatron.pipeline.stages import LayerSplit

_SIZES = (
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


@dataclasses.dataclass(frozen=True)
class PipelineConfig(Config):
    """How the layers are split over pipeline stages, and in which order these work."""

    pipeline_model_parallel_size: int = flag(1, "ranks that the layers are split over (pipeline model parallelism, p)")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of a virtual stage, several of which take turns on each rank; one a rank if not given",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first pipeline rank; the others share the rest evenly"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last pipeline rank; the others share the rest evenly"
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "balance the split by cost, the embedding of the first stage counted in"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False,
        "balance the split by cost, the output projection and the loss of the last stage counted in",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "1f1b: backward passes as soon as can be, interleaved with virtual stages; gpipe: all forward passes first",
        choices=SCHEDULES,
    )
    scatter_gather_tensors_in_pipeline: bool = flag(
        True,
        "let each tensor-parallel rank send its part of a boundary tensor, to be gathered where it arrives",
    )

    def problems(self) -> list[str]:
        """One sentence for each size below 1 and for a schedule that there is not."""
        return choice_problems(self) + minimum_problems(self, 1, *_SIZES)

    def split(self, num_layers: int, *, embedding_cost: float = 1.0, head_cost: float = 1.0) -> LayerSplit:
        """The split of `num_layers`; ask it for its `problems()`, its `virtual_size` and its `stages()`.

        The costs, in layers, count where the flags ask to account for them; `stages.head_cost` is the head's.
        """
        return LayerSplit(
            num_layers,
            **{name: getattr(self, name) for name in _SIZES},
            embedding_cost=embedding_cost if self.account_for_embedding_in_pipeline_split else 0.0,
            head_cost=head_cost if self.account_for_loss_in_pipeline_split else 0.0,
        )

    def batch_problems(self, virtual_size: int, global_batch_size: int, samples: int) -> list[str]:
        """A sentence where a global batch is of a number of micro-batches that virtual stages cannot take.

        `samples` are those of one micro-batch on all data-parallel ranks together, which divides the global batch.
        """
        p = self.pipeline_model_parallel_size
        if virtual_size == 1 or global_batch_size % (p * samples) == 0:
            return []
        sizes = nearest_words(global_batch_size, lambda n: n % (p * samples) == 0, global_batch_size + p * samples)
        return [
            f"--global-batch-size {global_batch_size}: it makes {micro_batches(global_batch_size // samples)}, and "
            f"with virtual stages their number must be a multiple of {flag_name(_SIZES[0])} {p}{sizes}"
        ]

    def schedule(self, virtual_size: int, num_micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """The schedule of an iteration of `num_micro_batches`; raises as `build_schedule` does."""
        p = self.pipeline_model_parallel_size
        return build_schedule(self.pipeline_schedule, p, num_micro_batches, virtual_size, forward_only=forward_only)
