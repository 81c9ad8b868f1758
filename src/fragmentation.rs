//! Why more is reserved than allocated.
//!
//! What goes back to the driver is a *unit*: a fixed segment, or a handle of an expandable range. A unit goes back when
//! nothing in it is in use, so a block that is in use pins the units that it lies in, with all that is free there.

use crate::BlockState;
use crate::driver::{DevicePtr, StreamHandle, StreamKey};
use crate::history::Note;
use crate::pytorch::Stack;
use crate::size::human_bytes;
use crate::snapshot::BlockInfo;
use crate::summary::counted;
use crate::survey::{Run, Survey};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Where the reserved bytes are that are not allocated; see [`units`](Self::units) for what pins them. The parts add up:
/// `reserved = allocated + pending + cached + pinned + private`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FragmentationReport {
    /// The device's ordinal.
    pub device: u32,
    /// Bytes in segments.
    pub reserved: u64,
    /// Bytes in blocks that users hold.
    pub allocated: u64,
    /// Bytes in blocks that are freed, and used by queued work.
    pub pending: u64,
    /// Bytes in units with nothing in use, which [`empty_cache`](crate::CachingAllocator::empty_cache) gives back.
    pub cached: u64,
    /// Free bytes in units with something in use.
    pub pinned: u64,
    /// Free bytes of [private pools](crate::PrivatePool), which only their release gives back.
    pub private: u64,
    /// Bytes of `allocated` that nobody asked for: rounding, and remainders too small to be split off.
    pub rounding: u64,
    /// What could be given back, beside `cached`, if blocks were moved into free blocks of the same stream elsewhere:
    /// found by emptying the least used units first. (A program moves a block by allocating, copying and freeing.)
    pub moving_gives_back: u64,
    /// Bytes that would have to be copied for that.
    pub moving_copies: u64,
    /// The units with free and used bytes, the most free bytes first.
    pub units: Vec<PinnedUnit>,
    /// The blocks whose freeing alone would empty a unit, the most gained first.
    pub pinning: Vec<Pinned>,
}

/// A segment, or a handle of expandable memory, that is partly in use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedUnit {
    /// Where it starts.
    pub address: DevicePtr,
    /// Its bytes, which go back together.
    pub bytes: u64,
    /// Bytes that are free in it.
    pub free: u64,
    /// The stream of the first block in use.
    pub stream: StreamKey,
    /// Whether it is a handle of expandable memory.
    pub expandable: bool,
    /// The blocks in use that lie in it, wholly or in part, by address.
    pub pinned_by: Vec<Pinned>,
}

/// A block in use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pinned {
    /// Where it is.
    pub address: DevicePtr,
    /// Its bytes.
    pub bytes: u64,
    /// Whether a user holds it, or queued work.
    pub state: BlockState,
    /// The scopes that it was allocated in.
    pub tag: Arc<str>,
    /// Where in the program, if that was recorded.
    pub frames: Stack,
    /// What would go back if this block alone were freed: the units that nothing else pins.
    pub gives_back: u64,
}

/// A unit, and the blocks in it by index.
struct Unit {
    start: u64,
    bytes: u64,
    expandable: bool,
    /// Of [`Blocks::used`].
    used: Vec<usize>,
    used_bytes: u64,
    /// Whether it is a private pool's: whatever is freed, moved or emptied, it stays.
    private: bool,
}

impl Unit {
    fn free_bytes(&self) -> u64 {
        self.bytes - self.used_bytes
    }
}

type Used<'a> = (&'a Run, BlockInfo, Note);

impl FragmentationReport {
    pub(crate) fn new(survey: &Survey) -> Self {
        let mut used: Vec<Used<'_>> = Vec::new();
        for run in &survey.runs {
            let blocks = run.blocks.iter().filter(|(block, _)| block.state != BlockState::Free);
            used.extend(blocks.map(|&(block, note)| (run, block, note)));
        }
        let units = units(survey, &used);
        let alone = gives_back_alone(&units, used.len());
        let mut frames = survey.frames();
        let mut pinned = |index: usize| {
            let (_, block, note) = &used[index];
            Pinned {
                address: block.address,
                bytes: block.bytes,
                state: block.state,
                tag: frames.tag(note.tag),
                frames: frames.stack(note.stack),
                gives_back: alone[index],
            }
        };
        let sum_of = |state, bytes: fn(&BlockInfo) -> u64| {
            let blocks = used.iter().filter(|(_, block, _)| block.state == state);
            blocks.map(|(_, block, _)| bytes(block)).sum::<u64>()
        };
        let partly =
            || units.iter().filter(|unit| !unit.private && !unit.used.is_empty() && unit.free_bytes() > 0);
        let (moving_gives_back, moving_copies) = move_out(survey, &units, &used);
        let mut report = Self {
            device: survey.device,
            reserved: units.iter().map(|unit| unit.bytes).sum(),
            allocated: sum_of(BlockState::Live, |block| block.bytes),
            pending: sum_of(BlockState::Pending, |block| block.bytes),
            cached: units.iter().filter(|unit| !unit.private && unit.used.is_empty()).map(|unit| unit.bytes).sum(),
            pinned: partly().map(Unit::free_bytes).sum(),
            private: units.iter().filter(|unit| unit.private).map(Unit::free_bytes).sum(),
            rounding: sum_of(BlockState::Live, |block| block.bytes - block.requested),
            moving_gives_back,
            moving_copies,
            units: partly()
                .map(|unit| PinnedUnit {
                    address: DevicePtr(unit.start),
                    bytes: unit.bytes,
                    free: unit.free_bytes(),
                    stream: used[unit.used[0]].0.stream,
                    expandable: unit.expandable,
                    pinned_by: unit.used.iter().map(|&index| pinned(index)).collect(),
                })
                .collect(),
            pinning: Vec::new(),
        };
        report.pinning = (0..used.len()).filter(|&index| alone[index] > 0).map(&mut pinned).collect();
        // Not those that fill what they lie in: they pin nothing but themselves.
        report.pinning.retain(|block| block.gives_back > block.bytes);
        report.pinning.sort_by_key(|block| (std::cmp::Reverse(block.gives_back - block.bytes), block.address));
        report.units.sort_by_key(|unit| (std::cmp::Reverse(unit.free), unit.address));
        report
    }
}

