//! The statistics as PyTorch defines them, added up anew after every operation.

use crate::Check;
use vramalloc::size::SizeClass;
use vramalloc::{MemoryStats, Stat, StatArray};

/// What one block adds: allocations, their bytes, requested bytes, active blocks, their bytes.
const LANES: usize = 5;
const NAMES: [&str; LANES] = ["allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes"];

/// All, large, small.
type Figures = [[u64; 3]; LANES];

/// A block that a user or queued work holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) class: SizeClass,
}

impl Block {
    fn lanes(&self, is_live: bool) -> [u64; LANES] {
        let live = u64::from(is_live);
        [live, live * self.bytes, self.requested, 1, self.bytes]
    }
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    current: Figures,
    peak: Figures,
    /// All increases ever.
    increased: Figures,
    /// `increased`, and increases less current, at the last reset of the sums.
    base: (Figures, Figures),
    pub(crate) ooms: u64,
}

fn add(figures: &mut Figures, block: &Block, is_live: bool) {
    let class = if block.class == SizeClass::Large { 1 } else { 2 };
    for (lane, by) in block.lanes(is_live).into_iter().enumerate() {
        figures[lane][0] += by;
        figures[lane][class] += by;
    }
}

fn each(f: impl Fn(usize, usize) -> u64) -> Figures {
    std::array::from_fn(|lane| std::array::from_fn(|scope| f(lane, scope)))
}

impl Model {
    /// Counts a hand-out.
    pub(crate) fn hand_out(&mut self, block: &Block) {
        add(&mut self.increased, block, true);
    }

    /// Looks at what is held after an operation.
    pub(crate) fn observe<'a>(&mut self, held: impl Iterator<Item = (&'a Block, bool)>) {
        self.current = Figures::default();
        held.for_each(|(block, is_live)| add(&mut self.current, block, is_live));
        self.peak = each(|lane, scope| self.peak[lane][scope].max(self.current[lane][scope]));
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.peak = self.current;
    }

    pub(crate) fn reset_sums(&mut self) {
        self.base = (self.increased, self.decreased());
        self.ooms = 0;
    }

    fn decreased(&self) -> Figures {
        each(|lane, scope| self.increased[lane][scope] - self.current[lane][scope])
    }

    pub(crate) fn compare(&self, stats: &MemoryStats) -> Check {
        let found = [
            &stats.allocation,
            &stats.allocated_bytes,
            &stats.requested_bytes,
            &stats.active,
            &stats.active_bytes,
        ];
        let decreased = self.decreased();
        for (lane, array) in found.into_iter().enumerate() {
            let StatArray { all, large_pool, small_pool } = array;
            for (scope, stat) in [all, large_pool, small_pool].into_iter().enumerate() {
                let expected = Stat {
                    current: self.current[lane][scope],
                    peak: self.peak[lane][scope],
                    allocated: self.increased[lane][scope] - self.base.0[lane][scope],
                    freed: decreased[lane][scope] - self.base.1[lane][scope],
                };
                let scope = ["all", "large_pool", "small_pool"][scope];
                ensure!(*stat == expected, "{}.{scope}: {stat:?}, the model has {expected:?}", NAMES[lane]);
            }
        }
        ensure!(stats.num_ooms == self.ooms, "{} ooms, the model has {}", stats.num_ooms, self.ooms);
        Ok(())
    }
}
