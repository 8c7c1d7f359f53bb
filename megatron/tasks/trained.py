"""A trained GPT from a checkpoint, built from what the checkpoint says of itself, on any tensor ranks and stages."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from megatron import mpu
from megatron.base.complaints import ConfigError
from megatron.base.compose import ComposedConfig, combines, compose, make_section
from megatron.base.config import Config, flag, minimum_problems
from megatron.base.stages import StagePart
from megatron.checkpointing import load_checkpoint, read_state
from megatron.checkpointing.convert import Transfer
from megatron.model import GPTModel, TransformerConfig
from megatron.optimizer.state import OPTIMIZER_STATE
from megatron.pipeline import PipelineConfig
from megatron.tasks.hugging_face import fill, is_hugging_face, open_folder
from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from megatron.training.arguments import read_flags
from megatron.training.failure import mistakes
from megatron.training.memory import memory_needed
from megatron.training.setup import DistributedConfig, World, distributed_world, world_size
from megatron.training.state import layout
from megatron.training.stored import stored_precision

_THE_CHECKPOINT = "the checkpoint says it"
_ONLY_WEIGHTS = "only the weights are read"


@dataclasses.dataclass(frozen=True)
class TrainedConfig(Config):
    """Which trained model is used, and how it is held."""

    load: str = flag(
        dataclasses.MISSING,
        "folder of the run's checkpoints, of which the newest is taken; or one of Hugging Face's, with a GPT-2",
    )
    ckpt_step: int | None = flag(None, "iteration of the checkpoint, not the newest")
    pipeline_model_parallel_size: int = flag(1, "ranks that the layers are split over (pipeline model parallelism, p)")
    fp16: bool = flag(False, "calculate in FP16; weights of 16 bits are calculated with in FP32 if not given")
    bf16: bool = flag(False, "calculate in BF16; weights of 16 bits are calculated with in FP32 if not given")
    tokenizer_type: str | None = flag(None, "type of the tokenizer; the checkpoint's if not given")
    vocab_file: str | None = flag(None, "where the tokenizer's vocabulary lies now")
    merge_file: str | None = flag(None, "where the tokenizer's merges lie now")
    tokenizer_model: str | None = flag(None, "where the tokenizer's tokenizer.json or SentencePiece model lies now")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 1, "pipeline_model_parallel_size") + minimum_problems(self, 0, "ckpt_step")
        return [*found, "--fp16 and --bf16: choose one of them"] if self.fp16 and self.bf16 else found

    @property
    def dtype(self) -> torch.dtype | None:
        """What to calculate in, None where that is left to the checkpoint."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


@dataclasses.dataclass(frozen=True)
class TrainedRequest(ComposedConfig):
    """What is asked of a trained model, whose ranks are all those of the world, or one of several such groups."""

    distributed: DistributedConfig
    trained: TrainedConfig

    # Whether the ranks beyond those of one model hold further copies of it, which share the work.
    data_parallel: ClassVar[bool] = False
    ignored_flags: ClassVar[Mapping[str, str]] = {
        "num-layers VALUE": _THE_CHECKPOINT,
        "hidden-size VALUE": _THE_CHECKPOINT,
        "num-attention-heads VALUE": _THE_CHECKPOINT,
        "max-position-embeddings VALUE": _THE_CHECKPOINT,
        "seq-length VALUE": _THE_CHECKPOINT,
        "use-checkpoint-args": "the checkpoint always says its sizes",
        "no-load-optim": _ONLY_WEIGHTS,
        "no-load-rng": _ONLY_WEIGHTS,
        "checkpoint-activations": "it is for training",
    }

    @combines("distributed", "trained")
    def sizes_fit(self, world_size: int) -> list[str]:
        """Whether the ranks of the world are those of one model."""
        found = ["--sequence-parallel: it is for training"] if self.distributed.sequence_parallel else []
        t, p = self.distributed.tensor_model_parallel_size, self.trained.pipeline_model_parallel_size
        if world_size % (t * p) if self.data_parallel else t * p != world_size:
            stages = "" if p == 1 else f" times --pipeline-model-parallel-size {p}"
            relation = "divide" if self.data_parallel else "equal"
            found.append(
                f"--tensor-model-parallel-size {t}: it{stages} must {relation} the number of ranks, which is "
                f"{world_size}"
            )
        return found


Asked = TypeVar("Asked", bound=TrainedRequest)


