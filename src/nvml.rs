//! Used memory by process, as `nvidia-smi` shows it (NVML), to set what the allocator reserves against it. The library
//! comes with NVIDIA's driver and is looked for at run time.

use crate::driver::cuda::{CudaDriver, CudaError};
use crate::size::human_bytes;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use std::ffi::OsStr;
use std::fmt;

#[cfg(not(windows))]
const LIBRARY: &str = "libnvidia-ml.so.1";
#[cfg(windows)]
const LIBRARY: &str = "nvml.dll";

/// Why NVML could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessMemoryError {
    /// The library is not there, or would not say.
    #[error(
        "NVML: {source}; it comes with NVIDIA's driver ({LIBRARY}), in containers with the capability `utility`"
    )]
    Nvml {
        /// What it said.
        #[from]
        source: NvmlError,
    },
    /// The CUDA driver would not say which device this is.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// What one process has of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// The process, as the machine knows it; in a container that is another number than the process's own.
    pub pid: u32,
    /// Its bytes, contexts and libraries included; `None` where the driver does not tell (as on Windows).
    pub bytes: Option<u64>,
}

/// A device's memory by process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceProcesses {
    /// Bytes of the device.
    pub total: u64,
    /// Bytes in use, by whomever.
    pub used: u64,
    /// Bytes that nobody has.
    pub free: u64,
    /// The processes, the most bytes first.
    pub processes: Vec<ProcessMemory>,
}

impl DeviceProcesses {
    /// Asks NVML about the device. Takes some milliseconds, most of them to open the library.
    ///
    /// # Errors
    /// [`ProcessMemoryError`].
    pub fn of(device: &CudaDriver) -> Result<Self, ProcessMemoryError> {
        let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init()?;
        // A part of a device (MIG) has the same digits behind another word.
        let uuid = device.uuid()?;
        let device = nvml
            .device_by_uuid(uuid.as_str())
            .or_else(|error| nvml.device_by_uuid(uuid.replace("GPU-", "MIG-")).map_err(|_| error))?;
        let memory = device.memory_info()?;
        let mut processes: Vec<ProcessMemory> = Vec::new();
        for process in device.running_compute_processes()?.into_iter().chain(device.running_graphics_processes()?)
        {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            // One that does both is in both lists, with the same figure.
            if !processes.iter().any(|known| known.pid == process.pid) {
                processes.push(ProcessMemory { pid: process.pid, bytes });
            }
        }
        processes.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.pid));
        Ok(Self { total: memory.total, used: memory.used, free: memory.free, processes })
    }

    /// This process's part, if it is in the list under its own number.
    #[must_use]
    pub fn own(&self) -> Option<ProcessMemory> {
        let pid = std::process::id();
        self.processes.iter().copied().find(|process| process.pid == pid)
    }

    /// What this process has beside what an allocator reserves: its context, libraries, other allocators. `None` if its
    /// part is not known.
    #[must_use]
    pub fn beside(&self, allocator: &crate::CachingAllocator) -> Option<u64> {
        Some(self.own()?.bytes?.saturating_sub(allocator.memory_reserved()))
    }
}

impl fmt::Display for DeviceProcesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} in use", human_bytes(self.used), human_bytes(self.total))?;
        for process in &self.processes {
            let own = if process.pid == std::process::id() { " (this one)" } else { "" };
            let bytes = process.bytes.map_or("unknown".to_owned(), human_bytes);
            writeln!(f, "  process {}{own}: {bytes}", process.pid)?;
        }
        Ok(())
    }
}

/// The same for an allocator, as a line: what its process has, and what of it is reserved.
#[must_use]
pub fn compare(allocator: &crate::CachingAllocator, processes: &DeviceProcesses) -> String {
    let reserved = allocator.memory_reserved();
    match processes.own().and_then(|own| own.bytes).zip(processes.beside(allocator)) {
        Some((own, beside)) => format!(
            "device {}: this process has {}, {} of it reserved by the allocator, {} by its context, libraries and others",
            allocator.driver().device(),
            human_bytes(own),
            human_bytes(reserved),
            human_bytes(beside)
        ),
        None => format!(
            "device {}: {} reserved by the allocator; what this process has is not known (in a container it has another \
             number outside)",
            allocator.driver().device(),
            human_bytes(reserved)
        ),
    }
}
