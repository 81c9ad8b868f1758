//! A stream's pool: its blocks, its free index, its statistics, all under one lock.
//!
//! This is the hot path. It knows neither CUDA nor the driver and has no lock of its own; [`StreamPool`] wraps it
//! in one. A hit costs a search of the free index, at most one split or two merges, and eight counters; it makes
//! no driver call, takes no other lock and allocates nothing, but for the block table, which doubles now and then.
//!
//! [`StreamPool`]: crate::stream::StreamPool

use crate::block::{Block, BlockId, BlockTable, NONE, OVERSIZE, SHARED, State};
use crate::config::Config;
use crate::event::StreamClock;
use crate::free_index::FreeIndex;
use crate::front::{FRONT, Front};
use crate::history::{Kind as EventKind, Recorder};
use crate::segment::{Segment, SegmentTable};
use crate::size::{LARGE_SPLIT_REMAINDER_BYTES, MIN_BLOCK_BYTES, REQUEST_MAX_BYTES, SizeClass, round_to_granule};
use crate::stats::{ABOVE, Lane, PoolStats, SEPARATE};
use crate::supply::policy;
use crate::supply::span::Spans;
use rustc_hash::FxHashMap;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

/// How blocks may be cut, from the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The smallest remainder that is split off a block of a fixed segment, by size class.
    split_remainder: [u64; 2],
    /// Blocks of this size or more are oversize.
    max_split: u64,
    /// How much larger than an oversize request its block may be.
    non_split_slack: u64,
    /// Whether segments are expandable: then a large block is cut beside its older neighbour, and free parts of segments
    /// do not count as not releasable, since their pages can leave.
    pub(crate) expandable: bool,
    /// Large free blocks of this size or more are kept for requests of this size or more: others get a place in one only
    /// where that is chosen with care, in the slow path.
    pub(crate) kept_bytes: u64,
}

impl Rules {
    pub(crate) fn new(config: &Config, expandable: bool) -> Self {
        Self {
            split_remainder: [MIN_BLOCK_BYTES, LARGE_SPLIT_REMAINDER_BYTES + MIN_BLOCK_BYTES],
            max_split: if expandable { u64::MAX } else { config.max_split() },
            non_split_slack: config.max_non_split_rounding_bytes,
            expandable,
            kept_bytes: if expandable { policy::kept_bytes(config) } else { u64::MAX },
        }
    }

    /// Whether a block of `size` bytes is kept for larger requests than one of `bytes`.
    #[inline(always)]
    fn keeps(&self, class: SizeClass, bytes: u64, size: u64) -> bool {
        size >= self.kept_bytes && bytes < self.kept_bytes && class == SizeClass::Large
    }

    /// The smallest remainder that is split off a block of a fixed segment.
    #[inline(always)]
    pub(crate) fn split_remainder(&self, class: SizeClass) -> u64 {
        self.split_remainder[class.index()]
    }

    /// Whether a block may stay in front of the free index: which block serves a request depends on sizes alone.
    pub(crate) fn may_front(&self) -> bool {
        self.kept_bytes == u64::MAX && self.max_split == u64::MAX
    }

    pub(crate) fn is_oversize(&self, bytes: u64) -> bool {
        bytes >= self.max_split
    }

    /// Whether a large enough block of `size` bytes may serve the request: an ordinary one is not served from oversize
    /// blocks, an oversize one only from a block that is not much larger, and no block serves a request that it is kept
    /// from.
    fn may_serve(&self, request: &Request, size: u64) -> bool {
        if self.keeps(request.class, request.bytes, size) {
            return false;
        }
        if self.is_oversize(request.bytes) {
            size < request.padded_bytes().saturating_add(self.non_split_slack)
        } else {
            !self.is_oversize(size)
        }
    }

    /// Requests of up to so many bytes are ordinary.
    pub(crate) fn ordinary_bytes(&self) -> u64 {
        self.max_split.min(REQUEST_MAX_BYTES).saturating_sub(MIN_BLOCK_BYTES)
    }
}

/// For which pools the hot path is compiled.
pub(crate) trait Kind {
    /// Segments are expandable: see [`Rules::expandable`].
    const EXPANDABLE: bool;
    /// Blocks may be oversize: there is a `max_split_size`.
    const BOUNDED: bool;
    /// Large free blocks are kept for large requests: see [`Rules::kept_bytes`].
    const KEEPING: bool;
}

