#!/usr/bin/env bash
# What guidellm gets from a server of a full-size shape, beside what its engine yields alone: text, and drafts.
#
#   OUT=results benchmarks/serving/guidellm.sh
#   OUT=/tmp/dry LEVELS=1,4 DRAFTS=4 benchmarks/serving/guidellm.sh --shape small-llada2 --device cpu --prompt 40 --new 64
#
# All arguments go to benchmarks.serving.full_size. guidellm comes twice, and the second time counts: before, graphs are
# captured of all shapes that its way of sending requests leads to. Then benchmarks.serving.streams sends the same load,
# and tells the time between pieces, of which guidellm tells means alone. With --stagger (one level, ROUNDS=4) requests
# end one by one. Without, all end at once, and the card waits until the generator has asked for as many more.
# PYTHON runs dinfer and GUIDELLM guidellm, which may need packages of its own. Results: OUT/text.json, OUT/drafts.json,
# OUT/streams.jsonl and OUT/*.log. CPU seconds of the server are of its event loop, and of its engine's thread.
set -euo pipefail
: "${OUT:?a folder for the results}" "${LEVELS:=1,16,64,256}" "${DRAFTS:=64}" "${ROUNDS:=2}" "${PORT:=8100}"
: "${PYTHON:=python3}" "${GUIDELLM:=python3 -m guidellm}"
[ $# -gt 0 ] || set -- --shape llada2-mini --spread --settle --gather --prompt 512 --new 256
work=$(mktemp -d); mkdir -p "$OUT"; : > "$OUT/server.log"
PYTHONUNBUFFERED=1 $PYTHON -m benchmarks.serving.full_size --port "$PORT" --out "$work/engine.json" \
  --prompts-to "$work/load" --in-flight "$LEVELS" --rounds "$ROUNDS" "$@" > "$OUT/server.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true; rm -rf "$work"' EXIT
until grep -q '^ready' "$OUT/server.log"; do
  kill -0 $server 2> /dev/null || { tail -5 "$OUT/server.log"; exit 1; }
  sleep 0.5
done
grep '^{.in_flight' "$OUT/server.log"; echo "ready after $SECONDS s"
url=http://127.0.0.1:$PORT

cpu() {  # hundredths of a second: of the first thread, and of the busiest other one
  for task in /proc/$server/task/*; do sed 's/.*) //' "$task/stat" | awk -v id="${task##*/}" '{print id, $12 + $13}'; done |
    awk -v id=$server '$1 == id {main = $2} $1 != id && $2 > other {other = $2} END {print main, other + 0}'
}

streams() {  # number in flight, further arguments
  $PYTHON -m benchmarks.serving.streams --url "$url/v1/completions" --prompts "$work/load/prompts.jsonl" --streams "$@"
}

load() {  # kind, number in flight
  cat > "$work/$1.yaml" <<Y
spec:
  backend:
    kind: openai_http
    target: "$url"
    model: shape
    request_format: /v1/completions
    extras: {body: {dinfer: {drafts: $([ "$1" = text ] && echo false || echo true)}}}
Y
  for pass in warm kept; do
    read -r main engine <<< "$(cpu)"
    timeout 60 $GUIDELLM run -c "$work/$1.yaml" --tokenizer "kind=huggingface_auto,model=$work/load" \
      --data "kind=json_file,path=$work/load/prompts.jsonl" --profile "kind=concurrent,streams=$2" \
      --constraint "kind=max_requests,count=$(($2 * ROUNDS))" --output "kind=json,path=$work/$1-$2.json" \
      --disable-console > "$OUT/guidellm.log" 2>&1 || tail -3 "$OUT/guidellm.log"
    read -r main_after engine_after <<< "$(cpu)"
    echo "$1 $2, $pass: event loop $((main_after - main))0 ms, engine $((engine_after - engine))0 ms, $SECONDS s"
  done
  streams "$2" --rounds "$ROUNDS" $([ "$1" = text ] || echo --drafts) | tee -a "$OUT/streams.jsonl"
  [ ! -e "$work/$1-$2.json" ] || $PYTHON -m benchmarks.serving.ratio "$work/engine.json" "$work/$1"-*.json --out "$OUT/$1.json" | tail -1
}

: > "$OUT/streams.jsonl"
for n in ${DRAFTS//,/ }; do load text "$n"; load drafts "$n"; done
for n in ${LEVELS//,/ }; do [[ ",$DRAFTS," = *",$n,"* ]] || load text "$n"; done
curl -s "$url/metrics" | grep -E '^dinfer_(round_seconds_(sum|count)|inter_commit|time_to_first)' > "$OUT/metrics.txt"
