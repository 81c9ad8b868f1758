//! Copies and fills: work on a stream that moves real bytes when it ends.

use super::oracle::Refusal;
use super::state::State;
use super::work::{Effect, Work};
use crate::driver::{Call, DevicePtr, HostPtr, StreamKey};

impl State {
    /// Queues a transfer, which takes its time on the virtual clock. A device without contents moves none.
    fn transfer(
        &mut self,
        call: Call,
        key: StreamKey,
        bytes: u64,
        work: Work,
        effect: Option<Effect>,
    ) -> Result<(), Refusal> {
        self.reach(key)?;
        let effect = effect.filter(|_| self.physical().has_backing());
        let nanos = self.costs.transfer_nanos(call, bytes);
        Ok(self.launch(key, work.lasting(nanos).with_effect(effect))?)
    }

    /// # Safety
    /// As for [`Driver::copy_to_device`](crate::driver::Driver::copy_to_device).
    pub(super) unsafe fn copy_to_device(
        &mut self,
        target: DevicePtr,
        source: *const u8,
        bytes: u64,
        key: StreamKey,
    ) -> Result<(), Refusal> {
        let host = HostPtr(source.expose_provenance() as u64);
        let effect = if self.host.contains(host, bytes) {
            Effect::FromHost(host)
        } else {
            // The driver stages pageable memory before it returns.
            let len = usize::try_from(bytes).map_err(|_| Refusal::invalid("more than the host can address"))?;
            // SAFETY: the caller promises so much initialized memory.
            Effect::Store(unsafe { std::slice::from_raw_parts(source, len) }.to_vec())
        };
        self.transfer(Call::CopyToDevice, key, bytes, Work::writing(target, bytes), Some(effect))
    }

    /// # Safety
    /// As for [`Driver::copy_to_host`](crate::driver::Driver::copy_to_host).
    pub(super) unsafe fn copy_to_host(
        &mut self,
        target: *mut u8,
        source: DevicePtr,
        bytes: u64,
        key: StreamKey,
    ) -> Result<(), Refusal> {
        let host = HostPtr(target.expose_provenance() as u64);
        let work = Work::reading(source, bytes);
        if self.host.contains(host, bytes) {
            return self.transfer(Call::CopyToHost, key, bytes, work, Some(Effect::ToHost(host)));
        }
        self.transfer(Call::CopyToHost, key, bytes, work, None)?;
        self.forbid_captured(key, "a copy to pageable memory was captured, which waits")?;
        let horizon = self.timeline.horizon(key.id);
        self.wait(&horizon);
        let pieces = self.locate(source, bytes, false)?;
        if self.physical().has_backing() {
            let held = self.contents(&pieces);
            // SAFETY: the caller promises so much memory of its own.
            unsafe { std::ptr::copy_nonoverlapping(held.as_ptr(), target, held.len()) };
        }
        Ok(())
    }

    pub(super) fn copy_on_device(
        &mut self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        key: StreamKey,
    ) -> Result<(), Refusal> {
        let work = Work::reading(source, bytes).and_writing(target, bytes);
        self.transfer(Call::CopyOnDevice, key, bytes, work, Some(Effect::Copy))
    }

    pub(super) fn set_bytes(
        &mut self,
        target: DevicePtr,
        value: u8,
        bytes: u64,
        key: StreamKey,
    ) -> Result<(), Refusal> {
        let work = Work::writing(target, bytes);
        self.transfer(Call::Fill, key, bytes, work, Some(Effect::Fill(value)))
    }

    pub(super) fn synchronize_stream(&mut self, key: StreamKey) -> Result<(), Refusal> {
        self.reach(key)?;
        self.forbid_captured(key, "the host waited for a captured stream")?;
        let horizon = self.timeline.horizon(key.id);
        self.wait(&horizon);
        Ok(())
    }
}
