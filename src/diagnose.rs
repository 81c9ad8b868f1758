//! The allocator's tools: the history, scopes, and snapshots drawn from them.

use crate::allocator::CachingAllocator;
use crate::breakdown::MemoryBreakdown;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fragmentation::FragmentationReport;
use crate::history::{HistoryOptions, Kind, Recorder, Scope, Session, Stacks};
use crate::leaks::{LeakReport, Mark};
use crate::pytorch;
use crate::shared::Whole;
use crate::stream::StreamPool;
use crate::supply::State as Supply;
use crate::survey::Survey;
use std::sync::Arc;

/// Calls `f` with every pool and the supply locked: nothing moves meanwhile.
pub(crate) fn frozen<T>(device: &Device, f: impl FnOnce(&[Arc<StreamPool>], &mut [Whole<'_>], &Supply) -> T) -> T {
    let supply = device.supply.state.lock();
    device.with_all_locked(|pools, cores| f(pools, cores, &supply))
}

impl CachingAllocator {
    /// Starts recording what the allocator does, or stops it. Either forgets what was recorded before: take a snapshot
    /// first. Locks every pool for a moment.
    ///
    /// While it is off it costs nothing. While it is on an event costs tens of nanoseconds, and some microseconds with
    /// its call stack; memory is 64 bytes an event that is kept and 24 a block.
    ///
    /// ```
    /// # use vramalloc::{CachingAllocator, Config, HistoryOptions, driver::sim::SimDriver};
    /// # let device = SimDriver::builder().capacity(1 << 30).build();
    /// # let allocator = CachingAllocator::new(device, Config::default())?;
    /// allocator.record_history(Some(HistoryOptions::default()))?;
    /// let stream = allocator.default_stream()?;
    /// let forward = allocator.scope("forward");
    /// let activations = allocator.alloc(30 << 20, &stream)?;
    /// drop(forward);
    /// let snapshot = allocator.pytorch_snapshot();
    /// assert_eq!(&*snapshot.device_traces[0].last().unwrap().user_metadata, "forward");
    /// snapshot.write_json(std::io::sink())?; // or `snapshot.save("run.pickle")`: opens in pytorch.org/memory_viz
    /// # drop(activations);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoStacks`] if stacks are asked for and the feature `stacks` is off.
    pub fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        let device = self.shared();
        if options.is_some_and(|options| options.stacks != Stacks::Off) && !Session::CAPTURES_STACKS {
            return Err(Error::NoStacks);
        }
        let session = options.map(Session::new);
        let mut former = Vec::new(); // dropped when no lock is held any more
        frozen(device, |pools, cores, _| {
            device.history.switch(session.clone());
            for (pool, core) in pools.iter().zip(cores) {
                let recorder = session.as_ref().map(|session| {
                    let recorder = Recorder::new(Arc::clone(session), pool.clock.key.handle.0);
                    recorder.of_private_pool(device.private_id(pool))
                });
                pool.unshare_whole(core); // they would keep what they do to themselves
                former.push(core.set_recorder(recorder));
            }
        });
        Ok(())
    }

    /// Whether a history is being recorded.
    #[must_use]
    pub fn is_recording_history(&self) -> bool {
        self.shared().history.session().is_some()
    }

    /// Opens a scope: what the calling thread allocates until the value is dropped carries `name` as its tag, within
    /// those of the scopes that are open (`step/forward`). The tag counts on every device, since a phase of a program
    /// may use several; this allocator's history also keeps when the scope began and ended.
    ///
    /// Costs a look-up of the name; allocations cost nothing more.
    pub fn scope(&self, name: &str) -> Scope {
        let mut scope = Scope::open(name);
        if let Some(session) = self.shared().history.session() {
            session.record_scope(Kind::ScopeBegin, scope.tag());
            scope.on_end(move |tag| session.record_scope(Kind::ScopeEnd, tag)); // of a former session, nobody sees it
        }
        scope
    }

    /// Notes `text` in the history, as an instant between its events; the newest 65,536 are kept. Does nothing while no
    /// history is recorded.
    pub fn annotate(&self, text: &str) {
        if let Some(session) = self.shared().history.session() {
            session.annotate(text);
        }
    }

    /// What the allocator holds and, if [`record_history`](Self::record_history) was called, what it did, in PyTorch's
    /// schema. Locks every pool while it copies.
    #[must_use]
    pub fn pytorch_snapshot(&self) -> pytorch::Snapshot {
        let survey = Survey::new(self.shared(), true);
        let mut frames = survey.frames();
        let ordinal = survey.device as usize;
        let mut snapshot = pytorch::Snapshot {
            segments: pytorch::segments(&survey, &mut frames),
            device_traces: vec![Vec::new(); ordinal + 1],
            allocator_settings: pytorch::settings(self.config(), self.is_expandable()),
            external_annotations: Vec::new(),
        };
        if let Some(session) = &survey.session {
            let (trace, annotations) = pytorch::device_trace(
                survey.device,
                session.dial(),
                (&survey.records, &session.private_ids()),
                &session.annotations(),
                &mut frames,
            );
            snapshot.device_traces[ordinal] = trace;
            snapshot.external_annotations = annotations;
        }
        snapshot
    }

    /// The present moment, for [`LeakReport::between`].
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark::new(self.shared().history.session().as_ref().map_or(0, |session| session.next_seq()))
    }

    /// What users hold, oldest first, with tags and stacks as far as the history knows them. Locks every pool while it
    /// copies.
    #[must_use]
    pub fn leak_report(&self) -> LeakReport {
        LeakReport::new(&Survey::new(self.shared(), false))
    }

    /// Calls `observer` with what is live when the last handle of this allocator is dropped, if anything is; instead of
    /// the warning on standard error that a program gets which records a history. It must not panic.
    pub fn on_leak(&self, observer: impl Fn(&LeakReport) + Send + Sync + 'static) {
        self.shared().history.on_leak(Box::new(observer));
    }

    /// What each stream and each tag holds; printed, a table of each. Locks every pool while it copies.
    #[must_use]
    pub fn memory_breakdown(&self) -> MemoryBreakdown {
        MemoryBreakdown::new(&Survey::new(self.shared(), false))
    }

    /// Why more is reserved than allocated: which blocks pin which segments or pages, and what moving or freeing them
    /// would give back. Locks every pool while it copies; O(blocks log blocks).
    #[must_use]
    pub fn fragmentation_report(&self) -> FragmentationReport {
        FragmentationReport::new(&Survey::new(self.shared(), false))
    }
}
