# shellcheck shell=bash
# What the examples of large runs share; to be sourced by them. They say what a run is, this says how it is started:
#
#   DRY_RUN=1     print the command that would be run, behind the variables that it is given, and run nothing; where
#                 DATA_PATH or another is not set, its name stands in its place
#   TOY=1         the same command at toy size on ranks of this machine's CPU, with data made for it in a new folder
#                 (TOY_FOLDER, if set); DATA_PATH, VOCAB_FILE, MERGE_FILE and SAVE are not read
#
# Arguments of an example are further flags of the run; they win over its own.

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # a rank's work is done by its GPU, or it shares the CPU with others
files_needed=(DATA_PATH VOCAB_FILE MERGE_FILE SAVE)

declare -A meaning=(
  [DATA_PATH]="the token set, its .bin and .idx files without the extension, or a blend, '0.7 books 0.3 web'"
  [VOCAB_FILE]="GPT-2's vocab.json, with which the token set was made"
  [MERGE_FILE]="GPT-2's merges.txt, with which the token set was made"
  [SAVE]="the folder of checkpoints; a run that finds one there continues it"
  [LOAD]="the folder of the trained model's checkpoints"
  [TOY_FOLDER]="the folder that the nodes of a toy run share"
  [MASTER_ADDR]="name or address of the first node, that of NODE_RANK 0, the same on every node"
  [NODE_RANK]="this node's number, from 0, another one on every node"
)

is_dry() { [ "${DRY_RUN:-0}" = 1 ]; }
is_toy() { [ "${TOY:-0}" = 1 ]; }

# refuse SENTENCE ...: ends the script with all that is wrong at once.
refuse() {
  local sentence
  for sentence in "$@"; do printf '%s: %s\n' "$(basename "$0")" "$sentence" >&2; done
  exit 2
}

# stand_in NAME ...: where nothing is run, a variable that is not set has its own name for a value.
stand_in() {
  local name
  is_dry || return 0
  for name in "$@"; do [ -n "${!name:-}" ] || printf -v "$name" %s "$name"; done
}

