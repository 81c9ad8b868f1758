//! The slow path: what is tried, in order, when a pool has no block for a request.
//!
//! Each rung is one function, named after what it gives back. After each one the pool is searched again, since
//! another thread may have freed what is wanted; and no lock is held while the driver waits.
//!
//! 1. [`finish_passed`]: frees that waited for other streams, and need not any more.
//! 2. [`collect_garbage`]: old cached segments, past the threshold or the soft limit.
//! 3. [`grow`]: a new segment. If the driver or the limit refuses:
//! 4. [`release_one_fitting`]: one cached segment large enough, and `grow` again.
//! 5. [`wait_for_oldest`]: the oldest pending frees, one at a time, only as long as needed.
//! 6. [`release_all_cached`]: every cached segment, and `grow` again, at last with the smallest segment that will do.
//! 7. [`report`]: the error.

use crate::block::State;
use crate::config::OnPending;
use crate::device::Device;
use crate::driver::{DevicePtr, DriverErrorKind};
use crate::error::{Cause, Error, OutOfMemory, Result};
use crate::history::Kind;
use crate::pool::{Request, Taken};
use crate::segment::Segment;
use crate::size::{MIN_BLOCK_BYTES, SEGMENT_STEP_BYTES, SMALL_SEGMENT_BYTES, SizeClass, align_up, segment_bytes};
use crate::stream::StreamPool;
use crate::supply::{self, plan::Beyond};
use crate::tell;
use std::sync::Arc;

/// Who refused to let the pool grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Limit,
    Device,
    AddressSpace,
}

/// The way of a request that the pool could not serve.
#[cold]
#[inline(never)]
pub(crate) fn allocate(pool: &Arc<StreamPool>, request: &Request) -> Result<Taken> {
    let result = climb(pool, request);
    tell::slow_path(&pool.device, request, &result);
    result
}

fn climb(pool: &Arc<StreamPool>, request: &Request) -> Result<Taken> {
    let device = &*pool.device;
    if !device.is_usable() {
        return Err(device.unusable());
    }
    device.checked(device.driver.check_usable())?;
    let wanted = match request.class {
        // Padded for its alignment it may be larger than that class's requests, but never than its segments.
        SizeClass::Small => {
            Some(SMALL_SEGMENT_BYTES.max(request.padded_bytes().next_multiple_of(SEGMENT_STEP_BYTES)))
        }
        SizeClass::Large => segment_bytes(request.padded_bytes(), &device.config),
    };
    let wanted = wanted.ok_or(Error::SizeOverflow { requested: request.requested })?;

    if let Some(taken) = finish_passed(pool, request) {
        return Ok(taken);
    }
    if let Some(taken) = supply::take_kept(pool, request) {
        return Ok(taken);
    }
    if request.bytes > device.total_bytes {
        return report(pool, request, wanted, Refusal::Device); // nothing that is given back could help
    }
    if !device.is_capturing() {
        collect_garbage(device)?;
    }
    let refusal = if device.expandable {
        match allocate_expandable(pool, request)? {
            Ok(taken) => return Ok(taken),
            Err(refusal) => refusal,
        }
    } else {
        match allocate_fixed(pool, request, wanted)? {
            Ok(taken) => return Ok(taken),
            Err(refusal) => refusal,
        }
    };
    if let Some(taken) = finish_passed(pool, request).or_else(|| supply::take_kept(pool, request)) {
        return Ok(taken);
    }
    if !device.is_usable() {
        return Err(device.unusable()); // lost on the way: not for want of memory
    }
    report(pool, request, wanted, refusal)
}

