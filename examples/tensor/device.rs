//! A device and one of its streams.

use super::call::Backend;
use super::host::{Host, Pace};
use super::{Machine, Result};
use std::rc::Rc;
use std::sync::Arc;
use vramalloc::driver::sim::{SimBuilder, SimDriver};
use vramalloc::driver::{Call, CallCount, CallCounts, Driver};
use vramalloc::size::human_bytes;
use vramalloc::{DeviceChoice, StreamHandle};

/// A device, and the stream that all work of it here goes to.
pub struct Device {
    pub driver: Arc<dyn Driver>,
    pub stream: StreamHandle,
    pub backend: Rc<dyn Backend>,
    pub sim: Option<Arc<SimDriver>>,
    #[cfg(feature = "cuda")]
    pub cuda_driver: Option<Arc<vramalloc::driver::cuda::CudaDriver>>,
    #[cfg(feature = "cuda")]
    pub cuda: Option<Rc<super::Cuda>>,
    pace: Option<Pace>,
    why: String,
}

impl Device {
    /// The device of that name. `auto` takes the first GPU if it and the libraries are there.
    pub fn open(choice: DeviceChoice, sim: SimBuilder) -> Result<Self> {
        let asked = || format!("--device {choice} asks for it");
        match choice {
            DeviceChoice::Sim => Ok(Self::simulated(sim.build(), asked())),
            DeviceChoice::Cuda(ordinal) => open_cuda(ordinal, asked()),
            _ => match open_cuda(0, "it is the first GPU".to_owned()) {
                Ok(device) => Ok(device),
                Err(error) => Ok(Self::simulated(sim.build(), format!("no GPU can be used: {error}"))),
            },
        }
    }

    pub fn simulated(sim: Arc<SimDriver>, why: String) -> Self {
        Self {
            driver: Arc::clone(&sim) as Arc<dyn Driver>,
            stream: StreamHandle::DEFAULT,
            backend: Rc::new(Host::new(&sim, StreamHandle::DEFAULT, None)),
            sim: Some(sim),
            #[cfg(feature = "cuda")]
            cuda_driver: None,
            #[cfg(feature = "cuda")]
            cuda: None,
            pace: None,
            why,
        }
    }

    /// The same device with another stream.
    pub fn with_new_stream(&self) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &self.cuda {
            return Ok(Self::of_cuda(cuda.with_new_stream()?, self.why.clone()));
        }
        let sim = self.sim.as_ref().ok_or("a device is a GPU or simulated")?;
        let mut device = Self::simulated(Arc::clone(sim), self.why.clone());
        device.stream = sim.create_stream();
        Ok(device.paced(self.pace))
    }

    /// The same device; simulated streams are busy in virtual time from now on.
    pub fn paced(mut self, pace: Option<Pace>) -> Self {
        if let Some(sim) = &self.sim {
            self.backend = Rc::new(Host::new(sim, self.stream, pace));
            self.pace = pace;
        }
        self
    }

    #[cfg(feature = "cuda")]
    fn of_cuda(cuda: super::Cuda, why: String) -> Self {
        let cuda = Rc::new(cuda);
        let driver = Arc::clone(cuda.driver());
        Self {
            driver: Arc::clone(&driver) as Arc<dyn Driver>,
            stream: cuda.stream(),
            backend: Rc::clone(&cuda) as Rc<dyn Backend>,
            sim: None,
            cuda_driver: Some(driver),
            cuda: Some(cuda),
            pace: None,
            why,
        }
    }

    pub fn is_simulated(&self) -> bool {
        self.sim.is_some()
    }

    /// Prints which device it is and why.
    pub fn print(&self) {
        let total = human_bytes(self.driver.capabilities().total_bytes);
        println!("device      {} ({}, {total})", self.driver.label(), self.driver.name());
        println!("because     {}", self.why);
    }

    /// Driver calls so far, for memory and for events.
    pub fn calls(&self) -> CallCount {
        self.driver.calls().total()
    }

    /// Nanoseconds of virtual time; `None` on a GPU.
    pub fn virtual_nanos(&self) -> Option<u64> {
        self.sim.as_ref().map(|sim| sim.now_nanos())
    }

    /// On the simulated device: that every access and driver call was in order.
    pub fn assert_clean(&self) {
        if let Some(sim) = &self.sim {
            sim.assert_clean();
        }
    }
}

/// How many of the calls took, moved or gave back memory. The others ask streams how far they are.
pub fn memory_calls(counts: &CallCounts) -> u64 {
    let calls = [
        Call::Alloc,
        Call::Free,
        Call::ReserveAddresses,
        Call::FreeAddresses,
        Call::CreatePages,
        Call::ReleasePages,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
    ];
    calls.iter().map(|&call| counts.get(call).calls).sum()
}

impl Machine {
    /// Prints the caching allocator's figures.
    pub fn print_memory(&self, device: &Device) {
        let allocator = self.allocator();
        println!(
            "memory      peak allocated {}, peak reserved {}, {} driver calls",
            human_bytes(allocator.max_memory_allocated()),
            human_bytes(allocator.max_memory_reserved()),
            device.calls().calls
        );
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: u32, why: String) -> Result<Device> {
    Ok(Device::of_cuda(super::Cuda::open(ordinal)?, why))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: u32, _: String) -> Result<Device> {
    Err("this build has no CUDA: it lacks the feature 'cuda'".into())
}