/// What goes back to the driver as one, by address, with the blocks in use there.
fn units(survey: &Survey, used: &[Used<'_>]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let unit = |start, bytes, expandable| Unit {
        start,
        bytes,
        expandable,
        used: Vec::new(),
        used_bytes: 0,
        private: false,
    };
    units.extend(survey.handles.iter().map(|&(start, bytes)| unit(start, bytes, true)));
    let fixed = survey.runs.iter().filter(|run| !run.expandable);
    units.extend(fixed.map(|run| unit(run.base, run.bytes(), false)));
    units.sort_by_key(|unit| unit.start);
    for run in survey.runs.iter().filter(|run| run.is_private()) {
        let first = units.partition_point(|unit| unit.start + unit.bytes <= run.base);
        for unit in units[first..].iter_mut().take_while(|unit| unit.start < run.base + run.bytes()) {
            unit.private = true;
        }
    }
    for (index, (_, block, _)) in used.iter().enumerate() {
        let (start, end) = (block.address.0, block.address.0 + block.bytes);
        let first = units.partition_point(|unit| unit.start + unit.bytes <= start);
        for unit in units[first..].iter_mut().take_while(|unit| unit.start < end) {
            unit.used.push(index);
            unit.used_bytes += end.min(unit.start + unit.bytes) - start.max(unit.start);
        }
    }
    units
}

/// For each block, the bytes of the units that it alone pins.
fn gives_back_alone(units: &[Unit], blocks: usize) -> Vec<u64> {
    let mut alone = vec![0; blocks];
    for unit in units.iter().filter(|unit| !unit.private) {
        if let [only] = unit.used[..] {
            alone[only] += unit.bytes;
        }
    }
    alone
}

/// The pools' free blocks.
type Rooms = BTreeMap<PoolKey, BTreeSet<Room>>;

/// The stream's number, and the size class.
type PoolKey = (u64, usize);

/// Bytes and address.
type Room = (u64, u64);

