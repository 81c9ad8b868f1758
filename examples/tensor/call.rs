//! What a device is asked to do.

use super::memory::{DType, Tensor};
use super::{Machine, Result};

macro_rules! kernels {
    ($($kernel:ident $name:literal,)*) => {
        /// The kernels of kernels.cu, where their parameters are described.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel { $($kernel,)* }

        impl Kernel {
            pub const ALL: &'static [Self] = &[$(Self::$kernel,)*];

            pub const fn name(self) -> &'static std::ffi::CStr {
                match self { $(Self::$kernel => $name,)* }
            }
        }
    };
}

kernels! {
    Fill c"fill", Add c"add", Mul c"mul", Scale c"scale", Relu c"relu", ReluBack c"relu_back", Widen c"widen",
    Narrow c"narrow", Gelu c"gelu", GeluBack c"gelu_back", AddBias c"add_bias", SumRows c"sum_rows",
    Softmax c"softmax", SoftmaxBack c"softmax_back", LayerNorm c"layer_norm", LayerNormBack c"layer_norm_back",
    NormFactorsBack c"norm_factors_back", BatchStats c"batch_stats", BatchNorm c"batch_norm",
    BatchNormBack c"batch_norm_back", CrossEntropy c"cross_entropy", Embedding c"embedding", OneHot c"one_hot",
    SwapAxes c"swap_axes", Im2Col c"im2col", Col2Im c"col2im", MaxPool c"max_pool", MaxPoolBack c"max_pool_back",
    Average c"average", AverageBack c"average_back", Sgd c"sgd", Adam c"adam", FindOverflow c"find_overflow",
}

/// How a kernel is spread over threads.
#[derive(Clone, Copy)]
pub enum Span {
    /// A thread for each of so many numbers.
    Each(usize),
    /// A block of 256 threads for each row.
    Rows(usize),
    /// A block of 32 by 32 threads for 32 columns.
    Columns(usize),
}

/// One kernel with its parameters, in the kernel's order. `outs` are written; the optimizers' are also read.
pub struct Call<'a> {
    pub kernel: Kernel,
    /// The kind of storage that the kernel is compiled for.
    pub storage: DType,
    pub span: Span,
    pub outs: &'a [&'a Tensor],
    pub ins: &'a [&'a Tensor],
    pub ints: &'a [usize],
    pub floats: &'a [f32],
}

/// `out = factor · a · b` for each of `batch` matrices that lie one behind the other, row by row; `a` is `rows`×`inner` and
/// `b` `inner`×`columns`, or the other way round in memory if transposed.
pub struct Product<'a> {
    pub out: &'a Tensor,
    pub a: &'a Tensor,
    pub b: &'a Tensor,
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub batch: usize,
    pub transposed: (bool, bool),
    pub factor: f32,
}

/// A stream of a device. What it is told is done, or looks done, in order.
pub trait Backend {
    fn run(&self, call: &Call<'_>) -> Result<()>;
    fn multiply(&self, product: &Product<'_>) -> Result<()>;
    /// Copies to the device; `bytes` are not in page-locked memory, and can be reused at once.
    fn upload(&self, bytes: &[u8], out: &Tensor) -> Result<()>;
    /// Waits for all earlier work and copies from the device.
    fn download(&self, x: &Tensor) -> Result<Vec<u8>>;
    /// Copies `bytes` from one tensor into another; offsets in bytes.
    fn copy(&self, out: &Tensor, out_offset: u64, x: &Tensor, x_offset: u64, bytes: u64) -> Result<()>;
    /// Whether work is done when it is asked for, not queued.
    fn is_immediate(&self) -> bool {
        false
    }
    /// Waits for all earlier work.
    fn wait(&self) -> Result<()>;
}
