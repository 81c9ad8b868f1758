//! A forked child that drops everything asks the driver for nothing.

use crate::bench::bench;
use crate::streams::{BYTES, Use, launch};

#[test]
fn a_fork_keeps_its_hands_off_buffers_and_streams() {
    let Some(bench) = bench("a_fork_keeps_its_hands_off_buffers_and_streams") else { return };
    let (stream, other) = bench.streams();
    let memory =
        vramalloc::cuda::CudaAllocator::new(&bench.context, vramalloc::Config::default()).expect("allocator");
    let mut x = memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    launch(&bench, &other, &mut x, Use::Writing);
    drop(memory.alloc_zeros::<u8>(100, &stream).expect("its events are kept"));
    let slice = memory.alloc_zeros::<u8>(100, &stream).expect("zeros").into_cuda_slice().expect("slice");
    let lent = memory.alloc_zeros::<u8>(100, &stream).expect("zeros").into_cuda_slice().expect("slice");
    // SAFETY: the child does not drop the slice, and the parent takes it back.
    let (bare, lease) = unsafe { lent.release() };
    let host = memory.pin_slice(&[1_u8; 100]).expect("pinned");
    host.record_stream(&memory.stream(&other).expect("stream"));
    let (left, _) = bench.streams();
    drop(memory.alloc_zeros::<u8>(100, &left).expect("zeros"));
    drop(left); // the allocator alone has it

    // SAFETY: the child drops what is its copy, and ends; no other test runs meanwhile that could hold a lock.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(20) };
        let functions =
            ["cuStreamDestroy_v2", "cuEventDestroy_v2", "cuStreamWaitEvent", "cuEventRecord", "cuMemFree_v2"];
        let before = functions.map(|function| bench.fake.calls(function));
        let refused = lease.adopt(bare);
        let is_refused = refused.is_err(); // asking for its address takes a lock that nobody may be there to let go of
        std::mem::forget(refused);
        drop((x, slice, host, memory));
        let made_calls = functions.map(|function| bench.fake.calls(function)) != before;
        let code = i32::from(made_calls) | i32::from(!is_refused) << 1;
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork");
    let mut status = -1;
    // SAFETY: the pointer is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    other.synchronize().expect("the parent goes on");
    drop(lease.adopt(bare).map_err(|_| "refused").expect("the parent gets it back"));
}