/// Rungs 3 to 6 with fixed segments.
fn allocate_fixed(pool: &Arc<StreamPool>, request: &Request, wanted: u64) -> Result<Growth> {
    let device = &*pool.device;
    let mut refusal = match grow(pool, request, wanted)? {
        Ok(taken) => return Ok(Ok(taken)),
        Err(refusal) => refusal,
    };
    let smallest = align_up(request.padded_bytes(), SEGMENT_STEP_BYTES).unwrap_or(wanted);
    if device.is_capturing() {
        // To free or to wait would spoil the capture.
        return if smallest == wanted { Ok(Err(refusal)) } else { grow(pool, request, smallest) };
    }
    if release_one_fitting(device, wanted)? {
        match grow(pool, request, wanted)? {
            Ok(taken) => return Ok(Ok(taken)),
            Err(again) => refusal = again,
        }
    }
    if device.config.on_pending != OnPending::Fail {
        while wait_for_oldest(pool) {
            if let Some(taken) = pool.take(request) {
                return Ok(Ok(taken));
            }
        }
        for other in device.pools().iter().filter(|other| !Arc::ptr_eq(other, pool)) {
            while wait_for_oldest(other) {
                if release_one_fitting(device, wanted)?
                    && let Ok(taken) = grow(pool, request, wanted)?
                {
                    return Ok(Ok(taken));
                }
            }
        }
    }
    release_all_cached(device)?;
    device.ledger.lock().alloc_retries += 1;
    for bytes in [wanted, smallest] {
        match grow(pool, request, bytes)? {
            Ok(taken) => return Ok(Ok(taken)),
            Err(again) => refusal = again,
        }
        if smallest == wanted {
            break;
        }
    }
    Ok(Err(refusal))
}

/// Rungs 3 to 6 with expandable segments, where growing moves what is idle anyway: fresh memory, or what is idle now;
/// then what the oldest queued work still holds; then everything that is cached goes back, and fresh memory again.
fn allocate_expandable(pool: &Arc<StreamPool>, request: &Request) -> Result<Growth> {
    let device = &*pool.device;
    let supply = &device.supply;
    let grow = |beyond| supply::grow(supply, pool, request, beyond);
    let capturing = device.is_capturing(); // to wait would spoil it
    if device.config.on_pending == OnPending::Wait && !capturing {
        // Rather wait than take more than the slack.
        loop {
            match grow(Beyond::Forbidden)? {
                Ok(taken) => return Ok(Ok(taken)),
                Err(Refusal::Device) if supply::wait_for_oldest(device) => {}
                Err(_) => break,
            }
        }
    }
    let mut refusal = match grow(Beyond::Allowed)? {
        Ok(taken) => return Ok(Ok(taken)),
        Err(refusal) => refusal,
    };
    if let Ok(taken) = grow(Beyond::Spent)? {
        return Ok(Ok(taken));
    }
    if capturing {
        return Ok(Err(refusal));
    }
    if device.config.on_pending != OnPending::Fail {
        while wait_for_oldest(pool) {
            if let Some(taken) = pool.take(request) {
                return Ok(Ok(taken));
            }
            // By pages that can move now, or in a kept block: nothing else is waited for if that will do.
            if let Ok(taken) = grow(Beyond::Spent)? {
                return Ok(Ok(taken));
            }
        }
        loop {
            let others = device.pools();
            if !others.iter().any(|other| wait_for_oldest(other)) && !supply::wait_for_oldest(device) {
                break;
            }
            if let Ok(taken) = grow(Beyond::Spent)? {
                return Ok(Ok(taken));
            }
        }
    }
    release_all_cached(device)?;
    device.ledger.lock().alloc_retries += 1;
    match grow(Beyond::Allowed)? {
        Ok(taken) => return Ok(Ok(taken)),
        Err(again) => refusal = if again == Refusal::AddressSpace { again } else { refusal },
    }
    Ok(Err(refusal))
}

/// Rung 1: caches what waited for other streams' work that has passed, and searches, now in all of a bin.
fn finish_passed(pool: &StreamPool, request: &Request) -> Option<Taken> {
    pool.device.empty_magazines(); // threads go on freeing into them
    poll(pool);
    pool.take_anywhere(request)
}

