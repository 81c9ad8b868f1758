//! The driver calls of a growth and of giving back, with their roll-back and their bookkeeping.

use super::State;
use super::arena::Handle;
use super::plan::{Idle, Plan, Source};
use super::window::Window;
use crate::device::Device;
use crate::driver::{DevicePtr, DriverError, DriverErrorKind, StreamHandle};
use crate::error::{Error, Result};
use crate::history::Kind;
use crate::pool::{Request, Taken};
use crate::reclaim::Refusal;
use crate::size::SizeClass;
use crate::stream::StreamPool;
use std::sync::Arc;

/// Why a growth stopped half-way.
pub(super) enum Stop {
    Refused(Refusal),
    Failed(DriverError),
}

/// What was mapped, and what became of the rest.
pub(super) struct Outcome {
    /// Start and bytes of what is mapped now.
    mapped: Vec<(u64, u64)>,
    /// Handles that were not moved after all, still mapped where they were.
    unmoved: Vec<Idle>,
    stop: Option<Stop>,
}

impl State {
    /// Carries a plan out for a pool's stream, which is what the history names. After a failure, created pages are given back; moved ones stay where they are.
    pub(super) fn carry_out(
        &mut self,
        device: &Device,
        class: SizeClass,
        plan: &Plan,
        moving: Vec<Idle>,
        stream: StreamHandle,
    ) -> Outcome {
        let mut outcome = Outcome { mapped: Vec::new(), unmoved: moving, stop: None };
        for (index, &handle) in plan.releases.iter().enumerate() {
            // `Err(None)`: unmapped, and kept among such handles; the next one may still go.
            if let Err(Some(error)) = self.release(device, handle, stream) {
                outcome.unmoved.extend_from_slice(&plan.releases[index..]);
                outcome.stop = Some(Stop::Failed(error));
                return outcome;
            }
        }
        let mut created = Vec::new();
        let peaks = device.reserved_peaks();
        for step in &plan.steps {
            let result = match step.source {
                Source::Fresh => self.create(device, class, step.at, step.bytes, stream).inspect(|()| {
                    created.push((step.at, step.bytes));
                }),
                Source::Move(handle) => {
                    outcome.unmoved.retain(|waiting| *waiting != handle);
                    self.move_handle(device, handle, class, step.at, &mut outcome.unmoved, stream)
                }
            };
            match result {
                Ok(()) => outcome.mapped.push((step.at, step.bytes)),
                Err(stop) => {
                    outcome.stop = Some(stop);
                    break;
                }
            }
        }
        if outcome.stop.is_some() {
            for (at, bytes) in created {
                match self.release(device, Idle { class, at, bytes }, stream) {
                    Err(Some(error)) => device.defer(error), // still mapped and open: the pool's free memory
                    Ok(()) => {
                        outcome.mapped.retain(|(start, _)| *start != at);
                        device.forget_pages(class, bytes, peaks);
                    }
                    Err(None) => outcome.mapped.retain(|(start, _)| *start != at),
                }
            }
        }
        outcome
    }

