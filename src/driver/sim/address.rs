//! Device addresses: which are reserved, and what physical memory is mapped there.

use super::memory::insert_free;
use super::oracle::Violation;
use std::collections::BTreeMap;

/// Address ranges start at a multiple of this, or of the page if that is more.
const LEAST_ALIGNMENT: u64 = 2 << 20;

/// A reserved range of addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) bytes: u64,
    /// Whether it belongs to a plain allocation.
    pub(super) is_plain: bool,
}

/// One chunk of physical memory at one address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) bytes: u64,
    /// The bytes that may be used: fewer than mapped for a plain allocation that was rounded up.
    pub(super) usable: u64,
    pub(super) chunk: u64,
    /// The devices that may use it, one bit each.
    pub(super) access: u64,
}

/// The addresses of one device.
#[derive(Debug)]
pub(super) struct AddressSpace {
    alignment: u64,
    free: BTreeMap<u64, u64>,
    regions: BTreeMap<u64, Region>,
    mappings: BTreeMap<u64, Mapping>,
}

impl AddressSpace {
    pub(super) fn new(base: u64, budget: u64, page_bytes: u64) -> Self {
        let alignment = page_bytes.max(LEAST_ALIGNMENT);
        let budget = budget - budget % alignment;
        let free = if budget > 0 { BTreeMap::from([(base, budget)]) } else { BTreeMap::new() };
        Self { alignment, free, regions: BTreeMap::new(), mappings: BTreeMap::new() }
    }

    /// Reserves the lowest free range that is long enough.
    pub(super) fn reserve(&mut self, bytes: u64, is_plain: bool) -> Option<u64> {
        let needed = bytes.checked_next_multiple_of(self.alignment)?;
        let (&base, &length) = self.free.iter().find(|(_, length)| **length >= needed)?;
        self.free.remove(&base);
        if length > needed {
            self.free.insert(base + needed, length - needed);
        }
        self.regions.insert(base, Region { bytes, is_plain });
        Some(base)
    }

    pub(super) fn release(&mut self, base: u64) {
        if let Some(region) = self.regions.remove(&base) {
            insert_free(&mut self.free, base, region.bytes.next_multiple_of(self.alignment));
        }
    }

    pub(super) fn region(&self, base: u64) -> Option<Region> {
        self.regions.get(&base).copied()
    }

    pub(super) fn regions(&self) -> impl Iterator<Item = (u64, Region)> + '_ {
        self.regions.iter().map(|(&base, &region)| (base, region))
    }

    /// The region that all of the range lies in.
    pub(super) fn region_around(&self, start: u64, bytes: u64) -> Option<(u64, Region)> {
        let (&base, &region) = self.regions.range(..=start).next_back()?;
        (start - base <= region.bytes && bytes <= region.bytes - (start - base)).then_some((base, region))
    }

    pub(super) fn insert(&mut self, at: u64, mapping: Mapping) {
        self.mappings.insert(at, mapping);
    }

    pub(super) fn remove(&mut self, at: u64) -> Option<Mapping> {
        self.mappings.remove(&at)
    }

    /// The first mapping with a byte in the range.
    pub(super) fn first_in(&self, start: u64, bytes: u64) -> Option<(u64, Mapping)> {
        let before = self.mappings.range(..start).next_back().filter(|(at, mapping)| **at + mapping.bytes > start);
        let found = before.or_else(|| self.mappings.range(start..start.saturating_add(bytes)).next());
        found.map(|(&at, &mapping)| (at, mapping))
    }

    /// The sizes of the mappings that begin in the range.
    pub(super) fn sizes_in(&self, start: u64, bytes: u64) -> impl Iterator<Item = u64> + '_ {
        self.mappings.range(start..start.saturating_add(bytes)).map(|(_, mapping)| mapping.bytes)
    }

    /// The mappings that make up exactly this range: no gap, none cut.
    pub(super) fn whole(&self, start: u64, bytes: u64) -> Result<Vec<(u64, Mapping)>, String> {
        let end = start.checked_add(bytes).ok_or("the range passes the end of the address space")?;
        let mut found = Vec::new();
        let mut at = start;
        while at < end {
            let Some(&mapping) = self.mappings.get(&at) else {
                let part = self.first_in(at, 1).is_some();
                let what = if part { "the range cuts a mapping" } else { "nothing is mapped" };
                return Err(format!("{what} at {at:#x}"));
            };
            found.push((at, mapping));
            at += mapping.bytes;
        }
        if at > end {
            return Err(format!("the range cuts a mapping at {end:#x}"));
        }
        Ok(found)
    }

    pub(super) fn grant(&mut self, at: u64, devices: u64) {
        if let Some(mapping) = self.mappings.get_mut(&at) {
            mapping.access |= devices;
        }
    }

    /// The bits of the devices that may use the mapping over an address.
    pub(super) fn access_at(&self, addr: u64) -> Option<u64> {
        let (base, mapping) = self.mappings.range(..=addr).next_back()?;
        (addr - base < mapping.bytes).then_some(mapping.access)
    }

    /// Walks the mappings behind a range that `device` wants to use: chunk, offset in it, bytes.
    pub(super) fn walk(
        &self,
        start: u64,
        bytes: u64,
        device: u32,
        mut visit: impl FnMut(u64, u64, u64),
    ) -> Result<(), Violation> {
        let fault = |at: u64, why: &str| Violation(format!("{at:#x} in [{start:#x}, +{bytes}) {why}"));
        let end = start.checked_add(bytes).ok_or_else(|| fault(start, "is past the end of the address space"))?;
        let mut at = start;
        while at < end {
            let (base, mapping) = self.first_in(at, 1).ok_or_else(|| fault(at, "is not mapped"))?;
            if mapping.access & (1 << device) == 0 {
                return Err(fault(at, "is mapped without access"));
            }
            let usable_end = base + mapping.usable;
            if at >= usable_end || (end > usable_end && mapping.usable < mapping.bytes) {
                return Err(fault(usable_end.max(at), "is past the end of its allocation"));
            }
            let stop = end.min(usable_end);
            visit(mapping.chunk, at - base, stop - at);
            at = stop;
        }
        Ok(())
    }
}
