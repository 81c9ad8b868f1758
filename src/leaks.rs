//! What is live: by tag, by stack, oldest first, and since when.

use crate::device::Device;
use crate::driver::{DevicePtr, StreamKey};
use crate::pytorch::Stack;
use crate::size::human_bytes;
use crate::summary::counted;
use crate::survey::Survey;
use rustc_hash::FxHashMap;
use std::fmt;
use std::hash::Hash;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// A moment, from [`CachingAllocator::mark`](crate::CachingAllocator::mark). Two of them are told apart by what was
/// recorded between them: a history must be on, and the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    seq: u64,
}

impl Mark {
    pub(crate) fn new(seq: u64) -> Self {
        Self { seq }
    }
}

/// An allocation that a user holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveAllocation {
    /// Where it is.
    pub address: DevicePtr,
    /// The bytes that were asked for.
    pub requested: u64,
    /// The bytes of its block.
    pub block_bytes: u64,
    /// The stream that it was allocated on.
    pub stream: StreamKey,
    /// The scopes that it was allocated in; empty if there was none, or it was not recorded.
    pub tag: Arc<str>,
    /// Where in the program, if that was recorded.
    pub frames: Stack,
    /// How long ago; `None` if it was there before the history began, or none is recorded.
    pub age: Option<Duration>,
    /// Its number in the history.
    seq: u64,
}

/// What is live, oldest first: what was there before the history began, by address, and then in the order of allocation.
///
/// ```
/// # use vramalloc::{CachingAllocator, Config, HistoryOptions, driver::sim::SimDriver};
/// # let device = SimDriver::builder().capacity(1 << 30).build();
/// # let allocator = CachingAllocator::new(device, Config::default())?;
/// # let stream = allocator.default_stream()?;
/// allocator.record_history(Some(HistoryOptions::default().events(0)))?; // live allocations only
/// let before = allocator.mark();
/// let step = allocator.scope("step");
/// let kept = allocator.alloc(4 << 20, &stream)?;
/// drop(step);
/// let after = allocator.mark();
/// let grown = allocator.leak_report().between(before, after);
/// assert_eq!((grown.allocations.len(), &*grown.by_tag()[0].name), (1, "step"));
/// # drop(kept);
/// # Ok::<(), vramalloc::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakReport {
    /// The device's ordinal.
    pub device: u32,
    /// Oldest first.
    pub allocations: Vec<LiveAllocation>,
}

/// Live allocations that have something in common.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakGroup {
    /// The tag, or the stack's functions, innermost first, a line each.
    pub name: String,
    /// How many.
    pub count: usize,
    /// Bytes of their blocks.
    pub bytes: u64,
    /// The age of the oldest; `None` if that is not known of one of them.
    pub oldest: Option<Duration>,
}

impl LeakReport {
    pub(crate) fn new(survey: &Survey) -> Self {
        let (ages, mut frames) = (survey.ages(), survey.frames());
        let mut allocations: Vec<LiveAllocation> = survey
            .live()
            .map(|(run, block, note)| LiveAllocation {
                address: block.address,
                requested: block.requested,
                block_bytes: block.bytes,
                stream: run.stream,
                tag: frames.tag(note.tag),
                frames: frames.stack(note.stack),
                age: ages(note),
                seq: note.seq,
            })
            .collect();
        allocations.sort_by_key(|allocation| (allocation.seq, allocation.address));
        Self { device: survey.device, allocations }
    }