/// Fixed segments.
pub(crate) struct Fixed;
/// Fixed segments, and a bound of what is split.
pub(crate) struct Bounded;
/// Expandable segments.
pub(crate) struct Expandable;
/// Expandable segments, with less slack than by default.
pub(crate) struct Tight;

impl Kind for Fixed {
    const EXPANDABLE: bool = false;
    const BOUNDED: bool = false;
    const KEEPING: bool = false;
}

impl Kind for Bounded {
    const EXPANDABLE: bool = false;
    const BOUNDED: bool = true;
    const KEEPING: bool = false;
}

impl Kind for Expandable {
    const EXPANDABLE: bool = true;
    const BOUNDED: bool = false;
    const KEEPING: bool = false;
}

impl Kind for Tight {
    const EXPANDABLE: bool = true;
    const BOUNDED: bool = false;
    const KEEPING: bool = true;
}

/// A rounded request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// What the user asked for.
    pub(crate) requested: u64,
    /// That, rounded.
    pub(crate) bytes: u64,
    /// A power of two; 512 at least.
    pub(crate) alignment: u64,
    pub(crate) class: SizeClass,
}

impl Request {
    /// How large a block must be so that an aligned piece of the right size surely lies in it.
    #[inline]
    pub(crate) fn padded_bytes(&self) -> u64 {
        self.bytes + (self.alignment - MIN_BLOCK_BYTES)
    }
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) id: BlockId,
    pub(crate) addr: u64,
    pub(crate) size: u64,
}

impl Taken {
    /// What the user's handle keeps. `requested` is what the user asked for.
    #[inline(always)]
    pub(crate) fn handle(&self, requested: u64) -> BlockHandle {
        let excess = (self.size - round_to_granule(requested)) / MIN_BLOCK_BYTES;
        BlockHandle { addr: self.addr, tag: u64::from(self.id) | excess.min(MAX_EXCESS) << 32 }
    }
}

/// What names a live block: two words, so that it is returned in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockHandle {
    pub(crate) addr: u64,
    /// The id; above it, in 31 bits, by how many granules the block is larger than the request, rounded; and
    /// [`RECORDED`]. The excess is below 2^31 on any device that there is, and is taken for 2^31 - 1 where it is not.
    pub(crate) tag: u64,
}

/// In [`BlockHandle::tag`]: other streams were recorded as users of the block.
pub(crate) const RECORDED: u64 = 1 << 63;
const MAX_EXCESS: u64 = (1 << 31) - 1;

impl BlockHandle {
    /// No block.
    pub(crate) const EMPTY: Self = Self { addr: 0, tag: NONE as u64 };

    /// [`NONE`] if there is no block.
    #[inline(always)]
    pub(crate) fn id(self) -> BlockId {
        self.tag as BlockId
    }

    /// The block's bytes.
    #[inline]
    pub(crate) fn block_bytes(self, requested: u64) -> u64 {
        round_to_granule(requested) + (self.tag >> 32 & MAX_EXCESS) * MIN_BLOCK_BYTES
    }

    #[inline]
    pub(crate) fn is_recorded(self) -> bool {
        self.tag & RECORDED != 0
    }
}

/// A freed block and the epochs that must pass before it is unused.
#[derive(Debug)]
pub(crate) struct PendingFree {
    pub(crate) block: BlockId,
    pub(crate) waits: Vec<(Arc<StreamClock>, u64)>,
}

/// In [`PoolStats::attention`]: the allocator is gone, what becomes unused is given back at once.
pub(crate) const CLOSED: u8 = 2;
/// Likewise: the stream is destroyed, nothing more is allocated here.
pub(crate) const RETIRED: u8 = 4;
/// Likewise: the history is recorded.
const RECORDING: u8 = 8;

/// What a stream's pool holds. See the module's text.
#[derive(Debug)]
pub(crate) struct PoolCore {
    pub(crate) rules: Rules,
    pub(crate) blocks: BlockTable,
    pub(crate) free: [FreeIndex; 2],
    /// Fixed segments.
    pub(crate) segments: SegmentTable,
    /// Spans of expandable memory, by size class.
    pub(crate) spans: [Spans; 2],
    pub(crate) stats: PoolStats,
    pub(crate) front: Front,
    /// Streams that live blocks were recorded on.
    uses: FxHashMap<BlockId, Vec<Arc<StreamClock>>>,
    /// Freed blocks that wait for other streams, oldest first.
    pub(crate) pending: VecDeque<PendingFree>,
    /// Searches so far, the clock of garbage collection; wraps.
    pub(crate) searches: u32,
    /// The owner of this core, from when the allocator is gone until the last live block is freed.
    pub(crate) keep: Option<Arc<dyn Any + Send + Sync>>,
    /// There while the history is recorded.
    recorder: Option<Box<Recorder>>,
}

