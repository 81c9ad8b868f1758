//! Opening a device by name: the GPU where there is one, else the simulated device.

#[cfg(not(feature = "cuda"))]
use crate::driver::DriverErrorKind;
#[cfg(feature = "cuda")]
use crate::driver::cuda::CudaDriver;
use crate::driver::sim::{SimBuilder, SimDriver};
use crate::driver::{Call, Driver, DriverError, StreamHandle};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Which device to use, as a command line option says it: `auto`, `cuda:N` or `sim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first GPU if the driver works and has one, else the simulated device.
    #[default]
    Auto,
    /// The GPU of that ordinal.
    Cuda(u32),
    /// The simulated device.
    Sim,
}

/// Not a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, cuda:N (as cuda:0) or sim, got '{0}'")]
pub struct ParseDeviceError(String);

impl FromStr for DeviceChoice {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Sim),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
                ordinal.map(Self::Cuda).ok_or_else(|| ParseDeviceError(text.to_owned()))
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Sim => f.write_str("sim"),
        }
    }
}

/// An opened device of either kind.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OpenDevice {
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<CudaDriver>),
    /// The simulated device.
    Sim(Arc<SimDriver>),
}

impl OpenDevice {
    /// Opens the device; `sim` describes the simulated one, should it come to that. The reason why
    /// [`DeviceChoice::Auto`] did not take a GPU is in [`why_no_gpu`].
    ///
    /// # Errors
    /// [`DriverErrorKind::Unavailable`](crate::DriverErrorKind::Unavailable) if the GPU that was named cannot be opened.
    pub fn open(choice: DeviceChoice, sim: SimBuilder) -> Result<Self, DriverError> {
        match choice {
            DeviceChoice::Sim => Ok(Self::Sim(sim.build())),
            DeviceChoice::Cuda(ordinal) => open_cuda(ordinal),
            DeviceChoice::Auto => open_cuda(0).or_else(|_| Ok(Self::Sim(sim.build()))),
        }
    }

    /// The device as the allocator takes it.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(driver) => Arc::clone(driver) as Arc<dyn Driver>,
            Self::Sim(driver) => Arc::clone(driver) as Arc<dyn Driver>,
        }
    }

    /// A new stream, which lives as long as the driver.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn create_stream(&self) -> Result<StreamHandle, DriverError> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(driver) => driver
                .create_stream()
                .map_err(|error| DriverError::with_detail(Call::StreamCreate, error.kind, error.detail)),
            Self::Sim(driver) => Ok(driver.create_stream()),
        }
    }
}

/// Why the first GPU cannot be used, if it cannot.
#[must_use]
pub fn why_no_gpu() -> Option<DriverError> {
    open_cuda(0).err()
}

#[cfg(feature = "cuda")]
fn open_cuda(ordinal: u32) -> Result<OpenDevice, DriverError> {
    CudaDriver::open(ordinal).map(OpenDevice::Cuda)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: u32) -> Result<OpenDevice, DriverError> {
    let why = "this build has no CUDA: it lacks the feature 'cuda'";
    Err(DriverError::with_detail(Call::Open, DriverErrorKind::Unavailable, why))
}
