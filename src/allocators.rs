//! Several devices: an allocator each, and a front that routes to them.

use crate::config::Config;
use crate::driver::{DevicePtr, Driver, StreamHandle};
use crate::error::{Error, Result};
use crate::{Allocation, CachingAllocator, Stream};
use std::sync::Arc;

/// The allocators of several devices, one each. A stream belongs to a device, so it says where a request goes; the
/// calling thread's current device is neither read nor changed.
///
/// ```
/// use vramalloc::driver::sim::{SimDriver, SimMachine};
/// use vramalloc::{Allocators, Config, StreamHandle, driver::Driver};
/// use std::sync::Arc;
///
/// let machine = SimMachine::new(2, &SimDriver::builder().capacity(1 << 30));
/// let drivers = (0..2).map(|ordinal| machine.device(ordinal) as Arc<dyn Driver>);
/// let allocators = Allocators::new(drivers, &Config::default())?;
/// let stream = allocators.stream(1, StreamHandle::DEFAULT)?;
/// let block = allocators.alloc(4 << 20, &stream)?;
/// assert_eq!(allocators.get(1)?.memory_allocated(), 4 << 20);
/// assert_eq!(allocators.get(0)?.memory_allocated(), 0);
/// # drop(block);
/// # Ok::<(), vramalloc::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Allocators {
    /// In the order in which the drivers were given.
    allocators: Vec<CachingAllocator>,
}

impl Allocators {
    /// An allocator for each of `drivers`, all with the same configuration.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if two drivers are of one device, else as [`CachingAllocator::new`].
    pub fn new(drivers: impl IntoIterator<Item = Arc<dyn Driver>>, config: &Config) -> Result<Self> {
        let mut allocators: Vec<CachingAllocator> = Vec::new();
        for driver in drivers {
            let device = driver.device();
            if allocators.iter().any(|other| other.device() == device) {
                return Err(Error::WrongDevice { what: "second driver", theirs: device, ours: device });
            }
            allocators.push(CachingAllocator::new(driver, config.clone())?);
        }
        Ok(Self { allocators })
    }

    /// The allocator of a device, by ordinal.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] naming those that there are.
    pub fn get(&self, device: u32) -> Result<&CachingAllocator> {
        self.allocators.iter().find(|allocator| allocator.device() == device).ok_or_else(|| Error::UnknownDevice {
            device,
            known: self.allocators.iter().map(CachingAllocator::device).collect(),
        })
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, CachingAllocator> {
        self.allocators.iter()
    }

    /// A stream of a device; see [`CachingAllocator::stream`].
    ///
    /// # Errors
    /// [`Error::UnknownDevice`], else as there.
    pub fn stream(&self, device: u32, handle: StreamHandle) -> Result<Stream> {
        self.get(device)?.stream(handle)
    }

    /// Allocates on the stream's device; see [`CachingAllocator::alloc`].
    ///
    /// # Errors
    /// As there.
    pub fn alloc(&self, bytes: u64, stream: &Stream) -> Result<Allocation> {
        self.get(stream.device())?.alloc(bytes, stream)
    }

    /// Allocates on the stream's device and returns the bare address; see [`CachingAllocator::alloc_raw`].
    ///
    /// # Errors
    /// As there.
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr> {
        self.get(stream.device())?.alloc_raw(bytes, stream)
    }

    /// Frees a bare address of `device`; addresses of different devices may be equal. See
    /// [`CachingAllocator::free_raw`].
    ///
    /// # Errors
    /// As there.
    pub fn free_raw(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        self.get(device)?.free_raw(ptr)
    }

    /// The summaries of all devices, one below the other; see [`CachingAllocator::memory_summary`].
    #[must_use]
    pub fn memory_summary(&self) -> String {
        self.iter().map(CachingAllocator::memory_summary).collect()
    }

    /// The snapshots of all devices as one; see [`CachingAllocator::pytorch_snapshot`].
    #[must_use]
    pub fn pytorch_snapshot(&self) -> crate::pytorch::Snapshot {
        let empty = crate::pytorch::Snapshot::default();
        self.iter().fold(empty, |all, allocator| all.merged(allocator.pytorch_snapshot()))
    }

    /// Empties the cache of every device and returns the bytes given back; see [`CachingAllocator::empty_cache`].
    ///
    /// # Errors
    /// The first error; the other devices are done all the same.
    pub fn empty_cache(&self) -> Result<u64> {
        let results: Vec<_> = self.allocators.iter().map(CachingAllocator::empty_cache).collect();
        results.into_iter().sum()
    }
}

impl<'a> IntoIterator for &'a Allocators {
    type Item = &'a CachingAllocator;
    type IntoIter = std::slice::Iter<'a, CachingAllocator>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
