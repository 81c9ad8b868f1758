//! Page-locked host memory: real memory of the process, at its real address.

use super::oracle::Refusal;
use crate::driver::{DriverErrorKind, HostPtr};
use rustc_hash::FxHashMap;

/// It starts at a multiple of this.
const ALIGNMENT: usize = 4096;

#[derive(Debug)]
pub(super) struct HostMemory {
    limit: u64,
    used: u64,
    /// By address: what holds the memory, and how much was asked for.
    held: FxHashMap<u64, (Vec<u8>, u64)>,
}

impl HostMemory {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, used: 0, held: FxHashMap::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// The bytes asked for at an address.
    pub(super) fn size(&self, ptr: HostPtr) -> Option<u64> {
        self.held.get(&ptr.0).map(|entry| entry.1)
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> Result<HostPtr, Refusal> {
        if bytes == 0 {
            return Err(Refusal::invalid("an allocation of 0 bytes"));
        }
        let none = || Refusal::honest(DriverErrorKind::OutOfMemory, "no host memory is left");
        let used = self.used.checked_add(bytes).filter(|used| *used <= self.limit).ok_or_else(none)?;
        let size = usize::try_from(bytes).ok().and_then(|size| size.checked_add(ALIGNMENT)).ok_or_else(none)?;
        // Asks first, since `vec!` ends the process where this answers; and `vec!` commits nothing until used.
        Vec::<u8>::new().try_reserve_exact(size).map_err(|_| none())?;
        let mut memory = vec![0u8; size];
        let address = memory.as_mut_ptr().expose_provenance().next_multiple_of(ALIGNMENT) as u64;
        self.held.insert(address, (memory, bytes));
        self.used = used;
        Ok(HostPtr(address))
    }

    pub(super) fn free(&mut self, ptr: HostPtr) {
        if let Some((_, bytes)) = self.held.remove(&ptr.0) {
            self.used -= bytes;
        }
    }
}
