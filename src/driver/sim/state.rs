//! The device's memory as its driver manages it: addresses and what is behind them.

use super::address::{AddressSpace, Mapping};
use super::builder::SimBuilder;
use super::capture::Captures;
use super::cost::CostModel;
use super::events::Events;
use super::fault::FaultPlan;
use super::host::HostMemory;
use super::log::CallLog;
use super::memory::{Extent, PhysicalMemory, total};
use super::oracle::{Leaks, Oracle, Refusal, Violation};
use super::timeline::{Horizon, Timeline};
use super::work::Effect;
use crate::driver::{Call, DevicePtr, DriverErrorKind, HostPtr, MemoryInfo, PageHandle};
use rustc_hash::FxHashMap;

/// Beyond what a processor can address, so that a device address used on the host crashes.
const ADDRESS_BASE: u64 = 0x7_0000_0000_0000;

/// Bits of an event's, stream's or memory's number that say which device it is of.
const DEVICE_SHIFT: u32 = 40;

/// A handle of physical memory.
#[derive(Clone, Copy, Debug, Default)]
struct Handle {
    /// At how many addresses it is mapped.
    mappings: u32,
    /// Whether the user gave the handle back; the memory lives on while it is mapped.
    is_released: bool,
}

/// Everything behind the driver's lock.
#[derive(Debug)]
pub(super) struct State {
    device: u32,
    /// The devices of the machine, one bit each.
    devices: u64,
    capacity: u64,
    page_bytes: u64,
    pub(super) foreign_bytes: u64,
    pub(super) host: HostMemory,
    physical: PhysicalMemory,
    handles: FxHashMap<u64, Handle>,
    addresses: AddressSpace,
    pub(super) timeline: Timeline,
    pub(super) events: Events,
    pub(super) captures: Captures,
    pub(super) faults: FaultPlan,
    pub(super) oracle: Oracle,
    pub(super) log: CallLog,
    pub(super) costs: CostModel,
    /// The failure that every call answers from now on.
    pub(super) doom: Option<DriverErrorKind>,
    pub(super) calls: u64,
}

impl State {
    pub(super) fn new(options: &SimBuilder, devices: u64) -> Self {
        let numbers = u64::from(options.device) << DEVICE_SHIFT;
        let usable = options.capacity - options.capacity % options.page_bytes;
        let base = ADDRESS_BASE + (u64::from(options.device) << 46);
        Self {
            device: options.device,
            devices,
            capacity: options.capacity,
            page_bytes: options.page_bytes,
            foreign_bytes: options.foreign_bytes,
            host: HostMemory::new(options.host_limit),
            physical: PhysicalMemory::new(usable, numbers + 1, options.backing),
            handles: FxHashMap::default(),
            addresses: AddressSpace::new(base, options.address_budget, options.page_bytes),
            timeline: Timeline::new(numbers + 0x10),
            events: Events::new(numbers + 1),
            captures: Captures::default(),
            faults: FaultPlan::default(),
            oracle: Oracle::default(),
            log: CallLog::new(options.log),
            costs: options.costs.clone(),
            doom: None,
            calls: 0,
        }
    }

    /// What a call costs without waiting.
    pub(super) fn cost(&self, call: Call, ptr: DevicePtr, bytes: u64) -> u64 {
        let by_handle = |size| self.costs.nanos(call, size);
        if CostModel::is_per_handle(call) {
            return match self.addresses.sizes_in(ptr.0, bytes).map(by_handle).reduce(|a, b| a + b) {
                Some(nanos) => nanos,
                None => by_handle(bytes),
            };
        }
        by_handle(bytes)
    }

    pub(super) fn memory_info(&self) -> MemoryInfo {
        let taken = self.physical.used_bytes().saturating_add(self.foreign_bytes);
        MemoryInfo { free_bytes: self.capacity.saturating_sub(taken), total_bytes: self.capacity }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.physical.used_bytes()
    }

    fn take(&mut self, bytes: u64) -> Result<u64, Refusal> {
        let free = self.memory_info().free_bytes;
        let taken = if bytes <= free { self.physical.take(bytes) } else { None };
        taken.ok_or_else(|| Refusal::honest(DriverErrorKind::OutOfMemory, format!("{bytes} wanted, {free} free")))
    }

