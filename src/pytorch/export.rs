//! What an allocator holds and did, in PyTorch's schema.

use super::{Action, Annotation, Block, Frame, Segment, Stack, TraceEntry, Value};
use crate::config::Config;
use crate::driver::StreamKey;
use crate::history::{Dial, Kind, Record, Session, StackId, tag_name};
use crate::pool::PoolCore;
use crate::size::SizeClass;
use crate::snapshot::BlockInfo;
use crate::{BlockState, history::TagId};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// A pool that the caller has locked.
pub(crate) type Pool<'a> = (StreamKey, &'a PoolCore);

/// Stacks and tags of a session by number, each resolved once.
pub(crate) struct Frames<'a> {
    session: Option<&'a Session>,
    stacks: FxHashMap<StackId, Stack>,
    tags: FxHashMap<TagId, Arc<str>>,
    texts: FxHashMap<String, Arc<str>>,
}

impl<'a> Frames<'a> {
    pub(crate) fn new(session: Option<&'a Session>) -> Self {
        let (stacks, tags) = (FxHashMap::default(), FxHashMap::default());
        Self { session, stacks, tags, texts: FxHashMap::default() }
    }

    pub(crate) fn stack(&mut self, id: StackId) -> Stack {
        let Some(session) = self.session.filter(|_| id != StackId::NONE) else { return Stack::default() };
        if let Some(known) = self.stacks.get(&id) {
            return known.clone();
        }
        let mut text = |text: String| -> Arc<str> {
            Arc::clone(self.texts.entry(text).or_insert_with_key(|text| text.as_str().into()))
        };
        let symbols = session.stacks.resolve(id).into_iter();
        let frames = symbols.map(|symbol| Frame {
            filename: text(symbol.file),
            line: symbol.line,
            name: text(symbol.name),
        });
        let stack = Stack::new(frames.collect());
        self.stacks.insert(id, stack.clone());
        stack
    }

    pub(crate) fn tag(&mut self, tag: TagId) -> Arc<str> {
        let name = self.tags.entry(tag).or_insert_with(|| tag_name(tag).unwrap_or_else(|| "".into()));
        Arc::clone(name)
    }
}

/// The segments of all pools, by address, each with the stacks of its blocks; those are put in by
/// [`with_stacks`], when no lock is held any more.
pub(crate) fn segments(
    device: u32,
    pools: &[Pool<'_>],
    session: Option<&Arc<Session>>,
) -> Vec<(Segment, Vec<StackId>)> {
    let mut segments = Vec::new();
    for (stream, core) in pools {
        let recorder = core.recorder.as_ref();
        let recorder = recorder.filter(|recorder| session.is_some_and(|session| recorder.is_of(session)));
        for run in core.runs() {
            let mut segment = Segment {
                device,
                address: run.base,
                stream: stream.handle.0,
                is_large: run.class == SizeClass::Large,
                is_expandable: run.expandable,
                ..Segment::default()
            };
            let mut stacks = Vec::new();
            for id in core.chain(run.first) {
                let BlockInfo { address, bytes, requested, state } = BlockInfo::of(&core.blocks[id]);
                let active = state != BlockState::Free;
                segment.total_size += bytes;
                segment.allocated_size += if state == BlockState::Live { bytes } else { 0 };
                segment.active_size += if active { bytes } else { 0 };
                segment.requested_size += if active { requested } else { 0 };
                let note = recorder.filter(|_| active).map(|recorder| recorder.note(id));
                stacks.push(note.map_or(StackId::NONE, |note| note.stack));
                segment.blocks.push(Block {
                    address: address.0,
                    size: bytes,
                    requested_size: requested,
                    state,
                    frames: Stack::default(),
                });
            }
            segments.push((segment, stacks));
        }
    }
    segments.sort_by_key(|(segment, _)| segment.address);
    segments
}

/// Puts the stacks of the blocks in.
pub(crate) fn with_stacks(segments: Vec<(Segment, Vec<StackId>)>, frames: &mut Frames<'_>) -> Vec<Segment> {
    let filled = segments.into_iter().map(|(mut segment, stacks)| {
        for (block, stack) in segment.blocks.iter_mut().zip(stacks) {
            block.frames = frames.stack(stack);
        }
        segment
    });
    filled.collect()
}

/// The events as entries of a trace, and the scopes as annotations.
pub(crate) fn device_trace(
    device: u32,
    dial: Dial,
    records: &[Record],
    frames: &mut Frames<'_>,
) -> (Vec<TraceEntry>, Vec<Annotation>) {
    let (mut entries, mut annotations) = (Vec::with_capacity(records.len() * 3 / 2), Vec::new());
    for record in records {
        let time_us = dial.unix_us(record.ticks);
        let mut entry = |action| {
            let is_block = matches!(action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted);
            entries.push(TraceEntry {
                action,
                addr: record.addr,
                size: record.bytes,
                block_size: if is_block { record.block_bytes } else { 0 },
                stream: record.stream,
                time_us,
                frames: frames.stack(record.stack),
                user_metadata: frames.tag(record.tag),
                pool_id: (0, 0),
            });
        };
        match record.kind {
            Kind::Alloc => entry(Action::Alloc),
            Kind::Free => {
                entry(Action::FreeRequested);
                entry(Action::FreeCompleted);
            }
            Kind::FreeRequested => entry(Action::FreeRequested),
            Kind::FreeCompleted => entry(Action::FreeCompleted),
            Kind::SegmentAlloc => entry(Action::SegmentAlloc),
            Kind::SegmentFree => entry(Action::SegmentFree),
            Kind::Map => entry(Action::SegmentMap),
            Kind::Unmap => entry(Action::SegmentUnmap),
            // A segment is one stream's: what changes hands leaves one and comes to another.
            Kind::Adopt => {
                entry(Action::SegmentUnmap);
                entry(Action::SegmentMap);
            }
            Kind::OutOfMemory => entry(Action::Oom),
            Kind::ScopeBegin | Kind::ScopeEnd => {
                let stage = if record.kind == Kind::ScopeBegin { "START" } else { "END" };
                annotations.push(Annotation(vec![
                    ("stage".to_owned(), Value::Str(stage.to_owned())),
                    ("name".to_owned(), Value::Str(frames.tag(record.tag).to_string())),
                    ("device".to_owned(), Value::Int(i64::from(device))),
                    ("time_us".to_owned(), Value::Int(i64::try_from(time_us).unwrap_or(i64::MAX))),
                    ("thread".to_owned(), Value::Int(i64::try_from(record.addr).unwrap_or(i64::MAX))),
                ]));
            }
        }
    }
    (entries, annotations)
}

/// The settings under PyTorch's keys; those of its that have no meaning here are left out.
pub(crate) fn settings(config: &Config, expandable: bool) -> Vec<(String, Value)> {
    let max_split = config.max_split_bytes.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    let divisions = (0..16).map(|interval: u32| {
        let divisions = config.roundup_power2_divisions.for_size(1 << (20 + interval));
        ((1u64 << interval).to_string(), Value::Int(i64::try_from(divisions).unwrap_or(0)))
    });
    vec![
        (
            "PYTORCH_CUDA_ALLOC_CONF".to_owned(),
            Value::Str(format!("expandable_segments:{}", python_bool(expandable))),
        ),
        ("max_split_size".to_owned(), Value::Int(max_split)),
        ("garbage_collection_threshold".to_owned(), Value::Float(config.gc_threshold.unwrap_or(0.0))),
        ("expandable_segments".to_owned(), Value::Bool(expandable)),
        ("roundup_power2_divisions".to_owned(), Value::Dict(divisions.collect())),
    ]
}

fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}
