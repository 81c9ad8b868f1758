//! The allocator's errors: typed, with the numbers that a person needs to act.

use crate::config::ConfigError;
use crate::driver::{DevicePtr, DriverError};
use crate::size::human_bytes;
use std::fmt;

/// Why an operation of the allocator failed. A failed operation changes nothing but the failure counters.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no memory for the request, and nothing left to give back.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// The size cannot be rounded or counted; nothing was tried.
    #[error(
        "a request of {requested} bytes is beyond any device: sizes must be below 2^60; check the arithmetic that led to it"
    )]
    SizeOverflow {
        /// What was asked for; saturated if the number itself does not fit in 64 bits.
        requested: u64,
    },
    /// The alignment is not a power of two, or larger than 2 MiB.
    #[error(
        "alignment {alignment} is not supported: it must be a power of two up to {}",
        human_bytes(crate::MAX_ALIGNMENT)
    )]
    InvalidAlignment {
        /// What was asked for.
        alignment: u64,
    },
    /// The address was live once and is not any more: a double free.
    #[error("{ptr} is not live: it was freed before (device {device}); free each allocation once")]
    NotLive {
        /// The address.
        ptr: DevicePtr,
        /// The allocator's device.
        device: u32,
    },
    /// The address is none to free: foreign memory, the inside of an allocation, or the address of an
    /// [`Allocation`](crate::Allocation), which frees itself.
    #[error("{ptr} {}", unknown(*ptr, *device, *inside))]
    UnknownPointer {
        /// The address.
        ptr: DevicePtr,
        /// The allocator's device.
        device: u32,
        /// The live allocation that contains it, or begins there, if one does.
        inside: Option<DevicePtr>,
    },
    /// A stream or a block of another allocator (of another device, most likely).
    #[error(
        "the {what} belongs to device {theirs} (or to another allocator of it), this allocator to device {ours}"
    )]
    WrongDevice {
        /// "stream", "allocation" or "second driver".
        what: &'static str,
        /// The device of the argument.
        theirs: u32,
        /// The allocator's device.
        ours: u32,
    },
    /// There is no allocator for that device.
    #[error("there is no allocator for device {device}; there are those for {known:?}")]
    UnknownDevice {
        /// What was asked for.
        device: u32,
        /// The devices that there are.
        known: Vec<u32>,
    },
    /// There is no page-locked host memory for the request, and nothing left to give back.
    #[error(
        "out of page-locked host memory: {} requested ({requested} bytes, {rounded} with rounding), {} held by the program, {} used by copies under way, {} reserved{}; drop buffers that are not needed, or {}",
        human_bytes(*requested), human_bytes(*allocated), human_bytes(*pending), human_bytes(*reserved),
        limit.map_or_else(String::new, |limit| format!(", limit {}", human_bytes(limit))),
        if limit.is_some() { "raise the limit (host_limit:...)" } else { "free memory on the host" }
    )]
    HostOutOfMemory {
        /// What was asked for, in bytes.
        requested: u64,
        /// That, rounded to its class.
        rounded: u64,
        /// The bytes of blocks that the program holds.
        allocated: u64,
        /// The bytes of blocks that were dropped and are still used by copies.
        pending: u64,
        /// The bytes held of the host.
        reserved: u64,
        /// The limit in force, if there is one.
        limit: Option<u64>,
    },
    /// The allocator that the memory came from is gone, so there is nothing to allocate more from.
    #[error("the allocator of device {device} is gone; keep a clone of it for as long as you allocate")]
    AllocatorGone {
        /// The device.
        device: u32,
    },
    /// The configuration was refused.
    #[error(transparent)]
    InvalidConfig(#[from] ConfigError),
    /// The device does not support what was configured.
    #[error(
        "device {device} ({name}) has no virtual memory management, which segments:expandable needs; use segments:auto or segments:fixed"
    )]
    NoVirtualMemory {
        /// The allocator's device.
        device: u32,
        /// The device's name.
        name: String,
    },
    /// Call stacks were asked for, and this build cannot capture any.
    #[error(
        "call stacks need the feature `stacks` of vramalloc, which is off in this build; turn it on, or record without stacks"
    )]
    NoStacks,
    /// The driver failed, and not for want of memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn unknown(ptr: DevicePtr, device: u32, inside: Option<DevicePtr>) -> String {
    let not = format!("is not the start of an allocation of this allocator (device {device})");
    match inside {
        None => not,
        Some(base) if base != ptr => format!("{not}; it lies inside the allocation at {base}"),
        Some(_) => {
            "belongs to an `Allocation`, which frees itself when dropped: only what `alloc_raw` or `into_raw` \
                    gave is freed by address"
                .to_owned()
        }
    }
}

