//! A stream's pool: its blocks, its free index, its statistics, all under one lock.
//!
//! This is the hot path. It knows neither CUDA nor the driver and has no lock of its own; [`StreamPool`] wraps it
//! in one. A hit costs a search of the free index, at most one split or two merges, and eight counters; it makes
//! no driver call, takes no other lock and allocates nothing, but for the block table, which doubles now and then.
//!
//! [`StreamPool`]: crate::stream::StreamPool

use crate::block::{Block, BlockId, BlockTable, NONE, State};
use crate::config::Config;
use crate::event::StreamClock;
use crate::free_index::FreeIndex;
use crate::history::{Kind, Recorder};
use crate::segment::{Segment, SegmentTable};
use crate::size::{LARGE_SPLIT_REMAINDER_BYTES, MIN_BLOCK_BYTES, SizeClass};
use crate::stats::PoolStats;
use crate::supply::span::Spans;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// How blocks may be cut, from the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The smallest remainder that is split off, by size class.
    split_remainder: [u64; 2],
    /// Blocks of this size or more are oversize.
    max_split: u64,
    /// How much larger than an oversize request its block may be.
    non_split_slack: u64,
    /// Whether free parts of segments are counted as not releasable: not where pages can leave a segment.
    pub(crate) counts_inactive_split: bool,
    /// Whether a large block is cut beside its older neighbour.
    picks_side: bool,
}

impl Rules {
    pub(crate) fn new(config: &Config, expandable: bool) -> Self {
        let large = if expandable { MIN_BLOCK_BYTES } else { LARGE_SPLIT_REMAINDER_BYTES + MIN_BLOCK_BYTES };
        Self {
            split_remainder: [MIN_BLOCK_BYTES, large],
            max_split: if expandable { u64::MAX } else { config.max_split() },
            non_split_slack: config.max_non_split_rounding_bytes,
            counts_inactive_split: !expandable,
            picks_side: expandable,
        }
    }

    pub(crate) fn is_oversize(&self, bytes: u64) -> bool {
        bytes >= self.max_split
    }
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
    /// A counter rose above its ceiling: the peaks are to be raised before the lock is let go.
    pub(crate) raised: bool,
}

