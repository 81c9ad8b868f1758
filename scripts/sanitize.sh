#!/usr/bin/env bash
# The tests of the CUDA driver, the bridge to cudarc and page-locked memory under memory checkers, on the fake libcuda, and
# those with threads, of the allocator and all that is around it, under ThreadSanitizer: no GPU is needed.
# `scripts/sanitize.sh [valgrind] [asan] [tsan]`, all by default. AddressSanitizer needs a nightly toolchain, ThreadSanitizer
# its sources, too, and some minutes for a first build, as it takes in the standard library; the tests take one or two. What
# is not there is left out, with a line that says so.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- valgrind asan tsan
wanted() { case " $wants " in *" $1 "*) true ;; *) false ;; esac; }
wants=$*

tests=(fake_cuda cuda_driver pinned buffer)
# These leak by design: what they gave away may still be in use, or its end would name a stream that is gone or captured, or
# ask a driver that is lost or out of order.
skip=()
for leaks in a_lease_that_is_dropped_keeps_the_memory_from_everyone a_slice_returned_during_a_capture_does_not_break_it \
  no_call_names_a_stream_after_it_was_retired a_recycled_handle_is_not_taken_for_the_retired_stream \
  waits_that_fail_at_a_slices_end_are_ours_to_report a_lost_device_parks_nothing_on_the_default_stream \
  a_driver_out_of_order_parks_nothing_where_cudarc_waits_for_nothing; do
  skip+=(--skip "$leaks")
done

binary() { # of a test, from cargo's messages
  cargo test --no-run --test "$1" --message-format json 2>/dev/null |
    grep -o "\"executable\":\"[^\"]*/$1-[^\"]*\"" | tail -n 1 | cut -d'"' -f4
}

if ! wanted valgrind; then
  :
elif command -v valgrind >/dev/null; then
  for test in "${tests[@]}"; do
    printf '\n== valgrind %s\n' "$test"
    valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
      --num-callers=30 "$(binary "$test")" --test-threads 1 "${skip[@]}" --skip a_fork_keeps_its_hands_off
  done
else
  echo "LEFT OUT: valgrind is not installed" >&2
fi

host=$(rustc -vV | sed -n 's/^host: //p')
if ! wanted asan; then
  :
elif cargo +nightly --version >/dev/null 2>&1; then
  for test in "${tests[@]}"; do
    printf '\n== AddressSanitizer %s\n' "$test"
    # The fake library stays loaded to the end, with what it holds; valgrind looks for leaks.
    ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS="-Zsanitizer=address" cargo +nightly test --target "$host" \
      --target-dir "${CARGO_TARGET_DIR:-target}/sanitize" --test "$test" -- "${skip[@]}"
  done
else
  echo "LEFT OUT: AddressSanitizer needs a nightly toolchain (rustup toolchain install nightly)" >&2
fi

sources=lib/rustlib/src/rust/library/Cargo.lock
if ! wanted tsan; then
  :
elif [ -e "$(rustc +nightly --print sysroot 2>/dev/null)/$sources" ]; then
  printf '\n== ThreadSanitizer\n'
  # The first race ends a test program: after it there are often thousands. The fake library takes the sanitizer's functions
  # from the program that loads it, hence the link argument.
  TSAN_OPTIONS=halt_on_error=1 RUSTFLAGS="-Zsanitizer=thread -Clink-arg=-rdynamic" \
    CARGO_PROFILE_DEV_OPT_LEVEL=${CARGO_PROFILE_DEV_OPT_LEVEL:-1} cargo +nightly test -Zbuild-std --target "$host" \
    --target-dir "${CARGO_TARGET_DIR:-target}/tsan" -p vramalloc -p vramalloc-capi --lib --test stress --test scenarios \
    --test regressions --test diagnostics --test sim_device --test buffer --test pinned --test cuda_driver --test fake_cuda
else
  echo "LEFT OUT: ThreadSanitizer needs a nightly toolchain with its sources" \
    "(rustup toolchain install nightly --component rust-src)" >&2
fi
