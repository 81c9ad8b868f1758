//! The devices of one allocator handle, each opened when it is first used.

use crate::routes::Routes;
use crate::status::{Failure, Result};
use crate::streams::Streams;
use parking_lot::Mutex;
use std::str::FromStr;
use std::sync::OnceLock;
use vramalloc::config::parse_bytes;
use vramalloc::driver::sim::{SimBuilder, SimDriver};
use vramalloc::{CachingAllocator, Config, DeviceChoice, DevicePtr, HistoryOptions, OpenDevice};

/// Ordinals are below this.
const DEVICES_MAX: usize = 64;

/// A simulated device has as much memory unless told otherwise.
const SIM_BYTES: u64 = 1 << 30;

/// Which devices there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The GPUs of the process, or one of them.
    Cuda(Option<u32>),
    /// One simulated device of so many bytes, by the ordinal 0.
    Sim(u64),
}

impl FromStr for Source {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(bytes) = text.strip_prefix("sim:") {
            let bytes = parse_bytes(bytes).filter(|bytes| *bytes > 0);
            return bytes.map(Self::Sim).ok_or_else(|| unknown(text));
        }
        match text {
            "cuda" => Ok(Self::Cuda(None)),
            "auto" => Ok(if gpus().is_ok() { Self::Cuda(None) } else { Self::Sim(SIM_BYTES) }),
            _ => match text.parse() {
                Ok(DeviceChoice::Cuda(ordinal)) => Ok(Self::Cuda(Some(ordinal))),
                Ok(DeviceChoice::Sim) => Ok(Self::Sim(SIM_BYTES)),
                _ => Err(unknown(text)),
            },
        }
    }
}

fn unknown(text: &str) -> Failure {
    Failure::Argument(format!(
        "expected auto, cuda, cuda:N (as cuda:0), sim or sim:BYTES (as sim:4GiB), got '{text}'"
    ))
}

/// How many GPUs the process sees. Makes no context.
fn gpus() -> Result<u32> {
    #[cfg(feature = "cuda")]
    return Ok(vramalloc::driver::cuda::CudaDriver::device_count()?);
    #[cfg(not(feature = "cuda"))]
    Err(Failure::Device("this build has no CUDA: it lacks the feature 'cuda'".to_owned()))
}

/// An allocator handle's devices.
#[derive(Debug)]
pub(crate) struct Devices {
    source: Source,
    config: Config,
    opened: [OnceLock<Device>; DEVICES_MAX],
    /// Locked while a device is opened.
    opening: Mutex<Later>,
}

/// What was asked for devices that are opened later.
#[derive(Debug, Default)]
struct Later {
    /// A history, or none, whatever the configuration says.
    history: Option<Option<HistoryOptions>>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) allocator: CachingAllocator,
    pub(crate) open: OpenDevice,
    pub(crate) streams: Streams,
    pub(crate) routes: Routes,
}

impl Devices {
    /// Opens a device that was named; all GPUs are opened one by one when they are used.
    pub(crate) fn new(source: Source, config: Config) -> Result<Self> {
        let opened = std::array::from_fn(|_| OnceLock::new());
        let devices = Self { source, config, opened, opening: Mutex::default() };
        match devices.source {
            Source::Cuda(None) => drop(gpus()?),
            Source::Cuda(Some(ordinal)) => drop(devices.open(ordinal as usize)?),
            Source::Sim(_) => drop(devices.open(0)?),
        }
        Ok(devices)
    }

    /// The device of that ordinal.
    #[inline]
    pub(crate) fn get(&self, ordinal: i32) -> Result<&Device> {
        let index = usize::try_from(ordinal).unwrap_or(usize::MAX);
        match self.opened.get(index).and_then(OnceLock::get) {
            Some(device) => Ok(device),
            None => self.open(index),
        }
    }

