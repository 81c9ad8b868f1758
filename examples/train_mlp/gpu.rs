//! The operations on a GPU: kernels (kernels.cu), all queued on the default stream.

use crate::ops::{Backend, Op, Result, Tensor};
use std::ffi::{CStr, CString};
use std::sync::Arc;
use vramalloc::StreamHandle;
use vramalloc::driver::cuda::{CudaDriver, CudaKernel, KernelArg, LaunchShape};

use KernelArg::{F32, Ptr, U32};

/// Where the allocator's tensors are allocated, and where plain copies go as well.
const STREAM: StreamHandle = StreamHandle::DEFAULT;
/// The side of the tiles that `matmul` works in.
const TILE: u32 = 16;
/// Threads of a block of all other kernels.
const THREADS: u32 = 128;

pub struct Gpu {
    driver: Arc<CudaDriver>,
    kernels: Kernels,
}

struct Kernels {
    matmul: CudaKernel,
    fill: CudaKernel,
    add_bias: CudaKernel,
    relu_backward: CudaKernel,
    sum_rows: CudaKernel,
    cross_entropy: CudaKernel,
    sgd: CudaKernel,
}

impl Gpu {
    /// Loads the kernels. The module itself lies in memory of the driver, not of the allocator.
    pub fn new(driver: &Arc<CudaDriver>) -> Result<Self> {
        let ptx = CString::new(include_str!("kernels.ptx"))?;
        let module = driver.load_ptx(&ptx)?;
        let kernel = |name: &CStr| module.kernel(name);
        let kernels = Kernels {
            matmul: kernel(c"matmul")?,
            fill: kernel(c"fill")?,
            add_bias: kernel(c"add_bias")?,
            relu_backward: kernel(c"relu_backward")?,
            sum_rows: kernel(c"sum_rows")?,
            cross_entropy: kernel(c"cross_entropy")?,
            sgd: kernel(c"sgd")?,
        };
        Ok(Self { driver: Arc::clone(driver), kernels })
    }

    /// Queues a kernel with one thread for each of `count` results.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    unsafe fn for_each(&self, kernel: &CudaKernel, count: u32, args: &[KernelArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(kernel, LaunchShape::row(count.div_ceil(THREADS), THREADS), args) }
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// `args` are what the kernel in kernels.cu takes, and the sizes among them are those of the tensors.
    unsafe fn launch(&self, kernel: &CudaKernel, shape: LaunchShape, args: &[KernelArg]) -> Result<()> {
        // SAFETY: the kernel stays within the sizes, which the caller answers for. The memory may be freed before
        // the kernel has run, but only work behind it on this stream gets it then.
        Ok(unsafe { kernel.launch(STREAM, shape, args) }?)
    }
}

fn ptr(x: &Tensor) -> KernelArg {
    Ptr(x.ptr())
}

fn flag(yes: bool) -> KernelArg {
    U32(u32::from(yes))
}

impl Backend for Gpu {
    fn run(&self, op: Op<'_>) -> Result<()> {
        op.check();
        let kernels = &self.kernels;
        // SAFETY: each list is its kernel's parameters, and `check` has compared the sizes of the tensors.
        unsafe {
            match op {
                Op::Fill { out, value } => {
                    self.for_each(&kernels.fill, out.len(), &[ptr(out), F32(value), U32(out.len())])
                }
                Op::MatMul { a, b, out } => {
                    let (m, n) = out.shape();
                    let sizes = [U32(m), U32(n), U32(a.shape().1), flag(a.transposed), flag(b.transposed)];
                    let args = [&[ptr(out), ptr(a.tensor), ptr(b.tensor)], &sizes[..]].concat();
                    let grid = [n.div_ceil(TILE), m.div_ceil(TILE), 1];
                    let shape = LaunchShape { grid, block: [TILE, TILE, 1], shared_bytes: 0 };
                    self.launch(&kernels.matmul, shape, &args)
                }
                Op::AddBias { x, bias, relu } => {
                    let args = [ptr(x), ptr(bias), U32(x.len()), U32(x.cols), flag(relu)];
                    self.for_each(&kernels.add_bias, x.len(), &args)
                }
                Op::ReluBackward { grad, output } => {
                    let args = [ptr(grad), ptr(output), U32(grad.len())];
                    self.for_each(&kernels.relu_backward, grad.len(), &args)
                }
                Op::SumRows { x, out } => {
                    let args = [ptr(out), ptr(x), U32(x.rows), U32(x.cols)];
                    self.for_each(&kernels.sum_rows, x.cols, &args)
                }
                Op::CrossEntropy { logits, labels, score, grad } => {
                    let sizes = [U32(logits.rows), U32(logits.cols)];
                    let args = [&[ptr(score), ptr(grad), ptr(logits), ptr(labels)], &sizes[..]].concat();
                    self.for_each(&kernels.cross_entropy, logits.rows, &args)
                }
                Op::Sgd { weights, velocity, grad, rate, momentum } => {
                    let factors = [U32(weights.len()), F32(rate), F32(momentum)];
                    let args = [&[ptr(weights), ptr(velocity), ptr(grad)], &factors[..]].concat();
                    self.for_each(&kernels.sgd, weights.len(), &args)
                }
            }
        }
    }

    fn upload(&self, bytes: &[u8], out: &mut Tensor) -> Result<()> {
        assert_eq!(bytes.len() as u64, out.bytes(), "bytes of an upload");
        // SAFETY: the tensor's memory, so long. The copy runs in order with the kernels.
        Ok(unsafe { self.driver.memcpy_htod(out.ptr(), bytes) }?)
    }

    fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        let mut bytes = vec![0; x.bytes() as usize];
        // SAFETY: the tensor's memory, so long; what wrote it is earlier in the same stream.
        unsafe { self.driver.memcpy_dtoh(&mut bytes, x.ptr()) }?;
        Ok(bytes.as_chunks().0.iter().map(|&word| f32::from_ne_bytes(word)).collect())
    }
}