def parse_request(composed: type[Asked], argv: Sequence[str] | None, *, prog: str) -> Asked:
    """Read the command line; all ranks share each layer, or each stage, unless told otherwise or `data_parallel`.

    Raises `ConfigError` with every complaint, as `parse_composed`.
    """
    values, problems = read_flags(composed, argv, prog=prog)
    ranks, stages = world_size(), values.get("pipeline_model_parallel_size", 1)
    if not composed.data_parallel and isinstance(stages, int) and 0 < stages <= ranks:
        values.setdefault("tensor_model_parallel_size", ranks // stages)
    return compose(composed, values, ranks, problems, check_inputs=True)


@dataclasses.dataclass(frozen=True)
class StoredConfig:
    """The part of a checkpoint's config that its use needs.

    `dtype` is the one in which its weights are stored, `vocab_size` the number of its real token ids where it says it,
    `foreign` the weights themselves where they are of a folder of Hugging Face's.
    """

    model: TransformerConfig
    tokenizer: TokenizerConfig
    dtype: torch.dtype
    vocab_size: int | None = None
    foreign: Transfer | None = None


def stored_config(directory: str | os.PathLike[str], iteration: int | None = None) -> StoredConfig:
    """What the checkpoint below `directory`, by default the newest, was trained with; or a folder of Hugging Face's is.

    Raises ValueError where there is none, it is of no GPT, or it does not say its model and tokenizer.
    """
    if is_hugging_face(directory):
        if iteration is not None:
            raise ValueError(f"--ckpt-step {iteration}: {directory} is a folder of Hugging Face's, without iterations")
        transfer, tokenizer = open_folder(directory)
        return StoredConfig(transfer.config, tokenizer, transfer.dtype, transfer.vocab_size, transfer)
    state = read_state(directory, iteration)
    config: dict[str, Any] = state.get("config", {})
    missing = [name for name in ("model", "tokenizer") if name not in config]
    if missing:
        raise ValueError(f"{directory}: its checkpoint does not say its {' and '.join(missing)}")
    signature = state.get("model", {})
    if signature.get("model", "gpt") != "gpt":
        raise ValueError(f"{directory}: its checkpoint is of a {signature['model']}, and a gpt is needed")
    return StoredConfig(
        make_section(TransformerConfig, config["model"]),
        make_section(TokenizerConfig, config["tokenizer"]),
        stored_precision(config).dtype,
        signature.get("vocab_size"),
    )


def tokenizer_of(trained: TrainedConfig, stored: StoredConfig) -> Tokenizer:
    """The tokenizer of the checkpoint, with the type and files that the flags name instead.

    Raises ValueError where it cannot be built, or has another number of ids than the model.
    """
    names = [field.name for field in dataclasses.fields(TokenizerConfig) if hasattr(trained, field.name)]
    given = {name: getattr(trained, name) for name in names if getattr(trained, name) is not None}
    config = make_section(TokenizerConfig, dataclasses.asdict(stored.tokenizer) | given)
    problems = config.input_problems()
    if problems:
        raise ValueError(f"{'; '.join(problems)}: say where the tokenizer of the checkpoint in {trained.load} lies now")
    tokenizer = build_tokenizer(config)
    if stored.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--tokenizer-type {config.tokenizer_type}: it has {tokenizer.vocab_size} ids, and the model of the "
            f"checkpoint in {trained.load} has {stored.vocab_size}: it is not the tokenizer of that model"
        )
    return tokenizer


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The id at which a text ends, None for a tokenizer that has none."""
    try:
        return tokenizer.eod
    except ValueError:
        return None


def load_gpt(
    directory: str | os.PathLike[str],
    stored: StoredConfig,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    iteration: int | None = None,
) -> GPTModel:
    """This rank's part of the GPT of a checkpoint, by default the newest, in evaluation mode.

    It is split as the current tensor and pipeline groups are, one stage a rank. Its weights become `dtype`; where that
    is None, weights of 16 bits become float32, in which any device calculates. Raises ValueError where the layers
    cannot be split, or a tensor is missing, damaged or of another shape. Collectives: those of `load_checkpoint`.
    """
    stages = _own_stage(stored.model.num_layers)
    model = GPTModel(stored.model, vocab_size, dtype=stored.dtype, device="meta", stages=stages)
    model = model.to_empty(device=device)
    mpu.mirror_attributes(model)
    shardings = mpu.parameter_shardings(model)
    tensors = {name: (p.detach(), shardings[name]) for name, p in model.named_parameters()}
    if stored.foreign is not None:
        fill(tensors, stored.foreign)
    else:
        load_checkpoint(
            directory,
            tensors,
            rank=torch.distributed.get_rank(),
            layout=layout(),
            iteration=iteration,
            skip=(OPTIMIZER_STATE,),
            world_size=torch.distributed.get_world_size(),
        )
    return model.to(dtype or torch.promote_types(stored.dtype, torch.float32)).eval()


def _own_stage(num_layers: int) -> list[StagePart]:
    """The layers of this rank; those of a pipeline that do not divide are dealt out as evenly as can be."""
    size, rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    uneven = num_layers % size != 0
    config = PipelineConfig(pipeline_model_parallel_size=size, account_for_embedding_in_pipeline_split=uneven)
    return [stage for stage in config.split(num_layers).stages() if stage.rank == rank]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model that is ready on this rank."""

    model: GPTModel
    tokenizer: Tokenizer
    world: World


@contextlib.contextmanager
def opened(request: TrainedRequest, seed: int = 0) -> Iterator[Trained]:
    """The model and tokenizer that are asked for, and the ranks that hold it; mistakes are told as `ConfigError`.

    So is a model that, inside the block, gives no numbers (FloatingPointError, which all ranks raise alike).
    """
    distributed, trained = request.distributed, request.trained
    with mistakes():
        stored = stored_config(trained.load, trained.ckpt_step)
        tokenizer = tokenizer_of(trained, stored)
    with distributed_world(distributed, seed, trained.pipeline_model_parallel_size) as world:
        with mistakes(), memory_needed("the model"):
            model = load_gpt(
                trained.load, stored, tokenizer.vocab_size, world.device, trained.dtype, iteration=trained.ckpt_step
            )
        try:
            yield Trained(model, tokenizer, world)
        except FloatingPointError as error:  # on every rank alike
            raise ConfigError([f"--load {trained.load}: {error}"]) from error
