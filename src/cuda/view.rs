//! What ties views of a buffer to cudarc.

use super::binding::{Access, Uses, not_bound};
use crate::Allocation;
use crate::driver::StreamKey;
use crate::error::Result;
use cudarc::driver::{CudaView, CudaViewMut};
use std::mem;

/// What a view has to do with cudarc.
#[derive(Clone)]
pub(crate) struct ViewBinding<'a>(Option<BoundView<'a>>);

pub(crate) struct BoundView<'a> {
    pub(super) uses: &'a Uses,
    pub(super) view: CudaView<'a, u8>,
}

impl Clone for BoundView<'_> {
    fn clone(&self) -> Self {
        Self { uses: self.uses, view: self.view.slice(..) }
    }
}

impl<'a> ViewBinding<'a> {
    pub(super) fn new(parts: Option<(&'a Uses, CudaView<'a, u8>)>) -> Self {
        Self(parts.map(|(uses, view)| BoundView { uses, view }))
    }

    #[track_caller]
    pub(super) fn bound(&self) -> &BoundView<'a> {
        match &self.0 {
            Some(bound) => bound,
            None => not_bound(),
        }
    }

    pub(crate) fn slice(&self, start: usize, bytes: usize) -> Self {
        Self(
            self.0
                .as_ref()
                .map(|bound| BoundView { uses: bound.uses, view: bound.view.slice(start..start + bytes) }),
        )
    }

    pub(crate) fn before_read(&self, allocation: &Allocation, stream: StreamKey) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |bound| bound.uses.before(allocation, stream, Access::Read))
    }

    pub(crate) fn after_read(&self, allocation: &Allocation, stream: StreamKey) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |bound| bound.uses.after(allocation, stream, Access::Read))
    }
}

/// What a mutable view has to do with cudarc.
pub(crate) struct ViewMutBinding<'a>(Option<BoundViewMut<'a>>);

pub(crate) struct BoundViewMut<'a> {
    pub(super) uses: &'a Uses,
    pub(super) view: CudaViewMut<'a, u8>,
}

impl<'a> ViewMutBinding<'a> {
    pub(super) fn new(parts: Option<(&'a Uses, CudaViewMut<'a, u8>)>) -> Self {
        Self(parts.map(|(uses, view)| BoundViewMut { uses, view }))
    }

    #[track_caller]
    pub(super) fn bound(&self) -> &BoundViewMut<'a> {
        match &self.0 {
            Some(bound) => bound,
            None => not_bound(),
        }
    }

    #[track_caller]
    pub(super) fn bound_mut(&mut self) -> &mut BoundViewMut<'a> {
        match &mut self.0 {
            Some(bound) => bound,
            None => not_bound(),
        }
    }

    pub(crate) fn as_view(&self) -> ViewBinding<'_> {
        ViewBinding(self.0.as_ref().map(|bound| BoundView { uses: bound.uses, view: bound.view.as_view() }))
    }

    pub(crate) fn into_view(self) -> ViewBinding<'a> {
        ViewBinding(self.0.map(|bound| BoundView { uses: bound.uses, view: bound.view.into_view() }))
    }

    pub(crate) fn reborrow(&mut self) -> ViewMutBinding<'_> {
        ViewMutBinding(
            self.0.as_mut().map(|bound| BoundViewMut { uses: bound.uses, view: bound.view.slice_mut(..) }),
        )
    }

    /// The first `mid` bytes and the others.
    pub(crate) fn split(self, mid: usize) -> (Self, Self) {
        let Some(BoundViewMut { uses, view }) = self.0 else { return (Self(None), Self(None)) };
        let (left, right) = split_for_good(view, mid);
        (Self(Some(BoundViewMut { uses, view: left })), Self(Some(BoundViewMut { uses, view: right })))
    }

    pub(crate) fn before_write(&self, allocation: &Allocation, stream: StreamKey) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |bound| bound.uses.before(allocation, stream, Access::Write))
    }

    pub(crate) fn after_write(&self, allocation: &Allocation, stream: StreamKey) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |bound| bound.uses.after(allocation, stream, Access::Write))
    }
}

/// Splits a view that is given up.
fn split_for_good<'a>(mut view: CudaViewMut<'a, u8>, mid: usize) -> (CudaViewMut<'a, u8>, CudaViewMut<'a, u8>) {
    let (left, right) = view.split_at_mut(mid);
    // SAFETY: only lifetimes change. The halves borrow `view` for no other reason than to be the only ones, which they
    // are, as it is given up here; what they point to lives for 'a.
    unsafe {
        (
            mem::transmute::<CudaViewMut<'_, u8>, CudaViewMut<'a, u8>>(left),
            mem::transmute::<CudaViewMut<'_, u8>, CudaViewMut<'a, u8>>(right),
        )
    }
}
