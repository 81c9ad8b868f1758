#!/usr/bin/env bash
# Everything that needs a GPU, from binaries built elsewhere, so that the GPU machine needs no Rust: on the building
# machine `scripts/gpu-run.sh build FOLDER` (`build-c FOLDER`: only what sweep, bench and soak need), on the GPU machine
# `FOLDER/gpu-run.sh run [PART...]` from the repository's root. Parts: tests example table replay kernels cudarc sanitize
# nvml viz (default: these; `cudarc` needs cuBLAS, cuRAND and NVRTC, `viz` PyTorch), workloads (the examples that compute;
# as `cudarc`, and data_parallel NCCL), and sweep bench soak, which run PyTorch and CuPy on the library, and C programs.
# What those four say in short comes last.
set -euo pipefail

# Lines of the workloads that belong into a summary.
WORDS='^(memory |cuMem|vramalloc |ratio |largest |loss scale|compared |rank |stage |.* ms a step;|activations )'
WORKLOADS=(train kv_cache checkpointing find_batch_size out_of_memory mixed_precision resnet data_parallel pipeline)

build_c() {
  local folder=$1 name
  mkdir -p "$folder"
  cargo build --release -p vramalloc-capi
  cp "${CARGO_TARGET_DIR:-target}/release/libvramalloc_c.so" "$folder"
  for name in api fork soak; do
    # shellcheck disable=SC2016
    cc -std=c11 -O2 -pthread -I capi/include "capi/tests/c/$name.c" -o "$folder/$name" -L "$folder" -lvramalloc_c \
      -Wl,-rpath,'$ORIGIN'
  done
  strip "$folder"/{libvramalloc_c.so,api,fork,soak}
  cp "${BASH_SOURCE[0]}" "$folder/gpu-run.sh"
}

build() {
  local folder=$1
  mkdir -p "$folder"
  cargo build --release --bin vramalloc --example train_mlp "${WORKLOADS[@]/#/--example=}"
  local release=${CARGO_TARGET_DIR:-target}/release
  cp "$release/vramalloc" "$release/examples/train_mlp" "${WORKLOADS[@]/#/$release/examples/}" "$folder"
  cargo test --release --no-run --test gpu --test cuda_driver --test gpu_cudarc --test tensor_gradients --message-format json > "$folder/build.json"
  cargo test --release --no-run --features nvml --test nvml --message-format json >> "$folder/build.json"
  cargo bench --no-run --features stacks --bench table --message-format json >> "$folder/build.json"
  for name in gpu cuda_driver gpu_cudarc tensor_gradients nvml table; do
    cp "$(grep -o "\"executable\":\"[^\"]*/$name-[^\"]*\"" "$folder/build.json" | tail -n 1 | cut -d'"' -f4)" "$folder/$name"
  done
  rm "$folder/build.json"
  build_c "$folder"
  (cd "$folder" && strip vramalloc train_mlp gpu cuda_driver gpu_cudarc tensor_gradients nvml table "${WORKLOADS[@]}")
  cp "${BASH_SOURCE[0]}" "$folder/gpu-run.sh"
  du -sh "$folder"
}