    fn whole_pages(&self, value: u64, what: &str) -> Result<(), Refusal> {
        if value == 0 || !value.is_multiple_of(self.page_bytes) {
            return Err(Refusal::invalid(format!("{what} {value:#x} is no multiple of the page, or 0")));
        }
        Ok(())
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> Result<DevicePtr, Refusal> {
        if bytes == 0 {
            return Err(Refusal::invalid("an allocation of 0 bytes"));
        }
        let too_much = || Refusal::honest(DriverErrorKind::OutOfMemory, "more than any device has");
        let mapped = bytes.checked_next_multiple_of(self.page_bytes).ok_or_else(too_much)?;
        let usable = bytes.next_multiple_of(512);
        let chunk = self.take(mapped)?;
        let Some(base) = self.addresses.reserve(mapped, true) else {
            self.physical.give_back(chunk);
            return Err(Refusal::honest(DriverErrorKind::AddressSpace, "no range is left"));
        };
        self.addresses.insert(base, Mapping { bytes: mapped, usable, chunk, access: 1 << self.device });
        Ok(DevicePtr(base))
    }

    /// The bytes of the plain allocation at an address.
    pub(super) fn plain(&self, ptr: DevicePtr) -> Result<u64, Refusal> {
        if let Some(region) = self.addresses.region(ptr.0).filter(|region| region.is_plain) {
            return Ok(region.bytes);
        }
        Err(Refusal::invalid(match self.addresses.region_around(ptr.0, 1) {
            Some((base, region)) if region.is_plain => format!("inside the allocation at {base:#x}"),
            Some((base, _)) => format!("in the reserved range at {base:#x}, which is no allocation"),
            None => "no allocation, or no longer".to_owned(),
        }))
    }

    pub(super) fn free(&mut self, ptr: DevicePtr) -> Result<(), Refusal> {
        self.plain(ptr)?;
        let everything = self.timeline.everything();
        self.wait(&everything);
        if let Some(mapping) = self.addresses.remove(ptr.0) {
            self.physical.give_back(mapping.chunk);
        }
        self.addresses.release(ptr.0);
        Ok(())
    }

    pub(super) fn reserve(&mut self, bytes: u64) -> Result<DevicePtr, Refusal> {
        self.whole_pages(bytes, "size")?;
        let none = || Refusal::honest(DriverErrorKind::AddressSpace, format!("no range of {bytes} is left"));
        self.addresses.reserve(bytes, false).map(DevicePtr).ok_or_else(none)
    }

    pub(super) fn free_addresses(&mut self, base: DevicePtr, bytes: u64) -> Result<(), Refusal> {
        let region = self.addresses.region(base.0).filter(|region| !region.is_plain && region.bytes == bytes);
        if region.is_none() {
            return Err(Refusal::invalid("not a reserved range, whole"));
        }
        if let Some((at, _)) = self.addresses.first_in(base.0, bytes) {
            return Err(Refusal::invalid(format!("something is still mapped at {at:#x}")));
        }
        self.addresses.release(base.0);
        Ok(())
    }

    pub(super) fn create_pages(&mut self, bytes: u64) -> Result<PageHandle, Refusal> {
        self.whole_pages(bytes, "size")?;
        let chunk = self.take(bytes)?;
        self.handles.insert(chunk, Handle::default());
        Ok(PageHandle(chunk))
    }

    pub(super) fn release_pages(&mut self, pages: PageHandle) -> Result<(), Refusal> {
        let handle = self.handles.get_mut(&pages.0).filter(|handle| !handle.is_released);
        let handle = handle.ok_or_else(|| Refusal::invalid("no such handle, or released already"))?;
        handle.is_released = true;
        self.drop_unused(pages.0);
        Ok(())
    }

    fn drop_unused(&mut self, chunk: u64) {
        if self.handles.get(&chunk).is_some_and(|handle| handle.is_released && handle.mappings == 0) {
            self.handles.remove(&chunk);
            self.physical.give_back(chunk);
        }
    }

    pub(super) fn map(&mut self, ptr: DevicePtr, bytes: u64, pages: PageHandle) -> Result<(), Refusal> {
        self.whole_pages(bytes, "size")?;
        self.whole_pages(ptr.0, "address")?;
        if self.addresses.region_around(ptr.0, bytes).is_none_or(|(_, region)| region.is_plain) {
            return Err(Refusal::invalid("not inside one reserved range"));
        }
        if let Some((at, _)) = self.addresses.first_in(ptr.0, bytes) {
            return Err(Refusal::invalid(format!("something is mapped already at {at:#x}")));
        }
        let size = self.physical.chunk_bytes(pages.0);
        let handle = self.handles.get_mut(&pages.0).filter(|handle| !handle.is_released);
        let handle = handle.ok_or_else(|| Refusal::invalid("no such handle, or released"))?;
        if size != Some(bytes) {
            return Err(Refusal::invalid("not all of the handle"));
        }
        handle.mappings += 1;
        self.addresses.insert(ptr.0, Mapping { bytes, usable: bytes, chunk: pages.0, access: 0 });
        Ok(())
    }

    pub(super) fn unmap(&mut self, ptr: DevicePtr, bytes: u64) -> Result<(), Refusal> {
        self.whole_pages(bytes, "size")?;
        let mappings = self.addresses.whole(ptr.0, bytes).map_err(Refusal::invalid)?;
        if self.addresses.region(ptr.0).is_some_and(|region| region.is_plain) {
            return Err(Refusal::invalid("a plain allocation"));
        }
        let range = Extent { start: ptr.0, bytes };
        for (stream, op) in self.timeline.unfinished() {
            let touched =
                |(start, bytes): &(DevicePtr, u64)| range.overlaps(Extent { start: start.0, bytes: *bytes });
            if let Some((used, len)) = op.work.ranges().find(touched) {
                let handle = self.timeline.stream(stream).map_or(0, |stream| stream.handle.0);
                let what = format!("unfinished work on stream {handle:#x} still touches [{used}, +{len})");
                return Err(Refusal::unnoticed(what));
            }
        }
        for (at, mapping) in mappings {
            self.addresses.remove(at);
            if let Some(handle) = self.handles.get_mut(&mapping.chunk) {
                handle.mappings -= 1;
            }
            self.drop_unused(mapping.chunk);
        }
        Ok(())
    }

    pub(super) fn set_access(&mut self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<(), Refusal> {
        self.whole_pages(bytes, "size")?;
        let mut granted = 0;
        for &device in devices {
            let bit = 1u64.checked_shl(device).unwrap_or(0) & self.devices;
            if bit == 0 {
                return Err(Refusal::invalid(format!("there is no device {device}")));
            }
            granted |= bit;
        }
        for (at, _) in self.addresses.whole(ptr.0, bytes).map_err(Refusal::invalid)? {
            self.addresses.grant(at, granted);
        }
        Ok(())
    }

    pub(super) fn free_host(&mut self, ptr: HostPtr) -> Result<(), Refusal> {
        if self.host.size(ptr).is_none() {
            return Err(Refusal::invalid("not page-locked host memory, or no longer"));
        }
        let everything = self.timeline.everything();
        self.wait(&everything);
        self.host.free(ptr);
        Ok(())
    }

    /// The bytes of a handle, for the cost of giving it back.
    pub(super) fn pages_size(&self, pages: PageHandle) -> u64 {
        self.physical.chunk_bytes(pages.0).unwrap_or(0)
    }

    /// Waits on the host.
    pub(super) fn wait(&mut self, horizon: &Horizon) {
        self.timeline.drive(horizon);
        self.settle();
    }

    /// Lets virtual time pass.
    pub(super) fn elapse(&mut self, nanos: u64) {
        self.timeline.elapse(nanos);
        self.settle();
    }

    /// Makes the effects of work that ended.
    pub(super) fn settle(&mut self) {
        for op in self.timeline.take_ended() {
            let pieces = |writes| op.pieces.iter().filter(move |piece| piece.1 == writes).map(|piece| piece.0);
            let (read, written): (Vec<Extent>, Vec<Extent>) = (pieces(false).collect(), pieces(true).collect());
            match op.work.effect {
                None => {}
                Some(Effect::Fill(byte)) => self.physical.fill(&written, byte),
                Some(Effect::Store(bytes)) => self.physical.write(&written, &bytes),
                Some(Effect::FromHost(source)) => {
                    let mut bytes = vec![0; total(&written)];
                    self.host.read(source, &mut bytes);
                    self.physical.write(&written, &bytes);
                }
                Some(Effect::ToHost(target)) => self.host.write(target, &self.contents(&read)),
                Some(Effect::Copy) => {
                    let bytes = self.contents(&read);
                    self.physical.write(&written, &bytes);
                }
            }
        }
    }

    /// What physical pieces hold.
    pub(super) fn contents(&self, pieces: &[Extent]) -> Vec<u8> {
        let mut bytes = vec![0; total(pieces)];
        self.physical.read(pieces, &mut bytes);
        bytes
    }

    pub(super) fn physical(&mut self) -> &mut PhysicalMemory {
        &mut self.physical
    }

    /// The bits of the devices that may use what is mapped at an address.
    pub(super) fn access_at(&self, ptr: DevicePtr) -> Option<u64> {
        self.addresses.access_at(ptr.0)
    }

    /// The physical pieces behind a range that this device may use.
    pub(super) fn locate(&mut self, ptr: DevicePtr, bytes: u64, writes: bool) -> Result<Vec<Extent>, Violation> {
        let mut pieces = Vec::with_capacity(1);
        let physical = &mut self.physical;
        self.addresses.walk(ptr.0, bytes, self.device, |chunk, offset, len| {
            physical.locate(chunk, offset, len, &mut pieces);
            if writes {
                physical.touch(chunk);
            }
        })?;
        Ok(pieces)
    }

    pub(super) fn leaks(&self) -> Leaks {
        let mut pages: Vec<_> = (self.handles.keys())
            .map(|&chunk| (PageHandle(chunk), self.physical.chunk_bytes(chunk).unwrap_or(0)))
            .collect();
        pages.sort_unstable_by_key(|entry| entry.0.0);
        let ranges = |is_plain: bool| {
            let regions = self.addresses.regions().filter(move |(_, region)| region.is_plain == is_plain);
            regions.map(|(base, region)| (DevicePtr(base), region.bytes)).collect()
        };
        Leaks {
            allocations: ranges(true),
            pages,
            ranges: ranges(false),
            events: self.events.len(),
            host_allocations: self.host.len(),
        }
    }
}
