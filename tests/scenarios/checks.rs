//! What must hold after every step of every scenario.

use vramalloc::driver::sim::SimDriver;
use vramalloc::{BlockState, CachingAllocator, MemoryStats, StatArray};

/// [`Gpu::check`](crate::dsl::Gpu::check) for an allocator that may not be alone on its device.
#[track_caller]
pub(crate) fn check_allocator(allocator: &CachingAllocator, sim: &SimDriver) {
    if let Err(broken) = allocator.validate() {
        panic!("{broken}\n{:#?}", allocator.snapshot());
    }
    sim.assert_clean();
    let (stats, snapshot) = (allocator.memory_stats(), allocator.snapshot());
    check_stats(&stats);
    let in_blocks: u64 = [BlockState::Live, BlockState::Pending, BlockState::Free]
        .map(|state| snapshot.bytes_in(state))
        .iter()
        .sum();
    assert_eq!(in_blocks, stats.reserved_bytes.all.current, "the snapshot does not add up to reserved");
    assert_eq!(snapshot.bytes_in(BlockState::Live), stats.allocated_bytes.all.current, "live is not allocated");
}

/// Every counter is what came less what went, the classes add up, and the figures are in their order.
#[track_caller]
fn check_stats(stats: &MemoryStats) {
    let arrays: [(&str, &StatArray); 9] = [
        ("allocation", &stats.allocation),
        ("allocated_bytes", &stats.allocated_bytes),
        ("requested_bytes", &stats.requested_bytes),
        ("active", &stats.active),
        ("active_bytes", &stats.active_bytes),
        ("segment", &stats.segment),
        ("reserved_bytes", &stats.reserved_bytes),
        ("inactive_split", &stats.inactive_split),
        ("inactive_split_bytes", &stats.inactive_split_bytes),
    ];
    for (name, array) in arrays {
        for (scope, stat) in [("all", array.all), ("large", array.large_pool), ("small", array.small_pool)] {
            let net = stat.allocated.checked_sub(stat.freed);
            assert_eq!(net, Some(stat.current), "{name}.{scope}: in less out is not the current value: {stat:?}");
            assert!(stat.peak >= stat.current, "{name}.{scope}: the peak is below the current value: {stat:?}");
        }
        let (small, large) = (array.small_pool.current, array.large_pool.current);
        assert_eq!(small + large, array.all.current, "{name}: the classes do not add up: {array:?}");
    }
    let [requested, allocated, active, reserved, split] = [
        &stats.requested_bytes,
        &stats.allocated_bytes,
        &stats.active_bytes,
        &stats.reserved_bytes,
        &stats.inactive_split_bytes,
    ]
    .map(|array| array.all.current);
    assert!(requested <= active, "{requested} bytes requested, {active} active");
    assert!(
        allocated <= active && active <= reserved,
        "allocated {allocated}, active {active}, reserved {reserved}"
    );
    assert!(split <= reserved - active, "{split} bytes not releasable, {} cached", reserved - active);
}