/// A freed block and the epochs that must pass before it is unused.
#[derive(Debug)]
pub(crate) struct PendingFree {
    pub(crate) block: BlockId,
    pub(crate) waits: Vec<(Arc<StreamClock>, u64)>,
}

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
    /// Streams that live blocks were recorded on.
    uses: FxHashMap<BlockId, Vec<Arc<StreamClock>>>,
    /// Freed blocks that wait for other streams, oldest first.
    pub(crate) pending: VecDeque<PendingFree>,
    /// Searches so far, the clock of garbage collection; wraps.
    pub(crate) searches: u32,
    /// Blocks that are live or pending.
    pub(crate) held: usize,
    /// The allocator is gone: what becomes unused is given back at once.
    pub(crate) closed: bool,
    /// The stream is destroyed: nothing more is allocated here.
    pub(crate) retired: bool,
    /// There while the history is recorded.
    pub(crate) recorder: Option<Box<Recorder>>,
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
            uses: FxHashMap::default(),
            pending: VecDeque::new(),
            searches: 0,
            held: 0,
            closed: false,
            retired: false,
            recorder: None,
        }
    }

    /// Hands out the best cached block for the request, if there is one.
    #[inline(always)]
    pub(crate) fn take(&mut self, request: &Request) -> Option<Taken> {
        self.searches = self.searches.wrapping_add(1);
        let free = &mut self.free[request.class.index()];
        let (id, bin) = free.find(&self.blocks, request.padded_bytes())?;
        let size = self.blocks[id].size;
        if request.bytes < self.rules.max_split {
            if size >= self.rules.max_split {
                return None;
            }
        } else if size >= request.padded_bytes().saturating_add(self.rules.non_split_slack) {
            return None;
        }
        free.take(&mut self.blocks, id, bin);
        Some(self.carve(id, request))
    }

    /// As [`take`](Self::take), but looks at every block that could fit: for the slow path, which must not report that
    /// memory is out while a block that fits lies far back in a long bin.
    pub(crate) fn take_anywhere(&mut self, request: &Request) -> Option<Taken> {
        let bytes = request.padded_bytes();
        let max_split = self.rules.max_split;
        let free = &mut self.free[request.class.index()];
        let slack = self.rules.non_split_slack;
        let fits = |size: u64| {
            size >= bytes
                && if request.bytes < max_split { size < max_split } else { size < bytes.saturating_add(slack) }
        };
        let id = free.find_anywhere(&self.blocks, bytes, fits)?;
        self.searches = self.searches.wrapping_add(1);
        free.remove(&mut self.blocks, id);
        Some(self.carve(id, request))
    }

    /// Cuts the request out of a block that is not in the free index (free or claimed), and hands it out.
    #[inline(always)]
    pub(crate) fn carve(&mut self, id: BlockId, request: &Request) -> Taken {
        let Block { addr, size, .. } = self.blocks[id];
        let picks_side = self.rules.picks_side && request.class == SizeClass::Large && size > request.bytes;
        let at = if picks_side || request.alignment > MIN_BLOCK_BYTES {
            self.place_in(id, addr, request)
        } else {
            addr
        };
        self.carve_at(id, at, request)
    }

    /// Where in a block the request goes if nothing speaks for a place behind `from`: at an aligned address, beside the
    /// older neighbour if the rules say so.
    #[inline]
    pub(crate) fn place_in(&self, id: BlockId, from: u64, request: &Request) -> u64 {
        let block = &self.blocks[id];
        let align = |addr: u64| (addr + (request.alignment - 1)) & !(request.alignment - 1);
        let high = block.end() - request.bytes;
        let low_only = !self.rules.picks_side || request.class == SizeClass::Small || from != block.addr;
        if low_only || high & (request.alignment - 1) != 0 {
            return align(from);
        }
        // What lives long beside what lives long leaves larger holes. An edge counts as young.
        let age = |neighbour: BlockId| match neighbour {
            NONE => 0,
            neighbour => self.searches.wrapping_sub(self.blocks[neighbour].born).saturating_add(1),
        };
        if age(block.next) > age(block.prev) { high } else { align(from) }
    }

    /// Cuts the request out of such a block at `at`, and hands it out.
    #[inline(always)]
    pub(crate) fn carve_at(&mut self, id: BlockId, at: u64, request: &Request) -> Taken {
        let mut raised = false;
        let id = if at == self.blocks[id].addr { id } else { self.cut_front(id, at, &mut raised) };
        let searches = self.searches;
        let block = &mut self.blocks[id];
        block.born = searches;
        let (addr, whole, part) = (block.addr, block.size, !block.is_whole_segment());
        block.set_state(State::Live);
        block.requested = request.requested;
        let remainder = whole - request.bytes;
        let split =
            remainder >= self.rules.split_remainder[request.class.index()] && request.bytes < self.rules.max_split;
        let size = if split {
            block.size = request.bytes;
            let (segment, epoch) = (block.segment, block.epoch);
            self.split_off(id, addr + request.bytes, remainder, segment, epoch, request.class);
            request.bytes
        } else {
            whole
        };
        if self.rules.counts_inactive_split && (part || split) {
            match (part, split) {
                (false, _) => raised |= self.stats.split_appears(request.class, 1, remainder),
                (true, true) => self.stats.split_goes(request.class, 0, size),
                (true, false) => self.stats.split_goes(request.class, 1, whole),
            }
        }
        if self.rules.is_oversize(size) {
            raised |= self.stats.hand_out_oversize(request.class);
        }
        self.held += 1;
        raised |= self.stats.hand_out(request.class, size, request.requested);
        Taken { id, addr, size, raised }
    }

    /// A new free block behind `id`.
    #[inline(always)]
    fn split_off(&mut self, id: BlockId, addr: u64, size: u64, segment: u32, epoch: u64, class: SizeClass) {
        let rest = self.blocks.insert(addr, size, segment, class);
        self.blocks.link_after(id, rest);
        let block = &mut self.blocks[rest];
        block.set_state(State::Free);
        block.epoch = epoch;
        block.born = self.searches;
        self.free[class.index()].insert(&mut self.blocks, rest);
    }

    /// Leaves what lies before `at` as a free block; the rest is a new block.
    #[inline(never)]
    fn cut_front(&mut self, id: BlockId, at: u64, raised: &mut bool) -> BlockId {
        let block = &self.blocks[id];
        let (addr, size, segment, epoch, state) =
            (block.addr, block.size, block.segment, block.epoch, block.state());
        let (class, front, part) = (block.class, at - addr, !block.is_whole_segment());
        self.blocks[id].size = front;
        if state == State::Claimed {
            self.blocks[id].set_state(State::Free);
        }
        self.blocks[id].born = self.searches;
        self.free[class.index()].insert(&mut self.blocks, id);
        let rest = self.blocks.insert(at, size - front, segment, class);
        self.blocks.link_after(id, rest);
        self.blocks[rest].set_state(State::Free);
        self.blocks[rest].epoch = epoch;
        if self.rules.counts_inactive_split {
            // From here on both parts count as free parts; `carve` takes the rest from that.
            let (blocks, bytes) = if part { (1, 0) } else { (2, size) };
            *raised |= self.stats.split_appears(class, blocks, bytes);
        }
        rest
    }

    /// Frees a live block that only its own stream used; true if the peaks are to be raised.
    #[inline(always)]
    pub(crate) fn free_now(&mut self, id: BlockId, epoch: u64) -> bool {
        let block = &mut self.blocks[id];
        let (size, requested, class) = (block.size, block.requested, block.class);
        block.epoch = epoch;
        self.stats.free(class, size, requested);
        if self.rules.is_oversize(size) {
            self.stats.free_oversize(class);
        }
        self.cache(id, class)
    }

    /// Puts a live or pending block back into the free index, merged with its free neighbours.
    #[inline(always)]
    fn cache(&mut self, id: BlockId, class: SizeClass) -> bool {
        self.held -= 1;
        let block = &mut self.blocks[id];
        block.set_state(State::Free);
        block.requested = 0;
        let (id, merged) = self.coalesce(id, class);
        if !self.rules.counts_inactive_split {
            return false;
        }
        let block = &self.blocks[id];
        if block.is_whole_segment() {
            self.stats.split_goes(class, merged.0, merged.1);
            return false;
        }
        // As in PyTorch, the running sums take in only the net change: what merges neither goes nor comes.
        let bytes = block.size - merged.1;
        self.stats.split_goes(class, merged.0.saturating_sub(1), 0);
        self.stats.split_appears(class, 1u64.saturating_sub(merged.0), bytes)
    }

    /// Merges a free block that is not in the index with its free neighbours, and inserts the result. Returns it
    /// with the number and bytes of the neighbours merged.
    #[inline(always)]
    pub(crate) fn coalesce(&mut self, mut id: BlockId, class: SizeClass) -> (BlockId, (u64, u64)) {
        let mut merged = (0, 0);
        let free = &mut self.free[class.index()];
        let Block { prev, next, .. } = self.blocks[id];
        if next != NONE && self.blocks[next].state() == State::Free {
            free.remove(&mut self.blocks, next);
            merged = (1, self.blocks[next].size);
            absorb_next(&mut self.blocks, id, next);
        }
        if prev != NONE && self.blocks[prev].state() == State::Free {
            free.remove(&mut self.blocks, prev);
            merged = (merged.0 + 1, merged.1 + self.blocks[prev].size);
            absorb_next(&mut self.blocks, prev, id);
            id = prev;
        }
        self.blocks[id].born = self.searches;
        free.insert(&mut self.blocks, id);
        (id, merged)
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
    pub(crate) fn record_segment(&mut self, kind: Kind, base: u64, bytes: u64, class: SizeClass) {
        if let Some(recorder) = &mut self.recorder {
            recorder.segment(kind, base, bytes, class);
        }
    }

    /// Notes that a live block is also used on another stream.
    pub(crate) fn record_use(&mut self, id: BlockId, clock: &Arc<StreamClock>) {
        self.blocks[id].shared = true;
        let clocks = self.uses.entry(id).or_default();
        if !clocks.iter().any(|known| Arc::ptr_eq(known, clock)) {
            clocks.push(Arc::clone(clock));
        }
    }

    /// Frees a live block that other streams used, too: it stays active until their epochs have passed.
    #[cold]
    pub(crate) fn free_later(&mut self, id: BlockId, epoch: u64) -> bool {
        let clocks = self.uses.remove(&id).unwrap_or_default();
        let waits = clocks.into_iter().map(|clock| (Arc::clone(&clock), clock.now())).collect();
        let block = &mut self.blocks[id];
        block.set_state(State::Pending);
        block.shared = false;
        block.epoch = epoch;
        let (size, class) = (block.size, block.class);
        self.stats.free_requested(class, size);
        if self.rules.is_oversize(size) {
            self.stats.free_oversize(class);
        }
        self.pending.push_back(PendingFree { block: id, waits });
        false
    }

    /// Caches the pending blocks whose epochs have all passed; whether there were any, and whether the peaks are
    /// to be raised. Looks at every pending block: one slow stream does not hold back another's.
    pub(crate) fn finish_pending(&mut self) -> (usize, bool) {
        let (mut finished, mut raised) = (0, false);
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
            let Block { size, requested, class, .. } = self.blocks[entry.block];
            self.stats.free_completed(class, size, requested);
            raised |= self.cache(entry.block, class);
            finished += 1;
        }
        self.pending = waiting;
        (finished, raised)
    }

    /// Adds a segment; its one block is claimed, for the caller to carve or to cache.
    pub(crate) fn add_segment(&mut self, segment: Segment) -> BlockId {
        let (base, bytes, class) = (segment.base, segment.bytes, segment.class);
        let number = self.segments.insert(segment);
        let id = self.blocks.insert(base, bytes, number, class);
        self.segments[number].first = id;
        self.blocks[id].set_state(State::Claimed);
        id
    }

    /// Puts a claimed block into the free index, merged with its free neighbours. Counts nothing.
    pub(crate) fn cache_claimed(&mut self, id: BlockId, class: SizeClass) -> BlockId {
        self.blocks[id].set_state(State::Free);
        self.coalesce(id, class).0
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

/// A contiguous piece of memory that a pool owns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) base: u64,
    pub(crate) first: BlockId,
    pub(crate) class: SizeClass,
    pub(crate) expandable: bool,
}

/// Appends `next`, the neighbour behind `id`, to `id`; neither is in the index.
#[inline]
pub(crate) fn absorb_next(blocks: &mut BlockTable, id: BlockId, next: BlockId) {
    let Block { size, epoch, .. } = blocks[next];
    debug_assert_eq!(blocks[id].end(), blocks[next].addr);
    blocks.unlink(next);
    blocks.remove(next);
    let block = &mut blocks[id];
    block.size += size;
    block.epoch = block.epoch.max(epoch);
}
