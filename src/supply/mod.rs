//! The page supply of expandable segments: who has which physical pages, and how they move.
//!
//! One supply a device, with a lock of its own that is taken only when a pool grows or gives back. It owns two
//! [`Arena`]s, one a size class: reserved addresses shared by all streams, in which handles are mapped. Pools own
//! *spans* of mapped memory there. A growth goes like this:
//!
//! 1. With all pools locked: choose the place ([`window`]) and the pages ([`plan`]), and take both out of the pools.
//! 2. With no pool locked: unmap, create, map, set access. None of these calls waits for the device.
//! 3. With the growing pool locked: what is mapped now becomes a free block, and the request is cut from it.
//!
//! A page is moved or given back only when the fences tell that all work that used it has passed.
//!
//! If a driver call fails, what was created is given back; pages that were moved by then are the growing pool's free
//! memory where they are now. Nothing is lost, and nothing is half mapped.

pub(crate) mod arena;
pub(crate) mod plan;
pub(crate) mod policy;
pub(crate) mod span;
mod window;
mod work;

use crate::device::Device;
use crate::driver::{DevicePtr, DriverError, DriverErrorKind, StreamHandle};
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::pool::{PoolCore, Request, Taken};
use crate::reclaim::{Growth, Refusal};
use crate::size::{MIN_BLOCK_BYTES, SizeClass};
use crate::stream::StreamPool;
use crate::sync::{Mutex, PoolGuard};
use arena::{Arena, Handle};
use plan::{Beyond, End, Idle, IdleHandles, Order};
use policy::{Policy, Use};
use std::cell::OnceCell;
use std::sync::Arc;
use window::{Piece, Pieces, Window};

/// One device's pages.
#[derive(Debug)]
pub(crate) struct Supply {
    pub(crate) state: Mutex<State>,
    page_bytes: u64,
}

/// Under the supply's lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) arenas: [Arena; 2],
    /// Handles that are mapped nowhere: a driver call failed at the wrong moment.
    pub(crate) unmapped: Vec<Handle>,
    /// Mappings that the driver would neither open nor undo; nobody uses them.
    pub(crate) stuck: Vec<(SizeClass, u64)>,
    /// The devices that may use the memory, this one first.
    access: Vec<u32>,
}

impl Supply {
    pub(crate) fn new(device: u32, page_bytes: u64) -> Self {
        let arenas = [Arena::default(), Arena::default()];
        let state = State { arenas, unmapped: Vec::new(), stuck: Vec::new(), access: vec![device] };
        Self { state: Mutex::new(state), page_bytes }
    }
}

/// What the pools have free, with all of them locked.
struct Locked<'a> {
    cores: Vec<PoolGuard<'a, PoolCore>>,
    pieces: [Pieces; 2],
}

impl<'a> Locked<'a> {
    /// Locks every pool, brings their ages to one measure and lists what is free.
    fn new(pools: &'a [Arc<StreamPool>]) -> Self {
        let mut cores: Vec<_> = pools.iter().map(|pool| pool.lock()).collect();
        let now = cores.iter().map(|core| core.searches).max().unwrap_or(0);
        let mut pieces = [Pieces::new(), Pieces::new()];
        for (owner, (core, pool)) in cores.iter_mut().zip(pools).enumerate() {
            core.searches = now;
            let pinned = pool.is_pinned(); // nobody else's, and stays where it is
            for class in SizeClass::ALL {
                for id in core.free[class.index()].iter(&core.blocks) {
                    let block = &core.blocks[id];
                    let passed = !pinned && pool.clock.has_passed(block.epoch);
                    let age = now.wrapping_sub(block.born);
                    pieces[class.index()].insert(block.addr, Piece { bytes: block.size, owner, id, age, passed });
                }
            }
        }
        Self { cores, pieces }
    }

