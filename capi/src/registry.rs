//! Handles: numbers that are looked up, so that a stale one is an error and nothing worse.

use crate::devices::{Devices, Source};
use crate::logging;
use crate::status::{Failure, Result};
use parking_lot::RwLock;
use std::env::VarError;
use std::sync::{Arc, OnceLock};
use vramalloc::Config;

/// Where the generation sits in a handle. Below is the slot's number plus one, so that no handle is 0.
const GENERATION_SHIFT: u32 = 32;

#[derive(Debug, Default)]
struct Slot {
    /// How often the slot was given up.
    generation: u32,
    devices: Option<Arc<Devices>>,
}

static SLOTS: RwLock<Vec<Slot>> = RwLock::new(Vec::new());

/// Makes a handle.
pub(crate) fn insert(devices: Arc<Devices>) -> u64 {
    let mut slots = SLOTS.write();
    let index = slots.iter().position(|slot| slot.devices.is_none() && slot.generation < u32::MAX);
    let index = index.unwrap_or_else(|| {
        slots.push(Slot::default());
        slots.len() - 1
    });
    let slot = &mut slots[index];
    slot.devices = Some(devices);
    handle_of(slot, index)
}

fn handle_of(slot: &Slot, index: usize) -> u64 {
    (u64::from(slot.generation) << GENERATION_SHIFT) | (index as u64 + 1)
}

fn place(handle: u64) -> Option<(usize, u32)> {
    let index = (handle & ((1 << GENERATION_SHIFT) - 1)).checked_sub(1)?;
    Some((usize::try_from(index).ok()?, (handle >> GENERATION_SHIFT) as u32))
}

/// What a handle stands for.
pub(crate) fn get(handle: u64) -> Result<Arc<Devices>> {
    let slots = SLOTS.read();
    let found = place(handle).and_then(|(index, generation)| {
        let slot = slots.get(index).filter(|slot| slot.generation == generation)?;
        slot.devices.clone()
    });
    found.ok_or(Failure::Handle(handle))
}

/// All handles that there are, and what they stand for.
pub(crate) fn all() -> Vec<(u64, Arc<Devices>)> {
    let slots = SLOTS.read();
    let used = slots.iter().enumerate().filter_map(|(index, slot)| {
        let devices = Arc::clone(slot.devices.as_ref()?);
        Some((handle_of(slot, index), devices))
    });
    used.collect()
}

/// Gives a handle up, and returns what it stood for.
pub(crate) fn remove(handle: u64) -> Result<Arc<Devices>> {
    let mut slots = SLOTS.write();
    let found = place(handle).and_then(|(index, generation)| {
        let slot = slots.get_mut(index).filter(|slot| slot.generation == generation)?;
        let devices = slot.devices.take()?;
        slot.generation += 1;
        Some(devices)
    });
    found.ok_or(Failure::Handle(handle))
}

/// The environment variable that says which devices the process's own allocator is for.
const DEVICE_VARIABLE: &str = "VRAMALLOC_DEVICE";

/// The allocator of the process, which PyTorch's and CuPy's functions use, and its handle.
static OWN: OnceLock<(Arc<Devices>, u64)> = OnceLock::new();

/// That allocator, as the environment configures it. A failure is not remembered: the next call tries again.
#[inline]
pub(crate) fn own() -> Result<&'static (Arc<Devices>, u64)> {
    match OWN.get() {
        Some(own) => Ok(own),
        None => open_own(),
    }
}

#[cold]
fn open_own() -> Result<&'static (Arc<Devices>, u64)> {
    static OPENING: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    logging::start();
    let _opening = OPENING.lock();
    if let Some(own) = OWN.get() {
        return Ok(own);
    }
    let source = match std::env::var(DEVICE_VARIABLE) {
        Ok(text) => text.parse()?,
        Err(VarError::NotPresent) => Source::Cuda(None),
        Err(VarError::NotUnicode(_)) => return Err(Failure::NotText(DEVICE_VARIABLE)),
    };
    let devices = Arc::new(Devices::new(source, Config::from_env()?)?);
    let handle = insert(Arc::clone(&devices));
    Ok(OWN.get_or_init(|| (devices, handle)))
}

/// Whether the handle is that allocator's.
pub(crate) fn is_own(handle: u64) -> bool {
    OWN.get().is_some_and(|(_, own)| *own == handle)
}
