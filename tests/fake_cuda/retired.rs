//! Streams that the user has let go of while buffers of theirs live: no call names them any more.

use crate::bench::{Bench, bench};
use crate::streams::{BYTES, Use, launch, reuse};
use cudarc::driver::{CudaStream, result};
use std::sync::Arc;
use vramalloc::{DeviceBuffer, DriverErrorKind, Error};

/// A stream of another library, which destroys it when it likes.
fn borrowed(bench: &Bench) -> Arc<CudaStream> {
    let handle = result::stream::create(result::stream::StreamKind::NonBlocking).expect("stream");
    // SAFETY: it lives until the test destroys it.
    unsafe { bench.context.wrap_borrowed_stream(handle) }
}

fn retire_and_destroy(bench: &Bench, stream: &CudaStream) {
    bench.memory.retire_stream(stream).expect("retire");
    // SAFETY: it was made by `borrowed`, and is let go of.
    unsafe { result::stream::destroy(stream.cu_stream()) }.expect("destroy");
}

fn refused<T>(result: Result<T, Error>) {
    let Err(Error::Driver(error)) = result.map(drop) else { panic!("it names a stream that was retired") };
    assert_eq!(error.kind, DriverErrorKind::StreamGone);
    let text = error.to_string();
    assert!(text.contains("retired") && text.contains("_on"), "{text}");
}

#[test]
fn no_call_names_a_stream_after_it_was_retired() {
    let Some(bench) = bench("no_call_names_a_stream_after_it_was_retired") else { return };
    let (lasting, other) = bench.streams();
    let known = bench.memory.stream(&lasting).expect("stream");
    let stream = borrowed(&bench);
    let mut used = bench.memory.clone_htod(&vec![7_u8; BYTES], &stream).expect("upload");
    let [mut seen, lent, bare, plain] =
        [(); 4].map(|()| bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros"));
    launch(&bench, &other, &mut seen, Use::Writing);
    let lent = lent.into_cuda_slice().expect("slice");
    // SAFETY: the slice comes back below.
    let (slice, lease) = unsafe { bare.into_cuda_slice().expect("slice").release() };
    retire_and_destroy(&bench, &stream);

    refused(used.to_vec());
    refused(used.copy_from_slice(&vec![1; BYTES]));
    refused(used.set_zero());
    refused(used.try_clone());
    let host = bench.memory.pin_slice(&vec![1_u8; BYTES]).expect("pinned");
    refused(used.copy_from_pinned(&host));
    refused(plain.into_cuda_slice());
    let mut values = vec![0; BYTES];
    used.as_view().copy_to_slice_on(&mut values, &known).expect("on a stream that lives");
    assert_eq!(values[BYTES - 1], 7);
    assert_eq!(lasting.clone_dtoh(&used.slice(..2)).expect("cudarc on a stream that lives"), [7, 7]);

    drop(lent);
    let returned = lease.adopt(slice).map_err(|_| "refused").expect("the one").into_buffer();
    let all: [DeviceBuffer<u8>; 3] = [used, seen, returned];
    drop(all);
    reuse(&bench, &lasting, "the memory of a retired stream");
    bench.context.synchronize().expect("synchronize");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_reserved(), 0, "nothing is stranded");
}

#[test]
fn a_recycled_handle_is_not_taken_for_the_retired_stream() {
    let Some(bench) = bench("a_recycled_handle_is_not_taken_for_the_retired_stream") else { return };
    let (lasting, _) = bench.streams();
    let stream = borrowed(&bench);
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    bench.context.synchronize().expect("synchronize");
    retire_and_destroy(&bench, &stream);
    let recycled = bench.context.new_stream().expect("stream");
    assert_eq!(recycled.cu_stream(), stream.cu_stream(), "the handle is another stream's now");
    launch(&bench, &recycled, &mut x, Use::Writing);
    drop(x);
    reuse(&bench, &lasting, "used on the recycled handle");
    let y = bench.memory.alloc_zeros::<u8>(16, &recycled).expect("a stream like any other");
    assert_eq!(y.to_vec().expect("download"), [0; 16]);
    bench.context.synchronize().expect("synchronize");
}

#[test]
fn a_stream_of_cudarcs_own_can_be_retired_while_buffers_live() {
    let Some(bench) = bench("a_stream_of_cudarcs_own_can_be_retired_while_buffers_live") else { return };
    let (stream, other) = bench.streams();
    let events = || bench.fake.calls("cuEventCreate") - bench.fake.calls("cuEventDestroy_v2");
    let before = events();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    bench.memory.retire_stream(&stream).expect("retire");
    launch(&bench, &other, &mut x, Use::Writing);
    refused(x.to_vec());
    drop(stream);
    drop(x);
    bench.context.synchronize().expect("synchronize");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_reserved(), 0);
    assert!(events() - before <= 2, "cudarc's events went with the buffer; those of clocks are kept for reuse");
}

#[test]
fn a_stream_that_was_retired_behind_the_list_is_known_anew() {
    let Some(bench) = bench("a_stream_that_was_retired_behind_the_list_is_known_anew") else { return };
    let stream = borrowed(&bench);
    let before = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    let known = bench.memory.stream(&stream).expect("stream");
    bench.memory.allocator().retire_stream(&known).expect("retire");
    let after = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("a stream like any other");
    assert_eq!(after.slice(..2).to_vec().expect("download"), [0; 2]);
    refused(before.to_vec());
    drop((before, after));
    retire_and_destroy(&bench, &stream);
    bench.context.synchronize().expect("synchronize");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_reserved(), 0, "nothing is stranded");
}