    /// What lies in the last handle of large memory, to a pool of which it could pay for `need` bytes.
    fn end(&self, arena: &Arena, pools: &[Arc<StreamPool>], own: usize, need: u64) -> End {
        let Some((&at, handle)) = arena.handles.last_key_value() else { return End::Used };
        if handle.bytes < need {
            return End::Used;
        }
        let (mut left, mut waits) = (at + handle.bytes, None);
        for (&start, piece) in self.pieces[SizeClass::Large.index()].iter().rev() {
            // For another stream's work, which may take any time, a page is not worth the wait.
            if start + piece.bytes != left || pools[piece.owner].is_pinned() || !piece.passed && piece.owner != own
            {
                return End::Used;
            }
            if !piece.passed {
                waits = waits.max(Some(self.cores[own].blocks[piece.id].epoch));
            }
            left = start;
            if left <= at {
                let idle = Idle { class: SizeClass::Large, at, bytes: handle.bytes };
                return waits.map_or(End::Idle(idle), End::Waits);
            }
        }
        End::Used
    }

    /// Takes addresses out of the free blocks that they lie in; returns the latest epoch and the first's owner.
    fn cut(&mut self, class: SizeClass, start: u64, bytes: u64) -> (u64, usize) {
        let end = start + bytes;
        let (mut at, mut epoch, mut first) = (start, 0, None);
        while at < end {
            let (&from, piece) = self.pieces[class.index()].range(..=at).next_back().expect("a free block");
            let part = (from + piece.bytes).min(end) - at;
            let (of, owner) = self.cut_one(class, at, part);
            epoch = epoch.max(of);
            first = first.or(Some(owner));
            at += part;
        }
        (epoch, first.expect("a handle has bytes"))
    }

    /// The same within one free block.
    fn cut_one(&mut self, class: SizeClass, start: u64, bytes: u64) -> (u64, usize) {
        let pieces = &mut self.pieces[class.index()];
        let (at, piece) =
            pieces.range(..=start).next_back().map(|(&at, &piece)| (at, piece)).expect("a free block");
        let core = &mut self.cores[piece.owner];
        let epoch = core.blocks[piece.id].epoch;
        let behind = core.cut_span(piece.id, start, bytes);
        pieces.remove(&at);
        if start > at {
            pieces.insert(at, Piece { bytes: start - at, ..piece });
        }
        if let Some(id) = behind {
            let end = start + bytes;
            pieces.insert(end, Piece { bytes: at + piece.bytes - end, id, ..piece });
        }
        (epoch, piece.owner)
    }
}

/// Asks the driver how far the streams are whose free memory could be moved. Errors are kept for later. Asks nothing during
/// a capture: an event on the default stream could spoil it.
pub(crate) fn poll_streams(device: &Device) {
    if !device.expandable || device.is_capturing() {
        return;
    }
    for pool in device.releasable_pools() {
        let latest = pool.lock().latest_free_epoch();
        if let Err(error) = pool.clock.poll(latest) {
            device.defer(error);
        }
    }
}

/// Waits on the host until the oldest stream's free memory can be moved; false if there is nothing to wait for. A
/// stream that cannot be waited for (it is being captured, or its event fails) does not keep the others back.
pub(crate) fn wait_for_oldest(device: &Device) -> bool {
    let mut waits: Vec<(u32, Arc<StreamPool>, u64)> = Vec::new();
    for pool in device.releasable_pools() {
        let core = pool.lock();
        let free = SizeClass::ALL.iter().flat_map(|class| core.free[class.index()].iter(&core.blocks));
        let waiting = free.map(|id| &core.blocks[id]).filter(|block| !pool.clock.has_passed(block.epoch));
        let Some(block) = waiting.min_by_key(|block| block.epoch) else { continue };
        waits.push((core.searches.wrapping_sub(block.born), Arc::clone(&pool), block.epoch));
    }
    waits.sort_by_key(|(age, ..)| std::cmp::Reverse(*age));
    waits.iter().any(|(_, pool, epoch)| wait_for(device, &pool.clock, *epoch))
}

/// Waits on the host for an epoch; false if that cannot be waited for, with the error kept for later.
pub(crate) fn wait_for(device: &Device, clock: &StreamClock, epoch: u64) -> bool {
    device.ledger.lock().syncs += 1;
    match clock.wait(epoch) {
        Ok(()) => true,
        Err(error) => {
            if error.kind != DriverErrorKind::Capturing {
                device.defer(error);
            }
            false
        }
    }
}

