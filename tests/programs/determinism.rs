//! The same program twice: the same addresses, the same statistics, the same driver calls at the same virtual times.

use crate::machine::Machine;
use crate::program::{Setup, configs, programs};
use crate::properties::runner;
use proptest::strategy::{Strategy, ValueTree};
use vramalloc::MemoryStats;
use vramalloc::driver::sim::LogEntry;

fn trace(setup: &Setup, seed: u64) -> (Vec<u64>, MemoryStats, Vec<LogEntry>) {
    let tree = programs(setup, 60).new_tree(&mut runner(seed)).expect("the strategy has no filter");
    let mut machine = Machine::new(setup);
    for op in &tree.current().ops {
        machine.step(op).unwrap_or_else(|why| panic!("{}, seed {seed}: {op:?}: {why}", setup.name));
    }
    (machine.addresses.clone(), machine.allocator.memory_stats(), machine.sim.log())
}

#[test]
fn a_program_runs_the_same_twice() {
    for setup in configs() {
        let mut handed_out = 0;
        for seed in 1_000_000..1_000_020 {
            let (first, second) = (trace(&setup, seed), trace(&setup, seed));
            assert_eq!(first.0, second.0, "addresses, {}, seed {seed}", setup.name);
            assert_eq!(first.1, second.1, "statistics, {}, seed {seed}", setup.name);
            assert_eq!(first.2, second.2, "driver calls, {}, seed {seed}", setup.name);
            handed_out += first.0.len();
        }
        assert!(handed_out > 100, "{}: {handed_out} allocations are too few to compare", setup.name);
    }
}
