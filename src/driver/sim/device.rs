//! The driver calls of the simulated device.

use super::SimDriver;
use super::log::{LogEntry, Subject};
use super::oracle::Refusal;
use super::state::State;
use crate::driver::{
    Call, CallCounts, Capabilities, DevicePtr, Driver, DriverError, DriverErrorKind, EventHandle, HostPtr,
    MemoryInfo, PageHandle, Result, StreamHandle, StreamKey,
};

impl SimDriver {
    /// Makes one driver call: counts it, lets it fail if it must, charges it, records it.
    ///
    /// `body` notes in the subject what the call answers.
    fn call<T>(
        &self,
        call: Call,
        mut subject: Subject,
        body: impl FnOnce(&mut State, &mut Subject) -> std::result::Result<T, Refusal>,
    ) -> Result<T> {
        if self.is_forked() {
            return Err(DriverError::new(call, DriverErrorKind::Forked));
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let seq = state.calls;
        state.calls += 1;
        if seq == 0 {
            self.machine.note_context(self.options.device);
        }
        let at_nanos = state.timeline.now();
        // Before the body, which may take away what the call is about.
        let cost = state.cost(call, subject.ptr, subject.bytes);

        let struck = state.faults.strike(call);
        if state.doom.is_none() {
            state.doom = struck.filter(|kind| kind.is_sticky());
        }
        let answer = match state.doom.or(struck) {
            Some(kind) => Err(Refusal::honest(kind, "")),
            None => body(state, &mut subject),
        };
        // Time passes after the effect: work that ends while the call runs was unfinished when it was made.
        state.elapse(cost);
        let nanos = state.timeline.now() - at_nanos;
        self.meter.add(call, nanos);
        if let Err(refusal) = &answer
            && refusal.is_violation
        {
            state.oracle.note_call(seq, call, &subject, &refusal.detail);
        }
        let Subject { ptr, bytes, pages, event, stream } = subject;
        let error = answer.as_ref().err().map(|refusal| refusal.kind);
        state.log.push(LogEntry { seq, call, ptr, bytes, pages, event, stream, at_nanos, nanos, error });
        answer.map_err(|refusal| DriverError::with_detail(call, refusal.kind, refusal.detail))
    }

    /// A call of virtual memory management.
    fn page_call<T>(
        &self,
        call: Call,
        subject: Subject,
        body: impl FnOnce(&mut State, &mut Subject) -> std::result::Result<T, Refusal>,
    ) -> Result<T> {
        if !self.options.virtual_memory {
            return self.call(call, subject, |_, _| Err(Refusal::honest(DriverErrorKind::NotSupported, "")));
        }
        self.call(call, subject, body)
    }
}

fn size(bytes: u64) -> Subject {
    Subject { bytes, ..Subject::default() }
}

fn range(ptr: DevicePtr, bytes: u64) -> Subject {
    Subject { ptr, bytes, ..Subject::default() }
}

fn transfer(ptr: DevicePtr, bytes: u64, stream: StreamKey) -> Subject {
    Subject { stream: Some(stream.handle), ..range(ptr, bytes) }
}

fn about(event: EventHandle) -> Subject {
    Subject { event: Some(event), ..Subject::default() }
}

fn both(event: EventHandle, stream: StreamKey) -> Subject {
    Subject { stream: Some(stream.handle), ..about(event) }
}

impl Driver for SimDriver {
    fn device(&self) -> u32 {
        self.options.device
    }

    fn name(&self) -> String {
        "simulated device".to_owned()
    }

    fn label(&self) -> String {
        match self.options.device {
            0 => "sim".to_owned(),
            device => format!("sim:{device}"),
        }
    }

    fn capabilities(&self) -> Capabilities {
        let plain = Capabilities::new(self.options.capacity);
        if self.options.virtual_memory { plain.with_virtual_memory(self.options.page_bytes) } else { plain }
    }

    fn check_usable(&self) -> Result<()> {
        let kind = if self.is_forked() { Some(DriverErrorKind::Forked) } else { self.state.lock().doom };
        kind.map_or(Ok(()), |kind| Err(DriverError::new(Call::Open, kind)))
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.call(Call::MemoryInfo, Subject::default(), |state, _| Ok(state.memory_info()))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.call(Call::Alloc, size(bytes), |state, subject| {
            subject.ptr = state.alloc(bytes)?;
            Ok(subject.ptr)
        })
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        // The size decides the cost. A foreign address costs what the smallest does.
        let bytes = if self.is_forked() { 0 } else { self.state.lock().plain(ptr).unwrap_or(0) };
        self.call(Call::Free, range(ptr, bytes), |state, _| {
            state.captures.forbid("memory was freed during a capture")?;
            state.free(ptr)
        })
    }

    fn reserve_addresses(&self, bytes: u64) -> Result<DevicePtr> {
        self.page_call(Call::ReserveAddresses, size(bytes), |state, subject| {
            subject.ptr = state.reserve(bytes)?;
            Ok(subject.ptr)
        })
    }

    fn free_addresses(&self, base: DevicePtr, bytes: u64) -> Result<()> {
        self.page_call(Call::FreeAddresses, range(base, bytes), |state, _| state.free_addresses(base, bytes))
    }

