//! Tensors in the allocator's memory, and the operations on them that each kind of device implements.

use crate::host::Host;
use std::error::Error;
use vramalloc::{Allocation, CachingAllocator, Config, DeviceChoice, DevicePtr, OpenDevice, Stream};
use vramalloc::{driver::sim::SimDriver, why_no_gpu};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A matrix of 4-byte numbers (floats; class numbers for labels), row by row. Dropping it frees the memory.
pub struct Tensor {
    memory: Allocation,
    pub rows: u32,
    pub cols: u32,
}

impl Tensor {
    pub fn ptr(&self) -> DevicePtr {
        self.memory.ptr()
    }

    pub fn len(&self) -> u32 {
        self.rows * self.cols
    }

    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    pub fn shape(&self) -> (u32, u32) {
        (self.rows, self.cols)
    }
}

/// A factor of a matrix product, as it is or transposed.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    pub tensor: &'a Tensor,
    pub transposed: bool,
}

impl<'a> Factor<'a> {
    pub fn plain(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: false }
    }

    pub fn transposed(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: true }
    }

    pub fn shape(&self) -> (u32, u32) {
        let (rows, cols) = self.tensor.shape();
        if self.transposed { (cols, rows) } else { (rows, cols) }
    }
}

/// One operation. What it writes is borrowed mutably, so it cannot also be one of its inputs.
pub enum Op<'a> {
    /// `out = value`
    Fill { out: &'a mut Tensor, value: f32 },
    /// `out = a b`
    MatMul { a: Factor<'a>, b: Factor<'a>, out: &'a mut Tensor },
    /// `x = x + bias` in every row, and then `max(x, 0)` if `relu`
    AddBias { x: &'a mut Tensor, bias: &'a Tensor, relu: bool },
    /// `grad = 0` where the forward pass gave nothing
    ReluBackward { grad: &'a mut Tensor, output: &'a Tensor },
    /// `out = ` the sum of the rows of `x`
    SumRows { x: &'a Tensor, out: &'a mut Tensor },
    /// For every row: its loss, whether the largest logit is the label's (1 or 0), and the mean loss's gradient
    CrossEntropy { logits: &'a Tensor, labels: &'a Tensor, score: &'a mut Tensor, grad: &'a mut Tensor },
    /// `velocity = momentum * velocity + grad; weights = weights - rate * velocity`
    Sgd { weights: &'a mut Tensor, velocity: &'a mut Tensor, grad: &'a Tensor, rate: f32, momentum: f32 },
}

impl Op<'_> {
    /// Panics if the shapes do not fit. Kernels on a GPU look at addresses only: this check is what makes them safe.
    pub fn check(&self) {
        match self {
            Self::Fill { .. } => {}
            Self::MatMul { a, b, out } => {
                assert_eq!(a.shape().1, b.shape().0, "inner sizes of a matrix product");
                assert_eq!(out.shape(), (a.shape().0, b.shape().1), "shape of a matrix product");
            }
            Self::AddBias { x, bias, .. } => assert_eq!(bias.shape(), (1, x.cols), "shape of a bias"),
            Self::ReluBackward { grad, output } => assert_eq!(grad.shape(), output.shape(), "shape of a gradient"),
            Self::SumRows { x, out } => assert_eq!(out.shape(), (1, x.cols), "shape of a sum"),
            Self::CrossEntropy { logits, labels, score, grad } => {
                assert_eq!(labels.shape(), (logits.rows, 1), "shape of the labels");
                assert_eq!(score.shape(), (logits.rows, 2), "shape of the scores");
                assert_eq!(grad.shape(), logits.shape(), "shape of the logits' gradient");
            }
            Self::Sgd { weights, velocity, grad, .. } => {
                assert_eq!(velocity.shape(), weights.shape(), "shape of a velocity");
                assert_eq!(grad.shape(), weights.shape(), "shape of a gradient");
            }
        }
    }
}

/// Who does the arithmetic. Operations are done, or look done, in the order in which they are given.
pub trait Backend {
    /// Does it, after [`Op::check`].
    fn run(&self, op: Op<'_>) -> Result<()>;
    /// Copies to the device; `bytes` can be reused at once.
    fn upload(&self, bytes: &[u8], out: &mut Tensor) -> Result<()>;
    /// Waits for all earlier operations and copies from the device.
    fn download(&self, x: &Tensor) -> Result<Vec<f32>>;
}

/// The device, the allocator of its memory, and the stream that all work goes to.
pub struct Machine {
    pub device: OpenDevice,
    pub allocator: CachingAllocator,
    stream: Stream,
    backend: Box<dyn Backend>,
}

impl Machine {
    pub fn open(choice: DeviceChoice) -> Result<Self> {
        let device = OpenDevice::open(choice, SimDriver::builder())?;
        let allocator = CachingAllocator::new(device.driver(), Config::from_env()?)?;
        // One stream does everything here, so a tensor can be dropped while queued kernels still use it: whoever
        // gets its memory next queues behind them.
        let stream = allocator.default_stream()?;
        let backend: Box<dyn Backend> = match &device {
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(driver) => Box::new(crate::gpu::Gpu::new(driver)?),
            OpenDevice::Sim(driver) => Box::new(Host::new(driver)),
            _ => return Err("this example knows no such device".into()),
        };
        Ok(Self { device, allocator, stream, backend })
    }

    /// Why the simulated device was taken, if it was not asked for.
    pub fn why_simulated(&self, choice: DeviceChoice) -> Option<String> {
        let is_sim = matches!(self.device, OpenDevice::Sim(_));
        let fell_back = is_sim && choice == DeviceChoice::Auto;
        if fell_back { why_no_gpu().map(|error| error.to_string()) } else { None }
    }

    /// A tensor with whatever was in the memory before.
    pub fn empty(&self, rows: u32, cols: u32) -> Result<Tensor> {
        assert!(rows.checked_mul(cols).is_some(), "the kernels count in 32 bits");
        let bytes = u64::from(rows) * u64::from(cols) * 4;
        Ok(Tensor { memory: self.allocator.alloc(bytes, &self.stream)?, rows, cols })
    }

    pub fn full(&self, rows: u32, cols: u32, value: f32) -> Result<Tensor> {
        let mut out = self.empty(rows, cols)?;
        self.run(Op::Fill { out: &mut out, value })?;
        Ok(out)
    }

    pub fn upload(&self, bytes: &[u8], rows: u32, cols: u32) -> Result<Tensor> {
        let mut out = self.empty(rows, cols)?;
        assert_eq!(bytes.len() as u64, out.bytes(), "bytes of a tensor");
        self.backend.upload(bytes, &mut out)?;
        Ok(out)
    }

    pub fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        self.backend.download(x)
    }

    pub fn matmul(&self, a: Factor<'_>, b: Factor<'_>) -> Result<Tensor> {
        let mut out = self.empty(a.shape().0, b.shape().1)?;
        self.run(Op::MatMul { a, b, out: &mut out })?;
        Ok(out)
    }

    pub fn run(&self, op: Op<'_>) -> Result<()> {
        self.backend.run(op)
    }
}
