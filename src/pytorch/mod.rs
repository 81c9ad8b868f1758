//! PyTorch's memory snapshots: the schema of `torch.cuda.memory._dump_snapshot`, written and read.
//!
//! [`CachingAllocator::pytorch_snapshot`](crate::CachingAllocator::pytorch_snapshot) gives one;
//! [`Snapshot::write_pickle`] and [`Snapshot::write_json`] write what `pytorch.org/memory_viz` opens (both) and
//! `python -m torch.cuda._memory_viz` reads (the pickle).
//!
//! Beside PyTorch's keys an entry of a trace has `block_size`, the block's bytes, and its `user_metadata` is the tag of
//! the [scope](crate::CachingAllocator::scope) that it happened in.

mod chrome;
mod export;
mod json;
mod pickle;
#[cfg(feature = "replay")]
mod read;
mod timeline;
#[cfg(feature = "replay")]
mod to_trace;
mod write;

pub(crate) use export::{Frames, device_trace, segments, settings};

#[cfg(feature = "replay")]
pub use read::SnapshotError;

pub use timeline::{Usage, UsageOverTime};
#[cfg(feature = "replay")]
pub(crate) use timeline::{block_bytes, held_bytes};

use std::sync::Arc;

/// The largest snapshot file that is read, in bytes after decompression; about as much is written as JSON, at most.
pub const FILE_MAX_BYTES: u64 = 1 << 30;

/// What a snapshot file holds: PyTorch's top-level dictionary.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Of all devices, by device and address.
    pub segments: Vec<Segment>,
    /// The events of each device, oldest first, by ordinal.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// The allocator's settings under PyTorch's keys.
    pub allocator_settings: Vec<(String, Value)>,
    /// Ranges and instants that the program marked.
    pub external_annotations: Vec<Annotation>,
}

/// A contiguous mapped range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Segment {
    /// The device's ordinal.
    pub device: u32,
    /// Device address.
    pub address: u64,
    /// Bytes.
    pub total_size: u64,
    /// Bytes of blocks held by users.
    pub allocated_size: u64,
    /// Bytes of blocks held by users or by queued work.
    pub active_size: u64,
    /// Bytes requested for those.
    pub requested_size: u64,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
    /// Whether it serves requests above 1 MiB.
    pub is_large: bool,
    /// The private pool; (0, 0) is none.
    pub segment_pool_id: (u64, u64),
    /// Whether pages are mapped in it rather than allocated as a whole.
    pub is_expandable: bool,
    /// The stack of the segment's allocation.
    pub frames: Stack,
    /// Its blocks, which tile it in address order.
    pub blocks: Vec<Block>,
}

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Block {
    /// Device address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes requested; meaningless for an inactive block.
    pub requested_size: u64,
    /// What it is at the moment.
    pub state: crate::BlockState,
    /// The stack of its allocation.
    pub frames: Stack,
}

/// A call stack, innermost function first; empty if none was kept. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stack(Option<Arc<[Frame]>>);

impl Stack {
    /// A stack of these functions.
    #[must_use]
    pub fn new(frames: Vec<Frame>) -> Self {
        Self((!frames.is_empty()).then(|| frames.into()))
    }

    /// The functions.
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        self.0.as_deref().unwrap_or_default()
    }

    /// What tells two stacks apart that are not the same value; 0 for the empty one.
    pub(crate) fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |frames| frames.as_ptr().addr())
    }
}

/// A function of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The source file.
    pub filename: Arc<str>,
    /// The line in it.
    pub line: u32,
    /// The function.
    pub name: Arc<str>,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceEntry {
    /// What happened.
    pub action: Action,
    /// The block's or the segment's address; of [`Action::Oom`] the bytes that the device had free.
    pub addr: u64,
    /// Bytes requested, or of the segment.
    pub size: u64,
    /// Bytes of the block; 0 if the file does not say.
    pub block_size: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Microseconds since 1970.
    pub time_us: u64,
    /// Where in the program.
    pub frames: Stack,
    /// The tag, or what the program noted.
    pub user_metadata: Arc<str>,
    /// The private pool; (0, 0) is none.
    pub pool_id: (u64, u64),
}

/// What happened, under PyTorch's names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// A user freed a block.
    FreeRequested,
    /// A freed block was cached.
    FreeCompleted,
    /// A segment was allocated.
    SegmentAlloc,
    /// A segment was freed.
    SegmentFree,
    /// Pages were mapped.
    SegmentMap,
    /// Pages were unmapped.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request could not be served.
    Oom,
    /// An action of a newer PyTorch.
    Other(Arc<str>),
}

impl Action {
    const NAMED: [Self; 9] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Snapshot,
        Self::Oom,
    ];

    /// PyTorch's name of it.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Snapshot => "snapshot",
            Self::Oom => "oom",
            Self::Other(name) => name,
        }
    }

    /// The action of that name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self::known(name).unwrap_or_else(|| Self::Other(name.into()))
    }

    /// The action of that name, if it is one of PyTorch's.
    pub(crate) fn known(name: &str) -> Option<Self> {
        Self::NAMED.iter().find(|action| action.name() == name).cloned()
    }
}

/// A range's beginning or end, or an instant, as free-form keys: `stage` (`START`, `END`), `name`, `device`, `time_us`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Annotation(pub Vec<(String, Value)>);

impl Annotation {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }
}

/// A value of the free-form dictionaries.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A text.
    Str(String),
    /// A list or a tuple.
    List(Vec<Value>),
    /// A dictionary with text keys, in its order.
    Dict(Vec<(String, Value)>),
}

impl Snapshot {
    /// Adds another device's segments and events, as when every device has an allocator of its own.
    #[must_use]
    pub fn merged(mut self, other: Self) -> Self {
        self.segments.extend(other.segments);
        self.segments.sort_by_key(|segment| (segment.device, segment.address));
        self.device_traces.resize(self.device_traces.len().max(other.device_traces.len()), Vec::new());
        for (trace, theirs) in self.device_traces.iter_mut().zip(other.device_traces) {
            trace.extend(theirs);
        }
        self.external_annotations.extend(other.external_annotations);
        if self.allocator_settings.is_empty() {
            self.allocator_settings = other.allocator_settings;
        }
        self
    }
}
