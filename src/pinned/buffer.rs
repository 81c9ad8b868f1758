//! Page-locked buffers, and copies from and to them.

use super::blocks::{HostBlock, Waits};
use super::pool::HostPool;
use super::size::GRANULE;
use crate::Stream;
use crate::buffer::{DeviceBuffer, DeviceView, DeviceViewMut, assert_same_len, bytes_of, key_for_use};
use crate::driver::Call;
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::sync::Mutex;
use bytemuck::{AnyBitPattern, NoUninit};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

/// A copy that uses a buffer: on which stream, and up to which epoch of it.
#[derive(Debug)]
struct Use {
    clock: Arc<StreamClock>,
    /// `None`: whatever is open when the buffer is looked at next.
    epoch: Option<u64>,
    /// Whether the device writes to the buffer.
    writes: bool,
}

/// `len` values of type `T` in page-locked host memory. Copies from and to it run while the host goes on.
///
/// The values are reached through [`as_slice`](Self::as_slice) and [`as_mut_slice`](Self::as_mut_slice), which wait for
/// the copies that stand in the way. Dropped, its memory is kept for later requests, which get it when the copies have
/// passed: a loader can drop a batch as soon as its copy is queued.
///
/// ```
/// use vramalloc::{CachingAllocator, Config, driver::sim::SimDriver};
///
/// let allocator = CachingAllocator::new(SimDriver::builder().capacity(1 << 30).build(), Config::default())?;
/// let stream = allocator.default_stream()?;
/// let mut on_device = allocator.alloc_uninit::<f32>(1000, &stream)?;
/// for batch in 0..3 {
///     let mut batch_on_host = allocator.alloc_pinned::<f32>(1000)?;
///     batch_on_host.as_mut_slice()?.fill(batch as f32);
///     on_device.copy_from_pinned(&batch_on_host)?; // queued; the buffer may go
/// }
/// assert_eq!(on_device.to_vec()?, [2.0; 1000]);
/// # Ok::<(), vramalloc::Error>(())
/// ```
pub struct PinnedBuffer<T> {
    /// `None` if there are no bytes.
    block: Option<HostBlock>,
    len: usize,
    uses: Mutex<Vec<Use>>,
    pool: Arc<HostPool>,
    marker: PhantomData<T>,
}

impl<T> PinnedBuffer<T> {
    pub(super) fn new(pool: &Arc<HostPool>, len: usize) -> Result<Self>
    where
        T: AnyBitPattern,
    {
        if align_of::<T>() as u64 > GRANULE {
            return Err(Error::InvalidAlignment { alignment: align_of::<T>() as u64 });
        }
        let bytes = bytes_of::<T>(len)?;
        let block = if bytes == 0 { None } else { Some(pool.alloc(bytes)?) };
        Ok(Self { block, len, uses: Mutex::new(Vec::new()), pool: Arc::clone(pool), marker: PhantomData })
    }

    /// The number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of all values together.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The bytes of the block that it has.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block.map_or(0, |block| block.bytes)
    }

    /// Where the values are. Copies may be under way; see [`as_slice`](Self::as_slice).
    #[must_use]
    pub fn as_ptr(&self) -> *const T {
        self.address().cast_const()
    }

    fn address(&self) -> *mut T {
        match self.block {
            Some(block) => std::ptr::with_exposed_provenance_mut(block.ptr.0 as usize),
            None => NonNull::dangling().as_ptr(),
        }
    }

    /// The values, after waiting for copies to the buffer.
    ///
    /// # Errors
    /// [`Error::Driver`], also about work that was queued before.
    pub fn as_slice(&self) -> Result<&[T]> {
        self.settle(false)?;
        // SAFETY: the block has so many bytes, aligned to 64, and any bits are valid values. They are initialized by the
        // driver, and by what was written since: by the device, or as values without uninitialized bytes.
        // Nothing on the device writes to it any more, and a copy to it needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) })
    }

    /// The values, to be written, after waiting for all copies. Not for types with padding, which would leave bytes
    /// uninitialized that a later buffer of another type reads.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]>
    where
        T: NoUninit,
    {
        self.settle(true)?;
        // SAFETY: as for `as_slice`; the device does not read it any more either, and no value has uninitialized bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address(), self.len) })
    }

    /// Announces that work on `stream` reads the buffer, or writes to it: to be called after the work was queued, when
    /// other code than this crate and cudarc uses its address.
    pub fn record_stream(&self, stream: &Stream) {
        self.record(&stream.pool.clock, Some(stream.pool.clock.now()), true);
    }

    pub(super) fn record(&self, clock: &Arc<StreamClock>, epoch: Option<u64>, writes: bool) {
        if self.block.is_none() {
            return;
        }
        let mut uses = self.uses.lock();
        // One whose epoch is not known yet stays by itself: `settle` gives it the one that it waited for.
        let is_like = |known: &&mut Use| {
            Arc::ptr_eq(&known.clock, clock) && known.writes == writes && known.epoch.is_some() == epoch.is_some()
        };
        match uses.iter_mut().find(is_like) {
            // Another thread may have been quicker with a later one.
            Some(known) => known.epoch = known.epoch.max(epoch),
            None => uses.push(Use { clock: Arc::clone(clock), epoch, writes }),
        }
    }

    /// Waits for the device's writes, or with `reads` for all that it does to the buffer. No lock is held meanwhile.
    pub(super) fn settle(&self, reads: bool) -> Result<()> {
        let waits = waits_of(&self.uses.lock(), reads);
        self.settle_all(reads, waits)
    }

    /// The same before a copy on a stream. What the buffer was used for there comes before by itself. A copy that is captured
    /// runs when the graph is launched: whoever does that orders it.
    pub(super) fn settle_for(&self, reads: bool, clock: &Arc<StreamClock>) -> Result<()> {
        let mut waits = waits_of(&self.uses.lock(), reads);
        waits.retain(|(used, epoch)| !(Arc::ptr_eq(used, clock) || used.has_passed(*epoch)));
        if waits.is_empty() || self.pool.is_captured(clock)? {
            return Ok(());
        }
        self.settle_all(reads, waits)
    }

    fn settle_all(&self, reads: bool, waits: Waits) -> Result<()> {
        let mut waited = Ok(());
        for (clock, epoch) in &waits {
            waited = waited.and(clock.wait(*epoch)); // though one may be captured: the others run now
        }
        waited?;
        let passed = |used: &Use| used.epoch.is_some_and(|epoch| used.clock.has_passed(epoch));
        let mut uses = self.uses.lock();
        for used in uses.iter_mut().filter(|used| reads || used.writes) {
            // Such a use is only ever noted while nobody else can settle it.
            let waited = waits.iter().find(|(clock, _)| Arc::ptr_eq(clock, &used.clock));
            used.epoch = used.epoch.or_else(|| waited.map(|(_, epoch)| *epoch));
        }
        uses.retain(|used| !passed(used));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    pub(super) fn pool(&self) -> &Arc<HostPool> {
        &self.pool
    }

    #[cfg(feature = "cuda")]
    pub(super) fn values_ptr(&self) -> *mut T {
        self.address()
    }
}

