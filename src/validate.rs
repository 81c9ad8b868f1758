//! Every invariant, numbered, and a walk that checks them all.
//!
//! | rule | |
//! | --- | --- |
//! | I1 | The blocks of a segment (or span) tile it: neighbours link to each other, addresses follow sizes. |
//! | I2 | Sizes and addresses are multiples of 512, and no block is empty. |
//! | I3 | No two neighbours are both free: they are merged. |
//! | I4 | A free block is in the free index, of its class, and nothing else is. |
//! | I5 | A live or pending block has a requested size of at most its own. |
//! | I6 | Pending blocks and the queue of pending frees are the same. |
//! | I7 | The counters are what a walk over the blocks finds. |
//! | I8 | Reserved is the sum of segments and pages, what is on its way back included. |
//! | I9 | Allocated is at most active, active at most reserved. |
//! | I10 | Segments and spans do not overlap. |
//! | I11 | No record of the block table is lost. |
//! | I12 | The spans of all pools are just what is mapped. |

use crate::block::{NONE, State};
use crate::device::Ledger;
use crate::driver::DevicePtr;
use crate::pool::{PoolCore, Run};
use crate::size::{MIN_BLOCK_BYTES, SizeClass};
use crate::stats::{LANES, Lane};
use crate::supply::State as Supply;

/// A broken invariant: a bug of the allocator (or memory corruption on the host).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant {rule} is broken{}: {detail}", address.map(|address| format!(" at block {address}")).unwrap_or_default())]
#[non_exhaustive]
pub struct InvariantViolation {
    /// The rule's number, as in the module's table.
    pub rule: &'static str,
    /// The block, if one is to blame.
    pub address: Option<DevicePtr>,
    /// What was found.
    pub detail: String,
}

type Check = Result<(), InvariantViolation>;

fn broken(rule: &'static str, address: Option<u64>, detail: impl Into<String>) -> InvariantViolation {
    InvariantViolation { rule, address: address.map(DevicePtr), detail: detail.into() }
}

/// Checks all pools of a device, which the caller has locked, against each other, the supply and the ledger.
pub(crate) fn check(pools: &[&PoolCore], supply: &Supply, ledger: &Ledger) -> Check {
    let mut runs = Vec::new();
    let (mut reserved, mut active) = (ledger.leaving + supply.reserved_bytes(), 0);
    for core in pools {
        for (run, bytes) in check_pool(core)? {
            if !run.expandable {
                reserved += bytes;
            }
            runs.push((run.base, bytes, run));
        }
        active += (0..2).map(|class| core.stats.currents(class)[Lane::ActiveBytes as usize]).sum::<i64>();
    }
    runs.sort_unstable_by_key(|(base, ..)| *base);
    for pair in runs.windows(2) {
        if pair[0].0 + pair[0].1 > pair[1].0 {
            return Err(broken("I10", Some(pair[1].0), "overlaps the memory before it"));
        }
    }
    for class in SizeClass::ALL {
        let spans = runs.iter().filter(|(.., run)| run.expandable && run.class == class);
        let owned = joined(spans.map(|&(base, bytes, _)| (base, bytes)));
        let mapped = joined(supply.owned_handles(class));
        if owned != mapped {
            let odd = owned.iter().zip(&mapped).find(|(owned, mapped)| owned != mapped);
            let detail = format!(
                "class {class:?}: pools own {} ranges, {} are mapped: {odd:x?}",
                owned.len(),
                mapped.len()
            );
            return Err(broken("I12", odd.map(|(owned, _)| owned.0), detail));
        }
    }
    let booked = ledger.reserved_bytes.all.current;
    if reserved != booked {
        return Err(broken("I8", None, format!("{booked} bytes are booked as reserved, there are {reserved}")));
    }
    let array = &ledger.reserved_bytes;
    if array.small_pool.current + array.large_pool.current != array.all.current {
        return Err(broken("I8", None, "reserved by class does not add up"));
    }
    if u64::try_from(active).is_ok_and(|active| active > booked) {
        return Err(broken("I9", None, format!("{active} bytes are active, {booked} reserved")));
    }
    Ok(())
}

/// Ranges in order, neighbours made one.
fn joined(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, bytes) in ranges {
        match joined.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += bytes,
            _ => joined.push((start, bytes)),
        }
    }
    joined
}

