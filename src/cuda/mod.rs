//! At home in cudarc: buffers that go wherever a `CudaSlice` goes, on cudarc's own streams.
//!
//! [`CudaAllocator`] allocates on `Arc<CudaStream>`s. Its [`DeviceBuffer`]s and their views implement cudarc's
//! [`DeviceSlice`](cudarc::driver::DeviceSlice), [`DevicePtr`](cudarc::driver::DevicePtr),
//! [`DevicePtrMut`](cudarc::driver::DevicePtrMut) and [`PushKernelArg`](cudarc::driver::PushKernelArg), so that copies,
//! kernel launches, cuBLAS, cuRAND and NCCL take them unchanged. `docs/cudarc.md` in the repository lists cudarc's calls
//! with their counterparts.
//!
//! # Other streams
//! cudarc's functions say which stream they use a buffer on. That is recorded here, so that a buffer can be dropped
//! right after: its memory is not reused before the work has passed. How, depends on the stream:
//!
//! | stream | |
//! | --- | --- |
//! | one that the allocator knows: it allocated on it, or got it by [`stream`](CudaAllocator::stream) | [`record_stream`](crate::Allocation::record_stream); costs no driver call |
//! | another, cudarc's event tracking in force | the buffer's own stream waits for it when the buffer is dropped, as for a `CudaSlice`; a buffer read on several such streams is kept until the device has been waited for |
//! | another, without tracking | copies and library calls are waited for on the host; a buffer that a kernel used is kept until the device has been waited for |
//! | one of another context | waited for on the host |
//!
//! cudarc's event tracking orders uses of one buffer on several streams, as it does for a `CudaSlice`, and costs what it
//! costs there, except that events are kept with the memory: a cached allocation creates none.
//!
//! # What can panic
//! A buffer that was allocated on a plain [`Stream`](crate::Stream) has no stream of cudarc to show; cudarc's traits
//! panic on it.

mod allocator;
pub(crate) mod binding;
mod errors;
mod launch;
mod shell;
mod slice;
mod streams;
mod traits;
pub(crate) mod view;

pub use allocator::CudaAllocator;
pub(crate) use streams::Shared;

pub use slice::{CudaSliceGuard, CudaSliceLease};

#[cfg(doc)]
use crate::DeviceBuffer;
