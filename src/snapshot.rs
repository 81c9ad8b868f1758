//! What the allocator holds, block by block, as plain data.

use crate::block::{Block, State};
use crate::driver::{DevicePtr, StreamKey};
use crate::pool::PoolCore;
use crate::size::SizeClass;

/// All segments of an allocator at one moment, by address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The device's ordinal.
    pub device: u32,
    /// By address.
    pub segments: Vec<SegmentInfo>,
}

/// A segment and its blocks, which tile it in address order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentInfo {
    /// Where it starts.
    pub address: DevicePtr,
    /// Its bytes.
    pub bytes: u64,
    /// The pool that it serves.
    pub class: SizeClass,
    /// The stream that it belongs to.
    pub stream: StreamKey,
    /// Whether this is a contiguous mapped range of expandable memory rather than a driver allocation.
    pub expandable: bool,
    /// Its blocks.
    pub blocks: Vec<BlockInfo>,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockInfo {
    /// Where it starts.
    pub address: DevicePtr,
    /// Its bytes.
    pub bytes: u64,
    /// What the user asked for; 0 for a block that is not held.
    pub requested: u64,
    /// What it is at the moment.
    pub state: BlockState,
}

/// What a block is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockState {
    /// Held by a user (PyTorch: `active_allocated`).
    Live,
    /// Freed, still used by queued work (PyTorch: `active_pending_free`).
    Pending,
    /// Cached (PyTorch: `inactive`).
    Free,
}

impl BlockInfo {
    pub(crate) fn of(block: &Block) -> Self {
        Self {
            address: DevicePtr(block.addr),
            bytes: block.size,
            requested: block.held_for(),
            state: match block.state() {
                State::Live => BlockState::Live,
                State::Pending => BlockState::Pending,
                State::Free | State::Claimed | State::Vacant => BlockState::Free,
            },
        }
    }
}

impl Snapshot {
    pub(crate) fn take<'a>(device: u32, pools: impl Iterator<Item = (StreamKey, &'a PoolCore)>) -> Self {
        let mut segments = Vec::new();
        for (stream, core) in pools {
            segments.extend(core.runs().map(|run| {
                let blocks: Vec<BlockInfo> =
                    core.chain(run.first).map(|id| BlockInfo::of(&core.blocks[id])).collect();
                SegmentInfo {
                    address: DevicePtr(run.base),
                    bytes: blocks.iter().map(|block| block.bytes).sum(),
                    class: run.class,
                    stream,
                    expandable: run.expandable,
                    blocks,
                }
            }));
        }
        segments.sort_by_key(|segment| segment.address);
        Self { device, segments }
    }

    /// Bytes of all blocks in `state`.
    #[must_use]
    pub fn bytes_in(&self, state: BlockState) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.state == state).map(|block| block.bytes).sum()
    }
}
