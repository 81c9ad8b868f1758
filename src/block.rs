//! Blocks: the pieces that segments are cut into, kept in host memory and named by index.
//!
//! A block record is one cache line. Its links are indices into the same [`BlockTable`]: `prev` and `next` are
//! its neighbours in address order within its segment, `bin_prev` and `bin_next` those in its list of the free
//! index. Owned by a stream's pool, and touched under that pool's lock only.

use crate::size::SizeClass;

/// A block's place in its pool's table.
pub(crate) type BlockId = u32;

/// No block: the end of a list, the edge of a segment. There is a record of that number, always vacant: what follows a
/// link without asking whether it is one reads a block that is not free, and may write that record's links.
pub(crate) const NONE: BlockId = 0;

/// What a block is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// The record is not in use.
    Vacant,
    /// Cached: in the free index.
    Free,
    /// Held by a user.
    Live,
    /// Freed by its user, still used by other streams.
    Pending,
    /// Taken out by a slow path, to be cut or cached.
    Claimed,
}

impl State {
    /// The legal transitions; everything else is a bug of this crate.
    pub(crate) const fn can_become(self, next: Self) -> bool {
        use State::{Claimed, Free, Live, Pending, Vacant};
        matches!(
            (self, next),
            (Vacant, Free | Claimed)
                | (Free, Live | Claimed | Vacant)
                | (Live, Free | Pending)
                | (Pending, Free)
                | (Claimed, Free | Live)
        )
    }
}

/// One piece of a segment.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Block {
    /// Device address.
    pub(crate) addr: u64,
    /// Bytes, a multiple of 512.
    pub(crate) size: u64,
    /// What the user asked for, if it is live or pending; else see [`held_for`](Self::held_for).
    pub(crate) requested: u64,
    /// The epoch of its stream when it was last freed: the whole block is unused once that has passed.
    pub(crate) epoch: u64,
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    pub(crate) bin_prev: BlockId,
    pub(crate) bin_next: BlockId,
    /// The pool's search count when it became free: its age for garbage collection.
    pub(crate) born: u32,
    /// Its bin in the free index.
    pub(crate) bin: u16,
    state: State,
    pub(crate) class: SizeClass,
    /// Why freeing it is not the ordinary thing, if not zero: [`SHARED`], [`OVERSIZE`].
    pub(crate) special: u8,
}

/// Other streams were recorded as users; which ones is in the pool's side table.
pub(crate) const SHARED: u8 = 1;
/// It is at least as large as the configured bound, and is counted apart.
pub(crate) const OVERSIZE: u8 = 2;

impl Block {
    fn vacant() -> Self {
        Self {
            addr: 0,
            size: 0,
            requested: 0,
            epoch: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
            born: 0,
            bin: 0,
            state: State::Vacant,
            class: SizeClass::Small,
            special: 0,
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> State {
        self.state
    }

    #[inline]
    pub(crate) fn set_state(&mut self, next: State) {
        debug_assert!(
            self.state.can_become(next),
            "block at {:#x}: {:?} cannot become {next:?}",
            self.addr,
            self.state
        );
        self.state = next;
    }

    /// Whether a user or queued work holds it.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self.state, State::Live | State::Pending)
    }

    /// What a user asked for who holds it, or whose work does; 0 if none.
    pub(crate) fn held_for(&self) -> u64 {
        if self.is_held() { self.requested } else { 0 }
    }

    /// Whether it is all of its segment.
    #[inline]
    pub(crate) fn is_whole_segment(&self) -> bool {
        (self.prev | self.next) == NONE
    }

    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.size
    }
}

/// All blocks of a pool. Grows with the number of blocks, never shrinks; vacant records are reused last in,
/// first out.
#[derive(Debug)]
pub(crate) struct BlockTable {
    blocks: Vec<Block>,
    /// The last vacated record; the next one is its `bin_next`.
    vacant: BlockId,
}

