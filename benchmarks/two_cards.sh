#!/usr/bin/env bash
# Everything about two cards that waits for two cards: tests, tokens, steps, the server.
#
#   OUT=results benchmarks/two_cards.sh                 # all parts, at most SECONDS_IN_ALL=400 on two H200s
#   OUT=results benchmarks/two_cards.sh checks          # one part
#   OUT=/tmp/dry DRY=1 benchmarks/two_cards.sh          # on a CPU, small shapes: does every command run?
#
# Parts: checks (tests and tokens, all at the same time), steps, server (under load: LEVELS in flight). Each command has its limit, and no limit goes beyond the end of all. One that fails
# loses no other. OUT/summary.txt has the status and the seconds of each, OUT/*.log what they said, OUT/*.json what they
# measured.
# PYTHON runs dinfer.
set -uo pipefail
: "${OUT:?a folder for the results}" "${PYTHON:=python3}" "${DRY:=}" "${SECONDS_IN_ALL:=400}" "${LEVELS:=1,8,64}"
mkdir -p "$OUT"; OUT=$(cd "$OUT" && pwd); cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1  # multicast hangs on hosts where it is broken

try() {  # name, most seconds, command
  local name=$1 most=$2 began=$SECONDS left=$((SECONDS_IN_ALL - SECONDS)); shift 2
  [ "$most" -lt "$left" ] || most=$left
  if [ "$most" -lt 10 ]; then echo "$name: no time is left" | tee -a "$OUT/summary.txt"; return; fi
  timeout -k 5 "$most" "$@" > "$OUT/$name.log" 2>&1
  echo "$name: status $? after $((SECONDS - began)) s: $*" | tee -a "$OUT/summary.txt"
  tail -3 "$OUT/$name.log"
}

if [ -n "$DRY" ]; then
  device=(--device cpu); tiny=(--tiny --device cpu); one=device=cpu; shape=small-llada2; LEVELS=1,2; every=1,2
  prompt=40; new=64; SECONDS_IN_ALL=2400; longest=800  # CPUs may be busy
else
  device=(); tiny=(); one=device=cuda; shape=llada2-mini; every=1,2,4,8,16,32,64; prompt=512; new=256; longest=100
fi

gpu_test() {  # name, most seconds, arguments of pytest
  local name=$1 most=$2; shift 2
  try "$name" "$most" $PYTHON -m pytest -q -p no:cacheprovider -o addopts= -m gpu --durations=3 "$@"
}

same_words() {  # name, model, settings: what one card says, and two, and two with settings of their own
  local name=$1 settings=("$one" dtype=float32 "model=$2" "${@:4}") two=runtime.tensor_parallel=2
  local ask=($PYTHON -m dinfer generate "Tom has 3 apples and buys 5 more. How many apples does he have?")
  try "$name-1" 90 "${ask[@]}" "${settings[@]}" &
  try "$name-2" 90 "${ask[@]}" "${settings[@]}" $two &
  [ -z "$3" ] || try "$name-2-dealt" 90 "${ask[@]}" "${settings[@]}" $two "$3" &
  wait
  for other in "$OUT/$name"-2*.log; do
    if cmp -s <(words "$OUT/$name-1.log") <(words "$other") && grep -q "^$name-1: status 0" "$OUT/summary.txt"; then
      echo "$(basename "$other" .log) says what $name-1 does: status 0"
    else
      echo "$(basename "$other" .log) DIFFERS from $name-1"
    fi | tee -a "$OUT/summary.txt"
  done
}

words() { grep -v "tokens per forward" "$1"; }  # without the line that ends with a time

warm() {  # compiles what one card will launch in `steps`; what it measures beside others is worth nothing
  try warm 85 $PYTHON -m benchmarks.tensor_parallel "${tiny[@]}" --budget 75 --longest 70 \
    --only "llada-8b, bf16, 1 " "llada-8b, fp8, 1 " "llada2-mini, bf16, 1 "
}

checks() {  # these need both cards, but not alone
  for stage in start loading capturing running; do
    gpu_test "kill-$stage" 120 tests/gpu/test_two_card_processes.py -k "ends_the_others and $stage" &
  done
  gpu_test words 120 tests/gpu/test_two_card_processes.py -k "say_what_one_does or a_command_ends" &
  gpu_test tokens 160 tests/gpu/test_two_card_tokens.py &
  same_words tiny tiny "" &
  same_words tiny-llada2 tiny-llada2 runtime.expert_parallel=true decoder=threshold sampling.temperature=0.7 sampling.top_k=20 &
  warm &
  wait
}

steps() {  # the table of docs/scaling.md in one session
  local budget=$((SECONDS_IN_ALL - SECONDS - 90))  # a server needs the rest
  try steps $((budget + 10)) $PYTHON -m benchmarks.tensor_parallel "${tiny[@]}" --budget $budget --longest $longest \
    --out "$OUT/tensor-parallel-h200.json"
}

server() {  # a replica of two cards under load
  try server $((longest * 8 / 5)) $PYTHON -m benchmarks.serving.load measure --shape $shape --spread --favour throughput \
    --new $new --tensor-parallel 2 "${device[@]}" --in-flight $LEVELS --prompt $prompt --rounds 4 --stagger --no-drafts \
    --out "$OUT/serving-$shape-two-cards-h200.json"
}

: > "$OUT/summary.txt"
[ $# -gt 0 ] || set -- checks steps server
for part in "$@"; do $part; done
! grep -v "status 0" "$OUT/summary.txt"
