//! Everything that an allocator holds at one moment, with what the history knows of it: what the reports are made from.

use crate::device::Device;
use crate::diagnose::frozen;
use crate::driver::StreamKey;
use crate::history::{Note, Record, Session};
use crate::size::SizeClass;
use crate::snapshot::BlockInfo;
use crate::{BlockState, pytorch::Frames};
use std::sync::Arc;
use std::time::Duration;

/// A copy, made with every pool locked.
pub(crate) struct Survey {
    pub(crate) device: u32,
    pub(crate) session: Option<Arc<Session>>,
    /// By address.
    pub(crate) runs: Vec<Run>,
    /// Start and bytes of each handle that is mapped, by address; none with fixed segments.
    pub(crate) handles: Vec<(u64, u64)>,
    /// The events that are kept, if they were asked for.
    pub(crate) records: Vec<Record>,
}

/// A segment, or a contiguous mapped range of one stream.
pub(crate) struct Run {
    pub(crate) stream: StreamKey,
    pub(crate) base: u64,
    pub(crate) class: SizeClass,
    pub(crate) expandable: bool,
    /// The private pool that it belongs to; (0, 0) is none.
    pub(crate) private: (u64, u64),
    pub(crate) blocks: Vec<(BlockInfo, Note)>,
}

impl Run {
    /// Whether nobody else can get its memory, cached or not.
    pub(crate) fn is_private(&self) -> bool {
        self.private != (0, 0)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(block, _)| block.bytes).sum()
    }
}

impl Survey {
    pub(crate) fn new(device: &Device, with_records: bool) -> Self {
        frozen(device, |pools, cores, supply| {
            let session = device.history.session();
            let mut runs = Vec::new();
            let mut recorders = Vec::new();
            for (pool, core) in pools.iter().zip(&*cores) {
                let recorder = core.recorder();
                let recorder =
                    recorder.filter(|recorder| session.as_ref().is_some_and(|session| recorder.is_of(session)));
                recorders.extend(recorder);
                let private = device.private_id(pool);
                runs.extend(core.runs().map(|run| {
                    Run {
                        stream: pool.clock.key,
                        base: run.base,
                        class: run.class,
                        expandable: run.expandable,
                        private,
                        blocks: core
                            .chain(run.first)
                            .map(|id| {
                                let block = BlockInfo::of(&core.blocks[id]);
                                let known = recorder.filter(|_| block.state != BlockState::Free);
                                (block, known.map(|recorder| recorder.note(id)).unwrap_or_default())
                            })
                            .collect(),
                    }
                }));
            }
            runs.sort_by_key(|run| run.base);
            let mut handles: Vec<_> =
                SizeClass::ALL.iter().flat_map(|class| supply.owned_handles(*class)).collect();
            handles.sort_unstable();
            let records = match &session {
                Some(session) if with_records => {
                    session.collect(recorders.iter().map(|recorder| recorder.records()))
                }
                _ => Vec::new(),
            };
            Self { device: device.driver.device(), session, runs, handles, records }
        })
    }

    /// Resolves stacks and tags. To be called with no lock held.
    pub(crate) fn frames(&self) -> Frames<'_> {
        Frames::new(self.session.as_deref())
    }

    /// How long ago an allocation was made; `None` if that was not recorded.
    pub(crate) fn ages(&self) -> impl Fn(&Note) -> Option<Duration> {
        let clock = self.session.as_ref().map(|session| (session.dial(), session.now()));
        move |note| {
            let (dial, now) = clock.filter(|_| note.seq > 0)?;
            Some(Duration::from_nanos(dial.nanos(now).saturating_sub(dial.nanos(note.ticks))))
        }
    }

    /// The blocks that users hold.
    pub(crate) fn live(&self) -> impl Iterator<Item = (&Run, &BlockInfo, &Note)> {
        let blocks =
            self.runs.iter().flat_map(|run| run.blocks.iter().map(move |(block, note)| (run, block, note)));
        blocks.filter(|(_, block, _)| block.state == BlockState::Live)
    }
}