/// A place for a request that found only free blocks that are kept for larger ones: in the block, and there at the end,
/// where the fewest idle handles would be touched, which can move as long as nothing lies in them. (At the low end the age
/// of the neighbours decides, as in a hit.) None where another pool has free memory that could do, which is preferred, as
/// [`grow`] does.
pub(crate) fn take_kept(pool: &StreamPool, request: &Request) -> Option<Taken> {
    let device = &*pool.device;
    let keeps = device.expandable && policy::kept_bytes(&device.config) < u64::MAX;
    if !keeps || request.class == SizeClass::Small || request.alignment > MIN_BLOCK_BYTES {
        return None;
    }
    let class = request.class.index();
    let state = device.supply.state.lock();
    // Pieces of less than a quarter of the request are of no account.
    let has_free = |other: &StreamPool| {
        let core = other.lock();
        !other.is_pinned() && core.free[class].largest(&core.blocks) >= request.bytes / 4
    };
    if device.pools().iter().any(|other| !std::ptr::eq(&**other, pool) && has_free(other)) {
        return None;
    }
    let arena = &state.arenas[class];
    pool.search(|core| {
        let places = core.free[class].iter_from(&core.blocks, request.bytes).flat_map(|id| {
            let (start, end) = (core.blocks[id].addr, core.blocks[id].end());
            [start, end - request.bytes].map(|at| (arena.touched_bytes(start, end, at, request.bytes), at, id))
        });
        let (_, at, id) = places.min()?;
        core.searches = core.searches.wrapping_add(1);
        core.claim(id);
        let at = core.place_in(id, at, request.bytes, request.alignment, request.class);
        Some(core.carve_at(id, at, request))
    })
}

/// Maps what the request needs and takes it from there.
pub(crate) fn grow(supply: &Supply, pool: &Arc<StreamPool>, request: &Request, beyond: Beyond) -> Result<Growth> {
    let mut attempt = Attempt { ahead: true, end: beyond == Beyond::Forbidden, wait: None };
    let mut grown = grow_once(supply, pool, request, beyond, &mut attempt)?;
    if let Some(epoch) = attempt.wait.take() {
        wait_for(&pool.device, &pool.clock, epoch); // once: if the end is in use again by then, so be it
        attempt = Attempt { ahead: true, end: false, wait: None };
        grown = grow_once(supply, pool, request, beyond, &mut attempt)?;
    }
    if grown.is_err() && attempt.ahead {
        // What was wanted ahead of need may be what was too much.
        return grow_once(supply, pool, request, beyond, &mut Attempt { ahead: false, ..attempt });
    }
    Ok(grown)
}

/// What an attempt to grow may do, and what came of that.
struct Attempt {
    /// Something may be created ahead of need; whether it was.
    ahead: bool,
    /// The end of large memory may be waited for.
    end: bool,
    /// It is to be, until the pool's stream has passed this epoch.
    wait: Option<u64>,
}

