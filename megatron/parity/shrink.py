"""A run made small enough for a laptop: the same choices and the same pattern of everything that a layout can break."""

import dataclasses
import math
from typing import Any

from megatron.base.compose import compose
from megatron.base.config import flag_name
from megatron.parity.synthetic import VOCAB_SIZE
from megatron.training.config import RunConfig

# To a multiple of this the synthetic vocabulary is padded: not by nothing at any layout.
_PADDING = 8
_HEAD_SIZE = 8
_SEQUENCE = 16
# Elements of a gradient bucket: several buckets, as a real run has.
_BUCKET = 4000
_LR = 1e-3
_NO_SPLIT: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
# A loss scale at which float16 gradients of a small model do not overflow.
_LOSS_SCALE = 2.0**12


@dataclasses.dataclass(frozen=True)
class Degrees:
    """A layout: tensor, pipeline and data parallelism, and the virtual stages of each rank."""

    tensor: int
    pipeline: int
    data: int
    virtual: int = 1

    @property
    def ranks(self) -> int:
        """How many it needs."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        chunks = f" (of {self.virtual} virtual stages each)" if self.virtual > 1 else ""
        return f"tensor {self.tensor} x pipeline {self.pipeline}{chunks} x data {self.data}"


def degrees_of(config: RunConfig, world_size: int) -> Degrees:
    """The layout that a run asks for."""
    sizes = config.distributed.tensor_model_parallel_size, config.pipeline.pipeline_model_parallel_size
    return Degrees(*sizes, config.data_parallel_size(world_size), config.layer_split().virtual_size)


def fitted(asked: Degrees, max_ranks: int) -> Degrees:
    """A layout of at most `max_ranks` ranks, each degree above 1 where it was, as long as that many ranks allow it.

    Data parallelism is reduced first, then whichever of pipeline and tensor is larger. Of the virtual stages two are
    enough to differ from one.
    """
    now = dataclasses.replace(asked, virtual=min(asked.virtual, 2))
    while now.ranks > max_ranks:
        order = ("data", *sorted(("tensor", "pipeline"), key=lambda name: -getattr(now, name)))
        name = next((n for n in order if getattr(now, n) > 2), None) or next(n for n in order if getattr(now, n) > 1)
        size = getattr(now, name)
        now = dataclasses.replace(now, **{name: max(2, size // 2) if size > 2 else 1})
    return now if now.pipeline > 1 else dataclasses.replace(now, virtual=1)


def shrunk(config: RunConfig, world_size: int, degrees: Degrees, steps: int) -> RunConfig:
    """The run of `config`, meant for `world_size` ranks, at small sizes on `degrees`.

    Kept is every choice, and of sizes what a layout could get wrong: whether there are several heads a rank, layers a
    stage, micro-batches a rank, samples in one, sizes given by hand. Dropout is off, and data is to be synthetic.
    """
    values = flat(config)
    for part in (_model(config, degrees), _layers(config, degrees), _batches(config, world_size, degrees)):
        values |= part
    values |= _schedule(steps, values["lr_decay_style"]) | _surroundings(config)
    return compose(RunConfig, values, degrees.ranks)


def one_process(config: RunConfig) -> RunConfig:
    """The same run as one process does it, with nothing of what spreads, overlaps or recomputes."""
    alone = {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        **dict.fromkeys(("recompute_granularity", "recompute_method"), None),
        **dict.fromkeys(("checkpoint_activations", "distribute_saved_activations"), False),
        "recompute_num_layers": 1,
        **dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), False),
        "pipeline_model_parallel_size": 1,
        "pipeline_schedule": "1f1b",
        **_NO_SPLIT,
    }
    return compose(RunConfig, flat(config) | alone, 1)


def in_float64(config: RunConfig, ranks: int) -> RunConfig:
    """The same run in float64, in which what is left of a difference is a mistake."""
    exact = {"params_dtype": "float64", "loss_scale": None, "accumulate_allreduce_grads_in_fp32": None}
    return compose(RunConfig, flat(config) | exact | dict.fromkeys(("fp16", "bf16"), False), ranks)


def differences(asked: RunConfig, small: RunConfig) -> list[tuple[str, Any, Any]]:
    """The flags that were made smaller, as they were asked for and as they are now; without those of files and time."""
    before, after = flat(asked), flat(small)
    sections = (small.distributed, small.pipeline, small.model, small.recompute)
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    names += ["seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size", "ddp_bucket_size"]
    names.remove("distributed_backend")
    return [(flag_name(n), before[n], after[n]) for n in names if before[n] != after[n] and before[n] is not None]


def flat(config: RunConfig) -> dict[str, Any]:
    """All flags of a run by field name."""
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return {field.name: getattr(section, field.name) for section in sections for field in dataclasses.fields(section)}


def _model(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    model, t = config.model, config.distributed.tensor_model_parallel_size
    heads = degrees.tensor * min(model.num_attention_heads // t, 2)
    hidden = heads * _HEAD_SIZE
    length = degrees.tensor * -(-_SEQUENCE // degrees.tensor)  # sequence parallelism cuts it
    longer = model.max_position_embeddings > config.data.seq_length
    wider = _sign(model.projection_size - model.hidden_size)
    return {
        "tensor_model_parallel_size": degrees.tensor,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "kv_channels": _HEAD_SIZE + 4 * wider if wider else None,
        "ffn_hidden_size": None if model.ffn_hidden_size in (None, 4 * model.hidden_size) else 3 * hidden,
        # Wider layers give larger sums; with this their outputs are as large as in the model that is meant.
        "init_method_std": model.init_method_std * math.sqrt(model.hidden_size / hidden),
        "seq_length": length,
        "max_position_embeddings": length + (4 if longer else 0),
        "make_vocab_size_divisible_by": _PADDING,
        "padded_vocab_size": None if model.padded_vocab_size is None else VOCAB_SIZE + 1,
        "cross_entropy_chunk_size": None if model.cross_entropy_chunk_size is None else _SEQUENCE // 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _layers(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    """Layers and their split: one a stage where there is one, else two; more or fewer where the asked ones differ."""
    pipeline, recompute = config.pipeline, config.recompute
    sizes = {stage.rank: len(stage.layers) for stage in config.layer_split().stages()}  # of each rank's stages
    first, last = pipeline.decoder_first_pipeline_num_layers, pipeline.decoder_last_pipeline_num_layers
    own = {rank for rank, given in ((0, first), (len(sizes) - 1, last)) if given is not None}
    typical = sizes[min(sizes.keys() - own, default=0)]
    each, v = min(typical, 2), degrees.virtual
    found: dict[str, Any] = {
        "pipeline_model_parallel_size": degrees.pipeline,
        # One tensor rank has nobody to share them with.
        "distribute_saved_activations": recompute.distribute_saved_activations and degrees.tensor > 1,
        "recompute_num_layers": _recomputed(recompute.recompute_num_layers, recompute.method, typical),
    }
    if degrees.pipeline == 1:
        return found | _NO_SPLIT | {"num_layers": each}
    ends = {
        rank: v * (each + _sign(sizes[rank] - typical)) for rank in own
    }  # layers of the ranks with their own number
    shared = (degrees.pipeline - len(ends)) * v * each
    balanced = pipeline.account_for_embedding_in_pipeline_split or pipeline.account_for_loss_in_pipeline_split
    return found | {
        # Balanced stages may be uneven.
        "num_layers": sum(ends.values()) + shared - (1 if balanced and each > 1 else 0),
        "num_layers_per_virtual_pipeline_stage": None if v == 1 else each if shared else ends[0] // v,
        "decoder_first_pipeline_num_layers": ends.get(0),
        "decoder_last_pipeline_num_layers": ends.get(len(sizes) - 1),
    }


def _recomputed(layers: int, method: str, typical: int) -> int:
    """Of a stage of two layers, which stands for one of `typical` layers; of one, the one."""
    some = layers < typical if method == "block" else layers == 1
    return 1 if some else min(typical, 2)


def _batches(config: RunConfig, world_size: int, degrees: Degrees) -> dict[str, Any]:
    """A micro-batch of one or two samples; of micro-batches one or two for each stage, as there are more or not."""
    training, asked = config.training, config.batch_sizes(world_size)
    p = config.pipeline.pipeline_model_parallel_size
    micro = min(training.micro_batch_size, 2)
    number = min(asked.num_micro_batches * degrees.pipeline // p, 2 * degrees.pipeline)
    number = max(number, 1) if training.ramp_up is None else 2 * degrees.pipeline
    unit = micro * degrees.data * (degrees.pipeline if degrees.virtual > 1 else 1)
    total = micro * degrees.data * number
    ramp = (unit, total - unit, 2 * unit)  # one step up, after two iterations
    return {
        "micro_batch_size": micro,
        "global_batch_size": total,
        "rampup_batch_size": None if training.ramp_up is None or total == unit else ramp,
    }


def _schedule(steps: int, style: str) -> dict[str, Any]:
    """So many iterations, at a learning rate that moves the weights from the first one on."""
    lengths = ("lr_decay_iters", "lr_decay_samples", "lr_warmup_fraction", "train_samples", "exit_interval")
    return {
        "train_iters": steps,
        **dict.fromkeys(lengths, None),
        **dict.fromkeys(("lr_warmup_iters", "lr_warmup_samples"), 0),
        "lr": _LR,
        "min_lr": 0.0 if style == "constant" else _LR / 10,
        "eval_interval": steps,
        "eval_iters": 1,
        "eval_at_start": False,
    }


def _surroundings(config: RunConfig) -> dict[str, Any]:
    """No files but the synthetic data, ranks on CPUs, a log line for each iteration."""
    paths = ("train_data_path", "valid_data_path", "test_data_path", "data_cache_path")
    files = ("vocab_file", "merge_file", "tokenizer_model", "save", "load", "save_interval")
    scale = max(min(config.precision.initial_loss_scale, _LOSS_SCALE), config.precision.min_loss_scale)
    return {
        **dict.fromkeys((*paths, *files, "tensorboard_dir", "metrics_file"), None),
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB_SIZE,
        "parse_special_tokens": False,
        "data_path": None,
        "split": "80,20,0",
        "num_workers": 0,
        "distributed_backend": "gloo",
        "ddp_bucket_size": _BUCKET,
        "initial_loss_scale": scale,
        "log_interval": 1,
        "progress_bar": False,
        "timing_log_level": 0,
    }
