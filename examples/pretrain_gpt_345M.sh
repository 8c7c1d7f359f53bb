#!/usr/bin/env bash
# GPT with 345 million parameters (GPT-2 medium) on one GPU.
#
#   DATA_PATH=/data/webtext_text_document VOCAB_FILE=/data/vocab.json MERGE_FILE=/data/merges.txt SAVE=/data/345M \
#     bash examples/pretrain_gpt_345M.sh
#
#   TOY=1 bash examples/pretrain_gpt_345M.sh        runs it at toy size, on the CPU
#   DRY_RUN=1 ...                                   prints the command and runs nothing
#
# On a V100 install PyTorch 2.9 or 2.10 (`pip install "torch<2.11"`): later wheels no longer hold kernels for it.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

if is_toy; then
  require
  make_toy_data "$repository"
else
  require DATA_PATH VOCAB_FILE MERGE_FILE SAVE
fi

# --- the model: 24 (12 h^2 + 13 h) + (V + s) h = 355e6 parameters, called 345M ever since -----------------------------
model=(
  --num-layers 24
  --hidden-size 1024
  --num-attention-heads 16
  --seq-length 1024
  --max-position-embeddings 1024
  --attention-dropout 0.1
  --hidden-dropout 0.1
)

# --- 16 bits ----------------------------------------------------------------------------------------------------------
# BF16 has FP32's range and needs no loss scale; GPUs multiply it since Ampere (compute capability 8.0). FP16 with a
# loss scale is for those before, and for PRECISION=fp16. A CPU multiplies BF16 much faster than FP16.
best_precision() {
  python - <<'PYTHON'
try:
    import torch

    on_old_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
except ImportError:
    on_old_gpu = False
print("fp16" if on_old_gpu else "bf16")
PYTHON
}
precision=${PRECISION:-$(best_precision)}

# --- memory, micro-batch 4 --------------------------------------------------------------------------------------------
#   parameters, gradients, optimizer      18 bytes each with BF16, 16 with FP16            6.4 or 5.7 GB
#   activations                           24 x 34 s b h                                    3.4 GB
#   logits of 1,024 tokens at a time      4 V bytes a token, a few times                   0.6 GB
# 10 GB: it fits 16 GB. With more memory, micro-batches of 8 or 16 are faster; with less, --recompute-granularity full
# makes the activations 24 x 2 s b h, 0.2 GB, for a third more arithmetic. One rank has no other to share its optimizer
# with.
memory=(
  "--$precision"
  --micro-batch-size 4
  --cross-entropy-chunk-size 1024
)

# --- the recipe -------------------------------------------------------------------------------------------------------
# The paper trains all its GPTs for 300,000 iterations of 512 samples, which take one GPU weeks. This is a twenty-fourth
# of it, 6.6e9 tokens, about twenty for each parameter: 1.6e19 operations, four days at 45 TFLOP/s (a V100, say), under a
# day at 300 (an H100): speeds that we assume, not ones that we measured. For the published run say
# --global-batch-size 512 --train-iters 300000 --lr-decay-iters 300000 --lr-warmup-iters 3000.
recipe=(
  --global-batch-size 64 # 16 micro-batches
  --train-iters 100000
  --lr 1.5e-4
  --lr-warmup-iters 1000
  --lr-decay-style cosine
  --lr-decay-iters 100000
  --min-lr 1e-5
  --weight-decay 0.01
  --clip-grad 1.0
)

# --- data, checkpoints, watching --------------------------------------------------------------------------------------
read -r -a data_path <<<"$DATA_PATH"
files=(
  --data-path "${data_path[@]}"
  --split "949,50,1"
  --tokenizer-type GPT2BPETokenizer
  --vocab-file "$VOCAB_FILE"
  --merge-file "$MERGE_FILE"
  --save "$SAVE"
  --load "$SAVE"
  --save-interval 1000
  --eval-interval 1000
  --eval-iters 10
  --log-interval 10
  --tensorboard-dir "$SAVE/tensorboard"
)

# --- toy size: the same flags, and then these -------------------------------------------------------------------------
toy=()
if is_toy; then
  toy=(
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --make-vocab-size-divisible-by 8
    --distributed-backend gloo --num-workers 0
    --micro-batch-size 2 --global-batch-size 4 --cross-entropy-chunk-size 32
    --train-iters 4 --lr-warmup-iters 1 --lr-decay-iters 4
    --split "80,20,0" --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1
  )
fi

launch torchrun --standalone --nproc-per-node 1 "$repository/pretrain_gpt.py" \
  "${model[@]}" "${memory[@]}" "${recipe[@]}" "${files[@]}" "${toy[@]}" "$@"