/// Asks the driver about the pool's pending frees and caches those that have passed; returns how many. Errors are
/// kept for later: the blocks stay withheld.
pub(crate) fn poll(pool: &StreamPool) -> usize {
    let mut epochs: Vec<(Arc<crate::event::StreamClock>, u64)> = Vec::new();
    for (clock, epoch) in pool.lock().pending.iter().flat_map(|entry| &entry.waits) {
        match epochs.iter_mut().find(|(known, _)| Arc::ptr_eq(known, clock)) {
            Some((_, latest)) => *latest = (*latest).max(*epoch),
            None => epochs.push((Arc::clone(clock), *epoch)),
        }
    }
    if epochs.is_empty() {
        return 0;
    }
    // During a capture nothing is asked: an event on the default stream could spoil it.
    for (clock, epoch) in epochs.into_iter().filter(|_| !pool.device.is_capturing()) {
        if let Err(error) = clock.poll(epoch) {
            pool.device.defer(error);
        }
    }
    finish(pool)
}

/// Waits for the device if memory waits for streams that are destroyed, or other threads' own: nothing else tells when their
/// work is done.
/// Fixed segments need that for pending frees only, since giving them back waits by itself.
pub(crate) fn finish_gone(device: &Device) {
    if device.is_capturing() {
        return;
    }
    for pool in device.pools() {
        let (mut waits, free) = {
            let core = pool.lock();
            let waits: Vec<_> = core.pending.iter().flat_map(|entry| entry.waits.iter().cloned()).collect();
            (waits, if device.expandable && !pool.is_pinned() { core.latest_free_epoch() } else { 0 })
        };
        waits.push((Arc::clone(&pool.clock), free));
        for (clock, epoch) in waits {
            let passed = clock
                .poll(epoch)
                .and_then(|passed| if !passed && clock.needs_device(epoch) { clock.wait(epoch) } else { Ok(()) });
            if let Err(error) = passed
                && error.kind != DriverErrorKind::Capturing
            {
                device.defer(error);
            }
        }
    }
}

/// Caches the pending frees that are known to have passed.
fn finish(pool: &StreamPool) -> usize {
    let mut core = pool.lock();
    let finished = core.finish_pending();
    pool.attend(&mut core);
    finished
}

/// Rung 2: past the threshold, gives back cached segments that were not used for longer than the average, until
/// reserved is below it. (PyTorch's rule, for every pool, and also without a limit.)
fn collect_garbage(device: &Device) -> Result<()> {
    let base = device.limit().unwrap_or(device.total_bytes);
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let threshold = device.config.gc_threshold.map(|part| (part * base as f64) as u64);
    let Some(target) = [threshold, device.config.soft_limit_bytes].into_iter().flatten().min() else {
        return Ok(());
    };
    let mut excess = device.reserved().saturating_sub(target);
    if device.expandable && excess > 0 {
        supply::trim(&device.supply, device, target)?;
        return Ok(());
    }
    let pools = device.releasable_pools();
    while excess > 0 {
        let mut candidates = Vec::new();
        for pool in &pools {
            let core = pool.lock();
            let age = |born: u32| u64::from(core.searches.wrapping_sub(born));
            candidates.extend(core.unused_segments().map(|(number, _, block)| (age(block.born), number, pool)));
        }
        let Some(average) =
            candidates.iter().map(|(age, ..)| age).sum::<u64>().checked_div(candidates.len() as u64)
        else {
            return Ok(());
        };
        let old: Vec<_> = candidates
            .into_iter()
            .filter(|(age, ..)| *age >= average)
            .map(|(_, number, pool)| (pool, number))
            .collect();
        let freed = release(&old)?;
        if freed == 0 {
            return Ok(());
        }
        excess = excess.saturating_sub(freed);
    }
    Ok(())
}

/// A block from a pool that grew, or who refused.
pub(crate) type Growth = std::result::Result<Taken, Refusal>;

/// Reserves a fixed segment of `bytes`, for requests above 1 MiB, and caches it.
pub(crate) fn reserve(pool: &StreamPool, bytes: u64) -> Result<()> {
    let device = &*pool.device;
    let class = SizeClass::Large;
    let request = Request { requested: bytes, bytes, alignment: MIN_BLOCK_BYTES, class };
    let base = match ask_driver(device, bytes)? {
        Ok(base) => base,
        Err(refusal) => return report(pool, &request, bytes, refusal),
    };
    let mut core = pool.lock();
    device.book_segment(class, bytes);
    core.record_segment(Kind::SegmentAlloc, base.0, bytes, class);
    let id = core.add_segment(Segment::new(base.0, bytes, class));
    core.cache_claimed(id, class);
    Ok(())
}