/// The records, by id. While it is borrowed none are added, so their place in memory is settled: the hot path borrows it
/// once an operation.
#[repr(transparent)]
pub(crate) struct Records([Block]);

impl BlockTable {
    pub(crate) fn new() -> Self {
        Self { blocks: vec![Block::vacant()], vacant: NONE }
    }

    /// A new record without neighbours, in state [`State::Vacant`] until the caller sets another.
    #[inline]
    pub(crate) fn insert(&mut self, addr: u64, size: u64, class: SizeClass) -> BlockId {
        let id = self.insert_unlinked(addr, size, class);
        let block = &mut self[id];
        block.prev = NONE;
        block.next = NONE;
        id
    }

    /// The same with whatever neighbours, for the caller to set.
    #[inline(always)]
    pub(crate) fn insert_unlinked(&mut self, addr: u64, size: u64, class: SizeClass) -> BlockId {
        let mut id = self.vacant;
        if id == NONE {
            id = self.push();
        } else {
            self.vacant = self[id].bin_next;
        }
        let block = &mut self[id];
        block.addr = addr;
        block.size = size;
        block.class = class;
        id
    }

    #[cold]
    #[inline(never)]
    fn push(&mut self) -> BlockId {
        let id = BlockId::try_from(self.blocks.len()).unwrap_or(NONE);
        assert!(id != NONE, "more than 2^32 blocks in one pool");
        self.blocks.push(Block::vacant());
        id
    }

    /// Gives the record of a free block up; nothing may link to it any more.
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: BlockId) {
        let vacant = std::mem::replace(&mut self.vacant, id);
        let block = &mut self[id];
        debug_assert!(block.special == 0);
        block.set_state(State::Vacant);
        block.bin_next = vacant;
    }

    /// Records in use. O(records).
    pub(crate) fn len(&self) -> usize {
        self.blocks.iter().filter(|block| block.state != State::Vacant).count()
    }
}

impl Records {
    /// Inserts `new` behind `id` in address order.
    #[inline(always)]
    pub(crate) fn link_after(&mut self, id: BlockId, new: BlockId) {
        let next = std::mem::replace(&mut self[id].next, new);
        self[new].prev = id;
        self[new].next = next;
        self[next].prev = new;
    }

    /// Whether there is a block and it is free.
    #[inline(always)]
    pub(crate) fn is_free(&self, id: BlockId) -> bool {
        self[id].state == State::Free
    }
}

impl std::ops::Deref for BlockTable {
    type Target = Records;

    #[inline(always)]
    fn deref(&self) -> &Records {
        let records: *const [Block] = &raw const *self.blocks;
        // SAFETY: `Records` is a `[Block]` in all but name, and is borrowed for as long as `self` is.
        unsafe { &*(records as *const Records) }
    }
}

impl std::ops::DerefMut for BlockTable {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Records {
        let records: *mut [Block] = &raw mut *self.blocks;
        // SAFETY: as in `deref`.
        unsafe { &mut *(records as *mut Records) }
    }
}

// The hot path follows half a dozen links an event. Each is an id that `insert` gave out and that was stored under the
// pool's lock, and the table never shrinks; `validate` walks them all, and debug builds check each one.

impl std::ops::Index<BlockId> for Records {
    type Output = Block;

    #[inline(always)]
    fn index(&self, id: BlockId) -> &Block {
        debug_assert!((id as usize) < self.0.len(), "no block {id}");
        // SAFETY: ids come from `BlockTable::insert` and are no larger than the largest it ever gave; the mark for the
        // end of a list is tested for before it would be followed.
        unsafe { self.0.get_unchecked(id as usize) }
    }
}

impl std::ops::IndexMut<BlockId> for Records {
    #[inline(always)]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        debug_assert!((id as usize) < self.0.len(), "no block {id}");
        // SAFETY: as in `index`.
        unsafe { self.0.get_unchecked_mut(id as usize) }
    }
}

const _: () = assert!(std::mem::size_of::<Block>() == 64, "a block is one cache line");
