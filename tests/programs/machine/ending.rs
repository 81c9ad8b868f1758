//! The end of a program: what is left when everything is freed.

use super::Machine;
use crate::Check;
use crate::program::{Op, Program};
use crate::shadow::check_pattern;
use vramalloc::driver::sim::Leaks;

impl Machine {
    /// Runs a whole program, frees everything, and checks that nothing is left.
    pub(crate) fn run(mut self, program: &Program) -> Check {
        for (at, op) in program.ops.iter().enumerate() {
            self.step(op).map_err(|why| format!("operation {at}, {op:?}: {why}"))?;
        }
        self.finish(program.abrupt)
    }

    /// Frees everything and checks that nothing is left.
    pub(crate) fn finish(mut self, abrupt: bool) -> Check {
        for held in &self.live {
            check_pattern(&self.sim, held.block.addr, held.block.bytes, held.id)?;
        }
        if !abrupt {
            while !self.live.is_empty() {
                self.step(&Op::Free { index: 0, raw: false })?;
            }
            self.sim.complete_all();
            self.step(&Op::EmptyCache)?;
            let stats = self.allocator.memory_stats();
            ensure!(
                (stats.active.all.current, stats.reserved_bytes.all.current, stats.segment.all.current)
                    == (0, 0, 0),
                "left at the end: {stats:?}"
            );
        }
        let (violations, leaks) = self.tear_down();
        ensure!(violations.is_empty(), "the device saw at the end: {violations:?}");
        ensure!(leaks.is_empty(), "leaked: {leaks:?}");
        Ok(())
    }

    fn tear_down(self) -> (Vec<String>, Leaks) {
        let Self { sim, allocator, marks, slots, live, .. } = self;
        drop(allocator);
        drop(slots);
        drop(live);
        marks.finish(&sim);
        (sim.violations(), sim.leaks())
    }

    /// Frees everything after a planned fault, which may be still to come. A lost device keeps what it has; else
    /// nothing is left but what one failing call of the teardown was to give back.
    pub(crate) fn finish_after_fault(mut self) -> Check {
        if self.is_lost() {
            ensure!(self.allocator.alloc(1 << 30, self.stream(0)).is_err(), "a lost device gives memory");
            let (violations, _) = self.tear_down();
            ensure!(violations.is_empty(), "the device saw at the end: {violations:?}");
            return Ok(());
        }
        if self.has_struck() {
            return self.finish(false);
        }
        self.sim.clear_faults();
        self.planned = None;
        self.finish(false)
    }
}