impl Error {
    /// The out-of-memory report, if this is one.
    #[must_use]
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Self::OutOfMemory(report) => Some(report),
            _ => None,
        }
    }
}

/// The result of an operation of the allocator.
pub type Result<T> = std::result::Result<T, Error>;

/// What stood between a request and its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The configured limit leaves no room.
    Limit,
    /// The device is full (others' memory included).
    Device,
    /// Enough bytes are cached, but in pieces that are too small.
    Fragmentation,
    /// Enough bytes are freed, but queued work still uses them and the configuration forbids to wait.
    PendingWork,
    /// Memory is free, but the range of addresses is used up.
    AddressSpace,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Limit => "the allocator's limit",
            Self::Device => "the device is full",
            Self::Fragmentation => "fragmentation: enough is cached, in pieces too small",
            Self::PendingWork => "pending work: enough is freed, queued work still uses it",
            Self::AddressSpace => "address space: memory is free, addresses are not",
        })
    }
}

/// Everything a person asks when memory runs out. All sizes in bytes. `Display` prints it with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The device's ordinal.
    pub device: u32,
    /// What the user asked for.
    pub requested: u64,
    /// That, rounded to a block.
    pub rounded: u64,
    /// What would have had to come from the driver: a segment.
    pub segment: u64,
    /// Held by users.
    pub allocated: u64,
    /// Held by the allocator.
    pub reserved: u64,
    /// Freed by users, still used by queued work of other streams.
    pub pending: u64,
    /// Cached in pieces of segments that are partly in use: cannot be given back.
    pub inactive_split: u64,
    /// Cached and unused, but not given back because a stream is being captured
    /// ([`PrivatePool::capture`](crate::PrivatePool::capture)); 0 outside captures.
    pub withheld: u64,
    /// The largest cached block that this stream could have used.
    pub largest_free: u64,
    /// Free on the device; `None` if the driver would not say.
    pub device_free: Option<u64>,
    /// The device's memory.
    pub device_total: u64,
    /// The limit in force, if there is one.
    pub limit: Option<u64>,
    /// Whether the segments are expandable.
    pub expandable: bool,
    /// The largest piece of physical memory behind expandable segments: each moves and goes back only as a whole. 0 with
    /// fixed segments.
    pub largest_page: u64,
    /// Whether such pieces would be smaller with less [`slack`](crate::Config::slack).
    pub less_slack_helps: bool,
    /// What stood in the way.
    pub cause: Cause,
}

impl OutOfMemory {
    /// Reserved and neither allocated nor pending: the cache.
    #[must_use]
    pub const fn cached(&self) -> u64 {
        self.reserved.saturating_sub(self.allocated).saturating_sub(self.pending)
    }

    /// Memory of the device that this allocator does not hold and that is not free: other allocators, other
    /// processes, contexts and libraries. `None` if the driver would not say what is free.
    #[must_use]
    pub const fn foreign(&self) -> Option<u64> {
        match self.device_free {
            Some(free) => Some(self.device_total.saturating_sub(free).saturating_sub(self.reserved)),
            None => None,
        }
    }

