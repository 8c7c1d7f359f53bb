"""A tiny GPT-2 of Hugging Face's that learns half of LAMBADA's sample, its tokenizer, and what they say of a text."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

LENGTH = 128
_SIZES = {"n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 4}


class Reference:
    """The model and tokenizer, and the figures of plain calls of them. `folder` becomes one of Hugging Face's.

    Without `learned` the weights are as they are drawn. The texts are those of `shared`, the reference data.
    """

    def __init__(self, folder: Path, shared: Path, *, learned: bool = True) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # here, so that the ranks do not load transformers

        folder.mkdir()
        self.wikitext = shared / "data" / "wikitext103" / "wiki.valid.tokens"
        self.lambada = shared / "data" / "lambada" / "lambada_sample40.jsonl"
        self.passages = [json.loads(line)["text"] for line in self.lambada.read_text(encoding="utf-8").splitlines()]
        self.tokenizer = ByteLevelBPETokenizer()
        texts = [self.wikitext.read_text(encoding="utf-8")[:200_000], *self.passages]
        self.tokenizer.train_from_iterator(texts, vocab_size=700, special_tokens=["<|endoftext|>"], show_progress=False)
        self.tokenizer.save_model(str(folder))
        torch.manual_seed(1)
        self.end = end = self.tokenizer.token_to_id("<|endoftext|>")
        sizes = {**_SIZES, "vocab_size": self.tokenizer.get_vocab_size(), "bos_token_id": end, "eos_token_id": end}
        dropped = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **dropped, initializer_range=0.1))
        self._learn(self.passages[::2] if learned else [])
        self.model.eval().save_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text).ids

    def word(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens before the last word of a passage, and its own."""
        cut = text.rstrip().rfind(" ")
        return self.ids(text[:cut]), self.ids(" " + text[cut:].strip())

    def parts(self, text: str, *, strict: bool) -> tuple[list[int], list[int]]:
        """The tokens that are given of a passage and those to be guessed: its last word, or only its last token."""
        return self.word(text) if strict else (self.ids(text)[:-1], self.ids(text)[-1:])

    def _learn(self, texts: Sequence[str]) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        taught = []
        for text in texts:
            context, word = self.word(text)
            taught.append((torch.tensor([[*context, *word][-LENGTH - 1 :]]), len(word)))
        for ids, scored in taught * 5:
            loss = -self.scores(ids[0].tolist(), scored).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def logits(self, ids: list[int], scored: int) -> torch.Tensor:
        """Those before each of the last `scored` of `ids`, [scored, v]."""
        hidden = self.model.transformer(torch.tensor([ids[:-1]])).last_hidden_state[0, -scored:]
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def scores(self, ids: list[int], scored: int) -> torch.Tensor:
        """Logarithms of the probabilities of the last `scored` of `ids`."""
        chances = self.logits(ids, scored).log_softmax(dim=-1)
        return chances.gather(1, torch.tensor(ids[-scored:])[:, None])[:, 0]

    @torch.no_grad()
    def greedy(self, ids: list[int], length: int) -> list[int]:
        """The `length` tokens that the library's own greedy decoding adds."""
        given = torch.tensor([ids])
        added = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=length, do_sample=False
        )
        return [int(i) for i in added[0, len(ids) :]]

    @torch.no_grad()
    def text_loss(self, ids: list[int], length: int, stride: int) -> float:
        """The sum of the losses of all `ids` but the first, each by the first window [k stride, k stride + length]."""
        windows: dict[int, list[int]] = {}
        for place in range(1, len(ids)):
            windows.setdefault(max(0, math.ceil((place - length) / stride)) * stride, []).append(place)
        return -sum(
            self.scores(ids[start : places[-1] + 1], len(places)).double().sum().item()
            for start, places in windows.items()
        )

    @torch.no_grad()
    def guess_loss(self, text: str, *, strict: bool) -> float:
        """The loss of what is to be guessed of a passage."""
        context, word = self.parts(text, strict=strict)
        return -self.scores([*context, *word][-LENGTH - 1 :], len(word)).double().sum().item()

    @torch.no_grad()
    def hits(self, texts: Sequence[str], *, strict: bool) -> list[bool]:
        """For each passage whether greedy decoding finds its last word, a subword at a time, or its last subword."""
        found = []
        for text in texts:
            context, word = self.parts(text, strict=strict)
            given = [*context, *word][-LENGTH - 1 : -len(word)]
            said: list[int] = []
            for _ in word:
                said.append(int(self.model(torch.tensor([given + said])).logits[0, -1].argmax()))
            found.append(said == word)
        return found
