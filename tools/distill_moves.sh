#!/usr/bin/env bash
# Trains the adapter that deletes and splits, from the one with several blocks, on one card; then measures it beside the
# same adapter without, and fills the tables of the models without adapters. OUT gets a tar.
#   OUT=out tools/distill_moves.sh
set -u
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false
work=$(mktemp -d)
results=$work/moves
mkdir -p "$results"
base=dinfer/demo/checkpoints/tiny-llada2-multi-block

python -m tools.distill_tiny tiny-llada2 "$results" --start-from $base --rank 48 --drafts 0.6 --moves 0.4 --rounds 1 \
    --rows 16384 --warmup 100 --fit-seconds "${SECONDS_TRAIN:-90}" --no-compile >"$results/log.txt" 2>&1

left=${SECONDS_TABLES:-100}
table() { # name, arguments of benchmarks.quality
    timeout "$left" python -m benchmarks.quality --preset several --device cuda --rows 1000 --out "$results/$1" "${@:2}" \
        >"$results/$1.txt" 2>&1 &
}
table insert-delete --model tiny-llada2 --adapter "$results" --edits \
    --only '(align=True|^block_diffusion) +(joint_threshold|insert_delete)'
table tiny-llada2 --model tiny-llada2 --edits --only '^(multi_block|dmax).*align=True (joint|dmax|threshold)'
table tiny --model tiny --only '^(multi_block|lopa)'
table lopa --model tiny --adapter tiny-d2f --block 32 --only '^lopa'
timeout "$left" python -m benchmarks.quality --preset everything --device cuda --out "$results/quality" \
    --only '^(blockwise block=32|full) (calibrated|prophet|daedal|s2d2)|d2cache' >"$results/quality.txt" 2>&1 &
wait
tar -C "$work" -cf "$OUT/moves.tar" moves
tail -n 3 "$results"/*.txt
