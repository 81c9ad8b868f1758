//! The schema, walked once for every file format.

use super::{Segment, Snapshot, Stack, TraceEntry, Value};
use super::{json::Json, pickle::Pickle};
use crate::BlockState;
use crate::size::human_bytes;
use rustc_hash::FxHashMap;
use std::io::{self, Write};
use std::path::Path;

/// What JSON has around the texts of a frame: keys, quotes, a line's number.
const FRAME_BYTES: u64 = 35;

/// What JSON has of an event beside texts and stack, at least: keys, quotes, numbers of one digit.
const EVENT_BYTES: u64 = 126;

/// The same of a block.
const BLOCK_BYTES: u64 = 73;

/// A file format. Values come in the order of the file; each item of a list is announced.
pub(super) trait Sink {
    fn begin_dict(&mut self) -> io::Result<()>;
    fn key(&mut self, key: &str) -> io::Result<()>;
    fn end_dict(&mut self) -> io::Result<()>;
    fn begin_list(&mut self) -> io::Result<()>;
    fn item(&mut self) -> io::Result<()>;
    fn end_list(&mut self) -> io::Result<()>;
    fn none(&mut self) -> io::Result<()>;
    fn bool(&mut self, value: bool) -> io::Result<()>;
    fn int(&mut self, value: i128) -> io::Result<()>;
    fn float(&mut self, value: f64) -> io::Result<()>;
    fn str(&mut self, value: &str) -> io::Result<()>;
    fn pair(&mut self, values: (u64, u64)) -> io::Result<()>;
    /// Writes the value that was [remembered](Self::remember) under `address`, if the format can; whether it did.
    fn recall(&mut self, address: usize) -> io::Result<bool>;
    /// Remembers the value that was just written.
    fn remember(&mut self, address: usize) -> io::Result<()>;
}

impl Snapshot {
    /// Writes it as a pickle (protocol 2), which both of PyTorch's viewers open. O(size); buffer the writer.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write_pickle(&self, to: impl Write) -> io::Result<()> {
        let mut pickle = Pickle::begin(to)?;
        walk(self, &mut pickle)?;
        pickle.finish()
    }

    /// Writes it as JSON, which `pytorch.org/memory_viz` opens, too. Stacks are repeated wherever they occur.
    ///
    /// # Errors
    /// As [`check_json`](Self::check_json), before anything is written; what the writer says.
    pub fn write_json(&self, to: impl Write) -> io::Result<()> {
        self.check_json()?;
        let mut json = Json::new(to);
        walk(self, &mut json)?;
        json.finish()
    }

    /// Whether it can be written as JSON, which has no way to name a text or a stack that was there before: a few
    /// megabytes of a pickle may be terabytes there. O(events and distinct stacks).
    ///
    /// # Errors
    /// `InvalidInput` if what is repeated would alone take more than [`FILE_MAX_BYTES`](super::FILE_MAX_BYTES): texts, stacks,
    /// keys. Numbers count as one digit, so a file may become somewhat larger than that.
    pub fn check_json(&self) -> io::Result<()> {
        let bytes = self.repeated_bytes();
        if bytes <= super::FILE_MAX_BYTES {
            return Ok(());
        }
        let (bytes, limit) = (human_bytes(bytes), human_bytes(super::FILE_MAX_BYTES));
        let text = format!(
            "as JSON it would be more than {bytes}, since stacks are repeated there for each event (about {limit} at most \
             are written): write a pickle, which has each once"
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    /// The bytes of events and blocks, at least: their texts and stacks, each as often as it occurs.
    fn repeated_bytes(&self) -> u64 {
        let mut known: FxHashMap<usize, u64> = FxHashMap::default();
        let mut stack = |stack: &Stack| {
            *known.entry(stack.address()).or_insert_with(|| {
                let frames = stack.frames().iter();
                frames.map(|frame| (frame.name.len() + frame.filename.len()) as u64 + FRAME_BYTES).sum()
            })
        };
        let mut sum = 0u64;
        for segment in &self.segments {
            sum = sum.saturating_add(stack(&segment.frames));
            for block in &segment.blocks {
                sum = sum.saturating_add(BLOCK_BYTES).saturating_add(stack(&block.frames));
            }
        }
        for entry in self.device_traces.iter().flatten() {
            let texts = (entry.action.name().len() + entry.user_metadata.len()) as u64 + EVENT_BYTES;
            sum = sum.saturating_add(texts).saturating_add(stack(&entry.frames));
        }
        sum
    }

    /// Writes it to a file: JSON if its name ends in `.json`, else a pickle.
    ///
    /// # Errors
    /// What the file system says; for JSON also [`check_json`](Self::check_json), before the file is touched.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        if is_json {
            self.check_json()?;
        }
        let mut to = io::BufWriter::new(std::fs::File::create(path)?);
        if is_json {
            self.write_json(&mut to)?;
        } else {
            self.write_pickle(&mut to)?;
        }
        to.flush()
    }
}

