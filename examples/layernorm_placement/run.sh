#!/usr/bin/env bash
# Where should the layer norms of a deep BERT stand? Three arrangements of one model, on the same data and from the same
# seeds, on this machine's CPU; README.md beside this file says what was seen.
#
#   bash examples/layernorm_placement/run.sh [FOLDER]     everything is made below FOLDER (layernorm_placement/ in the
#                                                         repository by default): losses.png, losses.csv, losses.md
#
# SEEDS="1 2 3", LAYERS, RATE and ITERATIONS change the runs; those whose losses are in FOLDER already are not run again.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-$repository/layernorm_placement}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
seeds=${SEEDS:-1 2} layers=${LAYERS:-24} rate=${RATE:-3e-3} iterations=${ITERATIONS:-300}
sizes=(--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 16)
if [ "${TOY:-0}" = 1 ]; then # walks through it in a minute and shows nothing
  seeds=${SEEDS:-1} layers=2 iterations=4
  sizes=(--hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 4)
fi

step() { printf '\n== %s\n' "$*"; }

step "1/4 environment"
source "$repository/tools/setup_environment.sh"
python -c "import matplotlib" 2>/dev/null || python -m pip install -c "$repository/constraints.txt" matplotlib
export OMP_NUM_THREADS=1 # three runs at a time
cd "$repository"

step "2/4 text: the Python standard library, cut into sentences"
if [ ! -e "$folder/corpus_text_sentence.idx" ]; then
  python examples/quickstart/gather_text.py "$folder/corpus.jsonl"
  # The most frequent words alone, so that all that is masked can be learned from few batches.
  python examples/vocabulary.py "$folder/corpus.jsonl" "$folder/vocab.txt" --size 512 --no-spelling
  python tools/preprocess_data.py --input "$folder/corpus.jsonl" --output-prefix "$folder/corpus" --split-sentences \
    --workers 2 --tokenizer-type BertWordPieceLowerCase --vocab-file "$folder/vocab.txt"
fi

# train NAME SEED FLAG ...: a run that leaves its losses in FOLDER/NAME-SEED.jsonl, and what it says beside them.
train() {
  local name=$1-$2
  [ -e "$folder/$name.jsonl" ] && return
  python pretrain_bert.py --seed "$2" --num-layers "$layers" "${sizes[@]}" --train-iters "$iterations" \
    --init-method-std 0.08 --attention-dropout 0 --hidden-dropout 0 \
    --lr "$rate" --lr-decay-style linear --lr-warmup-fraction 0.1 --clip-grad 1.0 --weight-decay 0.01 \
    --bert-no-binary-head --mask-prob 0.3 --short-seq-prob 0 --split 1,0,0 --num-workers 0 \
    --data-path "$folder/corpus_text_sentence" \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$folder/vocab.txt" \
    --distributed-backend gloo --log-interval 1 --metrics-file "$folder/$name.part" "${@:3}" >"$folder/$name.log" 2>&1 ||
    { tail -n 20 "$folder/$name.log" >&2 && return 1; }
  mv "$folder/$name.part" "$folder/$name.jsonl"
}

step "3/4 training: $layers layers, $iterations iterations, learning rate $rate, seeds $seeds"
rm -f "$folder"/*.part
for seed in $seeds; do
  started=()
  train pre "$seed" --norm-position pre & started+=($!)
  train post "$seed" --norm-position post & started+=($!)
  train residual-post "$seed" --apply-residual-connection-post-layernorm & started+=($!)
  for process in "${started[@]}"; do wait "$process"; done
  echo "seed $seed is done"
done

step "4/4 what was seen"
python examples/layernorm_placement/curves.py "$folder" --smooth "$((iterations < 20 ? 1 : 20))"
