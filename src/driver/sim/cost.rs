//! What a driver call costs on the simulated device.

use crate::driver::Call;

/// Measured points of one call: bytes and nanoseconds, by rising bytes.
type Curve = Vec<(u64, u64)>;

const MIB: u64 = 1 << 20;

/// How many nanoseconds each driver call takes, by the size it is about.
///
/// Between two measured sizes the cost is interpolated linearly, below the smallest it is flat, above the
/// largest the last slope goes on. [`Call::SetAccess`] and [`Call::Unmap`] are charged once for every handle
/// mapped in their range, each by that handle's own size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostModel {
    curves: Vec<Curve>,
    /// Bytes per microsecond between host and device; 0 if copies take no time.
    link: u64,
    /// Bytes per microsecond written to the device's memory from it; 0 as above.
    memory: u64,
}

impl CostModel {
    /// No call takes any time.
    #[must_use]
    pub fn free_of_charge() -> Self {
        Self { curves: vec![Vec::new(); Call::ALL.len()], link: 0, memory: 0 }
    }

    /// Measured on one NVIDIA H200 (driver 580.159, CUDA 13.0): mean over 8 to 64 calls on an idle device.
    ///
    /// Three calls were not measured and take their sibling's figure: giving back an address range costs what
    /// reserving it does, destroying an event what creating it does, and a wait that finds nothing to wait for
    /// what a query does. Copies were not measured either: queueing one is charged as recording an event, and it
    /// takes the time of the nominal bandwidths (55 GB/s over PCIe 5.0 x16, half of 4.8 TB/s on the device).
    #[must_use]
    pub fn h200() -> Self {
        let sizes = |nanos: [u64; 4]| [2 * MIB, 20 * MIB, 64 * MIB, 512 * MIB].into_iter().zip(nanos).collect();
        let flat = |nanos: u64| vec![(0, nanos)];
        let mut model = Self::free_of_charge();
        for &call in Call::ALL {
            model.curves[call as usize] = match call {
                Call::Alloc => sizes([56_000, 64_000, 72_000, 132_000]),
                Call::Free => sizes([44_000, 66_000, 91_000, 380_000]),
                Call::CreatePages => sizes([12_700, 13_200, 16_000, 27_000]),
                Call::SetAccess => sizes([31_000, 31_000, 33_000, 57_000]),
                Call::Unmap => sizes([20_000, 19_500, 21_900, 35_200]),
                Call::ReleasePages => sizes([15_000, 28_800, 50_800, 319_500]),
                Call::Map => flat(1_500),
                Call::ReserveAddresses | Call::FreeAddresses => flat(17_400),
                Call::MemoryInfo => flat(5_600),
                Call::HostAlloc => vec![(MIB, 51_000), (64 * MIB, 42_114_000), (512 * MIB, 300_317_000)],
                // The first point is not measured: the ratio to the allocation is that of 64 MiB.
                Call::HostFree => vec![(MIB, 12_600), (64 * MIB, 10_408_000), (512 * MIB, 81_150_000)],
                Call::EventCreate | Call::EventDestroy => flat(510),
                Call::EventRecord => flat(220),
                Call::CopyToDevice | Call::CopyToHost | Call::CopyOnDevice | Call::Fill => flat(220),
                Call::EventQuery | Call::EventSynchronize | Call::Synchronize | Call::StreamSynchronize => {
                    flat(300)
                }
                Call::StreamWait => flat(140),
                Call::IsCapturing => flat(25),
                Call::StreamId => flat(26),
                // Once in a program's life; not measured.
                Call::Open | Call::StreamCreate => Vec::new(),
            };
        }
        model.with_bandwidth(55_000, 2_400_000)
    }

    /// The same model with other bandwidths for copies, in bytes per microsecond: between host and device, and on the
    /// device; 0 makes them end as soon as they start.
    #[must_use]
    pub fn with_bandwidth(self, link: u64, memory: u64) -> Self {
        Self { link, memory, ..self }
    }

    /// How long a copy or fill of `bytes` runs, in nanoseconds, once it has begun.
    #[must_use]
    pub fn transfer_nanos(&self, call: Call, bytes: u64) -> u64 {
        let bandwidth = match call {
            Call::CopyToDevice | Call::CopyToHost => self.link,
            Call::CopyOnDevice | Call::Fill => self.memory,
            _ => 0,
        };
        bytes.saturating_mul(1000).checked_div(bandwidth).unwrap_or(0)
    }

    /// The same model with other `points` (bytes, nanoseconds) for one call; no points make it free of charge.
    #[must_use]
    pub fn with(mut self, call: Call, points: &[(u64, u64)]) -> Self {
        let mut curve = points.to_vec();
        curve.sort_unstable();
        curve.dedup_by_key(|point| point.0);
        self.curves[call as usize] = curve;
        self
    }

    /// What one call about `bytes` takes, in nanoseconds; for calls charged by handle, one handle's share.
    #[must_use]
    pub fn nanos(&self, call: Call, bytes: u64) -> u64 {
        let curve = &self.curves[call as usize];
        let (Some(&first), Some(&last)) = (curve.first(), curve.last()) else { return 0 };
        if bytes <= first.0 || curve.len() == 1 {
            return first.1;
        }
        let upper = if bytes >= last.0 { curve.len() - 1 } else { curve.partition_point(|point| point.0 < bytes) };
        line(curve[upper - 1], curve[upper], bytes)
    }

    /// Whether the call is charged for each handle in its range.
    #[must_use]
    pub const fn is_per_handle(call: Call) -> bool {
        matches!(call, Call::SetAccess | Call::Unmap)
    }
}

impl Default for CostModel {
    fn default() -> Self {
        Self::h200()
    }
}

/// The straight line through two points, at `bytes`; never below zero.
fn line(a: (u64, u64), b: (u64, u64), bytes: u64) -> u64 {
    let [ax, ay, bx, by, x] = [a.0, a.1, b.0, b.1, bytes].map(i128::from);
    let y = ay + (by - ay) * (x - ax) / (bx - ax);
    u64::try_from(y.max(0)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolates_between_points_and_goes_on_past_the_last() {
        let model = CostModel::free_of_charge().with(Call::Alloc, &[(30, 300), (10, 100), (50, 340)]);
        let costs = [0, 10, 20, 30, 40, 50, 60].map(|bytes| model.nanos(Call::Alloc, bytes));
        assert_eq!(costs, [100, 100, 200, 300, 320, 340, 360]);
        assert_eq!(model.nanos(Call::Free, 1 << 40), 0);
    }

    #[test]
    fn a_falling_line_stops_at_zero() {
        let model = CostModel::free_of_charge().with(Call::Alloc, &[(10, 100), (20, 50)]);
        assert_eq!(model.nanos(Call::Alloc, 1000), 0);
    }
}
