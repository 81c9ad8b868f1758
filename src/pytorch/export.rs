//! What an allocator holds and did, in PyTorch's schema.

use super::{Action, Annotation, Block, Frame, Segment, Stack, TraceEntry, Value};
use crate::config::Config;
use crate::history::{Annotated, Dial, Kind, Record, Session, StackId, tag_name};
use crate::size::SizeClass;
use crate::survey::Survey;
use crate::{BlockState, history::TagId};
use rustc_hash::FxHashMap;
use std::sync::Arc;

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

/// What is held, as segments.
pub(crate) fn segments(survey: &Survey, frames: &mut Frames<'_>) -> Vec<Segment> {
    let segments = survey.runs.iter().map(|run| {
        let mut segment = Segment {
            device: survey.device,
            address: run.base,
            stream: run.stream.handle.0,
            is_large: run.class == SizeClass::Large,
            segment_pool_id: run.private,
            is_expandable: run.expandable,
            ..Segment::default()
        };
        for (block, note) in &run.blocks {
            let active = block.state != BlockState::Free;
            segment.total_size += block.bytes;
            segment.allocated_size += if block.state == BlockState::Live { block.bytes } else { 0 };
            segment.active_size += if active { block.bytes } else { 0 };
            segment.requested_size += if active { block.requested } else { 0 };
            segment.blocks.push(Block {
                address: block.address.0,
                size: block.bytes,
                requested_size: block.requested,
                state: block.state,
                frames: frames.stack(note.stack),
            });
        }
        segment
    });
    segments.collect()
}

/// The events as entries of a trace, and the scopes as annotations.
pub(crate) fn device_trace(
    device: u32,
    dial: Dial,
    (records, private_ids): (&[Record], &[(u64, u64)]),
    notes: &[Annotated],
    frames: &mut Frames<'_>,
) -> (Vec<TraceEntry>, Vec<Annotation>) {
    let (mut entries, mut annotations) = (Vec::with_capacity(records.len() * 3 / 2), Vec::new());
    for record in records {
        let time_us = dial.unix_us(record.ticks);
        let pool = (record.private as usize).checked_sub(1).and_then(|index| private_ids.get(index));
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
                pool_id: pool.copied().unwrap_or_default(),
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
                annotations.push((time_us, stage, frames.tag(record.tag), record.addr));
            }
        }
    }
    let notes =
        notes.iter().map(|note| (dial.unix_us(note.ticks), "INSTANT", Arc::clone(&note.text), note.thread));
    annotations.extend(notes);
    annotations.sort_by_key(|(time_us, ..)| *time_us); // stable: scopes stay nested
    let int = |value: u64| Value::Int(i64::try_from(value).unwrap_or(i64::MAX));
    let annotations = annotations.into_iter().map(|(time_us, stage, name, thread)| {
        Annotation(vec![
            ("stage".to_owned(), Value::Str(stage.to_owned())),
            ("name".to_owned(), Value::Str(name.to_string())),
            ("device".to_owned(), int(device.into())),
            ("time_us".to_owned(), int(time_us)),
            ("thread".to_owned(), int(thread)),
        ])
    });
    (entries, annotations.collect())
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
