//! Page-locked buffers as cudarc's `HostSlice`.

use crate::bench::{FOREVER, ONE, bench};
use cudarc::driver::{HostSlice, PushKernelArg};

const LEN: usize = 1 << 20;

#[test]
fn copies_of_cudarc_take_pinned_buffers() {
    let Some(bench) = bench("copies_of_cudarc_take_pinned_buffers") else { return };
    let (stream, _) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u16>(3, &stream).expect("zeros");
    let host = bench.memory.pin_slice(&[1_u16, 2, 3]).expect("pinned");
    assert_eq!(HostSlice::len(&host), 3);
    stream.memcpy_htod(&host, &mut x).expect("htod");
    let mut back = bench.memory.alloc_pinned::<u16>(3).expect("pinned");
    stream.memcpy_dtoh(&x, &mut back).expect("dtoh");
    assert_eq!(back.as_slice().expect("waits for the copy"), [1, 2, 3]);
    let owned = stream.clone_htod(&host).expect("to a slice of cudarc's own");
    assert_eq!(stream.clone_dtoh(&owned).expect("dtoh"), [1, 2, 3]);
}

#[test]
fn a_dropped_buffer_is_not_reused_before_cudarcs_copy() {
    let Some(bench) = bench("a_dropped_buffer_is_not_reused_before_cudarcs_copy") else { return };
    let (stream, other) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(LEN, &stream).expect("zeros");
    for is_known in [true, false] {
        let copies = if is_known { &stream } else { &other };
        let nap = bench.memory.alloc_uninit::<u8>(512, copies).expect("alloc");
        // SAFETY: the kernel reads the buffer.
        unsafe {
            let mut builder = copies.launch_builder(&bench.read);
            builder.arg(&nap).arg(&512_u64).arg(&FOREVER).launch(ONE).expect("launch");
        }
        drop(nap);
        if !is_known {
            bench.memory.retire_stream(copies).expect("retire");
        }
        let waits = bench.fake.calls("cuStreamSynchronize");
        let host = bench.memory.pin_slice(&vec![5_u8; LEN]).expect("pinned");
        let place = host.as_ptr();
        copies.memcpy_htod(&host, &mut x).expect("htod");
        drop(host);
        let waited = bench.fake.calls("cuStreamSynchronize") - waits;
        assert_eq!(waited > 0, !is_known, "only a stream that is not known is waited for");
        let mut next = bench.memory.alloc_pinned::<u8>(LEN).expect("pinned");
        assert_eq!(next.as_ptr() == place, !is_known);
        next.as_mut_slice().expect("slice").fill(6);
        assert_eq!(x.slice(LEN - 1..).to_vec().expect("download"), [5], "known: {is_known}");
        bench.memory.empty_host_cache().expect("empty");
    }
}

#[test]
fn the_driver_says_what_is_page_locked() {
    let Some(bench) = bench("the_driver_says_what_is_page_locked") else { return };
    let (stream, _) = bench.streams();
    let host = bench.memory.pin_slice(&[9_u8; 64]).expect("pinned");
    let mut x = bench.memory.alloc_zeros::<u8>(64, &stream).expect("zeros");
    let before = bench.fake.calls("cuStreamSynchronize");
    x.copy_from_slice(&[1; 64]).expect("staged by the driver");
    assert_eq!(bench.fake.calls("cuStreamSynchronize"), before);
    x.copy_from_slice(host.as_slice().expect("slice")).expect("waited for: the slice ends with the call");
    assert_eq!(bench.fake.calls("cuStreamSynchronize"), before + 1);
    assert_eq!(x.to_vec().expect("download"), [9; 64]);
}
