//! Runs a program on the allocator and checks everything after every operation.

mod checks;
mod ending;

use crate::marks::Marks;
use crate::model::{Block, Model};
use crate::program::{Op, SLOTS, Setup};
use crate::shadow::{Shadow, State, check_pattern, write_pattern};
use crate::{Check, MIB};
use checks::has_unused_segment;
use std::sync::Arc;
use vramalloc::driver::StreamHandle;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::size::{SizeClass, round_request};
use vramalloc::{Allocation, CachingAllocator, Config, DriverErrorKind, Error, Stream};

/// What the harness itself takes of the device.
const HARNESS_BYTES: u64 = 2 * MIB;

struct Slot {
    handle: StreamHandle,
    stream: Stream,
}

struct Held {
    id: u64,
    block: Block,
    allocation: Allocation,
    /// Identities of the streams that it was recorded on.
    uses: Vec<u64>,
}

struct Pending {
    id: u64,
    block: Block,
    /// The uses at the time of the free: streams' identities and the last work on each.
    uses: Vec<(u64, Option<u64>)>,
    /// The last work on each of those streams when the allocator was first polled after that. It may close the
    /// epoch of the free as late as then, so that this is what it must have noticed.
    closed: Option<Vec<Option<u64>>>,
}

pub(crate) struct Machine {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) allocator: CachingAllocator,
    pub(crate) marks: Marks,
    setup: Setup,
    slots: Vec<Slot>,
    live: Vec<Held>,
    pending: Vec<Pending>,
    shadow: Shadow,
    pub(crate) model: Model,
    next_id: u64,
    /// Addresses handed out, in order.
    pub(crate) addresses: Vec<u64>,
    /// The fault that the test planned, if it did.
    pub(crate) planned: Option<DriverErrorKind>,
}

impl Machine {
    pub(crate) fn new(setup: &Setup) -> Self {
        let sim = SimDriver::builder().capacity(setup.capacity + HARNESS_BYTES).build();
        let config: Config = setup.config.parse().expect("the configuration is valid");
        let marks = Marks::new(&sim, HARNESS_BYTES);
        let allocator = CachingAllocator::new(sim.clone(), config).expect("an allocator on a sound device");
        let slots = (0..SLOTS)
            .map(|slot| {
                let handle = if slot == 0 { StreamHandle::DEFAULT } else { sim.create_stream() };
                Slot { handle, stream: allocator.stream(handle).expect("the stream exists") }
            })
            .collect();
        Self {
            sim,
            allocator,
            marks,
            setup: *setup,
            slots,
            live: Vec::new(),
            pending: Vec::new(),
            shadow: Shadow::default(),
            model: Model::default(),
            next_id: 0,
            addresses: Vec::new(),
            planned: None,
        }
    }

    /// Runs one operation and checks everything.
    pub(crate) fn step(&mut self, op: &Op) -> Check {
        match *op {
            Op::Alloc { bytes, slot } => self.alloc(bytes, None, slot)?,
            Op::Aligned { bytes, log2, slot } => self.alloc(bytes, Some(1 << log2), slot)?,
            Op::Zero { slot } => {
                let nothing = self.allocator.alloc(0, self.stream(slot)).map_err(|why| why.to_string());
                ensure!(nothing.is_err() || nothing?.ptr().is_null(), "zero bytes have an address");
            }
            Op::Huge { bytes, slot } => self.alloc_huge(bytes, slot)?,
            Op::Free { index, raw } => self.free(index, raw)?,
            Op::Use { index, slot } => self.use_elsewhere(index, slot)?,
            Op::Work { slot } => self.launch(slot, None),
            Op::Complete { slot } => self.sim.complete(self.slots[slot as usize].handle),
            Op::CompleteOne { slot } => {
                let _ = self.sim.complete_one(self.slots[slot as usize].handle);
            }
            Op::Poll => self.poll()?,
            Op::EmptyCache => self.empty_cache()?,
            Op::Replace { slot } => self.replace(slot)?,
            Op::ResetPeaks => {
                self.allocator.reset_peak_memory_stats();
                self.model.reset_peaks();
            }
            Op::ResetSums => {
                self.allocator.reset_accumulated_memory_stats();
                self.model.reset_sums();
            }
        }
        self.settle()?;
        self.check()
    }

    fn stream(&self, slot: u8) -> &Stream {
        &self.slots[slot as usize].stream
    }

    /// Whether the planned fault has struck.
    pub(crate) fn has_struck(&self) -> bool {
        self.planned.is_some() && self.sim.pending_faults() == 0
    }

