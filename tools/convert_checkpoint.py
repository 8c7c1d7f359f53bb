"""Convert checkpoints: `convert_checkpoint.py --from hf|megatron|native --to native|hf --load DIR --save DIR`.

`hf` is a folder of Hugging Face's with a GPT-2 or a BERT, `megatron` one of Megatron-LM's classic checkpoints, at any
numbers of tensor and pipeline ranks, `native` one of this library, which a run at any layout can load. It says what has
become of each tensor, and refuses to leave any out. Nothing in a file that is read is run.
"""

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.base.complaints import naming, raise_joined
from megatron.base.compose import ComposedConfig, make_section, section_types
from megatron.base.config import Config, choice_problems, flag, flag_fields, flag_name, minimum_problems
from megatron.base.files import folder_problem
from megatron.checkpointing.convert import (
    ModelKind,
    Told,
    Transfer,
    classic_bert,
    classic_gpt,
    from_classic,
    from_hugging_face,
    from_native,
    hugging_face_bert_model,
    hugging_face_gpt,
    native_logits,
    refuse_checkpoints,
    refuse_model,
    to_hugging_face,
    to_native,
)
from megatron.tokenizer import TokenizerConfig, build_tokenizer
from megatron.tokenizer.folders import copied_files, described_for_hugging_face, find_tokenizer, special_ids
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig
from megatron.training.config import RunConfig
from megatron.training.failure import exit_code

# How far the largest difference of logits may be from the largest logit: float32, in another order of additions.
TOLERANCE = 1e-4
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class ConvertConfig(Config):
    """What is read and written."""

    from_: str = flag(dataclasses.MISSING, "what --load holds", choices=("hf", "megatron", "native"))
    to: str = flag(dataclasses.MISSING, "what --save gets", choices=("native", "hf"))
    load: str = flag(dataclasses.MISSING, "folder of the source; of checkpoints the newest is taken")
    save: str = flag(dataclasses.MISSING, "folder of the result, without a checkpoint or model in it so far")
    ckpt_step: int | None = flag(None, "take the checkpoint of this iteration")
    load_optim: bool = flag(True, "take the optimizer's state where there is one; else the weights alone")
    dtype: str | None = flag(
        None, "number format of the result's weights; as they are by default", choices=tuple(_DTYPES)
    )
    check: bool = flag(False, "compare the logits of source and result on random ids, in float32")
    num_attention_heads: int | None = flag(None, "heads of a model whose checkpoint does not say it")
    activation: str | None = flag(
        None, "GELU of a model whose checkpoint does not say it", choices=("gelu_tanh", "gelu_erf")
    )
    vocab_size: int | None = flag(
        None, "number of real tokens; the tokenizer's by default, rows after them are left out"
    )
    keep_padding: bool = flag(
        False,
        "keep the rows after the real tokens, which Megatron-LM trains and counts in its loss: a run goes on with them "
        "by --padded-vocab-size, and a model of Hugging Face's gets ids that no token has; of a native source they are "
        "kept by --to native in any case",
    )
    tokenizer_type: str | None = flag(None, "type of the tokenizer, where its files do not tell")
    vocab_file: str | None = flag(None, "vocab.json of the tokenizer; a source of Hugging Face's may have its own")
    merge_file: str | None = flag(None, "merges.txt of the tokenizer")
    tokenizer_model: str | None = flag(None, "tokenizer.json or SentencePiece model of the tokenizer")

    def problems(self) -> list[str]:
        given = [name for name in ("dtype", "activation") if getattr(self, name) is None]
        found = [p for p in choice_problems(self) if not any(p.startswith(flag_name(name)) for name in given)]
        found += minimum_problems(self, 1, "num_attention_heads", "vocab_size")
        return found + minimum_problems(self, 0, "ckpt_step")


@dataclasses.dataclass(frozen=True)
class Request(ComposedConfig):
    """Convert a checkpoint."""

    convert: ConvertConfig