    fn create_pages(&self, bytes: u64) -> Result<PageHandle> {
        self.page_call(Call::CreatePages, size(bytes), |state, subject| {
            let pages = state.create_pages(bytes)?;
            subject.pages = Some(pages);
            Ok(pages)
        })
    }

    fn release_pages(&self, pages: PageHandle) -> Result<()> {
        let bytes = if self.is_forked() { 0 } else { self.state.lock().pages_size(pages) };
        let subject = Subject { pages: Some(pages), ..size(bytes) };
        self.page_call(Call::ReleasePages, subject, |state, _| state.release_pages(pages))
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, pages: PageHandle) -> Result<()> {
        let subject = Subject { pages: Some(pages), ..range(ptr, bytes) };
        self.page_call(Call::Map, subject, |state, _| state.map(ptr, bytes, pages))
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.page_call(Call::Unmap, range(ptr, bytes), |state, _| state.unmap(ptr, bytes))
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        self.page_call(Call::SetAccess, range(ptr, bytes), |state, _| state.set_access(ptr, bytes, devices))
    }

    fn stream_key(&self, handle: StreamHandle) -> Result<StreamKey> {
        let subject = Subject { stream: Some(handle), ..Subject::default() };
        self.call(Call::StreamId, subject, |state, _| {
            state.timeline.key(handle).ok_or_else(|| Refusal::honest(DriverErrorKind::StreamGone, ""))
        })
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.call(Call::EventCreate, Subject::default(), |state, subject| {
            let event = state.events.create();
            subject.event = Some(event);
            Ok(event)
        })
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.call(Call::EventDestroy, about(event), |state, _| state.events.destroy(event))
    }

    fn record_event(&self, event: EventHandle, stream: StreamKey) -> Result<()> {
        self.call(Call::EventRecord, both(event, stream), |state, _| state.record_event(event, stream))
    }

    fn query_event(&self, event: EventHandle) -> Result<bool> {
        self.call(Call::EventQuery, about(event), |state, _| state.query_event(event))
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.call(Call::EventSynchronize, about(event), |state, _| state.synchronize_event(event))
    }

    fn stream_wait_event(&self, stream: StreamKey, event: EventHandle) -> Result<()> {
        self.call(Call::StreamWait, both(event, stream), |state, _| state.stream_wait_event(stream, event))
    }

    fn synchronize(&self) -> Result<()> {
        self.call(Call::Synchronize, Subject::default(), |state, _| state.synchronize())
    }

    fn is_capturing(&self, stream: StreamKey) -> Result<bool> {
        let subject = Subject { stream: Some(stream.handle), ..Subject::default() };
        self.call(Call::IsCapturing, subject, |state, _| Ok(state.capture_of(stream)?.is_some()))
    }

    fn capture_id(&self, stream: StreamKey) -> Result<Option<u64>> {
        let subject = Subject { stream: Some(stream.handle), ..Subject::default() };
        self.call(Call::IsCapturing, subject, |state, _| state.capture_of(stream))
    }

    fn alloc_host(&self, bytes: u64) -> Result<HostPtr> {
        self.call(Call::HostAlloc, size(bytes), |state, _| state.host.alloc(bytes))
    }

    fn free_host(&self, ptr: HostPtr) -> Result<()> {
        let bytes = if self.is_forked() { 0 } else { self.state.lock().host.size(ptr).unwrap_or(0) };
        self.call(Call::HostFree, size(bytes), |state, _| {
            state.captures.forbid("host memory was freed during a capture")?;
            state.free_host(ptr)
        })
    }

    fn is_page_locked(&self, address: *const u8) -> bool {
        !self.is_forked() && self.state.lock().host.contains(HostPtr(address.expose_provenance() as u64), 1)
    }

    unsafe fn copy_to_device(
        &self,
        target: DevicePtr,
        source: *const u8,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        self.call(Call::CopyToDevice, transfer(target, bytes, stream), |state, _| {
            // SAFETY: the caller's promise.
            unsafe { state.copy_to_device(target, source, bytes, stream) }
        })
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        self.call(Call::CopyToHost, transfer(source, bytes, stream), |state, _| {
            // SAFETY: the caller's promise.
            unsafe { state.copy_to_host(target, source, bytes, stream) }
        })
    }

    unsafe fn copy_on_device(
        &self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        self.call(Call::CopyOnDevice, transfer(target, bytes, stream), |state, _| {
            state.copy_on_device(target, source, bytes, stream)
        })
    }

    unsafe fn fill(&self, target: DevicePtr, value: u8, bytes: u64, stream: StreamKey) -> Result<()> {
        self.call(Call::Fill, transfer(target, bytes, stream), |state, _| {
            state.set_bytes(target, value, bytes, stream)
        })
    }

    fn synchronize_stream(&self, stream: StreamKey) -> Result<()> {
        let subject = Subject { stream: Some(stream.handle), ..Subject::default() };
        self.call(Call::StreamSynchronize, subject, |state, _| state.synchronize_stream(stream))
    }

    fn calls(&self) -> CallCounts {
        self.meter.counts()
    }
}