fn grow_once(
    supply: &Supply,
    pool: &Arc<StreamPool>,
    request: &Request,
    beyond: Beyond,
    attempt: &mut Attempt,
) -> Result<Growth> {
    let may_be_ahead = std::mem::replace(&mut attempt.ahead, false);
    let device = &*pool.device;
    poll_streams(device);
    let mut state = supply.state.lock();
    if let Some(taken) = pool.take(request) {
        return Ok(Ok(taken)); // another thread was faster
    }
    state.release_unmapped(device);
    let held = crate::allocator::held(device);
    let allocated = held.allocated.saturating_add(request.bytes);
    let peak = device.peaks.peak_allocated().max(allocated);
    let reserved = device.reserved();
    let [peak_reserved, ..] = device.reserved_peaks();
    let use_now = Use { reserved, peak_reserved, allocated, peak_allocated: peak, freed: held.freed };
    let mut policy = Policy::new(&device.config, supply.page_bytes, request.class, use_now);
    if !may_be_ahead {
        policy.ahead = 0;
    }
    let pools = device.pools();
    let Some(own) = pools.iter().position(|other| Arc::ptr_eq(other, pool)) else {
        return Err(pool.retired()); // by another thread, in between
    };
    let bytes = request.padded_bytes();

    let arena = &mut state.arenas[request.class.index()];
    let mut locked = Locked::new(&pools);
    let find = |arena: &Arena, locked: &Locked<'_>| {
        window::best_windows(arena, &locked.pieces[request.class.index()], own, bytes, &policy)
    };
    let mut windows = find(arena, &locked);
    if windows.is_empty() {
        drop(locked);
        match arena.reserve(&*device.driver, device.total_bytes, supply.page_bytes, bytes) {
            Ok(()) => {}
            Err(error) if error.kind == DriverErrorKind::AddressSpace => return Ok(Err(Refusal::AddressSpace)),
            Err(error) => return Err(Error::Driver(device.noted(error))),
        }
        locked = Locked::new(&pools);
        windows = find(arena, &locked);
        if windows.is_empty() {
            return Ok(Err(Refusal::AddressSpace));
        }
    }
    // Listed once in each order; what lies in a window stays.
    let handles = OnceCell::new();
    let lists: [OnceCell<Vec<Idle>>; Order::COUNT] = std::array::from_fn(|_| OnceCell::new());
    let idle = |window: &Window, order: Order| -> Vec<Idle> {
        let list = lists[order as usize].get_or_init(|| {
            let all = || IdleHandles::new(&state.arenas, &locked.pieces, supply.page_bytes);
            handles.get_or_init(all).in_order(order)
        });
        let stays = |handle: &Idle| {
            handle.class == request.class && handle.at < window.end && handle.at + handle.bytes > window.start
        };
        list.iter().filter(|handle| !stays(handle)).copied().collect()
    };
    let large = SizeClass::Large.index();
    // Nothing is given back during a capture.
    let end = match windows.first() {
        Some(window) if policy.trades(window.need) && !device.is_capturing() => {
            locked.end(&state.arenas[large], &pools, own, window.need)
        }
        _ => End::Used,
    };
    if let End::Waits(epoch) = end
        && attempt.end
    {
        attempt.wait = Some(epoch);
        return Ok(Err(Refusal::Device));
    }
    let Some((window, plan)) = plan::cheapest(windows, &policy, beyond, end, idle) else {
        return Ok(Err(Refusal::Device));
    };
    let (fresh, given_back) = (plan.fresh_bytes(), plan.releases.iter().map(|handle| handle.bytes).sum());
    attempt.ahead = plan.steps.iter().map(|step| step.bytes).sum::<u64>() > window.need;
    if device.limit().is_some_and(|limit| reserved.saturating_add(fresh).saturating_sub(given_back) > limit) {
        return Ok(Err(Refusal::Limit)); // before anything is created for nothing
    }
    let (epoch, moving) = detach(&mut locked, request.class, &window, &plan);
    drop(locked);

    let outcome = state.carry_out(device, request.class, &plan, moving, pool.clock.key.handle);
    state.attach(device, pool, request, &window, &plan, epoch, outcome)
}

/// Takes the window's memory and the pages of the plan out of the pools. Returns the latest epoch of the pool's own
/// part, and where moved handles were.
fn detach(locked: &mut Locked<'_>, class: SizeClass, window: &Window, plan: &plan::Plan) -> (u64, Vec<Idle>) {
    let mut epoch = 0;
    for &(start, bytes) in &window.own {
        epoch = epoch.max(locked.cut(class, start, bytes).0);
    }
    for &(start, bytes) in &window.others {
        locked.cut(class, start, bytes); // its work has passed: no epoch of the new owner's stream is needed
    }
    let mut moving = Vec::new();
    for step in &plan.steps {
        if let plan::Source::Move(handle) = step.source {
            moving.push(handle);
        }
    }
    for handle in plan.releases.iter().chain(&moving) {
        locked.cut(handle.class, handle.at, handle.bytes);
    }
    (epoch, moving)
}