/// Checks one pool; returns what memory it owns.
fn check_pool(core: &PoolCore) -> Result<Vec<(Run, u64)>, InvariantViolation> {
    let mut found = [[0i64; LANES]; 2];
    let mut free = [0; 2];
    let mut runs = Vec::new();
    let (mut records, mut pending, mut held) = (0, 0, 0);
    for run in core.runs() {
        let (mut addr, mut before) = (run.base, NONE);
        for id in core.chain(run.first) {
            let block = &core.blocks[id];
            let at = Some(block.addr);
            records += 1;
            if block.addr != addr || block.prev != before || block.class != run.class {
                return Err(broken("I1", at, format!("expected at {addr:#x}")));
            }
            if block.size == 0
                || !block.size.is_multiple_of(MIN_BLOCK_BYTES)
                || !block.addr.is_multiple_of(MIN_BLOCK_BYTES)
            {
                return Err(broken("I2", at, format!("{} bytes", block.size)));
            }
            if before != NONE && block.state() == State::Free && core.blocks[before].state() == State::Free {
                return Err(broken("I3", at, "a free block beside a free one"));
            }
            let is_held = block.is_held();
            if is_held && !(1..=block.size).contains(&block.requested) {
                return Err(broken("I5", at, format!("{} of {} bytes requested", block.requested, block.size)));
            }
            pending += usize::from(block.state() == State::Pending);
            held += usize::from(is_held);
            free[run.class.index()] += usize::from(block.state() == State::Free);
            count(core, block, &mut found[run.class.index()]);
            (addr, before) = (block.end(), id);
        }
        let bytes = addr - run.base;
        if !run.expandable
            && core.segments.iter().any(|(_, segment)| segment.base == run.base && segment.bytes != bytes)
        {
            return Err(broken("I1", Some(run.base), "the blocks do not fill their segment"));
        }
        runs.push((run, bytes));
    }
    if records != core.blocks.len() {
        return Err(broken("I11", None, format!("{} records in use, {records} in segments", core.blocks.len())));
    }
    for class in SizeClass::ALL {
        let index = &core.free[class.index()];
        let indexed = index.check(&core.blocks).map_err(|detail| broken("I4", None, detail))?;
        if indexed != free[class.index()] {
            let detail = format!("{} free blocks of class {class:?}, {indexed} in the index", free[class.index()]);
            return Err(broken("I4", None, detail));
        }
        for id in index.iter(&core.blocks) {
            let block = &core.blocks[id];
            if block.state() != State::Free || block.class != class {
                return Err(broken("I4", Some(block.addr), format!("{:?} in the free index", block.state())));
            }
        }
    }
    if pending != core.pending.len()
        || core.pending.iter().any(|entry| core.blocks[entry.block].state() != State::Pending)
    {
        return Err(broken("I6", None, format!("{pending} pending blocks, {} in the queue", core.pending.len())));
    }
    if held != core.held() {
        return Err(broken("I7", None, format!("{held} blocks held, {} counted", core.held())));
    }
    check_counters(core, &found)?;
    Ok(runs)
}

/// What a block adds to the counters.
fn count(core: &PoolCore, block: &crate::block::Block, found: &mut [i64; LANES]) {
    let mut add = |lane: Lane, value: u64| found[lane as usize] += value as i64;
    match block.state() {
        State::Live => {
            add(Lane::Allocation, 1);
            add(Lane::AllocatedBytes, block.size);
            add(Lane::OversizeAllocation, u64::from(core.rules.is_oversize(block.size)));
        }
        State::Free if !core.rules.expandable && !block.is_whole_segment() => {
            add(Lane::InactiveSplit, 1);
            add(Lane::InactiveSplitBytes, block.size);
        }
        _ => {}
    }
    if block.is_held() {
        add(Lane::RequestedBytes, block.requested);
        add(Lane::Active, 1);
        add(Lane::ActiveBytes, block.size);
    }
}

fn check_counters(core: &PoolCore, found: &[[i64; LANES]; 2]) -> Check {
    for class in SizeClass::ALL {
        let current = core.stats.currents(class.index());
        if current != found[class.index()] {
            let detail = format!("class {class:?} counts {current:?}, a walk finds {:?}", found[class.index()]);
            return Err(broken("I7", None, detail));
        }
        if current[Lane::AllocatedBytes as usize] > current[Lane::ActiveBytes as usize] {
            return Err(broken("I9", None, "more is allocated than active"));
        }
    }
    Ok(())
}
