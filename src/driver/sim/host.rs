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

    /// Whether all of the range is page-locked.
    pub(super) fn contains(&self, ptr: HostPtr, bytes: u64) -> bool {
        let fits = |base: u64, len: u64| ptr.0 >= base && ptr.0 - base <= len && bytes <= len - (ptr.0 - base);
        self.held.iter().any(|(&base, entry)| fits(base, entry.1))
    }

    /// Reads a range that is page-locked, as the device does; what is not page-locked is not read.
    pub(super) fn read(&self, ptr: HostPtr, out: &mut [u8]) {
        if self.contains(ptr, out.len() as u64) {
            let source = std::ptr::with_exposed_provenance::<u8>(ptr.0 as usize);
            // SAFETY: the range lies in memory held here, whose address was exposed when it was made. That nobody
            // writes it now is what whoever queued the copy promised.
            unsafe { std::ptr::copy_nonoverlapping(source, out.as_mut_ptr(), out.len()) };
        }
    }

    /// Writes a range that is page-locked, as the device does; what is not page-locked is not written.
    pub(super) fn write(&self, ptr: HostPtr, bytes: &[u8]) {
        if self.contains(ptr, bytes.len() as u64) {
            let target = std::ptr::with_exposed_provenance_mut::<u8>(ptr.0 as usize);
            // SAFETY: as for `read`; nobody else uses the range now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        }
    }

    pub(super) fn free(&mut self, ptr: HostPtr) {
        if let Some((_, bytes)) = self.held.remove(&ptr.0) {
            self.used -= bytes;
        }
    }
}
