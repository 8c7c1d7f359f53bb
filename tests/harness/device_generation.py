"""Generation on any kind of device; run on the CPU by the unit tests and on a GPU by `tests/gpu`."""

import torch

from megatron.model import TransformerConfig, build_gpt
from megatron.tasks.generation import Continuations, Prompt, continue_prompts
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import SamplingConfig
from tests.harness.closeness import assert_close
from tests.harness.device_checks import TOLERANCES
from tests.harness.serial_gpt import serial_logits

VOCABULARY = 61
LAYERS = 2


def check_generation(device: torch.device, dtype: torch.dtype) -> None:
    """Logits behind a cache on `device` in `dtype`, for texts of several lengths, against a serial twin in float64."""
    config = TransformerConfig(LAYERS, 64, 4, 24, make_vocab_size_divisible_by=8, init_method_std=0.1)
    model = build_gpt(config, VOCABULARY, 3, dtype=dtype, device=device).eval()
    weights = {name: p.detach().cpu().double()[:VOCABULARY] for name, p in model.named_parameters() if "word" in name}
    weights = {name: p.detach().cpu().double() for name, p in model.named_parameters()} | weights
    texts = [[5, 9, 1, 30, 2], [7, 7], [60, 3, 8]]
    ranks, cache = SplitGPT(model, device), model.new_cache(3, 24)
    with torch.no_grad():
        for step in range(4):
            lengths = [len(text) for text in texts]
            held = torch.tensor(lengths, device=device) - 1
            rows = cache.behind(0, None if step == 0 else held, max(lengths))
            logits = ranks.logits(texts if step == 0 else [text[-1:] for text in texts], rows)
            assert logits is not None and logits.device.type == device.type
            wanted = [serial_logits(config, weights, torch.tensor([text]))[0, -1] for text in texts]
            assert_close(logits.cpu().double(), torch.stack(wanted), 4 * LAYERS * TOLERANCES[dtype])
            texts = [[*text, 11 * step + len(text)] for text in texts]
    check_draws(ranks)


def check_draws(ranks: SplitGPT) -> None:
    """Texts that are drawn are of the vocabulary, and a seed repeats them."""
    sampling = SamplingConfig(top_k=40, top_p=0.9)
    prompts = [Prompt([n], 9, sampling, seed=(1, n)) for n in range(5)]
    found = [[one.token for one in continue_prompts(Continuations(ranks, 3), prompts)] for _ in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == 45
    assert all(0 <= token < VOCABULARY for token in found[0])
