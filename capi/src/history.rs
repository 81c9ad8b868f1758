//! What happened: a history of events, and snapshots with it.

use crate::allocator::{Allocator, text};
use crate::registry;
use crate::status::{Failure, Status, answer};
use std::ffi::{c_char, c_int};
use vramalloc::pytorch::Snapshot;
use vramalloc::{HistoryOptions, Stacks};

/// `vram_record_history`: no call stacks.
pub const VRAM_STACKS_OFF: u32 = 0;
/// `vram_record_history`: the call stacks of allocations.
pub const VRAM_STACKS_ALLOC: u32 = 1;
/// `vram_record_history`: the call stacks of allocations and frees.
pub const VRAM_STACKS_ALL: u32 = 2;

/// Starts recording what the allocator does on `device` or, if that is negative, on every device used so far or later.
/// The newest `events` are kept (64 bytes each); with 0 only what is live is known better: its age. `vram_snapshot` then
/// writes them, too. What was recorded before is forgotten. From the start, before anything is allocated: the key
/// `history` of the configuration.
///
/// `stacks` is one of VRAM_STACKS_...: the functions (not Python's) that led to an event. That takes some microseconds an
/// event, and a library that was built with the feature `stacks`.
#[unsafe(no_mangle)]
pub extern "C" fn vram_record_history(allocator: Allocator, device: c_int, events: u64, stacks: u32) -> Status {
    answer(|| {
        let stacks = match stacks {
            VRAM_STACKS_OFF => Stacks::Off,
            VRAM_STACKS_ALLOC => Stacks::Alloc,
            VRAM_STACKS_ALL => Stacks::All,
            other => return Err(Failure::Argument(format!("{other} is none of VRAM_STACKS_..."))),
        };
        if stacks != Stacks::Off && !cfg!(feature = "stacks") {
            let text = "this build has no call stacks: build it with --features stacks, or pass VRAM_STACKS_OFF";
            return Err(Failure::Argument(text.to_owned()));
        }
        let events = usize::try_from(events).unwrap_or(usize::MAX);
        let options = HistoryOptions::default().events(events).stacks(stacks);
        registry::get(allocator)?.record_history(device, Some(options))
    })
}

/// Stops recording on `device` or, if that is negative, on every one, and forgets what was recorded.
#[unsafe(no_mangle)]
pub extern "C" fn vram_stop_history(allocator: Allocator, device: c_int) -> Status {
    answer(|| registry::get(allocator)?.record_history(device, None))
}

/// Writes every segment and block of a device to a file or, if `device` is negative, of every device used so far; and the
/// events if a history is recorded. It has the schema of PyTorch's memory snapshots: as JSON if the name ends in `.json`,
/// else as a pickle, which `pytorch.org/memory_viz` opens.
///
/// # Safety
/// `path` is a string that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_snapshot(allocator: Allocator, device: c_int, path: *const c_char) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        // SAFETY: the caller answers for it.
        let path = unsafe { text(path, "path")? }.ok_or(Failure::Null("path"))?;
        let snapshot = if device >= 0 {
            devices.get(device)?.allocator.pytorch_snapshot()
        } else {
            let snapshots = devices.used().map(|device| device.allocator.pytorch_snapshot());
            snapshots.fold(Snapshot::default(), Snapshot::merged)
        };
        snapshot.save(path).map_err(|error| Failure::Io { path: path.to_owned(), error })
    })
}
