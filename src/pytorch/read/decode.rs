//! From loaded values to a snapshot, with every value checked.

use super::Problem;
use super::arena::{Arena, Id, Node};
use crate::BlockState;
use crate::pytorch::{Action, Annotation, Block, Frame, Segment, Snapshot, Stack, TraceEntry, Value};
use rustc_hash::FxHashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Sizes and addresses above are no device's.
const NUMBER_MAX: u64 = 1 << 62;

/// Devices that a file may have.
const DEVICES_MAX: usize = 1024;

/// Keys of a dictionary: they are searched one by one.
const KEYS_MAX: usize = 256;

/// How deep the free-form dictionaries may be, and how many values, or eight bytes of text, they may have in all.
const DEPTH_MAX: usize = 16;
const VALUES_MAX: usize = 1 << 20;

pub(super) fn snapshot(arena: &Arena, root: Id) -> Result<Snapshot, Problem> {
    let mut decoder = Decoder {
        arena,
        seen: vec![0; arena.len().div_ceil(64)],
        texts: FxHashMap::default(),
        stacks: FxHashMap::default(),
        by_frames: FxHashMap::default(),
        values: 0,
        empty: "".into(),
    };
    decoder.snapshot(root)
}

struct Decoder<'a> {
    arena: &'a Arena,
    /// One bit a value: dictionaries that became an entry, a segment or a block. None does twice, so what is decoded is
    /// no larger than what was loaded.
    seen: Vec<u64>,
    texts: FxHashMap<&'a str, Arc<str>>,
    /// By the list's number; and by content.
    stacks: FxHashMap<Id, Stack>,
    by_frames: FxHashMap<Vec<Frame>, Stack>,
    values: usize,
    empty: Arc<str>,
}

/// Where a value is, from the root; written out for an error only.
#[derive(Clone, Copy)]
enum Place<'a> {
    Root,
    Key(&'a Place<'a>, &'a str),
    Item(&'a Place<'a>, usize),
}

impl Place<'_> {
    fn write(&self, to: &mut String) {
        match self {
            Self::Root => {}
            Self::Key(outer, key) => {
                outer.write(to);
                let _ = write!(to, "{}{key}", if to.is_empty() { "" } else { "." });
            }
            Self::Item(outer, index) => {
                outer.write(to);
                let _ = write!(to, "[{index}]");
            }
        }
    }
}

/// A dictionary's items.
#[derive(Clone, Copy)]
struct Dict<'a>(&'a Arena, &'a [Id]);

impl<'a> Dict<'a> {
    /// The value of a key; the last one, as in Python.
    fn get(&self, key: &str) -> Option<Id> {
        self.1.chunks_exact(2).rev().find(|pair| self.0.str(pair[0]) == Some(key)).map(|pair| pair[1])
    }
}

impl<'a> Decoder<'a> {
    fn wrong<T>(&self, place: &Place<'_>, expected: &str, found: impl Into<String>) -> Result<T, Problem> {
        let mut text = String::new();
        place.write(&mut text);
        if text.is_empty() {
            text.push_str("the snapshot");
        }
        Err(Problem::Schema { place: text, expected: expected.to_owned(), found: found.into() })
    }

    fn wrong_value<T>(&self, place: &Place<'_>, expected: &str, id: Id) -> Result<T, Problem> {
        self.wrong(place, expected, self.arena.describe(id))
    }

