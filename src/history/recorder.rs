//! A pool's side of the history: called under the pool's lock, on paths that are cold while recording is off.

use super::record::{Kind, Record};
use super::ring::Session;
use super::stacks::StackId;
use super::tags::TagId;
use super::{Stacks, tags};
use crate::block::{Block, BlockId, SHARED};
use crate::size::SizeClass;
use std::sync::Arc;

/// What is known of a live block beside its size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Note {
    /// The number of its allocation; 0 if that was not recorded.
    pub(crate) seq: u64,
    /// When it was allocated, by the session's clock.
    pub(crate) ticks: u64,
    pub(crate) stack: StackId,
    pub(crate) tag: TagId,
}

/// Records one pool's events.
#[derive(Debug)]
pub(crate) struct Recorder {
    session: Arc<Session>,
    /// The driver's handle of the pool's stream.
    stream: u64,
    /// The private pool by its number in the session; 0 is none.
    private: u32,
    chunk: Vec<Record>,
    /// By block; valid for live and pending ones.
    notes: Vec<Note>,
}

impl Recorder {
    pub(crate) fn new(session: Arc<Session>, stream: u64) -> Box<Self> {
        let chunk = session.chunk();
        Box::new(Self { session, stream, private: 0, chunk, notes: Vec::new() })
    }

    /// The same for a pool of the private pool of that id; (0, 0) is none.
    pub(crate) fn of_private_pool(mut self: Box<Self>, id: (u64, u64)) -> Box<Self> {
        self.private = self.session.private_number(id);
        self
    }

    /// Notes that `id` was handed out.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc(&mut self, id: BlockId, block: &Block) {
        let stack = self.session.stack_of(self.session.options.stacks != Stacks::Off);
        let (seq, ticks) = self.session.stamp();
        let note = Note { seq, ticks, stack, tag: tags::current() };
        let index = id as usize;
        if index >= self.notes.len() {
            self.notes.resize((index + 1).next_power_of_two(), Note::default());
        }
        self.notes[index] = note;
        self.push(Kind::Alloc, block, note);
    }

    /// Notes that the live block `id` is about to be freed.
    #[cold]
    #[inline(never)]
    pub(crate) fn free(&mut self, id: BlockId, block: &Block) {
        let kind = if block.special & SHARED != 0 { Kind::FreeRequested } else { Kind::Free };
        let stack = self.session.stack_of(self.session.options.stacks == Stacks::All);
        self.end(kind, id, block, stack);
    }

    /// Notes that the pending block `id` is about to be cached.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_completed(&mut self, id: BlockId, block: &Block) {
        self.end(Kind::FreeCompleted, id, block, StackId::NONE);
    }

    fn end(&mut self, kind: Kind, id: BlockId, block: &Block, stack: StackId) {
        let note = self.note(id);
        let (seq, ticks) = self.session.stamp();
        // As in PyTorch, a free without a stack of its own has the allocation's.
        let stack = if stack == StackId::NONE { note.stack } else { stack };
        self.push(kind, block, Note { seq, ticks, stack, tag: note.tag });
    }

    fn push(&mut self, kind: Kind, block: &Block, note: Note) {
        let Note { seq, ticks, stack, tag } = note;
        let (addr, bytes, block_bytes, class) = (block.addr, block.requested, block.size, block.class);
        let (stream, private) = (self.stream, self.private);
        self.put(Record { seq, ticks, addr, bytes, block_bytes, stream, stack, tag, kind, class, private });
    }

    /// Notes a segment of the pool.
    #[cold]
    pub(crate) fn segment(&mut self, kind: Kind, addr: u64, bytes: u64, class: SizeClass) {
        let (stack, tag) = (self.session.stack_of(self.session.options.stacks != Stacks::Off), tags::current());
        let (seq, ticks) = self.session.stamp();
        let (stream, private) = (self.stream, self.private);
        let block_bytes = bytes;
        self.put(Record { seq, ticks, addr, bytes, block_bytes, stream, stack, tag, kind, class, private });
    }

    fn put(&mut self, record: Record) {
        if self.session.options.events == 0 {
            return;
        }
        self.chunk.push(record);
        if self.chunk.len() == self.chunk.capacity() {
            self.chunk = self.session.hand_in(std::mem::take(&mut self.chunk));
        }
    }

    /// What is known of a live or pending block.
    pub(crate) fn note(&self, id: BlockId) -> Note {
        self.notes.get(id as usize).copied().unwrap_or_default()
    }

    /// Whether this is a recorder of `session`.
    pub(crate) fn is_of(&self, session: &Arc<Session>) -> bool {
        Arc::ptr_eq(&self.session, session)
    }

    /// The records that are not handed in yet.
    pub(crate) fn records(&self) -> &[Record] {
        &self.chunk
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.session.hand_in_last(std::mem::take(&mut self.chunk));
    }
}
