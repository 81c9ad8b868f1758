//! What ties a buffer to cudarc, in builds without cudarc: nothing.

use crate::Allocation;
use crate::driver::StreamKey;
use crate::error::Result;
use std::marker::PhantomData;

pub(crate) struct Binding;

impl Binding {
    pub(crate) fn none() -> Self {
        Self
    }

    pub(crate) fn sibling(&self, _: &Allocation) -> Result<Self> {
        Ok(Self)
    }

    pub(crate) fn release(&mut self, _: &Allocation) {}

    pub(crate) fn view(&self, _: usize) -> ViewBinding<'_> {
        ViewBinding(PhantomData)
    }

    pub(crate) fn view_mut(&mut self, _: usize) -> ViewMutBinding<'_> {
        ViewMutBinding(PhantomData)
    }
}

#[derive(Clone)]
pub(crate) struct ViewBinding<'a>(PhantomData<&'a ()>);

impl ViewBinding<'_> {
    pub(crate) fn slice(&self, _: usize, _: usize) -> Self {
        Self(PhantomData)
    }

    pub(crate) fn before_read(&self, _: &Allocation, _: StreamKey) -> Result<()> {
        Ok(())
    }

    pub(crate) fn after_read(&self, _: &Allocation, _: StreamKey) -> Result<()> {
        Ok(())
    }
}

pub(crate) struct ViewMutBinding<'a>(PhantomData<&'a mut ()>);

impl<'a> ViewMutBinding<'a> {
    pub(crate) fn as_view(&self) -> ViewBinding<'_> {
        ViewBinding(PhantomData)
    }

    pub(crate) fn into_view(self) -> ViewBinding<'a> {
        ViewBinding(PhantomData)
    }

    pub(crate) fn reborrow(&mut self) -> ViewMutBinding<'_> {
        ViewMutBinding(PhantomData)
    }

    pub(crate) fn split(self, _: usize) -> (Self, Self) {
        (Self(PhantomData), Self(PhantomData))
    }

    pub(crate) fn before_write(&self, _: &Allocation, _: StreamKey) -> Result<()> {
        Ok(())
    }

    pub(crate) fn after_write(&self, _: &Allocation, _: StreamKey) -> Result<()> {
        Ok(())
    }
}
