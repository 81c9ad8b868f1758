//! Who holds the memory: by stream, and by tag.

use crate::BlockState;
use crate::driver::StreamKey;
use crate::size::human_bytes;
use crate::survey::Survey;
use rustc_hash::FxHashMap;
use std::fmt;
use std::sync::Arc;

/// What each stream and each tag holds at one moment. Printed, a table of each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryBreakdown {
    /// The device's ordinal.
    pub device: u32,
    /// The streams that hold memory, the most reserved first.
    pub streams: Vec<StreamUsage>,
    /// The tags of what is allocated, the most bytes first; only the empty one if no history is recorded.
    pub tags: Vec<TagUsage>,
}

/// What a stream's pool holds, in bytes. `reserved = allocated + pending + cached`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamUsage {
    /// The stream.
    pub stream: StreamKey,
    /// Blocks that users hold.
    pub allocations: usize,
    /// Bytes of those.
    pub allocated: u64,
    /// Bytes that are freed, and used by queued work.
    pub pending: u64,
    /// Bytes that are free.
    pub cached: u64,
    /// Bytes of its segments.
    pub reserved: u64,
}

/// What is allocated under a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TagUsage {
    /// The scopes; empty for what was allocated in none, or not recorded.
    pub tag: Arc<str>,
    /// Blocks that users hold.
    pub allocations: usize,
    /// Bytes of those.
    pub allocated: u64,
}

impl MemoryBreakdown {
    pub(crate) fn new(survey: &Survey) -> Self {
        let mut streams: Vec<StreamUsage> = Vec::new();
        let mut places: FxHashMap<u64, usize> = FxHashMap::default();
        for run in &survey.runs {
            let place = *places.entry(run.stream.id).or_insert_with(|| {
                let stream = run.stream;
                streams.push(StreamUsage {
                    stream,
                    allocations: 0,
                    allocated: 0,
                    pending: 0,
                    cached: 0,
                    reserved: 0,
                });
                streams.len() - 1
            });
            let usage = &mut streams[place];
            usage.reserved += run.bytes();
            for (block, _) in &run.blocks {
                match block.state {
                    BlockState::Live => {
                        usage.allocations += 1;
                        usage.allocated += block.bytes;
                    }
                    BlockState::Pending => usage.pending += block.bytes,
                    BlockState::Free => usage.cached += block.bytes,
                }
            }
        }
        let mut frames = survey.frames();
        let mut by_tag: FxHashMap<Arc<str>, (usize, u64)> = FxHashMap::default();
        for (_, block, note) in survey.live() {
            let (count, bytes) = by_tag.entry(frames.tag(note.tag)).or_default();
            *count += 1;
            *bytes += block.bytes;
        }
        let tags =
            by_tag.into_iter().map(|(tag, (allocations, allocated))| TagUsage { tag, allocations, allocated });
        let mut tags: Vec<TagUsage> = tags.collect();
        tags.sort_by(|a, b| b.allocated.cmp(&a.allocated).then_with(|| a.tag.cmp(&b.tag)));
        streams.sort_by_key(|usage| (std::cmp::Reverse(usage.reserved), usage.stream.id));
        Self { device: survey.device, streams, tags }
    }
}

impl fmt::Display for MemoryBreakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |bytes: u64| format!("{:>12}", human_bytes(bytes));
        writeln!(
            f,
            "{:<20} {:>12} {:>12} {:>12} {:>12} {:>12}",
            format!("device {}, stream", self.device),
            "reserved",
            "allocated",
            "pending",
            "cached",
            "allocations"
        )?;
        for usage in &self.streams {
            let StreamUsage { stream, allocations, allocated, pending, cached, reserved } = usage;
            let name = if stream.handle.0 == 0 { "default".to_owned() } else { format!("{:#x}", stream.handle.0) };
            let [reserved, allocated, pending, cached] = [*reserved, *allocated, *pending, *cached].map(cell);
            writeln!(f, "{name:<20} {reserved} {allocated} {pending} {cached} {allocations:>12}")?;
        }
        if self.tags.iter().all(|usage| usage.tag.is_empty()) {
            return Ok(());
        }
        writeln!(f, "{:<46} {:>12} {:>12}", format!("device {}, tag", self.device), "allocated", "allocations")?;
        for TagUsage { tag, allocations, allocated } in &self.tags {
            let tag = if tag.is_empty() { "(no tag)" } else { tag };
            writeln!(f, "{tag:<46} {} {allocations:>12}", cell(*allocated))?;
        }
        Ok(())
    }
}
