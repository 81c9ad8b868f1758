//! What the page knows of a snapshot.

use super::columns::{Columns, Table};
use super::{lifetimes, mapped};
use crate::pytorch::{Action, Snapshot, Stack, TraceEntry};
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::io;

/// The head of the data.
#[derive(Serialize)]
struct Head<'a> {
    title: &'a str,
    /// Every text once: tags, functions, files.
    texts: Vec<&'a str>,
    /// `starts` of each stack in `frames`, and the functions: `name`, `file`, `line`.
    stacks: Table,
    devices: Vec<Device>,
}

#[derive(Serialize)]
struct Device {
    ordinal: usize,
    events: usize,
    /// What was reserved before the first event.
    reserved_at_start: u64,
    /// By `born`, all of a [`Lifetime`](lifetimes::Lifetime); `waited` is `gone` less `freed`.
    allocations: Table,
    segments: Table,
    /// `steps`: of each event, by how many microseconds it was later than the one before (the first: than 1970), modulo
    /// 2⁶⁴.
    times: Table,
    /// Where reserved changed: `at` which moment, and to how many `bytes`.
    reserved: Table,
    /// Requests that failed: `at` which moment, for how many `bytes`, and how many the device had `free`.
    ooms: Table,
}

/// The page's data: see [`Columns::packed`].
pub(super) fn encode(snapshot: &Snapshot, title: &str) -> io::Result<Vec<u8>> {
    let devices = snapshot.segments.iter().map(|segment| segment.device as usize + 1).max().unwrap_or(0);
    let mut writer = Writer::default();
    let mut shown = Vec::new();
    // A file may name a device of any number.
    for ordinal in (0..snapshot.device_traces.len().max(devices.min(MAX_DEVICES))).take(MAX_DEVICES) {
        let is_empty = snapshot.device_traces.get(ordinal).is_none_or(Vec::is_empty)
            && !snapshot.segments.iter().any(|segment| segment.device as usize == ordinal);
        if !is_empty {
            shown.push(writer.device(snapshot, ordinal)?);
        }
    }
    let Writer { mut columns, texts, stacks, .. } = writer;
    let stacks = stacks.write(&mut columns);
    columns.packed(&Head { title, texts: texts.all, stacks, devices: shown })
}

/// No host has more.
const MAX_DEVICES: usize = 1024;

/// Texts by number; 0 is the empty one.
struct Texts<'a> {
    all: Vec<&'a str>,
    numbers: FxHashMap<&'a str, u32>,
}

impl Default for Texts<'_> {
    fn default() -> Self {
        Self { all: vec![""], numbers: FxHashMap::from_iter([("", 0)]) }
    }
}

impl<'a> Texts<'a> {
    fn number(&mut self, text: &'a str) -> u32 {
        let next = self.all.len();
        *self.numbers.entry(text).or_insert_with(|| {
            self.all.push(text);
            number(next)
        })
    }
}

/// Stacks by number; 0 is the empty one.
#[derive(Default)]
struct Stacks<'a> {
    by_address: FxHashMap<usize, u32>,
    by_value: FxHashMap<&'a Stack, u32>,
    starts: Vec<u32>,
    frames: Vec<u32>,
    frame_numbers: FxHashMap<[u32; 3], u32>,
    distinct_frames: Vec<[u32; 3]>,
}

impl<'a> Stacks<'a> {
    fn number(&mut self, stack: Option<&'a Stack>, texts: &mut Texts<'a>) -> u32 {
        let Some(stack) = stack.filter(|stack| !stack.frames().is_empty()) else { return 0 };
        if let Some(&known) = self.by_address.get(&stack.address()) {
            return known;
        }
        let next = number(self.starts.len() + 1);
        let number_of = *self.by_value.entry(stack).or_insert(next);
        self.by_address.insert(stack.address(), number_of);
        if number_of == next {
            self.starts.push(number(self.frames.len()));
            for frame in stack.frames() {
                let key = [texts.number(&frame.name), texts.number(&frame.filename), frame.line];
                let next = number(self.distinct_frames.len());
                let frame = *self.frame_numbers.entry(key).or_insert(next);
                if frame == next {
                    self.distinct_frames.push(key);
                }
                self.frames.push(frame);
            }
        }
        number_of
    }

