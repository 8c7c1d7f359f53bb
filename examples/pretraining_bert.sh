# shellcheck shell=bash
# What the runs that pretrain a BERT share beside pretraining.sh, which this sources: the recipe of the first paper
# (arXiv:1909.08053, section 5.3), data, checkpoints, toy size. To be sourced by them; they say the model, where it
# lies, and for how long it is trained.

source "$repository/examples/pretraining.sh"

files_needed=(DATA_PATH VOCAB_FILE SAVE)
meaning[DATA_PATH]="the set of sentences (preprocess_data.py --split-sentences), .bin and .idx without the extension"
meaning[VOCAB_FILE]="BERT's vocab.txt, with which the set was made"

# shellcheck disable=SC2034  # they are read below
name_toy_files() { DATA_PATH=$1/toy_text_sentence VOCAB_FILE=$1/vocab.txt; }

write_toy_files() {
  cat "$1/LICENSE" "$1/README.md" >"$2/toy.txt" # its paragraphs are the documents
  python "$1/examples/vocabulary.py" "$2/toy.txt" "$VOCAB_FILE" --size 300
  python "$1/tools/preprocess_data.py" --input "$2/toy.txt" --output-prefix "$2/toy" --text-documents blank-line \
    --split-sentences --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE"
}

# pretrain_bert FLAG ...: starts the run that the script has described in ranks and meet (place_ranks), model, layout,
# memory, iterations and toy_layout, with further flags.
pretrain_bert() {
  local data_path recipe files toy=()
  # Dropout, decay and clipping as for the paper's GPTs. A sample is two segments of one document in their order or in
  # the other, and the model is to tell which; whole words are masked, in runs of one to three.
  recipe=(
    --seq-length 512
    --max-position-embeddings 512
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --mask-prob 0.15
    --global-batch-size 1024
    --train-iters "$iterations"
    --lr 1e-4
    --lr-warmup-iters 10000
    --lr-decay-style linear
    --lr-decay-iters 2000000
    --weight-decay 0.01
    --clip-grad 1.0
  )
  read -r -a data_path <<<"$DATA_PATH"
  files=(
    --data-path "${data_path[@]}"
    --split "97,3,0"                        # as the paper: 3 % of the documents are held out
    --tokenizer-type BertWordPieceLowerCase # 30,522 entries
    --vocab-file "$VOCAB_FILE"
    --save "$SAVE"
    --load "$SAVE"
    --save-interval 5000
    --eval-interval 5000
    --eval-iters 10
    --log-interval 100
    --tensorboard-dir "$SAVE/tensorboard"
  )
  if is_toy; then
    toy=(
      --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
      --make-vocab-size-divisible-by 8
      --distributed-backend gloo --num-workers 0 --initial-loss-scale 65536
      --micro-batch-size 2 --global-batch-size 8
      --train-iters 4 --lr-warmup-iters 1 --lr-decay-iters 4
      --split "80,20,0" --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1
      "${toy_layout[@]}"
    )
  fi
  launch torchrun --nproc-per-node "$ranks" "${meet[@]}" "$repository/pretrain_bert.py" \
    "${layout[@]}" "${model[@]}" "${memory[@]}" "${recipe[@]}" "${files[@]}" "${toy[@]}" "$@"
}
