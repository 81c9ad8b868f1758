//! Identities of streams.

use super::error::Failure;
use super::{CudaDriver, Scope, opaque};
use crate::driver::{Call, DriverError, DriverErrorKind, Result, StreamHandle, StreamKey};
use std::sync::atomic::{AtomicU64, Ordering};

/// Marks identities made here, so that they cannot be one of the driver's (which counts up from a small number).
const OURS: u64 = 1 << 63;
/// Marks identities made of a handle, as opposed to a thread's number.
const FROM_HANDLE: u64 = 1 << 62;
/// Where the context's number sits in an identity made here.
const CONTEXT_SHIFT: u32 = 48;
/// Marks numbers of contexts that are not a device's primary one.
const OTHER_CONTEXT: u64 = 1 << 13;

/// The number, in identities of streams, of the primary context of the device of that ordinal.
pub(super) fn primary_context_number(ordinal: u32) -> u64 {
    u64::from(ordinal) & (OTHER_CONTEXT - 1)
}

/// A new number, in identities of streams, for any other context.
pub(super) fn other_context_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    OTHER_CONTEXT | (NEXT.fetch_add(1, Ordering::Relaxed) & (OTHER_CONTEXT - 1))
}

/// A number that the calling thread shares with no other, not even with one that has ended.
fn thread_number() -> Option<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.try_with(|&number| number).ok()
}

impl CudaDriver {
    /// The identity of the calling thread's own default stream.
    ///
    /// Made of the thread's number and not asked of the driver, whose answer would leave open whether the
    /// number comes back when a thread ends.
    fn own_default_stream(&self) -> Option<u64> {
        Some(OURS | (self.context_number << CONTEXT_SHIFT) | (thread_number()? & ((1 << CONTEXT_SHIFT) - 1)))
    }

    pub(super) fn identify(&self, handle: StreamHandle) -> Result<StreamKey> {
        if handle == StreamHandle::PER_THREAD_DEFAULT {
            self.usable().map_err(|failure| failure.of_call(Call::StreamId))?;
            let id = self.own_default_stream().ok_or_else(|| thread_ending(Call::StreamId))?;
            return Ok(StreamKey { handle, id });
        }
        // Two names of one stream.
        let handle = if handle == StreamHandle::LEGACY { StreamHandle::DEFAULT } else { handle };
        let mut id = 0;
        let asked = self.invoke(Call::StreamId, Scope::Plain, |api| {
            let stream_id = api.stream_id.ok_or(Failure::Missing)?;
            // SAFETY: the pointer is valid for the call; the caller of `stream_key` answers for the handle.
            Ok(unsafe { stream_id(opaque(handle.0), &raw mut id) })
        });
        match asked {
            Ok(()) => Ok(StreamKey { handle, id }),
            Err(error) if error.kind == DriverErrorKind::NotSupported => {
                let context = self.context_number << CONTEXT_SHIFT;
                let id = OURS | FROM_HANDLE | context | (handle.0 & ((1 << CONTEXT_SHIFT) - 1));
                Ok(StreamKey { handle, id })
            }
            Err(error) => Err(error),
        }
    }

    /// The handle to use for `stream` in `call`; refused if it would be another stream on this thread.
    pub(super) fn reach(&self, call: Call, stream: StreamKey) -> Result<StreamHandle> {
        if stream.handle == StreamHandle::PER_THREAD_DEFAULT && self.own_default_stream() != Some(stream.id) {
            return Err(DriverError::with_detail(
                call,
                DriverErrorKind::StreamGone,
                "it is the default stream of another thread; use one that this thread can reach",
            ));
        }
        Ok(stream.handle)
    }
}

fn thread_ending(call: Call) -> DriverError {
    DriverError::with_detail(
        call,
        DriverErrorKind::StreamGone,
        "the calling thread is about to end, and with it its default stream; use another stream there",
    )
}