    /// What was allocated between two marks and is live: the growth that a loop without leaks has none of.
    #[must_use]
    pub fn between(&self, from: Mark, until: Mark) -> Self {
        let within = |allocation: &&LiveAllocation| (from.seq.max(1)..until.seq).contains(&allocation.seq);
        Self { device: self.device, allocations: self.allocations.iter().filter(within).cloned().collect() }
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.block_bytes).sum()
    }

    /// The same by tag, the most bytes first.
    #[must_use]
    pub fn by_tag(&self) -> Vec<LeakGroup> {
        self.grouped(
            |allocation| Arc::clone(&allocation.tag),
            |tag| {
                if tag.is_empty() { "(no tag)".to_owned() } else { tag.to_string() }
            },
        )
    }

    /// The same by stack, the most bytes first.
    #[must_use]
    pub fn by_stack(&self) -> Vec<LeakGroup> {
        self.grouped(
            |allocation| allocation.frames.clone(),
            |stack| {
                if stack.frames().is_empty() {
                    return "(no stack)".to_owned();
                }
                let frames = stack.frames().iter();
                let lines: Vec<String> =
                    frames.map(|frame| format!("{} ({}:{})", frame.name, frame.filename, frame.line)).collect();
                lines.join("\n")
            },
        )
    }

    fn grouped<K: Eq + Hash>(
        &self,
        key: impl Fn(&LiveAllocation) -> K,
        name: impl Fn(&K) -> String,
    ) -> Vec<LeakGroup> {
        let mut groups: FxHashMap<K, LeakGroup> = FxHashMap::default();
        for allocation in &self.allocations {
            let key = key(allocation);
            let fresh = || LeakGroup { name: name(&key), count: 0, bytes: 0, oldest: Some(Duration::ZERO) };
            // The name is made before the key is given away.
            let group = match groups.get_mut(&key) {
                Some(group) => group,
                None => {
                    let group = fresh();
                    groups.entry(key).or_insert(group)
                }
            };
            group.count += 1;
            group.bytes += allocation.block_bytes;
            group.oldest = group.oldest.zip(allocation.age).map(|(oldest, age)| oldest.max(age));
        }
        let mut groups: Vec<LeakGroup> = groups.into_values().collect();
        groups.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        groups
    }
}

/// Rows of each part of a printed report; the fields have all.
const ROWS: usize = 10;

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: u64| format!("{} ({bytes} bytes)", human_bytes(bytes));
        let age =
            |age: Option<Duration>| age.map_or("unknown".to_owned(), |age| format!("{:.1} s", age.as_secs_f64()));
        let count = self.allocations.len();
        write!(f, "device {}: {}, {}", self.device, counted(count, "live allocation"), bytes(self.bytes()))?;
        if count == 0 {
            return Ok(());
        }
        for (title, groups) in [("by tag", self.by_tag()), ("by stack", self.by_stack())] {
            if groups.len() == 1 && groups[0].name.starts_with("(no ") {
                continue;
            }
            write!(f, "\n{title}:")?;
            for group in groups.iter().take(ROWS) {
                let (first, rest) = group.name.split_once('\n').unwrap_or((&group.name, ""));
                write!(f, "\n  {} in {}, oldest {}: {first}", bytes(group.bytes), group.count, age(group.oldest))?;
                for line in rest.lines() {
                    write!(f, "\n      {line}")?;
                }
            }
            more(f, groups.len())?;
        }
        write!(f, "\noldest first:")?;
        for allocation in self.allocations.iter().take(ROWS) {
            let LiveAllocation { address, requested, stream, tag, .. } = allocation;
            write!(
                f,
                "\n  {address}: {requested} bytes on stream {:#x}, age {}",
                stream.handle.0,
                age(allocation.age)
            )?;
            if !tag.is_empty() {
                write!(f, ", {tag}")?;
            }
            if let Some(frame) = allocation.frames.frames().first() {
                write!(f, ", {} ({}:{})", frame.name, frame.filename, frame.line)?;
            }
        }
        more(f, count)
    }
}

fn more(f: &mut fmt::Formatter<'_>, count: usize) -> fmt::Result {
    if count > ROWS { write!(f, "\n  and {} more", count - ROWS) } else { Ok(()) }
}

/// Tells of what is live when the allocator goes: its observer, or, if a history is recorded, standard error.
pub(crate) fn warn(device: &Device) {
    if device.is_forked() || device.pools().iter().all(|pool| pool.lock_whole().held() == 0) {
        return;
    }
    let observer = device.history.take_leak_observer();
    if observer.is_none() && device.history.session().is_none() && !cfg!(feature = "tracing") {
        return;
    }
    let report = LeakReport::new(&Survey::new(device, false));
    if report.allocations.is_empty() {
        return; // only pending: nobody holds it
    }
    #[cfg(feature = "tracing")]
    crate::tell::leak(&report);
    match observer {
        Some(observer) => observer(&report),
        None if device.history.session().is_some() => {
            // Nobody can act on a standard error that is closed.
            let _ = writeln!(
                std::io::stderr(),
                "vramalloc: the allocator is dropped while memory of it is in use\n{report}"
            );
        }
        None => {}
    }
}