/// Memory for a segment of `bytes`, claimed of the limit and not yet booked; or who refused.
fn ask_driver(device: &Device, bytes: u64) -> Result<std::result::Result<DevicePtr, Refusal>> {
    if !device.claim(bytes) {
        return Ok(Err(Refusal::Limit));
    }
    device.driver.alloc(bytes).map(Ok).or_else(|error| {
        device.unclaim(bytes);
        match error.kind {
            DriverErrorKind::OutOfMemory => Ok(Err(Refusal::Device)),
            _ => Err(Error::Driver(device.noted(error))),
        }
    })
}

/// Rung 3: reserves a segment of `bytes` and takes the request from it.
fn grow(pool: &StreamPool, request: &Request, bytes: u64) -> Result<Growth> {
    let device = &*pool.device;
    let _growing = pool.growing.lock();
    if let Some(taken) = pool.take(request) {
        return Ok(Ok(taken));
    }
    let base = match ask_driver(device, bytes)? {
        Ok(base) => base,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let mut core = pool.lock();
    if core.is_retired() {
        drop(core); // by another thread, in between; the pool may be off the device's list
        device.unclaim(bytes);
        device.checked(device.driver.free(base))?;
        return Err(pool.retired());
    }
    device.book_segment(request.class, bytes);
    core.record_segment(Kind::SegmentAlloc, base.0, bytes, request.class);
    let id = core.add_segment(Segment::new(base.0, bytes, request.class));
    let taken = core.carve(id, request);
    pool.grown(&mut core, taken.id);
    Ok(Ok(taken))
}

/// Rung 4: gives back the smallest cached segment, of any stream, that makes room for `bytes` by itself.
fn release_one_fitting(device: &Device, bytes: u64) -> Result<bool> {
    device.empty_magazines();
    let pools = device.releasable_pools();
    let mut best: Option<(u64, &Arc<StreamPool>, u32)> = None;
    for pool in &pools {
        let core = pool.lock();
        for (number, segment, _) in core.unused_segments() {
            if segment.bytes >= bytes && best.is_none_or(|(least, ..)| segment.bytes < least) {
                best = Some((segment.bytes, pool, number));
            }
        }
    }
    match best {
        Some((_, pool, number)) => Ok(release(&[(pool, number)])? > 0),
        None => Ok(false),
    }
}

/// Rung 5: waits on the host for the oldest pending free of the pool that can be waited for; false if there is none.
/// One that a capture holds up, or whose wait fails, does not hold back those of other streams.
fn wait_for_oldest(pool: &StreamPool) -> bool {
    let mut waits: Vec<(Arc<crate::event::StreamClock>, u64)> = Vec::new();
    for entry in &pool.lock().pending {
        let oldest = entry.waits.iter().find(|(clock, epoch)| !clock.has_passed(*epoch)).or(entry.waits.first());
        // One wait a stream: its oldest.
        if let Some((clock, epoch)) = oldest
            && !waits.iter().any(|(known, _)| Arc::ptr_eq(known, clock))
        {
            waits.push((Arc::clone(clock), *epoch));
        }
    }
    let waited = waits.iter().any(|(clock, epoch)| supply::wait_for(&pool.device, clock, *epoch));
    if waited {
        finish(pool);
    }
    waited
}

/// Rung 6: gives back every cached segment of the device. Returns the bytes.
pub(crate) fn release_all_cached(device: &Device) -> Result<u64> {
    device.empty_magazines();
    if device.expandable {
        return supply::trim(&device.supply, device, 0);
    }
    let mut freed = 0;
    for pool in &device.releasable_pools() {
        let unused: Vec<_> = pool.lock().unused_segments().map(|(number, ..)| (pool, number)).collect();
        freed += release(&unused)?;
    }
    Ok(freed)
}

/// Gives segments back to the driver, if they are still unused; returns the bytes. A segment that the driver will
/// not take is cached again.
fn release(segments: &[(&Arc<StreamPool>, u32)]) -> Result<u64> {
    let mut freed = 0;
    for &(pool, number) in segments {
        let mut core = pool.lock();
        let unused = core.segments.get(number).is_some_and(|segment| {
            let block = &core.blocks[segment.first];
            block.state() == State::Free && block.is_whole_segment()
        });
        if !unused {
            continue;
        }
        let segment = pool.detach_segment(&mut core, number);
        drop(core);
        if let Err(error) = pool.free_segment(&segment) {
            pool.restore_segment(segment);
            return Err(Error::Driver(pool.device.noted(error)));
        }
        freed += segment.bytes;
    }
    Ok(freed)
}

/// Free bytes of expandable segments whose stream's work has not passed: they cannot move.
fn unpassed(device: &Device) -> u64 {
    if !device.expandable {
        return 0;
    }
    let bytes = |pool: &Arc<StreamPool>| {
        let core = pool.lock();
        let free =
            crate::size::SizeClass::ALL.iter().flat_map(|class| core.free[class.index()].iter(&core.blocks));
        let blocks = free.map(|id| &core.blocks[id]);
        blocks.filter(|block| !pool.clock.has_passed(block.epoch)).map(|block| block.size).sum::<u64>()
    };
    device.releasable_pools().iter().map(bytes).sum()
}

/// Bytes of fixed segments that would go back to the driver if no capture were under way.
fn withheld(device: &Device) -> u64 {
    if device.expandable || !device.is_capturing() {
        return 0;
    }
    let bytes = |pool: &Arc<StreamPool>| {
        let core = pool.lock();
        core.unused_segments().map(|(_, segment, _)| segment.bytes).sum::<u64>()
    };
    device.releasable_pools().iter().map(bytes).sum()
}

/// Bytes of the largest handle; 0 with fixed segments.
fn largest_page(device: &Device) -> u64 {
    let state = device.supply.state.lock();
    state.arenas.iter().flat_map(|arena| arena.handles.values()).map(|handle| handle.bytes).max().unwrap_or(0)
}

/// Rung 7: the error with its numbers; the observers hear of it first.
fn report<T>(pool: &StreamPool, request: &Request, segment: u64, refusal: Refusal) -> Result<T> {
    let device = &*pool.device;
    let crate::allocator::Held { allocated, active, inactive_split, .. } = crate::allocator::held(device);
    let (cached, largest_free) = {
        let core = pool.lock();
        (core.cached_bytes(request.class), core.free[request.class.index()].largest(&core.blocks))
    };
    let pending = active - allocated;
    let cause = match refusal {
        _ if request.bytes > device.total_bytes => Cause::Device,
        _ if device.config.on_pending == OnPending::Fail && pending + unpassed(device) >= request.bytes => {
            Cause::PendingWork
        }
        Refusal::Limit if device.limit().is_some_and(|limit| request.bytes > limit) => Cause::Limit,
        Refusal::AddressSpace => Cause::AddressSpace,
        _ if cached >= request.bytes => Cause::Fragmentation,
        Refusal::Limit => Cause::Limit,
        // What is in pieces here and what the device has would do together.
        Refusal::Device => {
            let free = device.driver.memory_info().map_or(0, |info| info.free_bytes);
            if cached > 0 && cached + free >= request.bytes { Cause::Fragmentation } else { Cause::Device }
        }
    };
    let largest_page = largest_page(device);
    let report = OutOfMemory {
        device: device.driver.device(),
        requested: request.requested,
        rounded: request.bytes,
        segment,
        allocated,
        reserved: device.reserved(),
        pending,
        inactive_split,
        withheld: withheld(device),
        largest_free,
        device_free: device.driver.memory_info().ok().map(|info| info.free_bytes),
        device_total: device.total_bytes,
        limit: device.limit(),
        expandable: device.expandable,
        largest_page,
        less_slack_helps: device.config.slack > 1.0 && largest_page > device.driver.capabilities().page_bytes,
        cause,
    };
    device.ledger.lock().ooms += 1;
    let free = DevicePtr(report.device_free.unwrap_or(0));
    device.history.record(Kind::OutOfMemory, free, request.bytes, pool.clock.key.handle.0, request.class);
    tell::out_of_memory(&report);
    device.observe(&report);
    Err(Error::OutOfMemory(Box::new(report)))
}
