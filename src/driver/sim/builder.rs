//! How a simulated device is made, alone or with others.

use super::SimDriver;
use super::cost::CostModel;
use super::timeline::{ThreadId, current};
use crate::sync::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Each device's addresses are a window of this size, apart from all others.
const ADDRESS_WINDOW: u64 = 1 << 46;

/// More devices than this have no bit in a mapping's access set.
const MOST_DEVICES: u32 = 64;

/// The properties of a simulated device. See [`SimDriver::builder`].
#[derive(Clone, Debug)]
pub struct SimBuilder {
    pub(super) capacity: u64,
    pub(super) device: u32,
    pub(super) foreign_bytes: u64,
    pub(super) virtual_memory: bool,
    pub(super) page_bytes: u64,
    pub(super) address_budget: u64,
    pub(super) host_limit: u64,
    pub(super) backing: bool,
    pub(super) log: bool,
    pub(super) costs: CostModel,
}

impl Default for SimBuilder {
    fn default() -> Self {
        Self {
            capacity: 80 << 30,
            device: 0,
            foreign_bytes: 0,
            virtual_memory: true,
            page_bytes: 2 << 20,
            address_budget: ADDRESS_WINDOW,
            host_limit: u64::MAX,
            backing: true,
            log: true,
            costs: CostModel::h200(),
        }
    }
}

impl SimBuilder {
    /// The device's memory in bytes; 80 GiB unless set.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Self {
        Self { capacity: bytes, ..self }
    }

    /// The device's ordinal, below 64; 0 unless set.
    #[must_use]
    pub fn device(self, ordinal: u32) -> Self {
        Self { device: ordinal, ..self }
    }

    /// Bytes that another tenant of the device holds at the start; see [`SimDriver::set_foreign_bytes`].
    #[must_use]
    pub fn foreign_bytes(self, bytes: u64) -> Self {
        Self { foreign_bytes: bytes, ..self }
    }

    /// Whether the device has virtual memory management; it does unless told otherwise.
    #[must_use]
    pub fn virtual_memory(self, yes: bool) -> Self {
        Self { virtual_memory: yes, ..self }
    }

    /// The size of a page, a power of two; 2 MiB unless set. Plain allocations take whole pages as well.
    #[must_use]
    pub fn page_bytes(self, bytes: u64) -> Self {
        Self { page_bytes: bytes, ..self }
    }

    /// How many bytes of addresses there are, for reserved ranges and plain allocations together; 64 TiB at
    /// most, which is also the default.
    #[must_use]
    pub fn address_budget(self, bytes: u64) -> Self {
        Self { address_budget: bytes.min(ADDRESS_WINDOW), ..self }
    }

    /// How many bytes of host memory can be page-locked; unlimited unless set.
    #[must_use]
    pub fn host_limit(self, bytes: u64) -> Self {
        Self { host_limit: bytes, ..self }
    }

    /// Whether device memory has real contents, which it does unless told otherwise. Without, nothing can be
    /// read or written, and all else works as before, only faster.
    #[must_use]
    pub fn backing(self, yes: bool) -> Self {
        Self { backing: yes, ..self }
    }

    /// Whether every driver call is recorded for [`SimDriver::log`]; it is unless told otherwise.
    #[must_use]
    pub fn log(self, yes: bool) -> Self {
        Self { log: yes, ..self }
    }

    /// What calls cost; [`CostModel::h200`] unless set.
    #[must_use]
    pub fn cost_model(self, costs: CostModel) -> Self {
        Self { costs, ..self }
    }

    /// Makes the device, the only one of its machine.
    ///
    /// # Panics
    /// If the page size is not a power of two of at least 512, or the ordinal is 64 or more.
    #[must_use]
    pub fn build(self) -> Arc<SimDriver> {
        let devices = 1u64.checked_shl(self.device).unwrap_or(0);
        self.build_in(Arc::new(Machine::new()), devices)
    }

    fn build_in(self, machine: Arc<Machine>, devices: u64) -> Arc<SimDriver> {
        assert!(self.page_bytes.is_power_of_two() && self.page_bytes >= 512, "page size {}", self.page_bytes);
        assert!(self.device < MOST_DEVICES, "device ordinal {}", self.device);
        Arc::new(SimDriver::new(self, machine, devices))
    }
}

/// What the devices of a machine share.
#[derive(Debug)]
pub(super) struct Machine {
    current: Mutex<FxHashMap<ThreadId, u32>>,
    contexts: [AtomicU64; MOST_DEVICES as usize],
}

impl Machine {
    fn new() -> Self {
        Self { current: Mutex::new(FxHashMap::default()), contexts: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    pub(super) fn note_context(&self, device: u32) {
        self.contexts[device as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Several simulated devices of one host: they can be given access to each other's mappings, and each thread
/// has a current device.
///
/// Driver calls never look at the current device and never change it, which is what a test can check with it.
#[derive(Debug)]
pub struct SimMachine {
    devices: Vec<Arc<SimDriver>>,
    machine: Arc<Machine>,
}

impl SimMachine {
    /// `count` devices alike, with the ordinals from 0.
    ///
    /// # Panics
    /// As [`SimBuilder::build`] does.
    #[must_use]
    pub fn new(count: u32, builder: &SimBuilder) -> Self {
        let machine = Arc::new(Machine::new());
        let all = if count >= MOST_DEVICES { u64::MAX } else { (1 << count) - 1 };
        let devices = (0..count).map(|i| builder.clone().device(i).build_in(Arc::clone(&machine), all)).collect();
        Self { devices, machine }
    }

    /// One of the devices.
    ///
    /// # Panics
    /// If there are not so many.
    #[must_use]
    pub fn device(&self, ordinal: u32) -> Arc<SimDriver> {
        Arc::clone(&self.devices[ordinal as usize])
    }

    /// Makes a device the calling thread's current one.
    pub fn set_current_device(&self, ordinal: u32) {
        self.machine.current.lock().insert(current().id(), ordinal);
    }

    /// The calling thread's current device; 0 until it sets one.
    #[must_use]
    pub fn current_device(&self) -> u32 {
        self.machine.current.lock().get(&current().id()).copied().unwrap_or(0)
    }

    /// How many contexts were created on a device: none before the first call that needs one.
    #[must_use]
    pub fn contexts_created(&self, ordinal: u32) -> u64 {
        self.machine.contexts.get(ordinal as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}