# cudarc looks for libnccl.so; packages often bring libnccl.so.2 alone: gives it that name in a folder of its own.
link_nccl() {
  local library
  library=$({ IFS=:; find ${LD_LIBRARY_PATH:-} /usr/lib/x86_64-linux-gnu /usr/local/cuda/lib64 -name 'libnccl.so.2' 2> /dev/null
    python3 -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0] + "/lib/libnccl.so.2")' 2> /dev/null; } | head -n 1) || true
  [ -n "$library" ] || { echo "there is no libnccl.so.2"; return 0; }
  mkdir -p "$1/libraries"
  ln -sf "$library" "$1/libraries/libnccl.so"
  export LD_LIBRARY_PATH="$1/libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# The tensor library's gradients, then each workload; what they say goes to $OUT, too, and one line of each to the summary.
workloads_part() {
  local words=$1 here=$2 logs=${OUT:-$(mktemp -d)} result=0 name begin state
  link_nccl "$words"
  "$here/tensor_gradients" --test-threads 1 || result=1
  printf '%-18s%8s%10s\n' workload seconds result > "$words/workloads"
  for name in "${WORKLOADS[@]}"; do
    printf '\n-- %s\n' "$name"
    begin=$(date +%s.%N) state=ok
    "$here/$name" --device cuda:0 > "$logs/$name.txt" 2>&1 || { state=failed result=1; }
    tail -n 40 "$logs/$name.txt"
    grep -E "$WORDS" "$logs/$name.txt" | sed "s/^/    /" > "$words/workloads-$name" || true
    printf '%-18s%8.1f%10s\n' "$name" "$(echo "$(date +%s.%N) $begin" | awk '{ print $1 - $2 }')" $state >> "$words/workloads"
  done
  return $result
}

# A Python script on the library; all of what it says goes to $OUT (or a folder of its own), the table to the summary.
python_part() {
  local name=$1 words=$2 here=$3 logs=${OUT:-$(mktemp -d)} result=0
  shift 3
  VRAMALLOC_LIBRARY="$here/libvramalloc_c.so" python3 "examples/python/$name.py" "$@" > "$logs/$name.txt" 2>&1 || result=1
  sed '/^\(section\|model\) /,$d' "$logs/$name.txt" | tail -c 6000
  sed -n '/^\(section\|model\) /,$p' "$logs/$name.txt" > "$words/$name"
  return $result
}

run() {
  local here
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  export VRAMALLOC_REQUIRE_GPU=1 VRAMALLOC_TRACES="$PWD/benches/traces"
  local parts=("$@")
  [ ${#parts[@]} -gt 0 ] || parts=(tests example table replay kernels cudarc sanitize nvml viz)
  local part failed=() words
  words=$(mktemp -d)
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
        # The steady state, without what the machine does beside it.
        "$here/vramalloc" replay --device cuda:0 --passes 40 benches/traces/*.csv.gz | grep -E 'segments on|least' \
          | tr -d '│┆' | paste - - | awk '{ print "steady state: " $1 ", " $(NF - 1), $NF }' | tee "$words/replay"
        ;;
      kernels) "$here/gpu" --test-threads 1 --nocapture ;;
      cudarc) "$here/gpu_cudarc" --test-threads 1 --nocapture ;;
      sanitize)
        VRAMALLOC_TRACE_EVENTS=3000 compute-sanitizer --error-exitcode 9 "$here/gpu" --test-threads 1 --nocapture \
          --skip blocks_keep_their_contents_under_churn
        ;;
      nvml) "$here/nvml" --nocapture ;;
      viz) scripts/check-memory-viz.sh "$here/vramalloc" ;;
      workloads) workloads_part "$words" "$here" ;;
      sweep) python_part sweep "$words" "$here" ;;
      bench) python_part bench "$words" "$here" --json "${OUT:-$words}/bench.json" ;;
      soak)
        "$here/api" cuda:0 | tail -n 1 | tee "$words/soak-0" \
          && VRAMALLOC_DEVICE=cuda VRAMALLOC_CONF=segments:expandable "$here/fork" cuda:0 40 2> "$words/fork" \
          | tee -a "$words/soak-0" && rm "$words/fork" && for segments in fixed expandable; do
          VRAMALLOC_CONF=segments:$segments "$here/soak" cuda:0 "${VRAMALLOC_SOAK_EVENTS:-10000000}" \
            | sed "s/^/$segments: /" | tee "$words/soak-$segments" || break
        done && [ -s "$words/soak-expandable" ]
        ;;
      *) echo "no such part: $part" >&2; exit 2 ;;
    esac || failed+=("$part")
  done
  printf '\n== in short\n'
  rm -f "$words/bench.json"; rm -rf "$words/libraries"; cat "$words"/* 2> /dev/null || true
  rm -r "$words"
  printf '\nfailed: %s\n' "${failed[*]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
}

case ${1:-} in
  build) build "${2:?a folder}" ;;
  build-c) build_c "${2:?a folder}" ;;
  run) shift; run "$@" ;;
  *) sed -n '2,7p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
