//! The operations on the simulated device: its memory holds real bytes, on which the host does the arithmetic, at once and
//! so in the order in which it was asked for. With a [`Pace`] the streams are busy for as long as a GPU's would be, so that
//! the allocator meets memory that queued work still uses.

use super::Result;
use super::call::{Backend, Call, Kernel, Product};
use super::host_kernels;
use super::memory::{Tensor, floats, stored};
use std::sync::Arc;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::{DevicePtr, StreamHandle};

/// How long operations take in virtual time.
#[derive(Clone, Copy)]
pub struct Pace {
    /// The host, to queue one.
    pub launch_nanos: u64,
    /// The stream, to do one.
    pub kernel_nanos: u64,
}

pub struct Host {
    driver: Arc<SimDriver>,
    stream: StreamHandle,
    /// `None`: they take no time.
    pace: Option<Pace>,
}

impl Host {
    pub fn new(driver: &Arc<SimDriver>, stream: StreamHandle, pace: Option<Pace>) -> Self {
        Self { driver: Arc::clone(driver), stream, pace }
    }

    /// Keeps the stream busy for as long as an operation takes.
    fn queue<'a>(
        &self,
        outs: impl IntoIterator<Item = &'a Tensor>,
        ins: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<()> {
        let Some(pace) = self.pace else { return Ok(()) };
        let work = Work::new().lasting(pace.kernel_nanos);
        let work = ins.into_iter().fold(work, |work, tensor| work.and_reading(tensor.ptr(), tensor.bytes()));
        let work = outs.into_iter().fold(work, |work, tensor| work.and_writing(tensor.ptr(), tensor.bytes()));
        self.driver.launch(self.stream, work)?;
        self.driver.advance(pace.launch_nanos);
        Ok(())
    }

    fn load(&self, x: &Tensor) -> Result<Vec<f32>> {
        Ok(self.driver.with_bytes(x.ptr(), x.bytes(), |bytes| floats(bytes, x.dtype()))?)
    }

    fn store(&self, out: &Tensor, values: &[f32]) -> Result<()> {
        Ok(self.driver.write(out.ptr(), &stored(values, out.dtype()))?)
    }

    /// A factor as the product sees it, row by row.
    fn factor(&self, x: &Tensor, transposed: bool, batch: usize, rows: usize) -> Result<Vec<f32>> {
        let values = self.load(x)?;
        if !transposed {
            return Ok(values);
        }
        let size = values.len() / batch;
        let cols = size / rows;
        let mut turned = vec![0.0; values.len()];
        for (from, to) in values.chunks_exact(size).zip(turned.chunks_exact_mut(size)) {
            for (col, line) in from.chunks_exact(rows).enumerate() {
                line.iter().enumerate().for_each(|(row, value)| to[row * cols + col] = *value);
            }
        }
        Ok(turned)
    }
}

impl Backend for Host {
    fn run(&self, call: &Call<'_>) -> Result<()> {
        let ins: Vec<Vec<f32>> = call.ins.iter().map(|tensor| self.load(tensor)).collect::<Result<_>>()?;
        let is_read = matches!(call.kernel, Kernel::Sgd | Kernel::Adam | Kernel::FindOverflow);
        let before = |tensor: &&Tensor| if is_read { self.load(tensor) } else { Ok(vec![0.0; tensor.len()]) };
        let mut outs: Vec<Vec<f32>> = call.outs.iter().map(before).collect::<Result<_>>()?;
        host_kernels::run(call.kernel, &mut outs, &ins, call.ints, call.floats);
        call.outs.iter().zip(&outs).try_for_each(|(tensor, values)| self.store(tensor, values))?;
        self.queue(call.outs.iter().copied(), call.ins.iter().copied())
    }

    fn multiply(&self, p: &Product<'_>) -> Result<()> {
        let a = self.factor(p.a, p.transposed.0, p.batch, p.rows)?;
        let b = self.factor(p.b, p.transposed.1, p.batch, p.inner)?;
        let mut out = vec![0.0; p.out.len()];
        let (left, right) = (a.chunks_exact(p.rows * p.inner), b.chunks_exact(p.inner * p.columns));
        for ((a, b), out) in left.zip(right).zip(out.chunks_exact_mut(p.rows * p.columns)) {
            for (row, out) in a.chunks_exact(p.inner).zip(out.chunks_exact_mut(p.columns)) {
                for (factor, line) in row.iter().zip(b.chunks_exact(p.columns)) {
                    let factor = factor * p.factor;
                    out.iter_mut().zip(line).for_each(|(out, value)| *out += factor * value);
                }
            }
        }
        self.store(p.out, &out)?;
        self.queue([p.out], [p.a, p.b])
    }

    fn upload(&self, bytes: &[u8], out: &Tensor) -> Result<()> {
        assert_eq!(bytes.len() as u64, out.bytes(), "bytes of an upload");
        self.driver.write(out.ptr(), bytes)?;
        self.queue([out], [])
    }

    fn download(&self, x: &Tensor) -> Result<Vec<u8>> {
        self.wait()?;
        Ok(self.driver.with_bytes(x.ptr(), x.bytes(), <[u8]>::to_vec)?)
    }

    fn copy(&self, out: &Tensor, out_offset: u64, x: &Tensor, x_offset: u64, bytes: u64) -> Result<()> {
        assert!(out_offset + bytes <= out.bytes() && x_offset + bytes <= x.bytes(), "a copy inside its tensors");
        self.driver.copy(DevicePtr(out.ptr().0 + out_offset), DevicePtr(x.ptr().0 + x_offset), bytes)?;
        self.queue([out], [x])
    }

    fn is_immediate(&self) -> bool {
        true
    }

    fn wait(&self) -> Result<()> {
        self.driver.complete(self.stream); // the bytes are there; their time has to pass
        Ok(())
    }
}
