"""What a sample computes, from the config of a run."""

from megatron.base.formulas import hardware_flops, model_flops
from megatron.training.config import RunConfig


def flops_per_sample(config: RunConfig, logits: int) -> tuple[int, int]:
    """Floating-point operations of one sample, forward and backward: the model's, and with what is recomputed.

    logits: of a token (`config.model.vocabulary_rows`); 0 for a model that makes none.
    """
    model, recompute = config.model, config.recompute
    sizes = (1, config.data.seq_length, model.num_layers, model.hidden_size, logits)
    shape = (model.ffn_size, model.projection_size)
    stages, each = config.layer_split(logits).stages(), recompute.recompute_num_layers
    chunk = model.cross_entropy_chunk_size
    some = recompute.granularity == "full" and recompute.method == "block"
    executed = hardware_flops(
        *sizes,
        *shape,
        recompute_granularity=recompute.granularity,
        recomputed_layers=sum(min(each, len(stage.layers)) for stage in stages) if some else None,
        recomputed_logits=chunk is not None and chunk < config.data.seq_length * config.training.micro_batch_size,
    )
    return model_flops(*sizes, *shape), executed