impl PoolCore {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            blocks: BlockTable::new(),
            free: [FreeIndex::new(), FreeIndex::new()],
            segments: SegmentTable::default(),
            spans: [Spans::new(), Spans::new()],
            stats: PoolStats::new(),
            front: Front::new(),
            uses: FxHashMap::default(),
            pending: VecDeque::new(),
            searches: 0,
            keep: None,
            recorder: None,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.stats.attention & CLOSED != 0
    }

    /// Whether the slow paths have to see every operation: the history is recorded, or the pool serves no more.
    #[inline(always)]
    pub(crate) fn is_off_the_hot_path(&self) -> bool {
        self.stats.attention & !(ABOVE | SEPARATE | FRONT) != 0
    }

    /// Whether freed blocks stay in front of the free index.
    pub(crate) fn keeps_front(&self) -> bool {
        self.stats.attention & FRONT != 0
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.stats.attention & RETIRED != 0
    }

    /// Blocks that are live or pending.
    pub(crate) fn held(&self) -> usize {
        usize::try_from(self.stats.total(Lane::Active)).unwrap_or(0)
    }

    /// Blocks that users hold.
    pub(crate) fn live(&self) -> usize {
        usize::try_from(self.stats.total(Lane::Allocation)).unwrap_or(0)
    }

    /// The hot path: hands out the best cached block for `requested` bytes, if there is one. Their rounded size is below
    /// the bound of oversize requests. `WATCHED`: [`PoolStats::attention`] may not be zero.
    #[inline(always)]
    pub(crate) fn take_plain<K: Kind, const WATCHED: bool>(&mut self, requested: u64) -> Option<BlockHandle> {
        let bytes = round_to_granule(requested);
        let class = SizeClass::of(bytes);
        self.searches = self.searches.wrapping_add(1);
        let blocks = &mut *self.blocks;
        let free = &mut self.free[class.index()];
        let mut id = free.find(blocks, bytes)?;
        let Block { mut addr, size, .. } = blocks[id];
        if K::BOUNDED && self.rules.is_oversize(size) || K::KEEPING && self.rules.keeps(class, bytes, size) {
            return None;
        }
        free.remove(blocks, id);
        if K::EXPANDABLE && size > bytes && class == SizeClass::Large && self.has_older_next(id) {
            addr += size - bytes;
            id = self.cut_at::<K>(id, addr);
        }
        let size = self.hand_out::<K, WATCHED>(id, addr, requested, bytes, class, true);
        // An ordinary block is larger than its request by less than 2^31 granules.
        Some(BlockHandle { addr, tag: u64::from(id) | ((size - bytes) / MIN_BLOCK_BYTES) << 32 })
    }

    /// As [`take_plain`](Self::take_plain), for any request.
    pub(crate) fn take(&mut self, request: &Request) -> Option<Taken> {
        self.searches = self.searches.wrapping_add(1);
        let blocks = &mut *self.blocks;
        let free = &mut self.free[request.class.index()];
        let id = free.find(blocks, request.padded_bytes())?;
        if !self.rules.may_serve(request, blocks[id].size) {
            return None;
        }
        free.remove(blocks, id);
        Some(self.carve(id, request))
    }

    /// As [`take`](Self::take), but looks at every block that could fit: for the slow path, which must not report that
    /// memory is out while a block that fits lies far back in a long bin.
    pub(crate) fn take_anywhere(&mut self, request: &Request) -> Option<Taken> {
        let bytes = request.padded_bytes();
        let rules = self.rules;
        let fits = |size: u64| size >= bytes && rules.may_serve(request, size);
        let free = &mut self.free[request.class.index()];
        let id = free.find_anywhere(&self.blocks, bytes, fits)?;
        self.searches = self.searches.wrapping_add(1);
        free.remove(&mut self.blocks, id);
        Some(self.carve(id, request))
    }

    /// Cuts the request out of a block that is not in the free index (free or claimed), and hands it out.
    pub(crate) fn carve(&mut self, id: BlockId, request: &Request) -> Taken {
        let Block { addr, size, .. } = self.blocks[id];
        let picks_side = self.rules.expandable && request.class == SizeClass::Large && size > request.bytes;
        let at = if picks_side || request.alignment > MIN_BLOCK_BYTES {
            self.place_in(id, addr, request.bytes, request.alignment, request.class)
        } else {
            addr
        };
        self.carve_at(id, at, request)
    }

    /// Where in a block the request goes if nothing speaks for a place behind `from`: at an aligned address, beside the
    /// older neighbour if the rules say so.
    pub(crate) fn place_in(&self, id: BlockId, from: u64, bytes: u64, alignment: u64, class: SizeClass) -> u64 {
        let block = &self.blocks[id];
        let align = |addr: u64| (addr + (alignment - 1)) & !(alignment - 1);
        let high = block.end() - bytes;
        let low_only = !self.rules.expandable || class == SizeClass::Small || from != block.addr;
        if low_only || high & (alignment - 1) != 0 {
            return align(from);
        }
        if self.has_older_next(id) { high } else { align(from) }
    }

    /// Whether the older neighbour is the one behind: what lives long beside what lives long leaves larger holes. An edge
    /// counts as young.
    #[inline(always)]
    fn has_older_next(&self, id: BlockId) -> bool {
        let Block { prev, next, .. } = self.blocks[id];
        self.is_older_behind(prev, next)
    }

    /// The same for a block between these two.
    #[inline(always)]
    pub(crate) fn is_older_behind(&self, prev: BlockId, next: BlockId) -> bool {
        let age = |neighbour: BlockId| self.searches.wrapping_sub(self.blocks[neighbour].born);
        next != NONE && (prev == NONE || age(next) > age(prev))
    }

    /// Cuts the request out of such a block at `at`, and hands it out.
    pub(crate) fn carve_at(&mut self, id: BlockId, at: u64, request: &Request) -> Taken {
        let id = if at == self.blocks[id].addr {
            id
        } else if self.rules.expandable {
            self.cut_at::<Expandable>(id, at)
        } else {
            self.cut_at::<Fixed>(id, at)
        };
        let Request { requested, bytes, class, .. } = *request;
        let may_split = !self.rules.is_oversize(bytes);
        let size = if self.rules.expandable {
            self.hand_out::<Expandable, true>(id, at, requested, bytes, class, may_split)
        } else {
            self.hand_out::<Fixed, true>(id, at, requested, bytes, class, may_split)
        };
        // An ordinary request, too, can get an oversize block: a new segment that is not split.
        if self.rules.is_oversize(size) {
            self.blocks[id].special = OVERSIZE;
            self.stats.hand_out_oversize(class);
        }
        Taken { id, addr: at, size }
    }

    /// Hands out the front of a block, and the rest of it unless that may be split off. Returns the block's size.
    #[inline(always)]
    fn hand_out<K: Kind, const WATCHED: bool>(
        &mut self,
        id: BlockId,
        addr: u64,
        requested: u64,
        bytes: u64,
        class: SizeClass,
        may_split: bool,
    ) -> u64 {
        let block = &mut self.blocks[id];
        block.born = self.searches;
        block.requested = requested;
        block.set_state(State::Live);
        let part = !block.is_whole_segment();
        let whole = block.size;
        let remainder = whole - bytes;
        let mut size = whole;
        // Pages can leave: whatever is too much is split off.
        let splits =
            if K::EXPANDABLE { remainder != 0 } else { remainder >= self.rules.split_remainder[class.index()] };
        if splits && may_split {
            size = bytes;
            self.split_off(id, addr + size, remainder, class);
            if !K::EXPANDABLE {
                self.count_split(class, size, remainder, part);
            }
        } else if part && !K::EXPANDABLE {
            self.stats.split_goes(class, 1, whole);
        }
        self.stats.hand_out::<WATCHED>(class, size, requested);
        size
    }

    /// Counts that `size` bytes are handed out of a free block, part of a segment or all of it, and `rest` remains.
    #[inline(always)]
    pub(crate) fn count_split(&mut self, class: SizeClass, size: u64, rest: u64, part: bool) {
        if part {
            self.stats.split_shrinks(class, size);
        } else {
            self.stats.split_appears(class, 1, rest);
        }
    }

    /// Leaves `bytes` at `addr`, the end of block `id`, to a new free block behind it.
    #[inline(always)]
    fn split_off(&mut self, id: BlockId, addr: u64, bytes: u64, class: SizeClass) {
        let rest = self.blocks.insert_unlinked(addr, bytes, class);
        let blocks = &mut *self.blocks;
        let block = &mut blocks[id];
        block.size -= bytes;
        let epoch = block.epoch;
        blocks.link_after(id, rest);
        let block = &mut blocks[rest];
        block.epoch = epoch;
        block.born = self.searches;
        block.set_state(State::Free);
        self.free[class.index()].insert(blocks, rest, bytes);
    }

    /// Leaves what lies before `at` as a free block; the rest is a new block, which is returned.
    #[inline(always)]
    fn cut_at<K: Kind>(&mut self, id: BlockId, at: u64) -> BlockId {
        let Block { addr, size, epoch, class, .. } = self.blocks[id];
        let (front, part) = (at - addr, !self.blocks[id].is_whole_segment());
        let rest = self.blocks.insert_unlinked(at, size - front, class);
        let blocks = &mut *self.blocks;
        let block = &mut blocks[id];
        block.size = front;
        block.born = self.searches;
        if block.state() == State::Claimed {
            block.set_state(State::Free);
        }
        blocks.link_after(id, rest);
        let block = &mut blocks[rest];
        block.set_state(State::Free);
        block.epoch = epoch;
        self.free[class.index()].insert(blocks, id, front);
        if !K::EXPANDABLE {
            // From here on both parts count as free parts; `hand_out` takes the rest from that.
            let (blocks, bytes) = if part { (1, 0) } else { (2, size) };
            self.stats.split_appears(class, blocks, bytes);
        }
        rest
    }

    /// Frees a live block. `now` is the open epoch of the pool's stream.
    #[inline(always)]
    pub(crate) fn free<K: Kind, const WATCHED: bool>(&mut self, id: BlockId, now: u64) {
        let block = &self.blocks[id];
        if block.special != 0 {
            return self.free_special(id, now);
        }
        let (size, requested, class) = (block.size, block.requested, block.class);
        self.stats.free::<WATCHED>(class, size, requested);
        self.cache::<K, true>(id, size, class, now);
    }

    /// Caches a live block whose user freed it into a magazine, where it was counted.
    pub(crate) fn cache_kept(&mut self, id: BlockId, now: u64) {
        let Block { size, class, .. } = self.blocks[id];
        self.cache_by_rules::<true>(id, size, class, now);
    }

    /// [`cache`](Self::cache) for slow paths, which are not compiled for each kind.
    fn cache_by_rules<const LATEST: bool>(&mut self, id: BlockId, size: u64, class: SizeClass, epoch: u64) {
        if self.rules.expandable {
            self.cache::<Expandable, LATEST>(id, size, class, epoch);
        } else {
            self.cache::<Fixed, LATEST>(id, size, class, epoch);
        }
    }

    /// Frees a live block that other streams used, too, which stays active until their epochs have passed; or an oversize
    /// one.
    #[cold]
    #[inline(never)]
    fn free_special(&mut self, id: BlockId, now: u64) {
        let block = &mut self.blocks[id];
        let (size, requested, class) = (block.size, block.requested, block.class);
        let special = std::mem::take(&mut block.special);
        if special & OVERSIZE != 0 {
            self.stats.free_oversize(class);
        }
        if special & SHARED == 0 {
            self.stats.free::<true>(class, size, requested);
            return self.cache::<Bounded, true>(id, size, class, now);
        }
        block.set_state(State::Pending);
        block.epoch = now;
        let clocks = self.uses.remove(&id).unwrap_or_default();
        let waits = clocks.into_iter().map(|clock| (Arc::clone(&clock), clock.now())).collect();
        self.stats.free_requested(class, size);
        self.pending.push_back(PendingFree { block: id, waits });
    }

    /// Puts a live or pending block back into the free index, merged with its free neighbours. `LATEST`: no epoch in the
    /// pool is later than `epoch`.
    #[inline(always)]
    fn cache<K: Kind, const LATEST: bool>(&mut self, id: BlockId, size: u64, class: SizeClass, epoch: u64) {
        let merged = self.coalesce::<LATEST>(id, size, class, epoch);
        if K::EXPANDABLE {
            return;
        }
        self.count_cached(class, size, merged.neighbours, merged.size, merged.whole);
    }

    /// Counts a block of `size` bytes that is free again and merged with so many neighbours to one of `merged` bytes,
    /// perhaps the whole segment.
    #[inline(always)]
    pub(crate) fn count_cached(&mut self, class: SizeClass, size: u64, neighbours: u64, merged: u64, whole: bool) {
        if whole {
            self.stats.split_goes(class, neighbours, merged - size);
            return;
        }
        // As in PyTorch, the running sums take in only the net change: what merges neither goes nor comes.
        match neighbours {
            0 => self.stats.split_appears(class, 1, size),
            1 => self.stats.split_grows(class, size),
            neighbours => {
                self.stats.split_goes(class, neighbours - 1, 0);
                self.stats.split_grows(class, size);
            }
        }
    }

    /// Merges a block that is not in the index with its free neighbours, and inserts the result, free.
    #[inline(always)]
    pub(crate) fn coalesce<const LATEST: bool>(
        &mut self,
        mut id: BlockId,
        mut size: u64,
        class: SizeClass,
        mut epoch: u64,
    ) -> Merged {
        let mut neighbours = 0;
        let free = &mut self.free[class.index()];
        let blocks = &mut *self.blocks;
        let Block { mut prev, mut next, .. } = blocks[id];
        if blocks.is_free(next) {
            free.remove(blocks, next);
            let Block { size: more, epoch: theirs, next: behind, .. } = blocks[next];
            size += more;
            if !LATEST {
                epoch = epoch.max(theirs);
            }
            self.blocks.remove(next);
            next = behind;
            self.blocks[next].prev = id;
            self.blocks[id].next = next;
            neighbours = 1;
        }
        let blocks = &mut *self.blocks;
        if blocks.is_free(prev) {
            free.remove(blocks, prev);
            let Block { size: more, epoch: theirs, prev: before, .. } = blocks[prev];
            size += more;
            if !LATEST {
                epoch = epoch.max(theirs);
            }
            blocks[id].set_state(State::Free);
            self.blocks.remove(id);
            self.blocks[next].prev = prev;
            self.blocks[prev].next = next;
            (id, prev) = (prev, before);
            neighbours += 1;
        } else {
            blocks[id].set_state(State::Free);
        }
        let blocks = &mut *self.blocks;
        let block = &mut blocks[id];
        block.size = size;
        block.epoch = epoch;
        block.born = self.searches;
        free.insert(blocks, id, size);
        Merged { id, size, neighbours, whole: (prev | next) == NONE }
    }

    /// Starts recording, or ends it; the hot path leaves what it does to the slow one meanwhile. Returns the former
    /// recorder, to be dropped without any lock.
    pub(crate) fn set_recorder(&mut self, recorder: Option<Box<Recorder>>) -> Option<Box<Recorder>> {
        match recorder {
            Some(_) => self.stats.attention |= RECORDING,
            None => self.stats.attention &= !RECORDING,
        }
        std::mem::replace(&mut self.recorder, recorder)
    }

    pub(crate) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_deref()
    }

    /// Tells the history, if there is one, of a block that was handed out.
    pub(crate) fn record_alloc(&mut self, id: BlockId) {
        if let Some(recorder) = &mut self.recorder {
            recorder.alloc(id, &self.blocks[id]);
        }
    }

    /// Tells the history, if there is one, of a live block that is about to be freed.
    pub(crate) fn record_free(&mut self, id: BlockId) {
        if let Some(recorder) = &mut self.recorder {
            recorder.free(id, &self.blocks[id]);
        }
    }

    /// Tells the history, if there is one, of a segment that comes or goes.
    pub(crate) fn record_segment(&mut self, kind: EventKind, base: u64, bytes: u64, class: SizeClass) {
        if let Some(recorder) = &mut self.recorder {
            recorder.segment(kind, base, bytes, class);
        }
    }

    /// Notes that a live block is also used on another stream.
    pub(crate) fn record_use(&mut self, id: BlockId, clock: &Arc<StreamClock>) {
        self.blocks[id].special |= SHARED;
        let clocks = self.uses.entry(id).or_default();
        if !clocks.iter().any(|known| Arc::ptr_eq(known, clock)) {
            clocks.push(Arc::clone(clock));
        }
    }

    /// Caches the pending blocks whose epochs have all passed; how many. Looks at every pending block: one slow stream does not hold back another's.
    pub(crate) fn finish_pending(&mut self) -> usize {
        let mut finished = 0;
        let mut waiting = VecDeque::with_capacity(self.pending.len());
        for mut entry in std::mem::take(&mut self.pending) {
            entry.waits.retain(|(clock, epoch)| !clock.has_passed(*epoch));
            if !entry.waits.is_empty() {
                waiting.push_back(entry);
                continue;
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.free_completed(entry.block, &self.blocks[entry.block]);
            }
            let Block { size, requested, class, epoch, .. } = self.blocks[entry.block];
            self.stats.free_completed(class, size, requested);
            self.cache_by_rules::<false>(entry.block, size, class, epoch);
            finished += 1;
        }
        self.pending = waiting;
        finished
    }

    /// Adds a segment; its one block is claimed, for the caller to carve or to cache.
    pub(crate) fn add_segment(&mut self, segment: Segment) -> BlockId {
        let (base, bytes, class) = (segment.base, segment.bytes, segment.class);
        let number = self.segments.insert(segment);
        let id = self.blocks.insert(base, bytes, class);
        self.segments[number].first = id;
        self.blocks[id].set_state(State::Claimed);
        id
    }

    /// Puts a claimed block into the free index, merged with its free neighbours. Counts nothing.
    pub(crate) fn cache_claimed(&mut self, id: BlockId, class: SizeClass) -> BlockId {
        let Block { size, epoch, .. } = self.blocks[id];
        self.coalesce::<false>(id, size, class, epoch).id
    }

    /// Takes a segment out of the pool whose one block is free.
    pub(crate) fn detach_segment(&mut self, number: u32) -> Segment {
        let segment = self.segments.remove(number);
        let id = segment.first;
        debug_assert!(self.blocks[id].is_whole_segment() && self.blocks[id].state() == State::Free);
        self.free[segment.class.index()].remove(&mut self.blocks, id);
        self.blocks.remove(id);
        segment
    }

    /// The segments that could go back to the driver whole, with their blocks.
    pub(crate) fn unused_segments(&self) -> impl Iterator<Item = (u32, &Segment, &Block)> {
        self.segments.iter().filter_map(|(number, segment)| {
            let block = &self.blocks[segment.first];
            (block.state() == State::Free && block.is_whole_segment()).then_some((number, segment, block))
        })
    }

    /// Bytes of a size class that are cached: free and reserved.
    pub(crate) fn cached_bytes(&self, class: SizeClass) -> u64 {
        self.free[class.index()].iter(&self.blocks).map(|id| self.blocks[id].size).sum()
    }

    /// The contiguous pieces of memory that the pool owns: segments, and spans.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let segments = self.segments.iter().map(|(_, segment)| Run {
            base: segment.base,
            first: segment.first,
            class: segment.class,
            expandable: false,
        });
        let spans = SizeClass::ALL.into_iter().flat_map(|class| {
            let spans = self.spans[class.index()].iter();
            spans.map(move |(&base, &first)| Run { base, first, class, expandable: true })
        });
        segments.chain(spans)
    }

    /// The latest epoch of its stream that any free block was used in.
    pub(crate) fn latest_free_epoch(&self) -> u64 {
        let free = SizeClass::ALL.iter().flat_map(|class| self.free[class.index()].iter(&self.blocks));
        free.map(|id| self.blocks[id].epoch).max().unwrap_or(0)
    }

    /// Whether the pool owns no memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.spans.iter().all(Spans::is_empty)
    }

    /// A block and those behind it, in address order.
    pub(crate) fn chain(&self, first: BlockId) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(Some(first), |&id| {
            let next = self.blocks[id].next;
            (next != NONE).then_some(next)
        })
    }

    /// The block that an address lies in.
    pub(crate) fn block_at(&self, addr: u64) -> Option<&Block> {
        let run = self.runs().filter(|run| run.base <= addr).max_by_key(|run| run.base)?;
        self.chain(run.first).map(|id| &self.blocks[id]).find(|block| (block.addr..block.end()).contains(&addr))
    }
}

/// What came of merging a block with its free neighbours.
#[derive(Clone, Copy)]
pub(crate) struct Merged {
    id: BlockId,
    size: u64,
    /// How many there were.
    neighbours: u64,
    /// Whether it is all of its segment.
    whole: bool,
}

/// A contiguous piece of memory that a pool owns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) base: u64,
    pub(crate) first: BlockId,
    pub(crate) class: SizeClass,
    pub(crate) expandable: bool,
}