/// Empties the least used units first, moving their blocks into the tightest free blocks elsewhere; what that gives
/// back, and what is copied.
fn move_out(survey: &Survey, units: &[Unit], used: &[Used<'_>]) -> (u64, u64) {
    let key = |run: &Run| (run.stream.id, run.class.index());
    let mut rooms = Rooms::new();
    // The free parts of each unit, as they are in `rooms`.
    let mut parts: Vec<Vec<(PoolKey, Room)>> = units.iter().map(|_| Vec::new()).collect();
    for run in &survey.runs {
        for (block, _) in run.blocks.iter().filter(|(block, _)| block.state == BlockState::Free) {
            // By unit: one that is empty goes back rather than being filled.
            let (start, end) = (block.address.0, block.address.0 + block.bytes);
            let first = units.partition_point(|unit| unit.start + unit.bytes <= start);
            for (index, unit) in (first..).zip(&units[first..]).take_while(|(_, unit)| unit.start < end) {
                let from = start.max(unit.start);
                let part = (end.min(unit.start + unit.bytes) - from, from);
                if !unit.used.is_empty() && !unit.private {
                    rooms.entry(key(run)).or_default().insert(part);
                    parts[index].push((key(run), part));
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..units.len()).filter(|&index| !parts[index].is_empty()).collect();
    order.sort_by_key(|&index| (u128::from(units[index].used_bytes) << 64) / u128::from(units[index].bytes));
    let (mut moved, mut given_back, mut copied) = (vec![false; used.len()], 0, 0);
    let mut filled: BTreeSet<u64> = BTreeSet::new();
    for index in order {
        let unit = &units[index];
        let blocks: Vec<usize> = unit.used.iter().copied().filter(|&block| !moved[block]).collect();
        // What was moved in stays, and what queued work uses cannot be moved.
        let is_stuck = filled.range(unit.start..unit.start + unit.bytes).next().is_some()
            || blocks.iter().any(|&block| used[block].1.state == BlockState::Pending);
        if is_stuck {
            continue;
        }
        for (pool, part) in &parts[index] {
            if let Some(room) = rooms.get_mut(pool) {
                room.remove(part);
            }
        }
        let taken: Vec<_> = blocks
            .iter()
            .map_while(|&block| {
                let (run, block, _) = &used[block];
                take(&mut rooms, key(run), block.bytes)
            })
            .collect();
        if taken.len() == blocks.len() {
            copied += blocks.iter().map(|&block| used[block].1.bytes).sum::<u64>();
            given_back += unit.bytes;
            unit.used.iter().for_each(|&block| moved[block] = true);
            filled.extend(taken.iter().map(|(_, (_, address), _)| *address));
            continue;
        }
        for (pool, whole, rest) in taken.into_iter().rev() {
            let room = rooms.entry(pool).or_default();
            if let Some(rest) = rest {
                room.remove(&rest);
            }
            room.insert(whole);
        }
        for &(pool, part) in &parts[index] {
            rooms.entry(pool).or_default().insert(part);
        }
    }
    (given_back, copied)
}

/// What was taken, and what is left of it.
type Taken = (PoolKey, Room, Option<Room>);

/// Takes the tightest room for a block.
fn take(rooms: &mut Rooms, pool: PoolKey, bytes: u64) -> Option<Taken> {
    let room = rooms.get_mut(&pool)?;
    let whole = *room.range((bytes, 0)..).next()?;
    room.remove(&whole);
    let rest = (whole.0 > bytes).then(|| (whole.0 - bytes, whole.1 + bytes));
    room.extend(rest);
    Some((pool, whole, rest))
}

/// Rows of each part of a printed report; the fields have all.
const ROWS: usize = 10;

impl fmt::Display for FragmentationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "device {}: why {} bytes are reserved and {} allocated",
            self.device, self.reserved, self.allocated
        )?;
        let mut row = |name: &str, bytes: u64, remark: &str| {
            writeln!(f, "  {name:<22}{:>14}  ({bytes} bytes){remark}", human_bytes(bytes))
        };
        row("allocated", self.allocated, "")?;
        row("  of it rounding", self.rounding, "")?;
        row("pending", self.pending, ": freed, used by queued work")?;
        row("cached", self.cached, ": empty_cache gives it back")?;
        row("pinned", self.pinned, ": free beside what is in use")?;
        if self.private > 0 {
            row("private", self.private, ": free in private pools, until they are released")?;
        }
        row("reserved", self.reserved, "")?;
        if self.moving_gives_back > 0 {
            let (back, copied) = (human_bytes(self.moving_gives_back), human_bytes(self.moving_copies));
            writeln!(f, "moving {copied} of blocks into free room elsewhere would give back {back}")?;
        }
        if !self.pinning.is_empty() {
            writeln!(f, "blocks that alone pin more than themselves:")?;
        }
        for block in self.pinning.iter().take(ROWS) {
            write!(f, "  ")?;
            describe(f, block)?;
            writeln!(f, ": freeing it would give back {}", human_bytes(block.gives_back))?;
        }
        if !self.units.is_empty() {
            writeln!(f, "partly used, the most free first:")?;
        }
        for unit in self.units.iter().take(ROWS) {
            let kind = if unit.expandable { "pages" } else { "segment" };
            let StreamHandle(stream) = unit.stream.handle;
            writeln!(
                f,
                "  {kind} at {}, {} of {} free, stream {stream:#x}, pinned by {}:",
                unit.address,
                human_bytes(unit.free),
                human_bytes(unit.bytes),
                counted(unit.pinned_by.len(), "block")
            )?;
            for block in unit.pinned_by.iter().take(3) {
                write!(f, "    ")?;
                describe(f, block)?;
                writeln!(f)?;
            }
            if unit.pinned_by.len() > 3 {
                writeln!(f, "    and {} more", unit.pinned_by.len() - 3)?;
            }
        }
        if self.units.len() > ROWS {
            writeln!(f, "  and {} more", self.units.len() - ROWS)?;
        }
        Ok(())
    }
}

fn describe(f: &mut fmt::Formatter<'_>, block: &Pinned) -> fmt::Result {
    write!(f, "{}, {}", block.address, human_bytes(block.bytes))?;
    if block.state == BlockState::Pending {
        write!(f, ", pending")?;
    }
    if !block.tag.is_empty() {
        write!(f, ", {}", block.tag)?;
    }
    if let Some(frame) = block.frames.frames().first() {
        write!(f, ", {} ({}:{})", frame.name, frame.filename, frame.line)?;
    }
    Ok(())
}