    #[cold]
    fn open(&self, index: usize) -> Result<&Device> {
        let known = match self.source {
            Source::Cuda(None) => index < DEVICES_MAX,
            Source::Cuda(Some(ordinal)) => index == ordinal as usize,
            Source::Sim(_) => index == 0,
        };
        if !known || index >= DEVICES_MAX {
            let what = match self.source {
                Source::Cuda(None) => format!("GPUs below {DEVICES_MAX}"),
                Source::Cuda(Some(ordinal)) => format!("device {ordinal}"),
                Source::Sim(_) => "device 0".to_owned(),
            };
            return Err(Failure::Device(format!("there is no allocator for that device, only for {what}")));
        }
        let later = self.opening.lock();
        if let Some(device) = self.opened[index].get() {
            return Ok(device);
        }
        let (choice, sim) = match self.source {
            Source::Cuda(_) => (DeviceChoice::Cuda(index as u32), SimDriver::builder()),
            Source::Sim(bytes) => (DeviceChoice::Sim, simulated(bytes)),
        };
        let open = OpenDevice::open(choice, sim)?;
        let allocator = CachingAllocator::new(open.driver(), self.config.clone())?;
        let (name, label) = (allocator.driver().name(), allocator.driver().label());
        let segments = if allocator.is_expandable() { "expandable" } else { "fixed" };
        log::info!("{label}: {name} opened, {segments} segments");
        log::debug!("{label}: {:?}", self.config);
        allocator.on_out_of_memory(|report| log::warn!("{report}"));
        allocator
            .on_leak(|report| log::warn!("the allocator is destroyed while memory of it is in use\n{report}"));
        if let Some(history) = later.history {
            allocator.record_history(history)?;
        }
        let device = Device { allocator, open, streams: Streams::new(), routes: Routes::new() };
        Ok(self.opened[index].get_or_init(|| device))
    }

    /// Starts or ends the history of a device or, if the ordinal is negative, of all, also those that are opened later.
    pub(crate) fn record_history(&self, ordinal: i32, options: Option<HistoryOptions>) -> Result<()> {
        if ordinal >= 0 {
            return Ok(self.get(ordinal)?.allocator.record_history(options)?);
        }
        let mut later = self.opening.lock();
        for device in self.used() {
            device.allocator.record_history(options)?;
        }
        later.history = Some(options);
        Ok(())
    }

    /// Those that were used so far.
    pub(crate) fn used(&self) -> impl Iterator<Item = &Device> {
        self.opened.iter().filter_map(OnceLock::get)
    }

    /// The one that `ptr` was allocated on; the first one used if it is nobody's, which will say so.
    pub(crate) fn of_ptr(&self, ptr: DevicePtr) -> Result<&Device> {
        let mut used = self.used().peekable();
        let first = used.peek().copied();
        let owner = used.find(|device| device.allocator.is_live_raw(ptr)).or(first);
        owner.ok_or_else(|| Failure::Core(vramalloc::Error::UnknownDevice { device: 0, known: Vec::new() }))
    }
}

/// Contents and a log are for tests in Rust, which have the driver's value.
fn simulated(bytes: u64) -> SimBuilder {
    SimDriver::builder().capacity(bytes).backing(false).log(cfg!(test))
}

impl Device {
    /// Allocates on the stream of a raw handle; in a private pool if one is being captured into.
    #[inline]
    pub(crate) fn alloc(&self, bytes: u64, handle: u64) -> Result<DevicePtr> {
        self.streams.with(&self.allocator, handle, |stream| {
            if self.routes.any() {
                return self.routes.alloc(&self.allocator, bytes, stream);
            }
            Ok(self.allocator.alloc_raw(bytes, stream)?)
        })
    }

    /// Gives all cached memory back, and waits for the device if work still uses some, as PyTorch's empty_cache does. Does
    /// nothing during a capture, which that could spoil.
    pub(crate) fn empty_cache_for_good(&self) -> Result<u64> {
        if self.routes.any() {
            log::warn!("device {}: the cache is not emptied during a capture", self.allocator.device());
            return Ok(0);
        }
        let mut bytes = self.allocator.empty_cache()?;
        if self.allocator.memory_reserved() > 0 {
            self.allocator.driver().synchronize()?;
            bytes += self.allocator.empty_cache()?;
        }
        log::debug!("device {}: {bytes} bytes given back", self.allocator.device());
        Ok(bytes)
    }

    pub(crate) fn record_stream(&self, ptr: DevicePtr, handle: u64) -> Result<()> {
        let record = |stream: &_| Ok(self.allocator.record_stream_raw(ptr, stream)?);
        self.streams.with(&self.allocator, handle, record)
    }
}