    /// Whether the device is lost for good.
    fn is_lost(&self) -> bool {
        self.has_struck() && self.planned.is_some_and(DriverErrorKind::is_sticky)
    }

    fn alloc(&mut self, bytes: u64, alignment: Option<u64>, slot: u8) -> Check {
        let stream = self.stream(slot).clone();
        let was_struck = self.has_struck();
        let mut answer = self.request(bytes, alignment, &stream);
        if answer.is_err() && self.has_struck() && !was_struck && !self.is_lost() {
            // The call that failed changed nothing; the same call must now be answered as if nothing had been.
            self.settle()?;
            self.check()?;
            answer = self.request(bytes, alignment, &stream);
        }
        let snapshot = self.settle()?;
        match answer {
            Ok(allocation) => self.handed_out(allocation, bytes, alignment, slot),
            // Also when the device is lost while the report is being written.
            Err(Error::OutOfMemory(_)) if !self.is_lost() || !was_struck => {
                self.check_refusal(bytes, alignment, &snapshot)
            }
            Err(Error::Driver(error)) if self.is_lost() => {
                ensure!(error.kind == DriverErrorKind::DeviceLost, "{error} on a lost device");
                Ok(())
            }
            Err(why) => Err(format!("{bytes} bytes: {why}")),
        }
    }

    fn request(&mut self, bytes: u64, alignment: Option<u64>, stream: &Stream) -> vramalloc::Result<Allocation> {
        let answer = match alignment {
            Some(alignment) => self.allocator.alloc_aligned(bytes, alignment, stream),
            None => self.allocator.alloc(bytes, stream),
        };
        self.model.ooms += u64::from(matches!(answer, Err(Error::OutOfMemory(_))));
        answer
    }

    fn handed_out(&mut self, allocation: Allocation, requested: u64, alignment: Option<u64>, slot: u8) -> Check {
        let (addr, bytes) = (allocation.ptr().0, allocation.block_bytes());
        let config = self.allocator.config();
        let rounded = round_request(requested, config).ok_or("the size rounds")?;
        let class = SizeClass::of(rounded);
        let waste = match class {
            SizeClass::Small => 0,
            SizeClass::Large if self.allocator.is_expandable() => 0,
            SizeClass::Large if rounded < config.max_split_bytes.unwrap_or(u64::MAX) => MIB,
            SizeClass::Large => config.max_non_split_rounding_bytes + alignment.unwrap_or(512),
        };
        ensure!(
            (rounded..=rounded + waste).contains(&bytes),
            "a block of {bytes} for {requested}, rounded {rounded}"
        );
        ensure!(addr.is_multiple_of(alignment.unwrap_or(512)), "{addr:#x} is not aligned to {alignment:?}");
        let id = self.next_id;
        self.next_id += 1;
        self.shadow.hand_out(addr, bytes, id)?;
        let block = Block { addr, bytes, requested, class };
        self.model.hand_out(&block);
        self.addresses.push(addr);
        self.launch(slot, Some(Work::writing(allocation.ptr(), bytes)));
        write_pattern(&self.sim, addr, bytes, id)?;
        self.live.push(Held { id, block, allocation, uses: Vec::new() });
        Ok(())
    }

    fn alloc_huge(&mut self, bytes: u64, slot: u8) -> Check {
        let (reserved, before) = (self.allocator.memory_reserved(), self.allocator.memory_stats());
        let stream = self.stream(slot).clone();
        let answer = self.request(bytes, None, &stream);
        let kind_is_right = match &answer {
            Err(Error::SizeOverflow { requested }) => bytes >= 1 << 60 && *requested == bytes,
            Err(Error::OutOfMemory(report)) => bytes < 1 << 60 && report.requested == bytes,
            Err(Error::Driver(_)) => self.has_struck(),
            _ => false,
        };
        ensure!(kind_is_right, "{bytes} bytes: {answer:?}");
        let after = self.allocator.memory_stats();
        let retries = (before.num_alloc_retries, after.num_alloc_retries);
        ensure!(
            retries.0 == retries.1 && reserved == after.reserved_bytes.all.current,
            "a huge request had effects"
        );
        Ok(())
    }

    fn free(&mut self, index: u8, raw: bool) -> Check {
        if self.live.is_empty() {
            return Ok(());
        }
        let Held { id, block, allocation, uses } = self.live.remove(index as usize % self.live.len());
        check_pattern(&self.sim, block.addr, block.bytes, id)?;
        let to = if uses.is_empty() { None } else { Some(State::Pending(id)) };
        self.shadow.change(block.addr, block.bytes, State::Live(id), to)?;
        if raw {
            let ptr = self.allocator.into_raw(allocation);
            self.allocator.free_raw(ptr).map_err(|why| why.to_string())?;
            let again = self.allocator.free_raw(ptr);
            ensure!(matches!(again, Err(Error::NotLive { .. })), "a double free was answered {again:?}");
        } else {
            drop(allocation);
        }
        if !uses.is_empty() {
            let uses = uses.into_iter().map(|stream| (stream, self.marks.last(stream))).collect();
            self.pending.push(Pending { id, block, uses, closed: None });
        }
        Ok(())
    }

