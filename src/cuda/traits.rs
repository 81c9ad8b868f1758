//! cudarc's traits on buffers and views.

use super::binding::{Access, Ending};
use crate::buffer::{DeviceBuffer, DeviceView, DeviceViewMut};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg,
    SyncOnDrop,
};
use std::sync::Arc;

/// The guard that the use must end with.
fn ending<'a>(how: Ending, tracked: SyncOnDrop<'a>, stream: &'a CudaStream) -> SyncOnDrop<'a> {
    match how {
        Ending::Tracked => tracked,
        Ending::Synchronized => {
            std::mem::forget(tracked); // it would record an event, perhaps in another context than its own
            SyncOnDrop::sync_stream(stream)
        }
    }
}

impl<T> DeviceSlice<T> for DeviceBuffer<T> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.memory().binding.bound().uses().known.cuda
    }
}

impl<T> DevicePtr<T> for DeviceBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let bound = self.memory().binding.bound();
        let how = bound.uses().notice(self.allocation(), stream, Access::Read);
        let (ptr, tracked) = bound.shell().slice().device_ptr(stream);
        (ptr, ending(how, tracked, stream))
    }
}

impl<T> DevicePtrMut<T> for DeviceBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let memory = self.memory_mut();
        let (uses, shell) = memory.binding.bound_mut().shell_mut();
        let how = uses.notice(&memory.allocation, stream, Access::Write);
        let (ptr, tracked) = shell.slice_mut().device_ptr_mut(stream);
        (ptr, ending(how, tracked, stream))
    }
}

impl<T> DeviceSlice<T> for DeviceView<'_, T> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.binding.bound().uses.known.cuda
    }
}

impl<T> DevicePtr<T> for DeviceView<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let bound = self.binding.bound();
        let how = bound.uses.notice(self.allocation, stream, Access::Read);
        let (ptr, tracked) = bound.view.device_ptr(stream);
        (ptr, ending(how, tracked, stream))
    }
}

impl<T> DeviceSlice<T> for DeviceViewMut<'_, T> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.binding.bound().uses.known.cuda
    }
}

impl<T> DevicePtr<T> for DeviceViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let bound = self.binding.bound();
        let how = bound.uses.notice(self.allocation, stream, Access::Read);
        let (ptr, tracked) = bound.view.device_ptr(stream);
        (ptr, ending(how, tracked, stream))
    }
}

impl<T> DevicePtrMut<T> for DeviceViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let bound = self.binding.bound_mut();
        let how = bound.uses.notice(self.allocation, stream, Access::Write);
        let (ptr, tracked) = bound.view.device_ptr_mut(stream);
        (ptr, ending(how, tracked, stream))
    }
}

// SAFETY: pushes what cudarc pushes for a `CudaSlice` at the same address.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline]
    fn arg(&mut self, arg: &'b DeviceBuffer<T>) -> &mut Self {
        let bound = arg.memory().binding.bound();
        bound.uses().notice_launch(arg.allocation(), self, Access::Read);
        PushKernelArg::<&'b CudaSlice<u8>>::arg(self, bound.shell().slice())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline]
    fn arg(&mut self, arg: &'b mut DeviceBuffer<T>) -> &mut Self {
        let memory = arg.memory_mut();
        let (uses, shell) = memory.binding.bound_mut().shell_mut();
        uses.notice_launch(&memory.allocation, self, Access::Write);
        PushKernelArg::<&'b mut CudaSlice<u8>>::arg(self, shell.slice_mut())
    }
}

// SAFETY: as above, for a `CudaView`.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b DeviceView<'c, T>> for LaunchArgs<'a> {
    #[inline]
    fn arg(&mut self, arg: &'b DeviceView<'c, T>) -> &mut Self {
        let bound = arg.binding.bound();
        bound.uses.notice_launch(arg.allocation, self, Access::Read);
        PushKernelArg::<&'b CudaView<'c, u8>>::arg(self, &bound.view)
    }
}

// SAFETY: as above, for a `CudaViewMut`.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b mut DeviceViewMut<'c, T>> for LaunchArgs<'a> {
    #[inline]
    fn arg(&mut self, arg: &'b mut DeviceViewMut<'c, T>) -> &mut Self {
        let bound = arg.binding.bound_mut();
        bound.uses.notice_launch(arg.allocation, self, Access::Write);
        PushKernelArg::<&'b mut CudaViewMut<'c, u8>>::arg(self, &mut bound.view)
    }
}

impl<'a, T> DeviceView<'a, T> {
    /// cudarc's own view, for the few functions that take one by value (NCCL's groups), to be used on `stream`.
    ///
    /// Nothing tells this crate where the view is used in truth. If it is used on one other stream instead, that is waited for
    /// where cudarc's event tracking is in force. Else, or for several streams, call this with each of them, or announce them
    /// by [`record_stream`](Self::record_stream). The one event that cudarc has for reads may tell of the view's or of a later
    /// one: after a view was lent and the buffer was read again, its memory is reused only when the device has been waited for.
    ///
    /// # Panics
    /// As cudarc's traits do on a buffer that was not allocated on a stream of cudarc.
    #[must_use]
    pub fn cuda_view(&self, stream: &CudaStream) -> CudaView<'a, T> {
        let bound = self.binding.bound();
        bound.uses.notice_lent(self.allocation, stream, Access::Read);
        // SAFETY: the same bytes, which are `len` values of this type.
        let view = unsafe { bound.view.transmute(self.len()) };
        view.unwrap_or_else(|| unreachable!("the view has the bytes of its values"))
    }
}

impl<T> DeviceViewMut<'_, T> {
    /// cudarc's own view, for the few functions that take one by value (NCCL's groups), to be used on `stream`.
    ///
    /// Nothing tells this crate where the view is used in truth. If it is written on one other stream instead, that is waited
    /// for where cudarc's event tracking is in force. Else, for several streams, or if it is only read there and the buffer
    /// is read again later, call this with each of them, or announce them by [`record_stream`](Self::record_stream).
    ///
    /// # Panics
    /// As cudarc's traits do on a buffer that was not allocated on a stream of cudarc.
    #[must_use]
    pub fn cuda_view_mut(&mut self, stream: &CudaStream) -> CudaViewMut<'_, T> {
        let len = self.len();
        let bound = self.binding.bound_mut();
        bound.uses.notice_lent(self.allocation, stream, Access::Write);
        // SAFETY: the same bytes, which are `len` values of this type.
        let view = unsafe { bound.view.transmute_mut(len) };
        view.unwrap_or_else(|| unreachable!("the view has the bytes of its values"))
    }
}
