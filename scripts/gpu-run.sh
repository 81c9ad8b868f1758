#!/usr/bin/env bash
# Everything that needs a GPU, from binaries built elsewhere, so that the GPU machine needs no Rust: on the building
# machine `scripts/gpu-run.sh build FOLDER`, on the GPU machine `FOLDER/gpu-run.sh run [PART...]` from the repository's
# root. Parts: tests example table replay kernels sanitize nvml viz (default: all; viz needs PyTorch).
set -euo pipefail

build() {
  local folder=$1
  mkdir -p "$folder"
  cargo build --release --bin vramalloc --example train_mlp
  local release=${CARGO_TARGET_DIR:-target}/release
  cp "$release/vramalloc" "$release/examples/train_mlp" "$folder"
  cargo test --release --no-run --test gpu --test cuda_driver --message-format json > "$folder/build.json"
  cargo test --release --no-run --features nvml --test nvml --message-format json >> "$folder/build.json"
  cargo bench --no-run --features stacks --bench table --message-format json >> "$folder/build.json"
  for name in gpu cuda_driver nvml table; do
    cp "$(grep -o "\"executable\":\"[^\"]*/$name-[^\"]*\"" "$folder/build.json" | tail -n 1 | cut -d'"' -f4)" "$folder/$name"
  done
  rm "$folder/build.json"
  strip "$folder"/{vramalloc,train_mlp,gpu,cuda_driver,nvml,table}
  cp "${BASH_SOURCE[0]}" "$folder/gpu-run.sh"
  du -sh "$folder"
}

run() {
  local here
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  export VRAMALLOC_REQUIRE_GPU=1 VRAMALLOC_TRACES="$PWD/benches/traces"
  local parts=("$@")
  [ ${#parts[@]} -gt 0 ] || parts=(tests example table replay kernels sanitize nvml viz)
  local part failed=()
  for part in "${parts[@]}"; do
    printf '\n== %s\n' "$part"
    case $part in
      tests) "$here/cuda_driver" --test-threads 1 ;;
      example) "$here/train_mlp" --device cuda:0 && VRAMALLOC_CONF=segments:expandable "$here/train_mlp" --device cuda:0 ;;
      table) "$here/table" && VRAMALLOC_CONF=segments:expandable "$here/table" ;;
      replay)
        for segments in fixed expandable; do
          "$here/vramalloc" replay --device cuda:0 --segments $segments --format json benches/traces/*.csv.gz
        done
        ;;
      kernels) "$here/gpu" --test-threads 1 --nocapture ;;
      sanitize)
        VRAMALLOC_TRACE_EVENTS=3000 compute-sanitizer --error-exitcode 9 "$here/gpu" --test-threads 1 --nocapture \
          --skip blocks_keep_their_contents_under_churn
        ;;
      nvml) "$here/nvml" --nocapture ;;
      viz) scripts/check-memory-viz.sh "$here/vramalloc" ;;
      *) echo "no such part: $part" >&2; exit 2 ;;
    esac || failed+=("$part")
  done
  printf '\nfailed: %s\n' "${failed[*]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
}

case ${1:-} in
  build) build "${2:?a folder}" ;;
  run) shift; run "$@" ;;
  *) sed -n '2,5p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
