#!/usr/bin/env bash
# Whether PyTorch's own tools read our snapshots, and print our figures: replays recorded traces on the simulated device
# and gives the pickles to `python -m torch.cuda._memory_viz`. Needs Python with PyTorch; no GPU.
#
#   scripts/check-memory-viz.sh [VRAMALLOC]      the program; else it is built
#
# PYTHON names the interpreter; MEMORY_VIZ the file of the module, where PyTorch as a whole is not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

program=${1:-}
if [ -z "$program" ]; then
  cargo build --bin vramalloc
  program=${CARGO_TARGET_DIR:-target}/debug/vramalloc
fi
python=${PYTHON:-python3}
folder=$(mktemp -d)
stub=/tmp/$(id -u)_flamegraph.pl
trap 'rm -rf "$folder"; [ -z "${ours:-}" ] || rm -f "$stub"' EXIT

# `segments` hands its lines to a script that it would download, to one of two places; one that passes the lines on does.
mkdir -p "$folder/home/.cache"
printf '#!/bin/sh\nexec cat\n' > "$folder/home/.cache/flamegraph.pl"
chmod +x "$folder/home/.cache/flamegraph.pl"
export PYTHONUSERBASE=${PYTHONUSERBASE:-$HOME/.local}
if [ ! -e "$stub" ]; then
  ours=yes
  cp "$folder/home/.cache/flamegraph.pl" "$stub"
fi

viz() {
  local HOME=$folder/home
  export HOME
  if [ -n "${MEMORY_VIZ:-}" ]; then "$python" "$MEMORY_VIZ" "$@"; else "$python" -m torch.cuda._memory_viz "$@"; fi
}

# Whole runs, at whose end little is live, and runs cut off in the middle.
for trace in gnn resnet50 serving_streams; do
  cp "benches/traces/$trace.csv.gz" "$folder/$trace.csv.gz"
  lines=$(($(gzip -dc "$folder/$trace.csv.gz" | wc -l) / 2))
  # `sed` reads to the end, so that nothing is written to a closed pipe.
  gzip -dc "$folder/$trace.csv.gz" | sed -n "1,${lines}p" > "$folder/$trace.half.csv"
done

count=0
for file in "$folder"/*.csv.gz "$folder"/*.csv; do
  for segments in fixed expandable; do
    name=$(basename "$file" .gz)
    out=$folder/${name%.csv}.$segments
    "$program" replay --device sim --segments $segments --snapshot "$out.pickle" --stats "$out.stats.json" "$file" > /dev/null
    viz stats "$out.pickle" > "$out.stats.txt"
    viz trace "$out.pickle" > "$out.trace.txt"
    viz segments "$out.pickle" -o "$out.segments.txt" > /dev/null
    viz trace_plot "$out.pickle" -o "$out.html" > /dev/null
    count=$((count + 1))
  done
done
"$python" scripts/check_memory_viz.py "$folder" "$count"
