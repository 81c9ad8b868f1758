//! The allocator that a trace is replayed in.

use crate::Failure;
use clap::{Args as ClapArgs, ValueEnum};
use vramalloc::driver::StreamHandle;
use vramalloc::driver::sim::SimDriver;
use vramalloc::trace::Trace;
use vramalloc::{CachingAllocator, Config, DeviceChoice, Error, HistoryOptions, Limit, OpenDevice, Segments};

#[derive(ClapArgs)]
pub(crate) struct Setup {
    /// The kind of segments; wins over --config.
    #[arg(long, value_enum)]
    segments: Option<SegmentsArg>,
    /// Bytes of the device, or with a unit (24GiB): the simulated device's memory, the allocator's limit on a GPU.
    #[arg(long, value_name = "BYTES", value_parser = parse_capacity)]
    capacity: Option<u64>,
    /// The allocator's configuration, as in VRAMALLOC_CONF, which it replaces: key:value,key:value.
    #[arg(long, value_name = "STRING")]
    config: Option<String>,
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
}

#[derive(Clone, Copy, ValueEnum)]
enum SegmentsArg {
    Fixed,
    Expandable,
}

pub(crate) fn parse_capacity(text: &str) -> Result<u64, String> {
    match vramalloc::config::parse_bytes(text) {
        Some(0) | None => Err("expected bytes, or a number with a unit such as 24GiB".to_owned()),
        Some(bytes) => Ok(bytes),
    }
}

/// The configuration of a string, or of the environment.
pub(crate) fn config_of(text: Option<&str>) -> Result<Config, Failure> {
    let config = match text {
        Some(text) => text.parse(),
        None => Config::from_env(),
    };
    config.map_err(|error| Failure::Usage(error.to_string()))
}

/// What a replay needs.
pub(crate) struct Opened {
    pub(crate) allocator: CachingAllocator,
    /// One for each of the trace's.
    pub(crate) streams: Vec<StreamHandle>,
}

impl Setup {
    /// Whether an option was given.
    pub(crate) fn is_given(&self) -> bool {
        self.segments.is_some() || self.capacity.is_some() || self.config.is_some()
    }

    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let config = config_of(self.config.as_deref())?;
        Ok(match self.segments {
            Some(SegmentsArg::Fixed) => config.segments(Segments::Fixed),
            Some(SegmentsArg::Expandable) => config.segments(Segments::Expandable),
            None => config,
        })
    }

    /// An allocator for a trace, which keeps the history of so many passes.
    pub(crate) fn open(
        &self,
        device: DeviceChoice,
        mut config: Config,
        trace: &Trace,
        passes_kept: u32,
    ) -> Result<Opened, Failure> {
        // No trace reads or writes memory, so none has to be behind the addresses.
        let mut sim = SimDriver::builder().backing(false).log(false);
        if let Some(bytes) = self.capacity {
            sim = sim.capacity(bytes);
        }
        let device = OpenDevice::open(device, sim).map_err(|error| Failure::Run(error.to_string()))?;
        if let (Some(bytes), false) = (self.capacity, matches!(device, OpenDevice::Sim(_))) {
            config = config.limit(Limit::Bytes(bytes));
        }
        let allocator = CachingAllocator::new(device.driver(), config).map_err(|error| match error {
            Error::InvalidConfig(_) | Error::NoVirtualMemory { .. } => Failure::Usage(error.to_string()),
            error => failed(trace, &error),
        })?;
        let streams = trace
            .streams
            .iter()
            .map(|number| if *number == 0 { Ok(StreamHandle::DEFAULT) } else { device.create_stream() })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Failure::Run(error.to_string()))?;
        if passes_kept > 0 {
            let events = trace.events.len().saturating_mul(passes_kept as usize);
            // And room for what the driver is asked for.
            let options = HistoryOptions::default().events(events.saturating_mul(2).max(1 << 16));
            allocator.record_history(Some(options)).map_err(|error| failed(trace, &error))?;
        }
        Ok(Opened { allocator, streams })
    }
}

/// What went wrong with a trace.
pub(crate) fn failed(trace: &Trace, error: &Error) -> Failure {
    Failure::Run(format!("{}: {error}", trace.name))
}
