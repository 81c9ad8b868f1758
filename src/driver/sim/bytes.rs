//! The contents of device memory, as a test or a simulated kernel sees them.

use super::SimDriver;
use super::memory::{Extent, PhysicalMemory, total};
use super::oracle::Violation;
use super::state::State;
use crate::driver::DevicePtr;

/// Contents. These act at once, apart from all streams, and are neither logged nor charged.
impl SimDriver {
    /// Looks up a range and acts on it, under the lock.
    fn with_pieces<T>(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        writes: bool,
        act: impl FnOnce(&mut PhysicalMemory, &[Extent]) -> T,
    ) -> Result<T, Violation> {
        if self.is_forked() {
            return Err(Violation("the process was forked after the device was opened".to_owned()));
        }
        let mut state = self.state.lock();
        if !state.physical().has_backing() {
            return Err(Violation("this device keeps no contents (`SimBuilder::backing`)".to_owned()));
        }
        let pieces = note(&mut state, |state| state.locate(ptr, bytes as u64, writes))?;
        Ok(act(state.physical(), &pieces))
    }

    /// The devices, by ordinal, that may use the memory mapped at `ptr`; none if nothing is.
    #[must_use]
    pub fn accessible_from(&self, ptr: DevicePtr) -> Vec<u32> {
        let access = self.state.lock().access_at(ptr).unwrap_or(0);
        (0..u64::BITS).filter(|device| access >> device & 1 == 1).collect()
    }

    /// Copies device memory out.
    ///
    /// # Errors
    /// If any byte of the range may not be used, or the device keeps no contents.
    pub fn read(&self, ptr: DevicePtr, out: &mut [u8]) -> Result<(), Violation> {
        self.with_pieces(ptr, out.len(), false, |memory, pieces| memory.read(pieces, out))
    }

    /// Copies bytes into device memory.
    ///
    /// # Errors
    /// As for [`read`](Self::read); nothing is then written.
    pub fn write(&self, ptr: DevicePtr, data: &[u8]) -> Result<(), Violation> {
        self.with_pieces(ptr, data.len(), true, |memory, pieces| memory.write(pieces, data))
    }

    /// Sets `bytes` of device memory to one value.
    ///
    /// # Errors
    /// As for [`read`](Self::read); nothing is then written.
    pub fn fill(&self, ptr: DevicePtr, bytes: u64, byte: u8) -> Result<(), Violation> {
        self.with_pieces(ptr, as_usize(bytes)?, true, |memory, pieces| memory.fill(pieces, byte))
    }

    /// Copies from one place in device memory to another; they may overlap.
    ///
    /// # Errors
    /// As for [`read`](Self::read); nothing is then written.
    pub fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<(), Violation> {
        // Both ends are looked at before room for the copy is made: the length may be nonsense.
        self.with_pieces(dst, as_usize(bytes)?, false, |_, _| ())?;
        let mut held = Vec::new();
        self.with_pieces(src, as_usize(bytes)?, false, |memory, pieces| {
            held.resize(total(pieces), 0);
            memory.read(pieces, &mut held);
        })?;
        self.write(dst, &held)
    }

    /// Gives `look` the contents of a range.
    ///
    /// It gets a copy: no lock is held meanwhile, and one page may well be mapped twice within the range.
    ///
    /// # Errors
    /// As for [`read`](Self::read); `look` is then not called.
    pub fn with_bytes<T>(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        look: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, Violation> {
        self.contents(ptr, bytes).map(|held| look(&held))
    }

    /// Gives `change` the contents of a range and writes back what it leaves there: a kernel, run at once.
    ///
    /// As for [`with_bytes`](Self::with_bytes) it works on a copy.
    ///
    /// # Errors
    /// As for [`read`](Self::read), before and after `change`.
    pub fn with_bytes_mut<T>(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, Violation> {
        let mut held = self.contents(ptr, bytes)?;
        let answer = change(&mut held);
        self.write(ptr, &held)?;
        Ok(answer)
    }

    fn contents(&self, ptr: DevicePtr, bytes: u64) -> Result<Vec<u8>, Violation> {
        self.with_pieces(ptr, as_usize(bytes)?, false, |memory, pieces| {
            let mut held = vec![0; total(pieces)];
            memory.read(pieces, &mut held);
            held
        })
    }
}

/// Runs a check and remembers what it finds.
pub(super) fn note<T>(
    state: &mut State,
    check: impl FnOnce(&mut State) -> Result<T, Violation>,
) -> Result<T, Violation> {
    check(state).inspect_err(|violation| state.oracle.note(violation.0.clone()))
}

fn as_usize(bytes: u64) -> Result<usize, Violation> {
    usize::try_from(bytes).map_err(|_| Violation(format!("{bytes} bytes are more than the host can address")))
}
