"""Continue a prompt with a trained GPT: `torchrun --nproc-per-node N tools/generate_text.py --load DIR --prompt TEXT`.

Any number of tensor-parallel ranks that divides the model will do: the checkpoint is read at whatever layout is asked,
and sizes and tokenizer come from the checkpoint itself.
"""

import dataclasses
import sys
from collections.abc import Sequence

import torch

from megatron import mpu
from megatron.base.compose import ComposedConfig, combines
from megatron.base.config import Config, flag, minimum_problems, range_problems
from megatron.model import gather_logits
from megatron.tasks.generation import generate
from megatron.tasks.trained import end_of_document, load_gpt, stored_config
from megatron.tokenizer import build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.failure import mistakes, user_errors
from megatron.training.setup import DistributedConfig, distributed_world, world_size


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Config):
    """What to write."""

    load: str = flag(dataclasses.MISSING, "folder of the run's checkpoints; the newest one is taken")
    prompt: str = flag(dataclasses.MISSING, "text to go on from")
    out_seq_length: int = flag(100, "tokens to add at most")
    temperature: float = flag(1.0, "divides the logits; 0 always takes the likeliest token")
    top_k: int = flag(0, "choose among this many of the likeliest tokens; 0 for all")
    seed: int = flag(1234, "seed of the choices")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 0, "out_seq_length", "temperature", "top_k")
        return found + range_problems(self, 0, 2**32, "seed")


@dataclasses.dataclass(frozen=True)
class Request(ComposedConfig):
    """Continue a prompt with a trained GPT."""

    distributed: DistributedConfig
    generate: GenerateConfig

    @combines("distributed")
    def sizes_fit(self, world_size: int) -> list[str]:
        t = self.distributed.tensor_model_parallel_size
        found = ["--sequence-parallel: it is for training"] if self.distributed.sequence_parallel else []
        if t != world_size:
            found.append(f"--tensor-model-parallel-size {t}: it must equal the number of ranks, which is {world_size}")
        return found


def write_text(request: Request) -> str:
    """The prompt with its continuation, the same on every rank."""
    asked = request.generate
    with mistakes():
        stored = stored_config(asked.load)
        tokenizer = build_tokenizer(stored.tokenizer)
        prompt = tokenizer.tokenize(asked.prompt)
        if not prompt:
            raise ValueError("--prompt: it is empty; at least one token is needed to go on from")
    with distributed_world(request.distributed, asked.seed) as world:
        with mistakes():
            model = load_gpt(asked.load, stored, tokenizer.vocab_size, world.device)

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            return gather_logits(model(tokens), tokenizer.vocab_size)

        new = generate(
            logits_of,
            prompt,
            length=asked.out_seq_length,
            context=stored.model.max_position_embeddings,
            eod=end_of_document(tokenizer),
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=asked.seed,
            device=world.device,
        )
        text = tokenizer.detokenize([*prompt, *new])
        if mpu.get_tensor_model_parallel_rank() == 0:
            print(text, flush=True)
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and print the text; the user's mistakes end it with exit code 2."""
    with user_errors():
        # All ranks of the world share the model unless told otherwise.
        words = ["--tensor-model-parallel-size", str(world_size()), *(sys.argv[1:] if argv is None else argv)]
        write_text(parse_composed(Request, words, prog="generate_text.py"))


if __name__ == "__main__":
    main()
