#!/usr/bin/env bash
# Trains and measures the adapters of the models in the box: four runs, each on a card of its own where there are four.
# OUT gets a tar of each: the adapter, training.json, the tables of benchmarks.quality, and the log.
#   SECONDS_EACH=290 OUT=out tools/distill_boxes.sh
set -u
cards=$(nvidia-smi -L | wc -l)
slot=0
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false
each=${SECONDS_EACH:-290}
work=$(mktemp -d)

one() { # name, card, model, arguments of distill_tiny, arguments of quality
    local name=$1 card=$2 model=$3 dir=$work/$1
    mkdir -p "$dir"
    {
        export CUDA_VISIBLE_DEVICES=$card
        # shellcheck disable=SC2086
        python -m tools.distill_tiny "$model" "$dir" --fit-seconds "$each" $4 ||
            python -m tools.distill_tiny "$model" "$dir" --fit-seconds $((each - 120)) --no-graphs $4
        # shellcheck disable=SC2086
        timeout "${EVAL_SECONDS:-190}" python -m benchmarks.quality --preset several --model "$model" --adapter "$dir" $5 \
            --rows 1000 --device cuda --out "$dir/table"
    } >"$dir/log.txt" 2>&1
    tar -C "$work" -cf "$OUT/$name.tar" "$name"
    tail -n 3 "$dir/log.txt"
}

start() {
    one "$1" $((slot % cards)) "$2" "$3" "$4" &
    slot=$((slot + 1))
}

start d2f tiny "--block 32 --length 144" "--block 32"
start d2f-edits tiny "--block 32 --length 144 --drafts 0.4" "--block 32 --edits"
start llada2-edits tiny-llada2 "--rank 48 --drafts 0.4" "--edits"
start llada2-moves tiny-llada2 "--rank 48 --drafts 0.5 --moves 0.25" "--edits"
wait
ls -l "$OUT"