    fn list(&self, place: &Place<'_>, id: Id) -> Result<&'a [Id], Problem> {
        match self.arena.node(id) {
            Node::List(list) => Ok(self.arena.children(list)),
            _ => self.wrong_value(place, "a list", id),
        }
    }

    fn dict(&self, place: &Place<'_>, id: Id) -> Result<Dict<'a>, Problem> {
        match self.arena.node(id) {
            Node::Dict(list) if self.arena.children(list).len() <= 2 * KEYS_MAX => {
                Ok(Dict(self.arena, self.arena.children(list)))
            }
            _ => self.wrong_value(place, "a dictionary of at most 256 keys", id),
        }
    }

    /// A dictionary that becomes a record, and no other one.
    fn record(&mut self, place: &Place<'_>, id: Id) -> Result<Dict<'a>, Problem> {
        let dict = self.dict(place, id)?;
        let (word, bit) = (id as usize / 64, 1u64 << (id % 64));
        if self.seen[word] & bit != 0 {
            return self.wrong(place, "a dictionary of its own", "one that is in another place, too");
        }
        self.seen[word] |= bit;
        Ok(dict)
    }

    fn number(&self, place: &Place<'_>, id: Id) -> Result<u64, Problem> {
        match self.arena.node(id) {
            Node::Int(value) if (0..=NUMBER_MAX as i64).contains(&value) => Ok(value as u64),
            _ => self.wrong_value(place, "a number from 0 to 2^62", id),
        }
    }

    fn required(&self, place: &Place<'_>, dict: Dict<'_>, key: &str) -> Result<u64, Problem> {
        match dict.get(key) {
            Some(id) => self.number(&Place::Key(place, key), id),
            None => self.wrong(&Place::Key(place, key), "a number", "nothing"),
        }
    }

    fn optional(&self, place: &Place<'_>, dict: Dict<'_>, key: &str) -> Result<Option<u64>, Problem> {
        dict.get(key).map(|id| self.number(&Place::Key(place, key), id)).transpose()
    }

    /// A stream's handle: any 64 bits.
    fn stream(&self, place: &Place<'_>, dict: Dict<'_>) -> Result<u64, Problem> {
        let Some(id) = dict.get("stream") else { return Ok(0) };
        match self.arena.node(id) {
            Node::Int(value) => Ok(value as u64),
            Node::Big(value) => Ok(value),
            _ => self.wrong_value(&Place::Key(place, "stream"), "a stream's handle", id),
        }
    }

    fn text(&mut self, id: Id) -> Option<Arc<str>> {
        let text = self.arena.str(id)?;
        Some(Arc::clone(self.texts.entry(text).or_insert_with(|| text.into())))
    }

    fn pair(&self, place: &Place<'_>, dict: Dict<'_>, key: &str) -> Result<(u64, u64), Problem> {
        let Some(id) = dict.get(key) else { return Ok((0, 0)) };
        let place = Place::Key(place, key);
        match self.list(&place, id)? {
            &[a, b] => Ok((self.number(&place, a)?, self.number(&place, b)?)),
            _ => self.wrong_value(&place, "two numbers", id),
        }
    }

    fn snapshot(&mut self, root: Id) -> Result<Snapshot, Problem> {
        let mut snapshot = Snapshot::default();
        let place = Place::Root;
        if let Node::List(list) = self.arena.node(root) {
            // As for PyTorch's own reader, a bare list is one of segments.
            let place = Place::Key(&place, "segments");
            snapshot.segments = self.segments(&place, self.arena.children(list))?;
        } else {
            let dict = self.dict(&place, root)?;
            let Some(segments) = dict.get("segments") else {
                return self.wrong(&Place::Key(&place, "segments"), "a list", "nothing");
            };
            let at = Place::Key(&place, "segments");
            snapshot.segments = self.segments(&at, self.list(&at, segments)?)?;
            if let Some(traces) = dict.get("device_traces") {
                let at = Place::Key(&place, "device_traces");
                let traces = self.list(&at, traces)?;
                if traces.len() > DEVICES_MAX {
                    return self.wrong(&at, "at most 1024 devices", traces.len().to_string());
                }
                for (index, &trace) in traces.iter().enumerate() {
                    let at = Place::Item(&at, index);
                    let entries = self.list(&at, trace)?;
                    let decoded = entries.iter().enumerate().map(|(index, &id)| {
                        let at = Place::Item(&at, index);
                        self.entry(&at, id)
                    });
                    snapshot.device_traces.push(decoded.collect::<Result<_, _>>()?);
                }
            }
            if let Some(settings) = dict.get("allocator_settings") {
                snapshot.allocator_settings =
                    self.values(&Place::Key(&place, "allocator_settings"), settings, 0)?;
            }
            if let Some(annotations) = dict.get("external_annotations") {
                let at = Place::Key(&place, "external_annotations");
                for (index, &id) in self.list(&at, annotations)?.iter().enumerate() {
                    let values = self.values(&Place::Item(&at, index), id, 0)?;
                    snapshot.external_annotations.push(Annotation(values));
                }
            }
        }
        let total = snapshot.segments.iter().map(|segment| u128::from(segment.total_size)).sum::<u128>();
        if total > u128::from(NUMBER_MAX) {
            return self.wrong(&Place::Key(&place, "segments"), "less than 2^62 bytes in all", total.to_string());
        }
        let devices = snapshot.segments.iter().map(|segment| segment.device as usize + 1).max().unwrap_or(0);
        let traces = snapshot.device_traces.len();
        snapshot.device_traces.resize(traces.max(devices), Vec::new());
        Ok(snapshot)
    }

    fn segments(&mut self, place: &Place<'_>, list: &[Id]) -> Result<Vec<Segment>, Problem> {
        list.iter().enumerate().map(|(index, &id)| self.segment(&Place::Item(place, index), id)).collect()
    }

    fn segment(&mut self, place: &Place<'_>, id: Id) -> Result<Segment, Problem> {
        let dict = self.record(place, id)?;
        let device = self.optional(place, dict, "device")?.unwrap_or(0);
        if device >= DEVICES_MAX as u64 {
            return self.wrong(&Place::Key(place, "device"), "a device below 1024", device.to_string());
        }
        let address = self.required(place, dict, "address")?;
        let total_size = self.required(place, dict, "total_size")?;
        let blocks = match dict.get("blocks") {
            Some(blocks) => self.blocks(&Place::Key(place, "blocks"), blocks, address, total_size)?,
            None => return self.wrong(&Place::Key(place, "blocks"), "a list", "nothing"),
        };
        let sum = |held: &dyn Fn(&Block) -> u64| blocks.iter().map(held).sum::<u64>();
        let is_large = match dict.get("segment_type") {
            None => total_size > crate::size::SMALL_SEGMENT_BYTES,
            Some(id) => match self.arena.str(id) {
                Some("large") => true,
                Some("small") => false,
                _ => return self.wrong_value(&Place::Key(place, "segment_type"), "\"large\" or \"small\"", id),
            },
        };
        let is_expandable = match dict.get("is_expandable").map(|id| (id, self.arena.node(id))) {
            None => false,
            Some((_, Node::Bool(value))) => value,
            Some((id, _)) => return self.wrong_value(&Place::Key(place, "is_expandable"), "True or False", id),
        };
        Ok(Segment {
            device: device as u32,
            address,
            total_size,
            // What the blocks say; the file's own sums are the same, or wrong.
            allocated_size: sum(&|block| if block.state == BlockState::Live { block.size } else { 0 }),
            active_size: sum(&|block| if block.state == BlockState::Free { 0 } else { block.size }),
            requested_size: sum(&|block| if block.state == BlockState::Free { 0 } else { block.requested_size }),
            stream: self.stream(place, dict)?,
            is_large,
            segment_pool_id: self.pair(place, dict, "segment_pool_id")?,
            is_expandable,
            frames: self.stack(place, dict)?,
            blocks,
        })
    }

    /// The blocks, which must fill the segment.
    fn blocks(&mut self, place: &Place<'_>, id: Id, base: u64, bytes: u64) -> Result<Vec<Block>, Problem> {
        let list = self.list(place, id)?;
        let mut blocks = Vec::with_capacity(list.len());
        let mut filled = 0u64;
        for (index, &id) in list.iter().enumerate() {
            let block = self.block(&Place::Item(place, index), id, base + filled)?;
            filled = filled.saturating_add(block.size);
            if filled > bytes {
                break;
            }
            blocks.push(block);
        }
        if filled != bytes {
            return self.wrong(place, &format!("blocks of {bytes} bytes in all"), format!("{filled} or more"));
        }
        Ok(blocks)
    }

    fn block(&mut self, place: &Place<'_>, id: Id, expected: u64) -> Result<Block, Problem> {
        let dict = self.record(place, id)?;
        let address = self.optional(place, dict, "address")?.unwrap_or(expected);
        if address != expected {
            return self.wrong(
                &Place::Key(place, "address"),
                &format!("{expected} (blocks follow each other)"),
                address.to_string(),
            );
        }
        let size = self.required(place, dict, "size")?;
        let state = match dict.get("state").and_then(|id| self.arena.str(id)) {
            Some("active_allocated") => BlockState::Live,
            Some("active_pending_free" | "active_awaiting_free") => BlockState::Pending,
            Some("inactive") => BlockState::Free,
            other => {
                let expected = "active_allocated, active_pending_free or inactive";
                return self.wrong(&Place::Key(place, "state"), expected, format!("{other:?}"));
            }
        };
        let requested = self.optional(place, dict, "requested_size")?.unwrap_or(size);
        // PyTorch leaves an old figure in an inactive block.
        let requested_size = if state == BlockState::Free { 0 } else { requested };
        if requested_size > size {
            let expected = format!("at most the block's size, {size}");
            return self.wrong(&Place::Key(place, "requested_size"), &expected, requested.to_string());
        }
        Ok(Block { address, size, requested_size, state, frames: self.stack(place, dict)? })
    }

    fn entry(&mut self, place: &Place<'_>, id: Id) -> Result<TraceEntry, Problem> {
        let dict = self.record(place, id)?;
        let known = dict.get("action").and_then(|id| self.arena.str(id)).and_then(Action::known);
        // An unknown name is kept once, however many entries share it.
        let action = match known.or_else(|| dict.get("action").and_then(|id| self.text(id)).map(Action::Other)) {
            Some(action) => action,
            None => return self.wrong(&Place::Key(place, "action"), "an action's name", "nothing"),
        };
        let key = if action == Action::Oom { "device_free" } else { "addr" };
        let addr = match (&action, self.optional(place, dict, key)?) {
            (_, Some(addr)) => addr,
            (Action::Snapshot | Action::Oom | Action::Other(_), None) => 0,
            (_, None) => return self.wrong(&Place::Key(place, key), "a number", "nothing"),
        };
        let user_metadata = match dict.get("user_metadata") {
            Some(id) => self.text(id).unwrap_or_else(|| Arc::clone(&self.empty)),
            None => Arc::clone(&self.empty),
        };
        Ok(TraceEntry {
            action,
            addr,
            size: self.required(place, dict, "size")?,
            block_size: self.optional(place, dict, "block_size")?.unwrap_or(0),
            stream: self.stream(place, dict)?,
            time_us: self.optional(place, dict, "time_us")?.unwrap_or(0),
            frames: self.stack(place, dict)?,
            user_metadata,
            pool_id: self.pair(place, dict, "pool_id")?,
        })
    }

    fn stack(&mut self, place: &Place<'_>, dict: Dict<'_>) -> Result<Stack, Problem> {
        let Some(id) = dict.get("frames") else { return Ok(Stack::default()) };
        if let Some(known) = self.stacks.get(&id) {
            return Ok(known.clone());
        }
        let place = Place::Key(place, "frames");
        let mut frames = Vec::new();
        for (index, &id) in self.list(&place, id)?.iter().enumerate() {
            frames.push(self.frame(&Place::Item(&place, index), id)?);
        }
        let stack = match self.by_frames.get(&frames) {
            Some(known) => known.clone(),
            None => {
                let stack = Stack::new(frames.clone());
                self.by_frames.insert(frames, stack.clone());
                stack
            }
        };
        self.stacks.insert(id, stack.clone());
        Ok(stack)
    }

    fn frame(&mut self, place: &Place<'_>, id: Id) -> Result<Frame, Problem> {
        let dict = self.dict(place, id)?;
        let mut text = |key| match dict.get(key).and_then(|id| self.text(id)) {
            Some(text) => Ok(text),
            None => self.wrong(&Place::Key(place, key), "a text", "nothing"),
        };
        let (filename, name) = (text("filename")?, text("name")?);
        let line = self.optional(place, dict, "line")?.unwrap_or(0);
        Ok(Frame { filename, line: u32::try_from(line).unwrap_or(u32::MAX), name })
    }

    fn values(&mut self, place: &Place<'_>, id: Id, depth: usize) -> Result<Vec<(String, Value)>, Problem> {
        let mut values = Vec::new();
        for pair in self.dict(place, id)?.1.chunks_exact(2) {
            let Some(key) = self.arena.str(pair[0]) else {
                return self.wrong_value(place, "a text as the key", pair[0]);
            };
            self.values += key.len() / 8;
            values.push((key.to_owned(), self.value(&Place::Key(place, key), pair[1], depth + 1)?));
        }
        Ok(values)
    }

    fn value(&mut self, place: &Place<'_>, id: Id, depth: usize) -> Result<Value, Problem> {
        self.values += 1 + self.arena.str(id).map_or(0, |text| text.len() / 8);
        if depth > DEPTH_MAX || self.values > VALUES_MAX {
            return self.wrong(place, "a value of at most 16 levels, and a million in all", "more");
        }
        Ok(match self.arena.node(id) {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(value),
            Node::Int(value) => Value::Int(value),
            Node::Big(value) => Value::Float(value as f64),
            Node::Float(value) => Value::Float(value),
            Node::Str { at, bytes } => Value::Str(self.arena.text(at, bytes).to_owned()),
            Node::List(list) => {
                let items = self.arena.children(list).iter();
                Value::List(items.map(|&id| self.value(place, id, depth + 1)).collect::<Result<_, _>>()?)
            }
            Node::Dict(_) => Value::Dict(self.values(place, id, depth)?),
        })
    }
}
