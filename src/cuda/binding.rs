//! What ties a buffer, and views of it, to cudarc: a shell, and a look at every use.

use super::errors::Events;
use super::launch::{self, LaunchStream};
use super::shell::Shell;
use super::streams::{Known, address, handle};
use super::view::{ViewBinding, ViewMutBinding};
use crate::Allocation;
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, StreamHandle, StreamKey};
use crate::error::Result;
use cudarc::driver::{CudaStream, LaunchArgs};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// No stream has recorded a read yet.
const NOBODY: u64 = u64::MAX;
/// Several streams have, and the event stands for one of them.
const SEVERAL: u64 = u64::MAX - 1;

/// What a buffer has to do with cudarc; nothing if it was allocated on a plain stream.
pub(crate) struct Binding(Option<Bound>);

/// A buffer on a stream of cudarc.
pub(crate) struct Bound {
    shell: Box<Shell>,
    uses: Uses,
}

/// How a buffer was used on streams that are not its own.
pub(crate) struct Uses {
    pub(super) known: Arc<Known>,
    events: Option<Events>,
    /// On a stream that is not known to the allocator, tracked by cudarc's events.
    foreign: AtomicBool,
    /// That, and read there.
    foreign_read: AtomicBool,
    /// Lent to cudarc for reading, so that the event for reads perhaps stands for one on a stream that nobody named.
    lent_read: AtomicBool,
    /// The stream that recorded the event for reads.
    reader: AtomicU64,
    /// On a stream of which only the device can tell when it has passed.
    unreachable: AtomicBool,
}

/// Whether memory is only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// How a use through a pointer must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// As cudarc's tracking says.
    Tracked,
    /// The host waits for the stream.
    Synchronized,
}

impl Binding {
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Ties an allocation to the stream that it was made on.
    pub(super) fn new(known: &Arc<Known>, allocation: &Allocation) -> std::result::Result<Self, DriverError> {
        let shell = known.take_shell(allocation.ptr(), allocation.block_bytes())?;
        let events = shell.events;
        let uses = Uses {
            known: Arc::clone(known),
            events,
            foreign: AtomicBool::new(false),
            foreign_read: AtomicBool::new(false),
            lent_read: AtomicBool::new(false),
            reader: AtomicU64::new(NOBODY),
            unreachable: AtomicBool::new(false),
        };
        Ok(Self(Some(Bound { shell, uses })))
    }

    /// The same for another allocation on the same stream.
    pub(crate) fn sibling(&self, allocation: &Allocation) -> Result<Self> {
        match &self.0 {
            None => Ok(Self::none()),
            Some(bound) => allocation.device().checked(Self::new(&bound.uses.known, allocation)),
        }
    }

    #[track_caller]
    pub(super) fn bound(&self) -> &Bound {
        match &self.0 {
            Some(bound) => bound,
            None => not_bound(),
        }
    }

    #[track_caller]
    pub(super) fn bound_mut(&mut self) -> &mut Bound {
        match &mut self.0 {
            Some(bound) => bound,
            None => not_bound(),
        }
    }

    /// To be called before the memory is freed: what cudarc's events stand for is made the stream's own past, and what
    /// nothing stands for is announced.
    pub(crate) fn release(&mut self, allocation: &Allocation) {
        let Some(bound) = self.0.take() else { return };
        if allocation.device().is_forked() {
            return mem::forget(bound); // another thread of the parent may have held a lock; and nothing here is the child's
        }
        let Bound { shell, mut uses } = bound;
        if uses.is_foreign() {
            uses.join(allocation);
        }
        uses.known.put_shell(allocation.ptr(), shell);
    }

    pub(crate) fn view(&self, bytes: usize) -> ViewBinding<'_> {
        ViewBinding::new(self.0.as_ref().map(|bound| (&bound.uses, bound.shell.slice().slice(..bytes))))
    }

    pub(crate) fn view_mut(&mut self, bytes: usize) -> ViewMutBinding<'_> {
        ViewMutBinding::new(self.0.as_mut().map(|bound| (&bound.uses, bound.shell.slice_mut().slice_mut(..bytes))))
    }
}

#[cold]
#[track_caller]
pub(super) fn not_bound() -> ! {
    panic!(
        "the buffer was not allocated on a stream of cudarc, so cudarc cannot use it; allocate it by a \
         `vramalloc::cuda::CudaAllocator`"
    )
}

impl Bound {
    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    pub(super) fn shell(&self) -> &Shell {
        &self.shell
    }