    /// What a person can do about it; only what applies, most promising first.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.requested > self.device_total {
            advice.push(format!(
                "the request alone is larger than the device ({}): check the size, or split the work",
                human_bytes(self.device_total)
            ));
            return advice;
        }
        if self.withheld > 0 {
            advice.push(format!(
                "{} are cached, and cannot be given back while a stream is captured: call empty_cache before the capture",
                human_bytes(self.withheld)
            ));
        }
        if self.cause == Cause::Limit {
            let limit = self.limit.unwrap_or_default();
            if self.rounded > limit {
                advice.push(format!("the request alone is larger than the limit ({})", human_bytes(limit)));
            }
            advice.push("raise the limit (limit:..., per_process_memory_fraction:...)".to_owned());
        }
        if self.pending >= self.rounded / 2 && self.pending > 0 {
            advice.push(format!(
                "{} are freed but still used by queued work of other streams: let the host run less far ahead, or \
                 free on the stream that used the memory last{}",
                human_bytes(self.pending),
                if self.cause == Cause::PendingWork { ", or allow waiting (on_pending:grow)" } else { "" }
            ));
        }
        if self.cause == Cause::Fragmentation {
            if self.expandable {
                let smaller = if self.less_slack_helps {
                    "use slack:1.0, which makes pages smaller and takes more driver time, or "
                } else {
                    ""
                };
                advice.push(format!(
                    "{} are free in pages of up to {} that are partly in use, and move only whole: {smaller}free \
                     what keeps them (fragmentation_report names it)",
                    human_bytes(self.cached()),
                    human_bytes(self.largest_page)
                ));
            } else {
                advice.push(format!(
                    "{} are cached in pieces of segments partly in use: use segments:expandable (or segments:auto), \
                     or max_split_size_mb to keep large blocks whole",
                    human_bytes(self.inactive_split)
                ));
            }
        }
        if self.cause == Cause::AddressSpace {
            advice.push("use fewer streams, or segments:fixed".to_owned());
        }
        if let Some(foreign) = self.foreign()
            && self.cause == Cause::Device
            && foreign >= self.rounded
        {
            advice.push(format!("{} of the device belong to others: see nvidia-smi", human_bytes(foreign)));
        }
        if self.allocated > 0 {
            advice.push(format!(
                "{} are held by the program: free what is not needed, or make the batch smaller",
                human_bytes(self.allocated)
            ));
        }
        advice
    }
}

impl std::error::Error for OutOfMemory {}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "out of memory on device {}: {} requested ({} bytes), {}",
            self.device,
            human_bytes(self.requested),
            self.requested,
            self.cause
        )?;
        let mut row =
            |name: &str, bytes: u64| writeln!(f, "  {name:<26}{:>14}  ({bytes} bytes)", human_bytes(bytes));
        row("needed from the driver", self.segment)?;
        row("allocated", self.allocated)?;
        row("pending", self.pending)?;
        row("cached", self.cached())?;
        row("  largest free block", self.largest_free)?;
        row("  not releasable", self.inactive_split)?;
        if self.withheld > 0 {
            row("  withheld by a capture", self.withheld)?;
        }
        row("reserved", self.reserved)?;
        if let Some(limit) = self.limit {
            row("limit", limit)?;
        }
        match self.device_free {
            Some(free) => row("device free", free)?,
            None => writeln!(f, "  device free               unknown (the driver would not say)")?,
        }
        writeln!(
            f,
            "  {:<26}{:>14}  ({} bytes)",
            "device total",
            human_bytes(self.device_total),
            self.device_total
        )?;
        write!(f, "What can be done:")?;
        let advice = self.advice();
        for line in &advice {
            write!(f, "\n  - {line}")?;
        }
        if advice.is_empty() {
            write!(f, "\n  - use a device with more memory, or ask for less")?;
        }
        Ok(())
    }
}
