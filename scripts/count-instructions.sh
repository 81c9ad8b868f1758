#!/usr/bin/env bash
# Instructions per event of a replay in the steady state, by callgrind: passes 12 minus passes 2, divided by ten times
# the events. Usage: scripts/count-instructions.sh [TRACE [REPLAY OPTION...]]; VRAMALLOC_PROGRAM names a release build, else one
# is made.
set -euo pipefail
cd "$(dirname "$0")/.."
trace=${1:-benches/traces/gpt2_amp.csv.gz}
shift || true
command -v valgrind >/dev/null || { echo "SKIPPED: valgrind is not installed (Debian: apt-get install valgrind)"; exit 0; }
program=${VRAMALLOC_PROGRAM:-}
if [ -z "$program" ]; then
  cargo build --release --quiet --bin vramalloc
  program=${CARGO_TARGET_DIR:-target}/release/vramalloc
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
count() {
  valgrind --tool=callgrind --callgrind-out-file="$scratch/out" "$program" replay \
    --device sim --format json --passes "$1" "${@:2}" "$trace" 2>&1 >/dev/null | awk '/Collected/ { print $4 }'
}
events=$(gzip -dc "$trace" | wc -l)
few=$(count 2 "$@")
many=$(count 12 "$@")
echo "$(basename "$trace" .csv.gz): $(((many - few) / (10 * events))) instructions per event"