    pub(super) fn shell_mut(&mut self) -> (&Uses, &mut Shell) {
        (&self.uses, &mut self.shell)
    }
}

impl Uses {
    /// Whether cudarc's events order this buffer's uses now.
    pub(super) fn tracked(&self, context: &cudarc::driver::CudaContext) -> Option<Events> {
        self.events.filter(|_| context.is_managing_stream_synchronization())
    }

    fn is_foreign(&mut self) -> bool {
        *self.foreign.get_mut() || *self.unreachable.get_mut()
    }

    /// Notes which stream the event for reads stands for from now on.
    fn note_reader(&self, stream: StreamHandle) {
        if self.lent_read.load(Ordering::Relaxed) {
            return self.lose_reader(); // the event will stand for this read alone
        }
        // Another's stream may be gone by now and its handle be a new stream's: it is known by its identity.
        let reader = if stream == handle(&self.known.cuda) {
            stream.0
        } else {
            self.known.driver.stream_key(stream).map_or(SEVERAL, |key| key.id | 1 << 63)
        };
        let noted = self.reader.compare_exchange(NOBODY, reader, Ordering::Relaxed, Ordering::Relaxed);
        if noted.is_err_and(|known| known != reader) {
            self.reader.store(SEVERAL, Ordering::Relaxed);
        }
    }

    /// Notes that the event for reads does not stand for all reads on streams that are not known.
    fn lose_reader(&self) {
        self.foreign_read.store(true, Ordering::Relaxed);
        self.reader.store(SEVERAL, Ordering::Relaxed);
    }

    fn note_foreign(&self, access: Access) {
        self.foreign.store(true, Ordering::Relaxed);
        if access == Access::Read {
            self.foreign_read.store(true, Ordering::Relaxed);
        }
    }

    /// Records the use on a stream of this context that the allocator knows; false if it does not.
    fn record(&self, allocation: &Allocation, stream: StreamHandle) -> bool {
        let own = handle(&self.known.cuda);
        if stream == own && stream != StreamHandle::PER_THREAD_DEFAULT {
            return true;
        }
        self.known.find(stream).is_some_and(|stream| allocation.record_stream(&stream).is_ok())
    }

    /// Notices a use through a pointer.
    pub(super) fn notice(&self, allocation: &Allocation, stream: &CudaStream, access: Access) -> Ending {
        let (context, user) = (stream.context(), handle(stream));
        if address(context) != address(self.known.cuda.context()) {
            return Ending::Synchronized;
        }
        let tracked = self.tracked(context).is_some() && self.tracked(self.known.cuda.context()).is_some();
        if tracked && access == Access::Read {
            self.note_reader(user);
        }
        if self.record(allocation, user) {
            Ending::Tracked
        } else if tracked {
            self.note_foreign(access);
            Ending::Tracked
        } else {
            Ending::Synchronized
        }
    }

    /// Notices a use by a kernel that is about to be launched.
    pub(super) fn notice_launch(&self, allocation: &Allocation, args: &LaunchArgs<'_>, access: Access) {
        let own = self.known.cuda.context();
        let own_stream = handle(&self.known.cuda);
        let is_known = |stream| stream == own_stream || self.known.find(stream).is_some();
        match launch::stream_of(args, address(own), is_known) {
            Some(LaunchStream::Known(stream)) => {
                let is_tracking = own.is_managing_stream_synchronization();
                self.notice_without_end(allocation, stream, is_tracking, access);
            }
            Some(LaunchStream::Unknown { stream, is_tracking }) => {
                self.notice_without_end(allocation, stream, is_tracking, access);
            }
            Some(LaunchStream::Elsewhere) | None => self.note_unreachable(),
        }
    }

    /// Notices a use by what is going to use the memory on a stream.
    pub(super) fn notice_raw(&self, allocation: &Allocation, stream: &CudaStream, access: Access) {
        let context = stream.context();
        if address(context) == address(self.known.cuda.context()) {
            let is_tracking = context.is_managing_stream_synchronization();
            self.notice_without_end(allocation, handle(stream), is_tracking, access);
        } else {
            self.note_unreachable();
        }
    }

