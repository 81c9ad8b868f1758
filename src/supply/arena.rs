//! A size class's addresses: reserved ranges, and the handles that are mapped in them.

use crate::driver::{DevicePtr, Driver, DriverError, DriverErrorKind, PageHandle};
use std::collections::BTreeMap;

/// Addresses reserved at first, as a multiple of the device's memory. They cost nothing, and room for large requests
/// beside live blocks is never short.
const RANGE_FACTOR: u64 = 8;

/// Physical memory that is mapped, whole, at one address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle {
    pub(crate) bytes: u64,
    pub(crate) pages: PageHandle,
}

/// The addresses of one size class, shared by all streams: what one stream leaves, another can take where it is.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// Base and bytes of each reservation, by base. Nothing is mapped in the last page, so no block reaches from one
    /// reservation into the next.
    ranges: BTreeMap<u64, u64>,
    /// By address.
    pub(crate) handles: BTreeMap<u64, Handle>,
}

impl Arena {
    /// Reserves addresses for a request of `bytes` that finds no room.
    ///
    /// # Errors
    /// What the driver says; [`DriverErrorKind::AddressSpace`] if not even room for the request is left.
    pub(crate) fn reserve(
        &mut self,
        driver: &dyn Driver,
        total_bytes: u64,
        page_bytes: u64,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let least = bytes.next_multiple_of(page_bytes) + page_bytes;
        // Little by little: other allocators, and the other size class, need addresses, too.
        let mut wanted =
            vec![total_bytes.saturating_mul(RANGE_FACTOR), total_bytes + total_bytes / 8, total_bytes / 4, least];
        if !self.ranges.is_empty() {
            wanted.remove(0);
        }
        let mut refused = None;
        for bytes in wanted {
            let bytes = bytes.max(least).next_multiple_of(page_bytes);
            match driver.reserve_addresses(bytes) {
                Ok(base) => {
                    self.ranges.insert(base.0, bytes);
                    return Ok(());
                }
                Err(error) if error.kind == DriverErrorKind::AddressSpace => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| {
            DriverError::new(crate::driver::Call::ReserveAddresses, DriverErrorKind::AddressSpace)
        }))
    }

    /// The unmapped gaps, by address: `(start, bytes)`.
    pub(crate) fn gaps(&self, page_bytes: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::with_capacity(self.handles.len() + 1);
        for (&base, &bytes) in &self.ranges {
            let end = base + bytes - page_bytes;
            let mut at = base;
            for (&start, handle) in self.handles.range(base..end) {
                if start > at {
                    gaps.push((at, start - at));
                }
                at = start + handle.bytes;
            }
            if end > at {
                gaps.push((at, end - at));
            }
        }
        gaps
    }

    /// The handles that lie wholly in `start..end`.
    pub(crate) fn whole_handles(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Handle)> + '_ {
        self.handles
            .range(start..end)
            .filter(move |(at, handle)| *at + handle.bytes <= end)
            .map(|(&at, &handle)| (at, handle))
    }

    /// Of the handles that lie wholly in `start..end`, the bytes of those that `bytes` from `at` on touch.
    pub(crate) fn touched_bytes(&self, start: u64, end: u64, at: u64, bytes: u64) -> u64 {
        let first = self.handles.range(..=at).next_back().map_or(at, |(&first, _)| first.max(start));
        let touched = self.whole_handles(first, end).take_while(|(first, _)| *first < at + bytes);
        touched.map(|(_, handle)| handle.bytes).sum()
    }

    /// Bytes that are mapped.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.handles.values().map(|handle| handle.bytes).sum()
    }

    /// Gives every reservation back; nothing is mapped any more.
    pub(crate) fn free_ranges(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        for (base, bytes) in std::mem::take(&mut self.ranges) {
            driver.free_addresses(DevicePtr(base), bytes)?;
        }
        Ok(())
    }
}
