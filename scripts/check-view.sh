#!/usr/bin/env bash
# Whether the page of `vramalloc view` opens and answers in time in a headless Chromium, and says what the snapshot says.
# Needs Node and a Chromium (or Chrome); leaves the pages and screenshots in target/view.
#
#   scripts/check-view.sh [VRAMALLOC]      the program; else it is built
#
# CHROMIUM names the browser. Without one (or Node) it says so and ends well, unless VRAMALLOC_REQUIRE_CHROMIUM=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing() {
  echo "skipped: scripts/check-view.sh: $*" >&2
  [ "${VRAMALLOC_REQUIRE_CHROMIUM:-0}" = 0 ]
  exit
}

command -v node > /dev/null || missing "no Node here"
for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
  [ -z "$name" ] || ! command -v "$name" > /dev/null || { browser=$(command -v "$name"); break; }
done
[ -n "${browser:-}" ] || missing "no Chromium here (apt-get install chromium, or name one in CHROMIUM)"

program=${1:-}
if [ -z "$program" ]; then
  cargo build --bin vramalloc
  program=${CARGO_TARGET_DIR:-target}/debug/vramalloc
fi
folder=${CARGO_TARGET_DIR:-target}/view
mkdir -p "$folder"

"$program" replay --device sim --snapshot "$folder/big.pickle" benches/traces/llama_generate.csv.gz > /dev/null
"$program" convert --to json -o "$folder/big.json" "$folder/big.pickle"
"$program" view "$folder/big.pickle" -o "$folder/big.html"
"$program" view tests/data/snapshots/mlp.pickle.gz -o "$folder/mlp.html"

# A million events: up to 3,000 blocks of many sizes, the same in every run.
awk 'BEGIN {
  seed = 7; next_id = 0; count = 0
  for (event = 0; event < 1000000; event++) {
    seed = (seed * 16807) % 2147483647
    if (count < 100 || (count < 3000 && seed % 2)) {
      printf "a,%d,%d,%d\n", next_id, 512 * (1 + seed % 4096), seed % 3
      live[count++] = next_id++
    } else {
      at = seed % count
      printf "f,%d\n", live[at]
      live[at] = live[--count]
    }
  }
}' > "$folder/long.csv"
"$program" view "$folder/long.csv" -o "$folder/long.html"

# Names that would run if they were taken for HTML.
evil='</script><img src=x onerror=\"window.ran=1\"><svg onload=\"window.ran=1\">'
cat > "$folder/hostile.json" << END
{"segments": [], "allocator_settings": {}, "external_annotations": [], "device_traces": [[
  {"action": "segment_alloc", "addr": 1048576, "size": 20971520, "stream": 0, "time_us": 1, "frames": []},
  {"action": "alloc", "addr": 1048576, "size": 5242880, "stream": 0, "time_us": 2, "user_metadata": "$evil",
   "frames": [{"name": "$evil", "filename": "<img src=x onerror=alert(1)>", "line": 3}]},
  {"action": "alloc", "addr": 6291456, "size": 10485760, "stream": 0, "time_us": 3, "user_metadata": "{{data}} --> \\u2028",
   "frames": [{"name": "{{script}}", "filename": "javascript:alert(1)", "line": 0}]}
]]}
END
hostile_name='<img src=x onerror=alert(1)>'
cp "$folder/hostile.json" "$folder/$hostile_name.json"
"$program" view "$folder/$hostile_name.json" -o "$folder/hostile.html"
rm "$folder/$hostile_name.json"

# Nothing but what is live, and nothing at all.
cat > "$folder/live.json" << 'END'
{"device_traces": [[]], "segments": [
  {"device": 0, "address": 2097152, "total_size": 4194304, "stream": 0, "segment_type": "large", "blocks": [
    {"address": 2097152, "size": 3145728, "requested_size": 3000000, "state": "active_allocated"},
    {"address": 5242880, "size": 1048576, "requested_size": 0, "state": "inactive"}]}]}
END
echo '{"device_traces": [], "segments": []}' > "$folder/empty.json"
"$program" view "$folder/live.json" -o "$folder/live.html"
"$program" view "$folder/empty.json" -o "$folder/empty.html"

node scripts/check_view.mjs "$browser" "$folder"
