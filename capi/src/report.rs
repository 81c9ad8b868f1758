//! What an allocator did and holds: as a struct, as JSON, as a table.

use crate::allocator::{Allocator, put};
use crate::registry;
use crate::status::{Failure, Result, Status, answer};
use serde_json::json;
use std::ffi::{c_char, c_int};
use std::time::Duration;
use vramalloc::driver::Call;
use vramalloc::{CachingAllocator, MemoryStats};

/// A counter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The highest since the last reset of peaks.
    pub peak: u64,
    /// All that came, since the last reset of sums.
    pub allocated: u64,
    /// All that went, since the last reset of sums.
    pub freed: u64,
}

/// A counter over all memory, and by size class.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatArray {
    /// Both classes.
    pub all: Stat,
    /// Requests above 1 MiB.
    pub large_pool: Stat,
    /// Requests up to 1 MiB.
    pub small_pool: Stat,
}

/// The statistics of a device. Fields are only ever added, at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Allocations held by users.
    pub allocation: StatArray,
    /// Their bytes, in blocks.
    pub allocated_bytes: StatArray,
    /// Their bytes, as asked for.
    pub requested_bytes: StatArray,
    /// Allocations that are held, or freed and still used by queued work.
    pub active: StatArray,
    /// Their bytes.
    pub active_bytes: StatArray,
    /// Segments reserved from the driver (fixed segments).
    pub segment: StatArray,
    /// Bytes reserved from the driver.
    pub reserved_bytes: StatArray,
    /// Cached blocks in segments that are partly in use.
    pub inactive_split: StatArray,
    /// Their bytes.
    pub inactive_split_bytes: StatArray,
    /// Allocations of max_split_size and more.
    pub oversize_allocations: Stat,
    /// Segments of that size.
    pub oversize_segments: Stat,
    /// How often everything cached was given back to serve a request.
    pub num_alloc_retries: u64,
    /// How often memory ran out.
    pub num_ooms: u64,
    /// How often queued work was waited for.
    pub num_sync_all_streams: u64,
    /// Driver calls that reserved or mapped.
    pub num_device_alloc: u64,
    /// Driver calls that gave back or unmapped.
    pub num_device_free: u64,
    /// max_split_size in bytes; -1 if there is none.
    pub max_split_size: i64,
}

impl From<vramalloc::Stat> for Stat {
    fn from(stat: vramalloc::Stat) -> Self {
        let vramalloc::Stat { current, peak, allocated, freed, .. } = stat;
        Self { current, peak, allocated, freed }
    }
}

impl From<vramalloc::StatArray> for StatArray {
    fn from(array: vramalloc::StatArray) -> Self {
        Self { all: array.all.into(), large_pool: array.large_pool.into(), small_pool: array.small_pool.into() }
    }
}

impl From<MemoryStats> for Stats {
    fn from(stats: MemoryStats) -> Self {
        Self {
            allocation: stats.allocation.into(),
            allocated_bytes: stats.allocated_bytes.into(),
            requested_bytes: stats.requested_bytes.into(),
            active: stats.active.into(),
            active_bytes: stats.active_bytes.into(),
            segment: stats.segment.into(),
            reserved_bytes: stats.reserved_bytes.into(),
            inactive_split: stats.inactive_split.into(),
            inactive_split_bytes: stats.inactive_split_bytes.into(),
            oversize_allocations: stats.oversize_allocations.into(),
            oversize_segments: stats.oversize_segments.into(),
            num_alloc_retries: stats.num_alloc_retries,
            num_ooms: stats.num_ooms,
            num_sync_all_streams: stats.num_sync_all_streams,
            num_device_alloc: stats.num_device_alloc,
            num_device_free: stats.num_device_free,
            max_split_size: stats.max_split_size,
        }
    }
}

/// Writes the statistics of a device to `out`, of which the caller says the size (`sizeof(vram_stats)`), so that a
/// program built with an older header gets the fields that it knows.
///
/// # Safety
/// `out` points to `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_get_stats(
    allocator: Allocator,
    device: c_int,
    out: *mut Stats,
    size: usize,
) -> Status {
    answer(|| {
        if out.is_null() {
            return Err(Failure::Null("out"));
        }
        let devices = registry::get(allocator)?;
        let stats = Stats::from(devices.get(device)?.allocator.memory_stats());
        let known = size.min(size_of::<Stats>());
        // SAFETY: the caller's buffer has at least `known` bytes, and so has the struct, which has no padding.
        unsafe { std::ptr::copy_nonoverlapping((&raw const stats).cast::<u8>(), out.cast::<u8>(), known) };
        Ok(())
    })
}

