//! One event, as it is kept.

use super::stacks::StackId;
use super::tags::TagId;
use crate::size::SizeClass;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A block was handed out.
    Alloc,
    /// A block was freed, and cached at once.
    Free,
    /// A block was freed, and stays active.
    FreeRequested,
    /// Such a block was cached.
    FreeCompleted,
    /// A fixed segment came from the driver.
    SegmentAlloc,
    /// A fixed segment left its pool, towards the driver.
    SegmentFree,
    /// Pages were mapped.
    Map,
    /// Pages were unmapped.
    Unmap,
    /// Mapped memory went to another stream as it is, without a driver call.
    Adopt,
    /// A request could not be served; `addr` is what the device had free.
    OutOfMemory,
    /// A scope was entered; `addr` is the thread.
    ScopeBegin,
    /// A scope was left; `addr` is the thread.
    ScopeEnd,
}

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Record {
    /// From one counter a session; counts from 1.
    pub(crate) seq: u64,
    /// When, by the session's clock.
    pub(crate) ticks: u64,
    pub(crate) addr: u64,
    /// As requested; else the bytes of what the event is about.
    pub(crate) bytes: u64,
    /// The block's.
    pub(crate) block_bytes: u64,
    /// The driver's handle.
    pub(crate) stream: u64,
    pub(crate) stack: StackId,
    pub(crate) tag: TagId,
    pub(crate) kind: Kind,
    pub(crate) class: SizeClass,
    /// A private pool by its number in the session; 0 is none.
    pub(crate) private: u32,
}

const _: () = assert!(std::mem::size_of::<Record>() == 64, "a record is one cache line");