    /// Notices that cudarc's own view was lent to be used on a stream, and perhaps is used on another.
    pub(super) fn notice_lent(&self, allocation: &Allocation, stream: &CudaStream, access: Access) {
        let is_tracked = self.tracked(self.known.cuda.context()).is_some();
        if is_tracked && access == Access::Read && self.foreign_read.load(Ordering::Relaxed) {
            self.lose_reader(); // a read through the view takes the event from the one that it stood for
        }
        self.notice_raw(allocation, stream, access);
        if is_tracked {
            self.foreign.store(true, Ordering::Relaxed);
            if access == Access::Read {
                self.lent_read.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Notices a use that nothing tracks.
    pub(super) fn notice_untracked(&self, allocation: &Allocation, stream: &CudaStream) {
        let is_here = address(stream.context()) == address(self.known.cuda.context());
        if !(is_here && self.record(allocation, handle(stream))) {
            self.note_unreachable();
        }
    }

    /// A use of which only cudarc's events can tell the end, if they do.
    fn notice_without_end(&self, allocation: &Allocation, user: StreamHandle, is_tracking: bool, access: Access) {
        let tracked = is_tracking && self.tracked(self.known.cuda.context()).is_some();
        if tracked && access == Access::Read {
            self.note_reader(user);
        }
        if self.record(allocation, user) {
            return;
        }
        if tracked {
            self.note_foreign(access);
        } else {
            self.note_unreachable();
        }
    }

    pub(super) fn note_unreachable(&self) {
        self.unreachable.store(true, Ordering::Relaxed);
    }

    /// Makes what happened on streams that are not known part of the own stream's past, or else announces it as work
    /// that only the device can tell the end of.
    #[cold]
    fn join(&mut self, allocation: &Allocation) {
        let lost = *self.foreign_read.get_mut() && *self.reader.get_mut() == SEVERAL;
        if *self.foreign.get_mut() && !lost && !*self.unreachable.get_mut() {
            match self.wait_for(allocation.clock().key, self.events) {
                Ok(()) => return,
                Err(error) if is_of_the_stream(&error) => {}
                Err(error) => allocation.device().defer(error),
            }
        }
        allocation.record_clock(&self.known.unreachable);
    }

    /// The same for what a slice's events stand for as well, at the slice's end.
    pub(super) fn join_slice(
        &self,
        allocation: &Allocation,
        events: Option<Events>,
    ) -> std::result::Result<(), DriverError> {
        let own = allocation.clock().key;
        self.wait_for(own, events)?;
        // The buffer's own event for writes will stand for the slice's end. Tracking may have been off at its beginning, so
        // that what the event stood for before was not waited for then.
        if self.foreign.load(Ordering::Relaxed) { self.wait_for(own, self.events) } else { Ok(()) }
    }

    /// Makes what is queued on `stream`, the buffer's own, from now on wait for both events.
    fn wait_for(&self, stream: StreamKey, events: Option<Events>) -> std::result::Result<(), DriverError> {
        let driver = &self.known.driver;
        if self.known.is_out_of_reach() {
            return Err(DriverError::new(Call::StreamWait, DriverErrorKind::StreamGone));
        }
        if driver.is_capturing(stream)? {
            // A wait for what is outside would break the capture.
            return Err(DriverError::new(Call::StreamWait, DriverErrorKind::Capturing));
        }
        if let Some(events) = events {
            driver.stream_wait_event(stream, events.read)?;
            driver.stream_wait_event(stream, events.write)?;
        }
        Ok(())
    }

    /// Orders a use of this crate's own, as cudarc orders those of its functions.
    pub(super) fn before(&self, allocation: &Allocation, stream: StreamKey, access: Access) -> Result<()> {
        let Some(events) = self.tracked(self.known.cuda.context()) else { return Ok(()) };
        let driver = &self.known.driver;
        if access == Access::Write {
            allocation.device().checked(driver.stream_wait_event(stream, events.read))?;
        }
        allocation.device().checked(driver.stream_wait_event(stream, events.write))
    }

    pub(super) fn after(&self, allocation: &Allocation, stream: StreamKey, access: Access) -> Result<()> {
        let Some(events) = self.tracked(self.known.cuda.context()) else { return Ok(()) };
        let event = match access {
            Access::Read => {
                self.note_reader(stream.handle);
                events.read
            }
            Access::Write => events.write,
        };
        allocation.device().checked(self.known.driver.record_event(event, stream))
    }
}

/// Whether it is the stream's state that stands in the way, which is nobody's fault.
pub(super) fn is_of_the_stream(error: &DriverError) -> bool {
    matches!(error.kind, DriverErrorKind::Capturing | DriverErrorKind::StreamGone)
}