    fn use_elsewhere(&mut self, index: u8, slot: u8) -> Check {
        if self.live.is_empty() {
            return Ok(());
        }
        let index = index as usize % self.live.len();
        let stream = self.stream(slot).clone();
        let (home, user) = (self.live[index].allocation.stream().key(), stream.key());
        if home != user && !self.marks.order(&self.sim, home, user) {
            self.sim.complete(home); // it is destroyed, or the fault struck
        }
        let held = &mut self.live[index];
        let work = Work::reading(held.allocation.ptr(), held.block.bytes);
        held.allocation.record_stream(&stream).map_err(|why| why.to_string())?;
        if home != user && !held.uses.contains(&user.id) {
            held.uses.push(user.id);
        }
        self.launch(slot, Some(work));
        Ok(())
    }

    /// Queues work on a stream, and a mark behind it that tells when it has passed.
    fn launch(&mut self, slot: u8, work: Option<Work>) {
        if self.is_lost() {
            return;
        }
        let key = self.stream(slot).key();
        // What is refused is a violation, which the check after the operation reports.
        let queued = work.is_none_or(|work| self.sim.launch(key, work).is_ok());
        if queued {
            self.marks.queue(&self.sim, key);
        }
    }

    fn poll(&mut self) -> Check {
        for pending in &mut self.pending {
            let last = pending.uses.iter().map(|&(stream, _)| self.marks.last(stream));
            pending.closed.get_or_insert_with(|| last.collect());
        }
        let before = self.pending.len();
        let finished = self.allocator.poll();
        self.settle()?;
        ensure!(before - self.pending.len() == finished, "poll says {finished} of {before} pending");
        if self.planned.is_some() {
            return Ok(());
        }
        let reachable = |id: u64| self.slots.iter().any(|slot| slot.stream.key().id == id);
        let late = self.pending.iter().find(|pending| {
            let mut closed = pending.closed.iter().flatten();
            pending.uses.iter().all(|&(stream, _)| reachable(stream))
                && closed.all(|&mark| self.marks.has_passed(&self.sim, mark))
        });
        ensure!(
            late.is_none(),
            "poll left {:?} pending, all of whose uses have passed",
            late.map(|late| late.block)
        );
        Ok(())
    }

    pub(crate) fn empty_cache(&mut self) -> Check {
        let before = self.allocator.memory_reserved();
        let was_struck = self.has_struck();
        let mut answer = self.allocator.empty_cache();
        if answer.is_err() && self.has_struck() && !was_struck && !self.is_lost() {
            self.settle()?;
            self.check()?;
            // What the first call gave back before it failed counts, too.
            answer = self.allocator.empty_cache().map(|_| before - self.allocator.memory_reserved());
        }
        let snapshot = self.settle()?;
        match answer {
            Ok(freed) => {
                ensure!(
                    before - freed == self.allocator.memory_reserved(),
                    "empty_cache says {freed} of {before}"
                );
                // Pages of an expandable segment stay while queued work uses them, since an unmap waits for nothing.
                let may_keep = self.planned.is_some() || self.allocator.is_expandable();
                ensure!(may_keep || !has_unused_segment(&snapshot), "empty_cache left a segment");
                Ok(())
            }
            Err(Error::Driver(error)) if self.is_lost() && error.kind == DriverErrorKind::DeviceLost => Ok(()),
            Err(why) => Err(format!("empty_cache: {why}")),
        }
    }

    fn replace(&mut self, slot: u8) -> Check {
        let old = &self.slots[slot as usize];
        let retired = self.allocator.retire_stream(&old.stream);
        ensure!(retired.is_ok() || self.has_struck(), "retire_stream: {retired:?}");
        self.sim.destroy_stream(old.handle).map_err(|why| why.to_string())?;
        let handle = self.sim.create_stream();
        let answer = self.allocator.stream(handle).or_else(|_| self.allocator.stream(handle));
        match answer {
            Ok(stream) => self.slots[slot as usize] = Slot { handle, stream },
            // The old value goes on standing for a stream that is gone; the device is, too.
            Err(why) => ensure!(self.is_lost(), "stream: {why}"),
        }
        Ok(())
    }
}
