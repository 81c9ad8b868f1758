//! A second opinion on who owns which bytes: every hand-out and every free must find its range as it expects it.

use crate::Check;
use std::collections::BTreeMap;
use vramalloc::DevicePtr;
use vramalloc::driver::sim::SimDriver;

/// Bytes that are written and checked in one place.
const SAMPLE: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Handed out under this number.
    Live(u64),
    /// Freed, and still used by queued work.
    Pending(u64),
}

/// Ranges that somebody holds; all else is free.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    /// By address: bytes and state.
    held: BTreeMap<u64, (u64, State)>,
}

impl Shadow {
    /// A free range becomes live.
    pub(crate) fn hand_out(&mut self, addr: u64, bytes: u64, id: u64) -> Check {
        ensure!(addr.is_multiple_of(512) && bytes.is_multiple_of(512) && bytes > 0, "odd block {addr:#x}+{bytes}");
        if let Some((start, (len, state))) = self.held.range(..addr + bytes).next_back() {
            ensure!(start + len <= addr, "{addr:#x}+{bytes} handed out over {state:?} at {start:#x}+{len}");
        }
        self.held.insert(addr, (bytes, State::Live(id)));
        Ok(())
    }

    /// A range changes from one state to another (`None`: free).
    pub(crate) fn change(&mut self, addr: u64, bytes: u64, from: State, to: Option<State>) -> Check {
        let found = self.held.get(&addr).copied();
        ensure!(found == Some((bytes, from)), "{addr:#x}+{bytes}: expected {from:?}, found {found:?}");
        match to {
            Some(state) => self.held.insert(addr, (bytes, state)),
            None => self.held.remove(&addr),
        };
        Ok(())
    }

    /// What is held, by address: `(address, bytes, is live)`.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u64, u64, bool)> + '_ {
        self.held.iter().map(|(&addr, &(bytes, state))| (addr, bytes, matches!(state, State::Live(_))))
    }
}

/// Where a block is written and checked: its start, its middle, its end.
fn samples(bytes: u64) -> [u64; 3] {
    [0, bytes / 2, bytes - SAMPLE]
}

/// The pattern of allocation `id` at an offset of its block.
fn pattern(id: u64, offset: u64) -> [u8; SAMPLE as usize] {
    let seed = (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ offset;
    std::array::from_fn(|i| (seed.rotate_left(i as u32) >> 7) as u8)
}

/// Marks a block's real bytes as allocation `id`'s.
pub(crate) fn write_pattern(sim: &SimDriver, addr: u64, bytes: u64, id: u64) -> Check {
    for offset in samples(bytes) {
        sim.write(DevicePtr(addr + offset), &pattern(id, offset)).map_err(|why| why.to_string())?;
    }
    Ok(())
}

/// Checks that the marks are still there.
pub(crate) fn check_pattern(sim: &SimDriver, addr: u64, bytes: u64, id: u64) -> Check {
    for offset in samples(bytes) {
        let mut found = [0; SAMPLE as usize];
        sim.read(DevicePtr(addr + offset), &mut found).map_err(|why| why.to_string())?;
        ensure!(
            found == pattern(id, offset),
            "the bytes of allocation {id} at {addr:#x}+{offset} were overwritten"
        );
    }
    Ok(())
}