# require NAME ...: refuses unless the variables named are set and torchrun can be called, or nothing is to be run.
require() {
  local name found=()
  stand_in "$@"
  for name in "$@"; do
    [ -n "${!name:-}" ] || found+=("$name is not set: ${meaning[$name]}")
  done
  is_dry || command -v torchrun >/dev/null ||
    found+=("torchrun is not on PATH: activate the environment that this repository is installed in (pip install -e .)")
  [ ${#found[@]} -eq 0 ] || refuse "${found[@]}"
}

# name_toy_files FOLDER: sets DATA_PATH, VOCAB_FILE, MERGE_FILE.
# shellcheck disable=SC2034  # they are read by who sources this
name_toy_files() { DATA_PATH=$1/toy_text_document VOCAB_FILE=$1/vocab.json MERGE_FILE=$1/merges.txt; }

# write_toy_files REPOSITORY FOLDER: makes them from this repository's own prose, by the tools that make real ones.
write_toy_files() {
  grep -h . "$1/LICENSE" "$1/README.md" >"$2/toy.txt" # without empty lines, which are no documents
  python "$1/tools/train_tokenizer.py" --input "$2/toy.txt" --vocab-size 300 --output-dir "$2"
  python "$1/tools/preprocess_data.py" --input "$2/toy.txt" --output-prefix "$2/toy" --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
}

# make_toy_data REPOSITORY: a tokenizer and a token set, made on the first node; sets the variables of name_toy_files,
# and SAVE.
# shellcheck disable=SC2034
make_toy_data() {
  local folder=${TOY_FOLDER:-}
  if [ -z "$folder" ]; then
    if is_dry; then folder=$(mktemp -d -u); else folder=$(mktemp -d); fi # -u makes none
  fi
  name_toy_files "$folder"
  SAVE=$folder/checkpoints
  if [ "${NODE_RANK:-0}" != 0 ] || [ -e "$folder/made" ] || is_dry; then return; fi
  echo "toy size: tokenizer, token set and checkpoints are in $folder"
  mkdir -p "$folder"
  write_toy_files "$1" "$folder"
  touch "$folder/made"
}

# train_toy_gpt REPOSITORY: trains the toy of pretrain_gpt_345M.sh in TOY_FOLDER, or a new folder; sets TOY_FOLDER, LOAD.
# shellcheck disable=SC2034
train_toy_gpt() {
  TOY_FOLDER=${TOY_FOLDER:-$(if is_dry; then mktemp -d -u; else mktemp -d; fi)} # -u makes none
  LOAD=$TOY_FOLDER/checkpoints
  is_dry || TOY_FOLDER=$TOY_FOLDER bash "$1/examples/pretrain_gpt_345M.sh"
}

# place_ranks NAME NODES GPUS: how many ranks there are and how they meet, on NODES nodes of GPUS GPUs unless NNODES and
# GPUS_PER_NODE say otherwise; a toy run has four. Sets ranks (of a node), meet (words for torchrun), needed (variables).
#
# torchrun starts one process a GPU and tells each its place. On several nodes its processes first have to find each
# other ("rendezvous"): at MASTER_ADDR:MASTER_PORT, which every node must be able to reach. RENDEZVOUS is
#   static  The node of NODE_RANK 0 listens there, and ranks are NODE_RANK times GPUS and up. All nodes must come.
#   c10d    Whoever finds itself to be MASTER_ADDR listens; nodes are numbered as they come, NODE_RANK is not read.
#           RUN_ID (or NAME) keeps two runs apart that use one address. It can start the ranks again when one fails,
#           MAX_RESTARTS times; the run then goes on from its last checkpoint.
# NCCL looks for a network by itself. Where it takes the wrong one, NCCL_SOCKET_IFNAME and NCCL_IB_HCA name the right
# one, and NCCL_DEBUG=INFO shows which it took.
place_ranks() {
  local nodes=${NNODES:-$2} port=${MASTER_PORT:-29500}
  ranks=${GPUS_PER_NODE:-$3}
  if is_toy; then nodes=${NNODES:-1} ranks=$((4 / ${NNODES:-1})); fi # of this machine, on which the nodes are
  needed=(MASTER_ADDR)
  if [ "$nodes" != 1 ]; then stand_in MASTER_ADDR NODE_RANK; fi
  case ${RENDEZVOUS:-static} in
    static)
      needed+=(NODE_RANK)
      meet=(--nnodes "$nodes" --node-rank "${NODE_RANK:-}" --master-addr "${MASTER_ADDR:-}" --master-port "$port")
      ;;
    c10d)
      meet=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-}:$port"
        --rdzv-id "${RUN_ID:-$1}" --max-restarts "${MAX_RESTARTS:-0}")
      ;;
    *) refuse "RENDEZVOUS=$RENDEZVOUS: it must be static or c10d" ;;
  esac
  if [ "$nodes" = 1 ]; then needed=() meet=(--standalone); fi # a free port of this machine
  if is_toy && [ "$nodes" != 1 ]; then needed+=(TOY_FOLDER); fi
}

# prepare REPOSITORY: all that must be set is set, or made for a toy run.
prepare() {
  if is_toy; then
    require "${needed[@]}"
    make_toy_data "$1"
  else
    require "${needed[@]}" "${files_needed[@]}"
  fi
}

# run WORD ...: runs the command of these words, or prints it with DRY_RUN=1.
run() {
  local name
  if ! is_dry; then
    "$@"
    return
  fi
  for name in CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS; do
    [ -z "${!name:-}" ] || printf '%s=%q ' "$name" "${!name}"
  done
  printf '%q ' "$@"
  echo
}

# launch WORD ...: the same, and the command takes the place of the script, so that signals reach it.
launch() {
  if is_dry; then run "$@"; else exec "$@"; fi
}