def convert(asked: ConvertConfig) -> None:
    """Do it, and say what was done. Raises ValueError or OSError for what is wrong with the source or the target."""
    if not Path(asked.load).is_dir():
        raise ValueError(f"--load {asked.load}: there is no such folder")
    problem = folder_problem(asked.save)
    if problem is not None:
        raise ValueError(f"--save {asked.save}: it cannot be written, for {problem}")
    (refuse_model if asked.to == "hf" else refuse_checkpoints)(Path(asked.save))
    tokenizer = _tokenizer(asked)
    size = None if tokenizer is None else build_tokenizer(tokenizer).vocab_size
    told = Told(
        asked.vocab_size,
        size,
        asked.num_attention_heads,
        asked.activation,
        asked.ckpt_step,
        asked.load_optim,
        asked.keep_padding,
    )
    with naming(asked.load):
        transfer = _read(asked, told)
    if asked.to == "hf" and transfer.optimizer is not None:
        print("the optimizer's state is left out, there is no place for it")
        transfer = transfer.without_optimizer()
    if asked.dtype is not None:
        transfer = transfer.in_dtype(_DTYPES[asked.dtype])
    with naming(asked.load):
        transfer.check()
    if tokenizer is None:
        tokenizer = TokenizerConfig("NullTokenizer", vocab_size=transfer.vocab_size)
    print(*transfer.table, *transfer.notes, sep="\n")
    try:
        (_write_hugging_face if asked.to == "hf" else _write_native)(asked, transfer, tokenizer)
    except OSError as error:
        raise ValueError(f"--save {asked.save}: it could not be written: {error}") from error
    if asked.check:
        _check(asked, transfer)


def _read(asked: ConvertConfig, told: Told) -> Transfer:
    directory = Path(asked.load)
    if asked.from_ == "megatron":
        return from_classic(directory, told, run_sections)
    if asked.from_ == "hf":
        return from_hugging_face(directory, told)
    return from_native(directory, told.step, told.optimizer)


