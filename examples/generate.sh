#!/usr/bin/env bash
# Text that a trained GPT goes on with.
#
#   LOAD=/data/8.3B TENSOR_PARALLEL=8 PROMPTS=prompts.jsonl bash examples/generate.sh
#       continues each prompt of a file, a {"prompt": ...} a line (or a plain text file's lines), into prompts.jsonl.out
#   LOAD=/data/8.3B TENSOR_PARALLEL=8 SAMPLES=samples.jsonl bash examples/generate.sh
#       writes texts from nothing, as samples of what the model has learned
#   LOAD=/data/8.3B TENSOR_PARALLEL=8 bash examples/generate.sh
#       asks for prompts
#
#   TOY=1 bash examples/generate.sh         trains a toy and continues prompts with it, on two ranks of the CPU
#   DRY_RUN=1 ...                           prints the command and runs nothing
#
# Sizes, and the tokenizer, come from the checkpoint, whatever layout it was saved at. For a model behind HTTP put
# tools/serve.py in the place of tools/generate_text.py, with the flags of the layout alone.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

if is_toy; then
  require
  train_toy_gpt "$repository"
  PROMPTS=$TOY_FOLDER/prompts.jsonl SAMPLES=
  is_dry || printf '{"prompt": "%s"}\n' "The License" "You may" "This" >"$PROMPTS"
else
  require LOAD
fi

# --- the layout -------------------------------------------------------------------------------------------------------
# As many GPUs share each layer as the weights need, 16.6 GB for 8.3B parameters in 16 bits, with the keys and values of
# the texts beside them: 4 l h bytes a token, 0.9 MB there, 7.2 GB for eight texts of 1,024 tokens. Where one node's
# GPUs are too few, --pipeline-model-parallel-size puts the layers on several.
ranks=${TENSOR_PARALLEL:-1}
layout=(
  --tensor-model-parallel-size "$ranks"
  --fp16 # as it was trained; the choice from the logits is made in FP64
)

# --- how tokens are chosen --------------------------------------------------------------------------------------------
# Megatron-LM's settings for its samples: from the likeliest tokens that together have a probability of 0.9.
# --greedy takes the likeliest always, and so repeats itself sooner.
choice=(
  --temperature 1.0
  --top_p 0.9
  --seed 1234 # a prompt's text depends on it, on the prompt and on its number, not on the layout or on --micro-batch-size
)

# --- how much ---------------------------------------------------------------------------------------------------------
# A text ends at the end-of-document token, at --out-seq-length, or at the model's context.
amount=(
  --out-seq-length 1024
  --micro-batch-size 8 # prompts at the same time
)

# --- what from, and where to ------------------------------------------------------------------------------------------
files=()
if [ -n "${PROMPTS:-}" ]; then
  files=(--sample-input-file "$PROMPTS" --sample-output-file "${OUTPUT:-$PROMPTS.out}")
elif [ -n "${SAMPLES:-}" ]; then
  files=(--num-samples 8 --genfile "$SAMPLES")
fi

# --- toy size: the same flags, and then these -------------------------------------------------------------------------
toy=()
if is_toy; then
  ranks=2
  toy=(
    --tensor-model-parallel-size 2 --no-fp16
    --out-seq-length 12 --micro-batch-size 2
    --distributed-backend gloo
  )
fi

launch torchrun --standalone --nproc-per-node "$ranks" "$repository/tools/generate_text.py" \
  --load "$LOAD" "${layout[@]}" "${choice[@]}" "${amount[@]}" "${files[@]}" "${toy[@]}" "$@"
