//! Threads on a small device whose streams end while others run, and whose memory outlives their allocator.

use crate::bench::{Bench, MIB, each_kind};
use crate::soak::Random;
use vramalloc::driver::sim::SimDriver;
use vramalloc::{CachingAllocator, Stream};

const THREADS: u64 = 4;
const STEPS: u64 = 400;

fn work(sim: &SimDriver, allocator: CachingAllocator, shared: &Stream, mut random: Random) {
    let mut own = allocator.stream(sim.create_stream()).unwrap();
    let mut live = Vec::new();
    for step in 1..=STEPS {
        let on_shared = random.below(3) == 0;
        let stream = if on_shared { shared } else { &own };
        if let Ok(block) = allocator.alloc(1 + random.below(6 * MIB), stream) {
            if !on_shared && random.below(5) == 0 {
                let work = vramalloc::driver::sim::Work::writing(block.ptr(), block.bytes());
                sim.launch(own.key(), work).unwrap();
            }
            live.push(block);
        }
        if live.len() > 6 {
            live.swap_remove(random.index(6));
        }
        match random.below(100) {
            0 => drop(allocator.empty_cache().unwrap()),
            1 => drop(allocator.memory_stats()),
            2 if allocator.is_expandable() => allocator.validate().unwrap(),
            _ => {}
        }
        if step.is_multiple_of(100) {
            allocator.retire_stream(&own).unwrap();
            sim.complete(own.key());
            own = allocator.stream(sim.create_stream()).unwrap();
        }
    }
    drop(allocator); // some of the memory goes after every handle of the allocator
    drop(live);
}

#[test]
fn streams_may_end_while_other_threads_need_their_memory() {
    // A stream that one thread retired while another took its idle pages ended in a panic, or in memory that nobody
    // gave back.
    each_kind(|segments| {
        for round in 0..8 {
            let Bench { sim, allocator } = Bench::light(128, segments, "");
            let shared = allocator.stream(sim.create_stream()).unwrap();
            std::thread::scope(|scope| {
                for number in 0..THREADS {
                    let (sim, allocator, shared) = (&*sim, allocator.clone(), shared.clone());
                    let random = Random::new(1 + round * THREADS + number);
                    scope.spawn(move || work(sim, allocator, &shared, random));
                }
                drop((allocator, shared));
            });
            sim.assert_clean();
            sim.complete_all();
            assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
        }
    });
}