def _tokenizer(asked: ConvertConfig) -> TokenizerConfig | None:
    """The tokenizer that the flags name, else that of the source; None where there is none."""
    given = {name: getattr(asked, name) for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")}
    named = {name: value for name, value in given.items() if value is not None}
    config: TokenizerConfig | None = None
    if named:
        kind = "GPT2BPETokenizer" if asked.tokenizer_model is None else "HuggingFaceTokenizer"
        config = make_section(TokenizerConfig, {"tokenizer_type": kind, **named, "vocab_size": asked.vocab_size})
    elif asked.from_ == "hf":
        config = find_tokenizer(Path(asked.load))
    elif asked.from_ == "native":
        stored = from_native(Path(asked.load), asked.ckpt_step).sections.get("tokenizer")
        config = None if stored is None else make_section(TokenizerConfig, stored)
    problems = [] if config is None else config.input_problems()
    if problems and not named:
        problems = [f"{'; '.join(problems)}: say where the tokenizer of the checkpoint in {asked.load} lies now"]
    raise_joined(problems)
    return config


def _write_hugging_face(asked: ConvertConfig, transfer: Transfer, tokenizer: TokenizerConfig) -> None:
    built = build_tokenizer(tokenizer)
    if transfer.config.padded_vocab_size is not None and not asked.keep_padding:
        print(f"rows of the vocabulary after the {transfer.vocab_size} tokens are left out: --keep-padding keeps them")
        transfer = transfer.without_padding()
    save, longest = Path(asked.save), transfer.config.max_position_embeddings
    with described_for_hugging_face(tokenizer, save, longest) as sentences:
        to_hugging_face(transfer, save, special_ids(built))
    print(*sentences, sep="\n", end="\n" * bool(sentences))
    print(f"saved to {asked.save}")


def _write_native(asked: ConvertConfig, transfer: Transfer, tokenizer: TokenizerConfig) -> None:
    precision = {**transfer.sections.get("precision", {}), **_format(transfer.dtype)}
    with copied_files(tokenizer, Path(asked.save).absolute() / "tokenizer") as kept:
        own = {"tokenizer": dataclasses.asdict(kept), "precision": precision}
        sections: dict[str, Mapping[str, Any]] = {**transfer.sections, **own}
        folder = to_native(dataclasses.replace(transfer, sections=sections), Path(asked.save), asked.from_)
    if transfer.kind.name not in ("gpt", "bert"):
        evaluated = "" if transfer.kind.name == "bert-encoder" else f" or is evaluated with it by --load {asked.save}"
        words = flag_words(run_sections(transfer.kind)["model"], sections["model"])
        print(f"saved to {folder}; a task begins with it by --pretrained-checkpoint {asked.save}{evaluated}, with")
        print(" ", shlex.join(words))
        return
    kinds, needed = run_sections(transfer.kind), ("model", "tokenizer", "precision", "bert")
    print(f"saved to {folder}; flags for pretrain_{transfer.kind.name}.py:")
    words = [word for name in needed if name in sections for word in flag_words(kinds[name], sections[name])]
    goes_on = transfer.optimizer is not None
    print(" ", shlex.join([*words, "--load", asked.save, *([] if goes_on else ["--finetune"])]))
    rest = [word for name, values in sections.items() if name not in needed for word in flag_words(kinds[name], values)]
    if goes_on and rest:
        print("and to go on as it was trained, with --data-path and batch sizes as they are now:")
        print(" ", shlex.join(rest))


def _format(dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a run's config that ask for weights in `dtype`."""
    full, bf16 = "float64" if dtype == torch.float64 else "float32", dtype == torch.bfloat16
    # With bf16 gradients are always added up in float32, and a source may have asked for something else.
    sums: dict[str, Any] = {"accumulate_allreduce_grads_in_fp32": None} if bf16 else {}
    return {"fp16": dtype == torch.float16, "bf16": bf16, "params_dtype": full, **sums}


def run_sections(kind: ModelKind) -> dict[str, type[Config]]:
    """The sections of the config of a run of that model."""
    return section_types(BertRunConfig if kind.is_bert else RunConfig)


def flag_words(section: type[Config], values: Mapping[str, Any]) -> list[str]:
    """The command line for those values of a section of a run's config that are not its defaults."""
    words: list[str] = []
    for field in flag_fields(section):
        value = values.get(field.name)
        if value is None or value == field.default:
            continue
        name = flag_name(field.name)
        if isinstance(value, bool):
            words.append(name if value else "--no-" + name.removeprefix("--"))
        else:
            words += [name, *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def _check(asked: ConvertConfig, transfer: Transfer) -> None:
    """Raise ValueError where source and result do not compute the same."""
    length = min(transfer.config.max_position_embeddings, 64)
    tokens = torch.randint(transfer.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    source = _logits(asked.from_, asked.load, asked.ckpt_step, transfer, tokens)
    result = _logits(asked.to, asked.save, None, transfer, tokens)
    both = min(source.shape[-1], result.shape[-1])  # one of them may be without padding
    source, result = source[..., :both], result[..., :both]
    off, scale = (source - result).abs().max().item(), source.abs().max().item()
    words = f"logits of source and result on {tokens.numel()} random ids differ by {off:.3g} at most, the largest is "
    words += f"{scale:.3g}; accepted is {TOLERANCE:g} of it"
    if not off <= TOLERANCE * scale:
        raise ValueError(f"--check: {words}")
    print(words)


def _logits(program: str, directory: str, step: int | None, transfer: Transfer, tokens: torch.Tensor) -> torch.Tensor:
    """In float32, by our model or for a foreign format by its plain reference; with columns of padding rows.

    The weights are rounded to the number format of the result, so that the rounding is no difference.
    """
    path, config, kind = Path(directory), transfer.config, transfer.kind
    if program == "native":
        return native_logits(path, tokens, step, transfer.dtype)
    if program == "megatron":
        model = classic_bert(path, config, kind, step) if kind.is_bert else classic_gpt(path, config, step)
    else:
        model = hugging_face_bert_model(path, config, kind) if kind.is_bert else hugging_face_gpt(path, config)
    return model.rounded(transfer.dtype).logits(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags and convert; returns 0, or 2 for what is wrong."""
    return exit_code(lambda: convert(parse_composed(Request, argv, world_size=1, prog="convert_checkpoint.py").convert))


if __name__ == "__main__":
    sys.exit(main())