    fn write(self, columns: &mut Columns) -> Table {
        let end = number(self.frames.len());
        // The empty one, the others, and the end of the last.
        let starts = [0].into_iter().chain(self.starts).chain([end]);
        let of = |at: usize| self.distinct_frames.iter().map(move |frame| frame[at]);
        Table::from([
            ("starts", columns.u32(starts)),
            ("frames", columns.u32(self.frames.iter().copied())),
            ("name", columns.u32(of(0))),
            ("file", columns.u32(of(1))),
            ("line", columns.u32(of(2))),
        ])
    }
}

#[derive(Default)]
struct Writer<'a> {
    columns: Columns,
    texts: Texts<'a>,
    stacks: Stacks<'a>,
}

impl<'a> Writer<'a> {
    fn device(&mut self, snapshot: &'a Snapshot, ordinal: usize) -> io::Result<Device> {
        let entries = snapshot.device_traces.get(ordinal).map(Vec::as_slice).unwrap_or_default();
        if u32::try_from(entries.len()).is_err() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a page shows fewer than 2³² events of a device",
            ));
        }
        let over_time = snapshot.usage_over_time(ordinal);
        let reserved_at_start = over_time.usage().reserved;
        let mut last = reserved_at_start;
        let reserved: Vec<(u32, u64)> = (1u32..)
            .zip(over_time)
            .filter_map(|(moment, (_, usage))| {
                (std::mem::replace(&mut last, usage.reserved) != usage.reserved)
                    .then_some((moment, usage.reserved))
            })
            .collect();
        let ooms: Vec<(u32, &TraceEntry)> =
            (1u32..).zip(entries).filter(|(_, entry)| entry.action == Action::Oom).collect();
        let columns = &mut self.columns;
        let mut last = 0;
        let step = |entry: &TraceEntry| entry.time_us.wrapping_sub(std::mem::replace(&mut last, entry.time_us));
        let times = Table::from([("steps", columns.u64(entries.iter().map(step)))]);
        let reserved = Table::from([
            ("at", columns.u32(reserved.iter().map(|(at, _)| *at))),
            ("bytes", columns.u64(reserved.iter().map(|(_, bytes)| *bytes))),
        ]);
        let ooms = Table::from([
            ("at", columns.u32(ooms.iter().map(|(at, _)| *at))),
            ("bytes", columns.u64(ooms.iter().map(|(_, entry)| entry.size))),
            ("free", columns.u64(ooms.iter().map(|(_, entry)| entry.addr))),
        ]);
        let allocations = self.allocations(&lifetimes::of(snapshot, ordinal));
        let segments = self.segments(&mapped::of(snapshot, ordinal));
        Ok(Device {
            ordinal,
            events: entries.len(),
            reserved_at_start,
            allocations,
            segments,
            times,
            reserved,
            ooms,
        })
    }

    fn allocations(&mut self, all: &[lifetimes::Lifetime<'a>]) -> Table {
        let tags: Vec<u64> = all.iter().map(|one| self.texts.number(one.tag).into()).collect();
        let stacks: Vec<u64> =
            all.iter().map(|one| self.stacks.number(one.stack, &mut self.texts).into()).collect();
        let columns = &mut self.columns;
        Table::from([
            ("address", columns.u64(all.iter().map(|one| one.address))),
            ("requested", columns.u64(all.iter().map(|one| one.requested))),
            ("bytes", columns.u64(all.iter().map(|one| one.bytes))),
            ("stream", columns.u64(all.iter().map(|one| one.stream))),
            ("born", columns.u32(all.iter().map(|one| one.born))),
            ("freed", columns.u32(all.iter().map(|one| one.freed))),
            ("waited", columns.u64(all.iter().map(|one| u64::from(one.gone - one.freed)))),
            ("stack", columns.u64(stacks)),
            ("tag", columns.u64(tags)),
        ])
    }

    fn segments(&mut self, all: &[mapped::Mapped]) -> Table {
        let columns = &mut self.columns;
        Table::from([
            ("address", columns.u64(all.iter().map(|one| one.address))),
            ("bytes", columns.u64(all.iter().map(|one| one.bytes))),
            ("stream", columns.u64(all.iter().map(|one| one.stream))),
            ("from", columns.u32(all.iter().map(|one| one.from))),
            ("to", columns.u32(all.iter().map(|one| one.to))),
            ("is_pages", columns.u64(all.iter().map(|one| u64::from(one.is_pages)))),
        ])
    }
}

/// A number of something that a file has at most a gigabyte of.
fn number(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}