fn waits_of(uses: &[Use], reads: bool) -> Waits {
    let uses = uses.iter().filter(|used| reads || used.writes);
    uses.map(|used| (Arc::clone(&used.clock), used.epoch.unwrap_or_else(|| used.clock.now()))).collect()
}

// SAFETY: the memory is the buffer's own and may be used from any thread, as a `Vec`'s.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: shared access only reads, as with a `Vec`; the list of uses is behind a lock.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        let uses = std::mem::take(self.uses.get_mut());
        match self.block {
            // In a fork nothing here is the child's, and what clocks hold goes back behind a lock.
            Some(_) if self.pool.is_forked() => std::mem::forget(uses),
            Some(block) => self.pool.free(block, waits_of(&uses, true)),
            None => {}
        }
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    /// Says where it is and how long; the values are not read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("type", &std::any::type_name::<T>())
            .field("ptr", &self.as_ptr())
            .field("len", &self.len)
            .finish()
    }
}

impl<T> DeviceViewMut<'_, T> {
    /// Queues a copy from page-locked memory, and does not wait for it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_pinned(&mut self, source: &PinnedBuffer<T>) -> Result<()>
    where
        T: NoUninit,
    {
        let stream = self.stream();
        self.copy_from_pinned_on(source, &stream)
    }

    /// [`copy_from_pinned`](Self::copy_from_pinned) on another stream, whose use is recorded. What was queued elsewhere
    /// must be ordered before by the caller.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], and as there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_pinned_on(&mut self, source: &PinnedBuffer<T>, stream: &Stream) -> Result<()>
    where
        T: NoUninit,
    {
        assert_same_len(source.len(), self.len());
        key_for_use(stream, Call::CopyToDevice)?;
        source.settle_for(false, &stream.pool.clock)?;
        // SAFETY: the values stay as they are until the copy has passed: the buffer waits for what is recorded here before
        // it lets anyone write, and before it is used again.
        let queued = unsafe { self.queue_from_host(source.as_ptr(), stream) };
        // After a failure, too: it may have come after the copy was queued.
        source.record(&stream.pool.clock, Some(stream.pool.clock.now()), false);
        queued
    }
}

impl<T> DeviceView<'_, T> {
    /// Queues a copy to page-locked memory, and does not wait for it; [`PinnedBuffer::as_slice`] does.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_pinned(&self, target: &mut PinnedBuffer<T>) -> Result<()>
    where
        T: AnyBitPattern,
    {
        self.copy_to_pinned_on(target, &self.stream())
    }

    /// [`copy_to_pinned`](Self::copy_to_pinned) on another stream, whose use is recorded. What was queued elsewhere must
    /// be ordered before by the caller.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], and as there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_pinned_on(&self, target: &mut PinnedBuffer<T>, stream: &Stream) -> Result<()>
    where
        T: AnyBitPattern,
    {
        assert_same_len(self.len(), target.len());
        key_for_use(stream, Call::CopyToHost)?;
        target.settle_for(true, &stream.pool.clock)?;
        // SAFETY: the buffer waits for what is recorded here before anyone gets to its values.
        let queued = unsafe { self.queue_to_host(target.address(), stream) };
        target.record(&stream.pool.clock, Some(stream.pool.clock.now()), true);
        queued
    }
}

impl<T> DeviceBuffer<T> {
    /// [`DeviceViewMut::copy_from_pinned`] to all of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_pinned(&mut self, source: &PinnedBuffer<T>) -> Result<()>
    where
        T: NoUninit,
    {
        self.as_view_mut().copy_from_pinned(source)
    }

    /// [`DeviceView::copy_to_pinned`] of all of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_pinned(&self, target: &mut PinnedBuffer<T>) -> Result<()>
    where
        T: AnyBitPattern,
    {
        self.as_view().copy_to_pinned(target)
    }
}
