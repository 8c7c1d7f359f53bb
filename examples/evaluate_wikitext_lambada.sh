#!/usr/bin/env bash
# A trained GPT on WikiText-103 (perplexity) and LAMBADA (accuracy), as the paper evaluates it (arXiv:1909.08053, 5.2):
#
#               WikiText-103   LAMBADA        parameters
#   355M        19.31          45.18 %
#   2.5B        12.76          61.73 %
#   8.3B        10.81          66.51 %
#
#   LOAD=/data/8.3B WIKITEXT=/data/wiki.test.tokens LAMBADA=/data/lambada_test.jsonl TENSOR_PARALLEL=8 \
#     bash examples/evaluate_wikitext_lambada.sh
#
#   TOY=1 bash examples/evaluate_wikitext_lambada.sh    trains and evaluates a toy on two ranks of the CPU
#   DRY_RUN=1 ...                                       prints the commands and runs nothing
#
# Sizes, and the tokenizer, come from the checkpoint, whatever layout it was saved at. A folder of Hugging Face's with a
# GPT-2 is taken as it is; of a model of Megatron-LM's tools/convert_checkpoint.py makes a checkpoint first.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

meaning+=(
  [WIKITEXT]="wiki.test.tokens of WikiText-103, as it is distributed, with its blanks and <unk>"
  [LAMBADA]='lambada_test.jsonl, a {"text": ...} a line: the plain text of 5,153 passages'
)

# make_toy_model: a trained toy, and texts for it out of the prose that it was trained on.
make_toy_model() {
  train_toy_gpt "$repository"
  WIKITEXT=$TOY_FOLDER/toy.txt LAMBADA=$TOY_FOLDER/toy.jsonl
  if is_dry; then return; fi
  python - "$WIKITEXT" >"$LAMBADA" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as lines:
    for line in lines:
        if len(line.split()) > 3:
            print(json.dumps({"text": line.strip()}))
PYTHON
}

if is_toy; then
  require
  make_toy_model
else
  require LOAD WIKITEXT LAMBADA
fi

# --- the layout -------------------------------------------------------------------------------------------------------
# As many GPUs share each layer as the weights need: 8.3B parameters in 16 bits are 16.6 GB. The others hold further
# copies, and share out the windows.
ranks=${GPUS_PER_NODE:-8}
layout=(
  --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
  --fp16 # as it was trained; losses and accuracies are FP32's
)

# --- both tasks -------------------------------------------------------------------------------------------------------
shared=(
  --load "$LOAD"
  --seq-length 1024 # what the models were trained with, and the window of the paper
  --micro-batch-size 8
  --log-interval 100
)

# --- WikiText-103 -----------------------------------------------------------------------------------------------------
# Windows of 1,024 tokens, each 32 further, of each of which the 32 new tokens are scored: each has at least 992 tokens
# before it. The perplexity is exp(sum of losses / 245,566), the words of the test set as it is distributed, whatever
# the 270,329 or so tokens are that a model makes of it.
wikitext=(
  --task WIKITEXT103
  --valid-data "$WIKITEXT"
  --overlapping-eval 32
)

# --- LAMBADA ----------------------------------------------------------------------------------------------------------
# A passage is right where each subword of its last word is the likeliest one. --no-strict-lambada asks for the last
# subword alone, which gives higher figures that are not the published ones.
lambada=(
  --task LAMBADA
  --valid-data "$LAMBADA"
  --strict-lambada
)

# --- toy size: the same flags, and then these -------------------------------------------------------------------------
toy=()
if is_toy; then
  ranks=2
  toy=(
    --tensor-model-parallel-size 1 --no-fp16
    --seq-length 32 --overlapping-eval 16
    --distributed-backend gloo
  )
fi

for task in wikitext lambada; do
  declare -n flags=$task
  (launch torchrun --standalone --nproc-per-node "$ranks" -m megatron.tasks.main \
    "${flags[@]}" "${shared[@]}" "${layout[@]}" "${toy[@]}" "$@")
done