    /// Hands what is mapped to the pool, and the request out of it if all went well.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attach(
        &mut self,
        device: &Device,
        pool: &Arc<StreamPool>,
        request: &Request,
        window: &Window,
        plan: &Plan,
        epoch: u64,
        outcome: Outcome,
    ) -> Result<std::result::Result<Taken, Refusal>> {
        debug_assert!(outcome.stop.is_some() || outcome.mapped.len() == plan.steps.len());
        let mut core = pool.lock();
        let unmoved = outcome.unmoved.iter().map(|handle| (handle.class, handle.at, handle.bytes));
        for (class, at, bytes) in
            window.others.iter().map(|&(at, bytes)| (request.class, at, bytes)).chain(unmoved)
        {
            device.history.record(Kind::Adopt, DevicePtr(at), bytes, pool.clock.key.handle.0, class);
        }
        let mut parts: Vec<(u64, u64)> =
            window.own.iter().chain(&window.others).chain(&outcome.mapped).copied().collect();
        parts.sort_unstable();
        let mut block = None;
        // Neighbours become one block; the stream's own epoch covers its own part.
        for run in parts.chunk_by(|a, b| a.0 + a.1 == b.0) {
            let (start, last) = (run[0].0, run[run.len() - 1]);
            let id = core.insert_span(request.class, start, last.0 + last.1 - start, epoch);
            if start <= window.start && last.0 + last.1 >= window.end {
                block = Some(id);
            }
        }
        for handle in &outcome.unmoved {
            core.insert_span(handle.class, handle.at, handle.bytes, 0);
        }
        match outcome.stop {
            None => {}
            Some(Stop::Refused(refusal)) => return Ok(Err(refusal)),
            Some(Stop::Failed(error)) => return Err(Error::Driver(device.noted(error))),
        }
        let id = block.expect("the window is mapped");
        core.claim(id);
        let at = core.place_in(id, window.start, request.bytes, request.alignment, request.class);
        let taken = core.carve_at(id, at, request);
        pool.grown(&mut core, taken.id);
        Ok(Ok(taken))
    }

    /// A new handle, mapped and open.
    fn create(
        &mut self,
        device: &Device,
        class: SizeClass,
        at: u64,
        bytes: u64,
        stream: StreamHandle,
    ) -> std::result::Result<(), Stop> {
        if !device.claim(bytes) {
            return Err(Stop::Refused(Refusal::Limit));
        }
        let pages = match device.driver.create_pages(bytes) {
            Ok(pages) => pages,
            Err(error) => {
                device.unclaim(bytes);
                return Err(match error.kind {
                    DriverErrorKind::OutOfMemory => Stop::Refused(Refusal::Device),
                    _ => Stop::Failed(error),
                });
            }
        };
        device.book_pages(class, bytes);
        let handle = Handle { bytes, pages };
        let result = self.map(device, class, at, handle, stream);
        if result.is_err() {
            self.drop_if_unmapped(device, handle);
        }
        result
    }

    /// Maps a handle that is mapped nowhere, and opens it. If that fails it is among the unmapped ones.
    fn map(
        &mut self,
        device: &Device,
        class: SizeClass,
        at: u64,
        handle: Handle,
        stream: StreamHandle,
    ) -> std::result::Result<(), Stop> {
        if let Err(error) = device.driver.map(DevicePtr(at), handle.bytes, handle.pages) {
            self.keep_unmapped(device, class, handle);
            return Err(Stop::Failed(error));
        }
        if let Err(error) = device.driver.set_access(DevicePtr(at), handle.bytes, &self.access) {
            match device.driver.unmap(DevicePtr(at), handle.bytes) {
                Ok(()) => self.keep_unmapped(device, class, handle),
                Err(stuck) => {
                    self.arenas[class.index()].handles.insert(at, handle);
                    self.stuck.push((class, at));
                    device.defer(stuck);
                }
            }
            return Err(Stop::Failed(error));
        }
        device.ledger.lock().device_allocs += 1;
        device.history.record(Kind::Map, DevicePtr(at), handle.bytes, stream.0, class);
        self.arenas[class.index()].handles.insert(at, handle);
        Ok(())
    }

    /// Keeps a handle that is mapped nowhere: booked with the large ones, to be given back.
    fn keep_unmapped(&mut self, device: &Device, class: SizeClass, handle: Handle) {
        device.move_pages(class, SizeClass::Large, handle.bytes);
        self.unmapped.push(handle);
    }

    /// Unmaps a handle in one place and maps it in another. If the first step fails it is `unmoved`.
    fn move_handle(
        &mut self,
        device: &Device,
        idle: Idle,
        class: SizeClass,
        at: u64,
        unmoved: &mut Vec<Idle>,
        stream: StreamHandle,
    ) -> std::result::Result<(), Stop> {
        if let Err(error) = device.driver.unmap(DevicePtr(idle.at), idle.bytes) {
            unmoved.push(idle);
            return Err(Stop::Failed(error));
        }
        device.ledger.lock().device_frees += 1;
        device.history.record(Kind::Unmap, DevicePtr(idle.at), idle.bytes, stream.0, idle.class);
        let handle = self.arenas[idle.class.index()].handles.remove(&idle.at).expect("a mapped handle");
        device.move_pages(idle.class, class, idle.bytes);
        self.map(device, class, at, handle, stream)
    }

    /// Unmaps a handle and gives it back. `Err(None)`: it is unmapped and could not be given back yet, which is tried
    /// again later; `Err(Some(_))`: it is still mapped.
    pub(super) fn release(
        &mut self,
        device: &Device,
        idle: Idle,
        stream: StreamHandle,
    ) -> std::result::Result<(), Option<DriverError>> {
        device.driver.unmap(DevicePtr(idle.at), idle.bytes).map_err(Some)?;
        device.ledger.lock().device_frees += 1;
        device.history.record(Kind::Unmap, DevicePtr(idle.at), idle.bytes, stream.0, idle.class);
        let handle = self.arenas[idle.class.index()].handles.remove(&idle.at).expect("a mapped handle");
        self.keep_unmapped(device, idle.class, handle);
        if self.release_unmapped(device) { Ok(()) } else { Err(None) }
    }

    /// Gives back the handles that are mapped nowhere; whether none is left.
    pub(super) fn release_unmapped(&mut self, device: &Device) -> bool {
        for (class, at) in std::mem::take(&mut self.stuck) {
            let handle = self.arenas[class.index()].handles[&at];
            if let Err(error) = device.driver.unmap(DevicePtr(at), handle.bytes) {
                self.stuck.push((class, at));
                device.defer(error);
                continue;
            }
            self.arenas[class.index()].handles.remove(&at);
            self.keep_unmapped(device, class, handle);
        }
        while let Some(handle) = self.unmapped.pop() {
            if let Err(error) = device.driver.release_pages(handle.pages) {
                self.unmapped.push(handle);
                device.defer(error);
                return false;
            }
            device.unbook_pages(SizeClass::Large, handle.bytes);
        }
        true
    }

    /// After a failed creation: the new handle goes at once, if it is not stuck.
    fn drop_if_unmapped(&mut self, device: &Device, handle: Handle) {
        if let Some(index) = self.unmapped.iter().position(|other| other.pages == handle.pages) {
            let last = self.unmapped.len() - 1;
            self.unmapped.swap(index, last);
            self.release_unmapped(device);
        }
    }
}