fn walk(snapshot: &Snapshot, to: &mut impl Sink) -> io::Result<()> {
    to.begin_dict()?;
    to.key("segments")?;
    list(to, &snapshot.segments, segment)?;
    to.key("device_traces")?;
    list(to, &snapshot.device_traces, |to, entries| list(to, entries, entry))?;
    to.key("allocator_settings")?;
    dict(to, &snapshot.allocator_settings)?;
    to.key("external_annotations")?;
    list(to, &snapshot.external_annotations, |to, annotation| dict(to, &annotation.0))?;
    to.end_dict()
}

fn list<S: Sink, T>(to: &mut S, items: &[T], write: impl Fn(&mut S, &T) -> io::Result<()>) -> io::Result<()> {
    to.begin_list()?;
    for item in items {
        to.item()?;
        write(to, item)?;
    }
    to.end_list()
}

fn segment(to: &mut impl Sink, segment: &Segment) -> io::Result<()> {
    to.begin_dict()?;
    for (key, number) in [
        ("device", u64::from(segment.device)),
        ("address", segment.address),
        ("total_size", segment.total_size),
        ("allocated_size", segment.allocated_size),
        ("active_size", segment.active_size),
        ("requested_size", segment.requested_size),
        ("stream", segment.stream),
    ] {
        to.key(key)?;
        to.int(number.into())?;
    }
    to.key("segment_type")?;
    to.str(if segment.is_large { "large" } else { "small" })?;
    to.key("segment_pool_id")?;
    to.pair(segment.segment_pool_id)?;
    to.key("is_expandable")?;
    to.bool(segment.is_expandable)?;
    to.key("frames")?;
    stack(to, &segment.frames)?;
    to.key("blocks")?;
    list(to, &segment.blocks, |to, block| {
        to.begin_dict()?;
        for (key, number) in
            [("address", block.address), ("size", block.size), ("requested_size", block.requested_size)]
        {
            to.key(key)?;
            to.int(number.into())?;
        }
        to.key("state")?;
        to.str(state_name(block.state))?;
        to.key("frames")?;
        stack(to, &block.frames)?;
        to.end_dict()
    })?;
    to.end_dict()
}

/// PyTorch's name of a block's state.
pub(super) fn state_name(state: BlockState) -> &'static str {
    match state {
        BlockState::Live => "active_allocated",
        BlockState::Pending => "active_pending_free",
        BlockState::Free => "inactive",
    }
}

fn entry(to: &mut impl Sink, entry: &TraceEntry) -> io::Result<()> {
    to.begin_dict()?;
    to.key("action")?;
    to.str(entry.action.name())?;
    to.key(if entry.action == super::Action::Oom { "device_free" } else { "addr" })?;
    to.int(entry.addr.into())?;
    for (key, number) in [("size", entry.size), ("stream", entry.stream), ("time_us", entry.time_us)] {
        to.key(key)?;
        to.int(number.into())?;
    }
    to.key("compile_context")?;
    to.str("N/A")?;
    to.key("user_metadata")?;
    to.str(&entry.user_metadata)?;
    if entry.block_size > 0 {
        to.key("block_size")?;
        to.int(entry.block_size.into())?;
    }
    to.key("pool_id")?;
    to.pair(entry.pool_id)?;
    to.key("frames")?;
    stack(to, &entry.frames)?;
    to.end_dict()
}

fn stack(to: &mut impl Sink, stack: &Stack) -> io::Result<()> {
    if to.recall(stack.address())? {
        return Ok(());
    }
    list(to, stack.frames(), |to, frame| {
        to.begin_dict()?;
        to.key("name")?;
        to.str(&frame.name)?;
        to.key("filename")?;
        to.str(&frame.filename)?;
        to.key("line")?;
        to.int(frame.line.into())?;
        to.end_dict()
    })?;
    to.remember(stack.address())
}

fn dict(to: &mut impl Sink, items: &[(String, Value)]) -> io::Result<()> {
    to.begin_dict()?;
    for (key, item) in items {
        to.key(key)?;
        value(to, item)?;
    }
    to.end_dict()
}

fn value(to: &mut impl Sink, item: &Value) -> io::Result<()> {
    match item {
        Value::None => to.none(),
        Value::Bool(value) => to.bool(*value),
        Value::Int(value) => to.int((*value).into()),
        Value::Float(value) => to.float(*value),
        Value::Str(value) => to.str(value),
        Value::List(items) => {
            to.begin_list()?;
            for item in items {
                to.item()?;
                value(to, item)?;
            }
            to.end_list()
        }
        Value::Dict(items) => dict(to, items),
    }
}