/// Gives idle pages back to the driver, the longest unused first, until `target` bytes or less are reserved. Waits for
/// nothing. Returns the bytes.
///
/// # Errors
/// What the driver says; what was not given back is cached as before.
pub(crate) fn trim(supply: &Supply, device: &Device, target: u64) -> Result<u64> {
    poll_streams(device);
    let mut state = supply.state.lock();
    let before = state.reserved_bytes();
    state.release_unmapped(device);
    let pools = device.pools();
    let mut locked = Locked::new(&pools);
    let mut excess = device.reserved().saturating_sub(target);
    let mut chosen = Vec::new();
    let handles = IdleHandles::new(&state.arenas, &locked.pieces, supply.page_bytes);
    for handle in handles.in_order(Order::Oldest) {
        if excess == 0 {
            break;
        }
        excess = excess.saturating_sub(handle.bytes);
        let (_, owner) = locked.cut(handle.class, handle.at, handle.bytes);
        chosen.push((handle, Arc::clone(&pools[owner])));
    }
    drop(locked);
    let mut failed = None;
    for (handle, owner) in chosen {
        let result = if failed.is_none() { state.release(device, handle, owner.clock.key.handle) } else { Ok(()) };
        match result {
            Ok(()) if failed.is_none() => {}
            Err(None) => {} // unmapped, and kept among such handles: nobody's memory any more
            Ok(()) | Err(Some(_)) => {
                failed = failed.or(result.err().flatten());
                owner.lock().insert_span(handle.class, handle.at, handle.bytes, 0); // all its work has passed
            }
        }
    }
    match failed {
        Some(error) => Err(Error::Driver(device.noted(error))),
        None => Ok(before - state.reserved_bytes()),
    }
}

/// Lets another device use all memory that is mapped, now and later.
///
/// # Errors
/// What the driver says; access is then as before, for what will be mapped, too.
pub(crate) fn grant_access(supply: &Supply, device: &Device, peer: u32) -> Result<()> {
    let mut state = supply.state.lock();
    if state.access.contains(&peer) {
        return Ok(());
    }
    let mut access = state.access.clone();
    access.push(peer);
    for arena in &state.arenas {
        for (&at, handle) in &arena.handles {
            device.checked(device.driver.set_access(DevicePtr(at), handle.bytes, &access))?;
        }
    }
    state.access = access;
    Ok(())
}

/// What the supply holds, for `validate`: reserved bytes, and the mapped ranges of a size class that pools own.
impl State {
    pub(crate) fn reserved_bytes(&self) -> u64 {
        let mapped: u64 = self.arenas.iter().map(Arena::mapped_bytes).sum();
        mapped + self.unmapped.iter().map(|handle| handle.bytes).sum::<u64>()
    }

    pub(crate) fn owned_handles(&self, class: SizeClass) -> impl Iterator<Item = (u64, u64)> + '_ {
        let handles = self.arenas[class.index()].handles.iter();
        handles.filter(move |(at, _)| !self.stuck.contains(&(class, **at))).map(|(&at, handle)| (at, handle.bytes))
    }
}

/// The end: every page goes back, and every range of addresses.
pub(crate) fn dismantle(supply: &Supply, device: &Device) {
    let mut state = supply.state.lock();
    state.release_unmapped(device);
    let mut result: std::result::Result<(), DriverError> = Ok(());
    for class in SizeClass::ALL {
        let handles: Vec<_> =
            state.arenas[class.index()].handles.iter().map(|(&at, handle)| (at, handle.bytes)).collect();
        for (at, bytes) in handles {
            if let Err(error) = state.release(device, Idle { class, at, bytes }, StreamHandle::DEFAULT) {
                result = result.and(error.map_or(Ok(()), Err));
            }
        }
    }
    state.release_unmapped(device);
    if state.arenas.iter().all(|arena| arena.handles.is_empty()) {
        for arena in &mut state.arenas {
            result = result.and(arena.free_ranges(&*device.driver));
        }
    }
    if let Err(error) = result {
        device.defer(error);
    }
}