/// Hands a text to the caller.
///
/// # Safety
/// `buffer` is null or has `capacity` bytes that can be written; `needed` is null or can be written.
unsafe fn give(text: &str, buffer: *mut c_char, capacity: usize, needed: *mut usize) -> Result<()> {
    let bytes = text.len() + 1;
    if !needed.is_null() {
        // SAFETY: the caller answers for it.
        unsafe { put(needed, "needed", bytes)? };
    }
    if buffer.is_null() && capacity == 0 && !needed.is_null() {
        return Ok(()); // only the size was asked for
    }
    if buffer.is_null() {
        return Err(Failure::Null("buffer"));
    }
    if capacity < bytes {
        return Err(Failure::Buffer { needed: bytes, capacity });
    }
    // SAFETY: the buffer has room for the text and the zero byte.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}

/// Hands a text about a device to the caller.
///
/// # Safety
/// As for [`give`].
unsafe fn give_of(
    allocator: Allocator,
    device: c_int,
    (buffer, capacity, needed): (*mut c_char, usize, *mut usize),
    text: impl FnOnce(&CachingAllocator) -> String,
) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        // SAFETY: the caller answers for it.
        unsafe { give(&text(&devices.get(device)?.allocator), buffer, capacity, needed) }
    })
}

/// Writes the statistics as a JSON object with PyTorch's keys (`allocated_bytes.all.peak`) to `buffer`, ended by a zero
/// byte. `needed`, if it is not null, gets the bytes that this takes; a null buffer of capacity 0 asks for that only.
///
/// # Safety
/// `buffer` is null or has `capacity` bytes that can be written; `needed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_stats_json(
    allocator: Allocator,
    device: c_int,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: the caller answers for it.
    unsafe {
        give_of(allocator, device, (buffer, capacity, needed), |allocator| {
            json!(allocator.memory_stats().to_map()).to_string()
        })
    }
}

/// Writes how often each function of the driver was called for a device, and the seconds that took, as a JSON object
/// (`{"cuMemMap": {"calls": 3, "seconds": 0.0001}}`); as `vram_stats_json`. Nothing starts these anew.
///
/// # Safety
/// As `vram_stats_json`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_driver_calls_json(
    allocator: Allocator,
    device: c_int,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: the caller answers for it.
    unsafe {
        give_of(allocator, device, (buffer, capacity, needed), |allocator| {
            let calls = allocator.driver().calls();
            let made = Call::ALL.iter().map(|&call| (call, calls.get(call))).filter(|(_, count)| count.calls > 0);
            let map: serde_json::Map<_, _> = made
                .map(|(call, count)| {
                    let seconds = Duration::from_nanos(count.nanos).as_secs_f64();
                    (call.name().to_owned(), json!({ "calls": count.calls, "seconds": seconds }))
                })
                .collect();
            json!(map).to_string()
        })
    }
}

/// Writes the statistics as a table for people, with the rows of `torch.cuda.memory_summary()`; as `vram_stats_json`.
///
/// # Safety
/// As `vram_stats_json`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_memory_summary(
    allocator: Allocator,
    device: c_int,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: the caller answers for it.
    unsafe { give_of(allocator, device, (buffer, capacity, needed), CachingAllocator::memory_summary) }
}

/// The same table without the rows by size class.
///
/// # Safety
/// As `vram_stats_json`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_memory_summary_abbreviated(
    allocator: Allocator,
    device: c_int,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: the caller answers for it.
    unsafe { give_of(allocator, device, (buffer, capacity, needed), CachingAllocator::memory_summary_abbreviated) }
}

/// Starts the peaks of a device anew, from what is current.
#[unsafe(no_mangle)]
pub extern "C" fn vram_reset_peak_stats(allocator: Allocator, device: c_int) -> Status {
    answer(|| {
        registry::get(allocator)?.get(device)?.allocator.reset_peak_memory_stats();
        Ok(())
    })
}

/// Starts the running sums and event counters of a device anew.
#[unsafe(no_mangle)]
pub extern "C" fn vram_reset_accumulated_stats(allocator: Allocator, device: c_int) -> Status {
    answer(|| {
        registry::get(allocator)?.get(device)?.allocator.reset_accumulated_memory_stats();
        Ok(())
    })
}

/// Walks every structure of a device's allocator and checks that it is sound. For tests; it takes time.
#[unsafe(no_mangle)]
pub extern "C" fn vram_validate(allocator: Allocator, device: c_int) -> Status {
    answer(|| Ok(registry::get(allocator)?.get(device)?.allocator.validate()?))
}
