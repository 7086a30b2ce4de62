#!/usr/bin/env bash
# Everything about two cards that waits for two cards: tests, tokens, steps, the server beside its simulation.
#
#   OUT=results benchmarks/two_cards.sh                 # all parts, about 17 minutes on two H200s
#   OUT=results benchmarks/two_cards.sh tests tokens    # some parts
#   OUT=/tmp/dry DRY=1 benchmarks/two_cards.sh          # on a CPU, small shapes: does every command run?
#
# Parts, and the most seconds that each takes: tests 300, tokens 240, steps 330, more_steps 330, capacity 420. Each
# command has its limit. One that fails loses no other. OUT/summary.txt has the status and the seconds of each, OUT/*.log
# what they said, OUT/*.json what they measured. PYTHON runs dinfer.
set -uo pipefail
: "${OUT:?a folder for the results}" "${PYTHON:=python3}" "${DRY:=}"
mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd); cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1  # multicast hangs on hosts where it is broken

try() {  # name, most seconds, command
  local name=$1 most=$2 began=$SECONDS; shift 2
  timeout -k 10 "$most" "$@" > "$OUT/$name.log" 2>&1
  echo "$name: status $? after $((SECONDS - began)) s: $*" | tee -a "$OUT/summary.txt"
  tail -3 "$OUT/$name.log"
}

if [ -n "$DRY" ]; then
  device=(--device cpu); tiny=(--tiny --device cpu); one=device=cpu; shape=small-llada2; levels=1,2; new=64; prompts=40
  limits=(--budget 1500 --longest 300); longest=1600  # CPUs may be busy
else
  device=(); tiny=(); one=device=cuda; shape=llada2-mini; levels=1,16,64; new=256; prompts=512
  limits=(--budget 300 --longest 60); longest=330
fi

tests() {
  try tests 300 $PYTHON -m pytest -q -p no:cacheprovider -o addopts= -m gpu tests/gpu/test_two_card_tokens.py \
    tests/gpu/test_two_card_processes.py tests/unit/test_triton_experts.py
}

tokens() {  # one card's words beside those of two
  local ask=("$PYTHON" -m dinfer.cli.main generate "Tom has 3 apples and buys 5 more. How many apples does he have?")
  local draw=(decoder=threshold sampling.temperature=0.7 sampling.top_k=20)
  ask+=("$one" dtype=float32)
  for model in tiny tiny-llada2; do
    try "$model-1" 60 "${ask[@]}" model=$model
    try "$model-2" 60 "${ask[@]}" model=$model runtime.tensor_parallel=2
    try "$model-1-drawn" 60 "${ask[@]}" model=$model "${draw[@]}"
    try "$model-2-drawn" 60 "${ask[@]}" model=$model runtime.tensor_parallel=2 "${draw[@]}"
  done
  try tiny-llada2-2-dealt 60 "${ask[@]}" model=tiny-llada2 runtime.tensor_parallel=2 runtime.expert_parallel=true
}

steps() {  # what has no figure yet: NCCL alone, all sums within norms, experts dealt out, several rows
  try steps $longest $PYTHON -m benchmarks.tensor_parallel "${tiny[@]}" "${limits[@]}" \
    --only collectives fused nccl "dealt out" --out "$OUT/tensor-parallel-more-h200.json"
}

more_steps() {  # the whole table in one session, for docs/scaling.md
  try more_steps $longest $PYTHON -m benchmarks.tensor_parallel "${tiny[@]}" "${limits[@]}" \
    --out "$OUT/tensor-parallel-h200.json"
}

capacity() {  # step times of a replica of two cards, its server under load, and the simulator beside it
  local kind=(--shape $shape --spread --gather --new $new --tensor-parallel 2 "${device[@]}")
  try capacity 150 $PYTHON -m benchmarks.capacity.measure "${kind[@]}" --prompts-of $prompts --in-flight $levels \
    --out "$OUT/capacity-$shape-two-cards-h200.json"
  try server 200 $PYTHON -m benchmarks.serving.load measure "${kind[@]}" --prompt $prompts --in-flight $levels \
    --no-drafts --out "$OUT/serving-$shape-two-cards-h200.json"
  try check 60 $PYTHON -m benchmarks.capacity.check --steps "$OUT/capacity-$shape-two-cards-h200.json" \
    --measured "$OUT/serving-$shape-two-cards-h200.json" --front-end benchmarks/results/capacity-front-end.json \
    --out "$OUT/scaling-check-two-cards-h200.json"
}

: > "$OUT/summary.txt"
[ $# -gt 0 ] || set -- tests tokens steps capacity more_steps
for part in "$@"; do $part; done
! grep -v "status 0" "$OUT/summary.txt"
