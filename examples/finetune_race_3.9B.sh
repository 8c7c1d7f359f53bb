#!/usr/bin/env bash
# RACE by the 3.9B BERT as the first paper did it (arXiv:1909.08053, section 5.3): five seeds, the best epoch of each by
# its accuracy on the development set, and the ensemble of the five on the test set. On one node of 8 GPUs:
#
#   export RACE=/data/RACE VOCAB_FILE=/data/vocab.txt PRETRAINED=/data/bert-3.9B SAVE=/data/race-3.9B
#   bash examples/finetune_race_3.9B.sh
#
# RACE has train, dev and test, and each of them middle and high. PRETRAINED is what examples/pretrain_bert_3.9B.sh
# saved, at any layout, or what tools/convert_checkpoint.py made of another's checkpoint. With Slurm:
#
#   sbatch -J race-3.9B --nodes 1 --gpus-per-node 8 examples/pretrain.slurm examples/finetune_race_3.9B.sh
#
# SEEDS="1 2" runs other ones. Started again, it goes on where it stopped. TOY=1 runs it at toy size on the CPU,
# DRY_RUN=1 prints the commands and runs nothing.
#
# For the 1.3B BERT add `--num-layers 24 --hidden-size 2048 --num-attention-heads 32 --global-batch-size 16 --lr 1e-5`,
# for the 336M `--num-layers 24 --hidden-size 1024 --num-attention-heads 16`.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

files_needed=(RACE VOCAB_FILE PRETRAINED SAVE)
meaning[RACE]="the folder of RACE, with train, dev and test"
meaning[VOCAB_FILE]="BERT's vocab.txt, with which it was pretrained"
meaning[PRETRAINED]="the folder of the pretrained BERT's checkpoints"
meaning[SAVE]="the folder for what comes out; one that a run was made in before is gone on with"

# At toy size the pretrained BERT is that of the other example at toy size.
name_toy_files() { RACE=$1/race VOCAB_FILE=$1/pretraining/vocab.txt PRETRAINED=$1/pretraining/checkpoints; }
write_toy_files() {
  TOY_FOLDER=$2/pretraining bash "$1/examples/pretrain_bert_3.9B.sh"
  python "$1/examples/toy_race.py" "$1/README.md" "$RACE"
}

[ "${NNODES:-1}" = 1 ] || refuse "NNODES=$NNODES: it runs on one node"
needed=()
prepare "$repository"
ranks=${GPUS_PER_NODE:-8} seeds=${SEEDS:-1 2 3 4 5}
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Slurm's signal makes a run save and end; then this ends too, once the run has.
trap 'exit 143' TERM

# --- the model and where it lies --------------------------------------------------------------------------------------
# As pretrained. Eight ranks share a layer: a rank has 0.5e9 parameters of 16 bytes, 8 GB, and a micro-batch of four
# questions is 16 sequences, whose activations are 13 GB. It fits a V100 of 32 GB.
model=(
  --num-layers 48
  --hidden-size 2560
  --num-attention-heads 40
  --seq-length 512 # of article, question and option; what is too long is cut at the article's end
  --max-position-embeddings 512
  --attention-dropout 0.1
  --hidden-dropout 0.1
  --tensor-model-parallel-size 8
  --fp16 # GPUs from Ampere on: --bf16
)

# --- the recipe: batch, learning rate and epochs are published; warm-up and decay to 0 are what is usual --------------
recipe=(
  --epochs 3
  --micro-batch-size 4
  --global-batch-size 32
  --lr 2e-5
  --lr-warmup-fraction 0.06
  --lr-decay-style linear
  --weight-decay 0.01
  --clip-grad 1.0
)
files=(
  --task RACE
  --tokenizer-type BertWordPieceLowerCase
  --vocab-file "$VOCAB_FILE"
)

toy=()
if is_toy; then
  ranks=2 seeds=${SEEDS:-1 2}
  toy=(
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --make-vocab-size-divisible-by 8 --tensor-model-parallel-size 2
    --distributed-backend gloo --num-workers 0 --initial-loss-scale 65536
    --micro-batch-size 2 --global-batch-size 4 --epochs 1 --log-interval 1
  )
fi

# finetune FLAG ...: one run of these flags, those of the toy, and those of the command line.
finetune() {
  run torchrun --standalone --nproc-per-node "$ranks" -m megatron.tasks.main \
    "${files[@]}" "${model[@]}" "$@" "${toy[@]}" "${further[@]}"
}

# finished FOLDER: whether the newest checkpoint there is of its run's last iteration.
finished() {
  python - "$1" <<'END'
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
number = int((folder / "latest_checkpointed_iteration.txt").read_text())
state = json.loads((folder / f"iter_{number:07d}" / "state.json").read_text())
sys.exit(state["run"]["iteration"] < state["config"]["training"]["train_iters"])
END
}

# --- each seed: order of questions, dropout and the new head are its own ----------------------------------------------
# The head's scores of the best epoch on both sets stay in SEED/dev.jsonl and SEED/test.jsonl, a line a question.
further=("$@")
dev=() test=()
for seed in $seeds; do
  own=$SAVE/seed-$seed
  dev+=("$own/dev.jsonl") test+=("$own/test.jsonl")
  if [ -e "$own/test.jsonl" ]; then continue; fi
  is_dry || mkdir -p "$own"
  finetune --seed "$seed" "${recipe[@]}" --train-data "$RACE/train" --valid-data "$RACE/dev" \
    --pretrained-checkpoint "$PRETRAINED" --save "$own" --load "$own" --save-interval 1000 \
    --keep-last-checkpoints 1 --log-interval 10 --predictions-file "$own/dev.jsonl"
  if ! is_dry && ! finished "$own"; then # --exit-duration-in-mins on the command line, for one
    echo "seed $seed is not trained to its end; started again, this goes on with it"
    exit 0
  fi
  finetune "${recipe[@]}" --eval-only --load "$own/best" --valid-data "$RACE/test" --predictions-file "$own/test.jsonl"
done

# --- the five together: the option with the highest mean score --------------------------------------------------------
run python "$repository/tools/ensemble_race.py" "${dev[@]}" --output "$SAVE/dev.jsonl"
run python "$repository/tools/ensemble_race.py" "${test[@]}" --output "$SAVE/test.jsonl"
