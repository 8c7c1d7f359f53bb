#!/usr/bin/env bash
# From nothing to a trained GPT on two tensor-parallel ranks of this machine's CPU.
#
#   bash examples/quickstart.sh [FOLDER]     everything is made below FOLDER (quickstart/ in the repository by default)
#
# It sets up the environment, gathers the text of the Python standard library, trains a tokenizer on it, tokenizes it,
# pretrains, and prints a table of losses, the held-out perplexity before and after, and a generated sample.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$repository/quickstart}
iterations=600 below=60
if [ "${TOY:-0}" = 1 ]; then iterations=4 below=1000; fi  # TOY=1 walks through it in a minute and learns nothing

step() { printf '\n== %s\n' "$*"; }

step "1/6 environment"
source "$repository/tools/setup_environment.sh"
export OMP_NUM_THREADS=1  # two ranks on as few as two cores
cd "$repository"
mkdir -p "$folder"

step "2/6 text: the Python standard library"
python examples/quickstart/gather_text.py "$folder/corpus.jsonl"

step "3/6 tokenizer: byte-level BPE with 1,024 entries"
python tools/train_tokenizer.py --input "$folder/corpus.jsonl" --vocab-size 1024 --output-dir "$folder/tokenizer"

tokenizer=(--tokenizer-type GPT2BPETokenizer
  --vocab-file "$folder/tokenizer/vocab.json" --merge-file "$folder/tokenizer/merges.txt")

step "4/6 tokens"
python tools/preprocess_data.py --input "$folder/corpus.jsonl" --output-prefix "$folder/corpus" --append-eod \
  --workers 2 "${tokenizer[@]}"

step "5/6 pretraining on two tensor-parallel ranks"
for old in checkpoints tensorboard metrics.jsonl index_cache; do
  if [ -e "$folder/$old" ]; then
    echo "replacing $folder/$old of an earlier run"
    rm -rf "${folder:?}/$old"
  fi
done
model=(--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --attention-dropout 0 --hidden-dropout 0)  # one pass over the text: nothing to guard against
batch=(--micro-batch-size 16 --global-batch-size 16 --train-iters "$iterations")
rate=(--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05)
watch=(--log-interval "$((iterations < 20 ? 1 : 20))" --eval-interval 200 --eval-iters 10 --eval-at-start --progress-bar
  --metrics-file "$folder/metrics.jsonl" --tensorboard-dir "$folder/tensorboard")
torchrun --standalone --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 --distributed-backend gloo \
  --data-path "$folder/corpus_text_document" --split 95,5,0 --num-workers 0 --save "$folder/checkpoints" \
  "${tokenizer[@]}" "${model[@]}" "${batch[@]}" "${rate[@]}" "${watch[@]}"

step "6/6 what it has learned"
python examples/quickstart/report.py "$folder/metrics.jsonl" --below "$below"
printf '\na sample:\n'
torchrun --standalone --nproc-per-node 2 tools/generate_text.py --load "$folder/checkpoints" --distributed-backend gloo \
  --prompt "def read_" --out-seq-length 80 --top-k 20 --temperature 0.8
printf '\nTensorBoard: %s --logdir %s\n' "$(command -v tensorboard || echo tensorboard)" "$folder/tensorboard"
