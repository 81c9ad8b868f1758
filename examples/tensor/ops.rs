//! The operations, each into new memory. They check the sizes; the backends rely on that.

use super::call::{Call, Kernel, Product, Span};
use super::memory::{DType, Kind, Tensor};
use super::{Machine, Result};

const EPS: f32 = 1e-5;

/// A window that is moved over images of batch, height, width, channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub side: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Window {
    /// How many positions there are along a side of an image.
    pub fn positions(&self, length: usize) -> usize {
        (length + 2 * self.padding - self.side) / self.stride + 1
    }

    /// What the kernels take behind the count, for images of that shape.
    fn sizes(&self, count: usize, image: &[usize]) -> [usize; 9] {
        let [_, height, width, channels] = image.try_into().expect("images have four axes");
        let (out_height, out_width) = (self.positions(height), self.positions(width));
        [count, height, width, channels, self.side, self.stride, self.padding, out_height, out_width]
    }

    fn output(&self, image: &[usize]) -> [usize; 4] {
        [image[0], self.positions(image[1]), self.positions(image[2]), image[3]]
    }
}

fn same(a: &Tensor, b: &Tensor) {
    assert_eq!((a.len(), a.dtype()), (b.len(), b.dtype()), "two tensors of one size");
}

impl Machine {
    /// One kernel with a thread for each number of the first output.
    fn each(
        &self,
        kernel: Kernel,
        storage: DType,
        outs: &[&Tensor],
        ins: &[&Tensor],
        ints: &[usize],
        floats: &[f32],
    ) -> Result<()> {
        self.backend.run(&Call { kernel, storage, span: Span::Each(outs[0].len()), outs, ins, ints, floats })
    }

    /// As [`each`](Self::each), into a new tensor.
    fn map(
        &self,
        kernel: Kernel,
        shape: &[usize],
        ins: &[&Tensor],
        ints: &[usize],
        floats: &[f32],
    ) -> Result<Tensor> {
        let storage = ins[0].dtype();
        let out = self.empty(shape, storage)?;
        self.each(kernel, storage, &[&out], ins, ints, floats)?;
        Ok(out)
    }

    fn unary(&self, kernel: Kernel, x: &Tensor, floats: &[f32]) -> Result<Tensor> {
        self.map(kernel, x.shape(), &[x], &[x.len()], floats)
    }

    fn binary(&self, kernel: Kernel, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        same(a, b);
        self.map(kernel, a.shape(), &[a, b], &[a.len()], &[])
    }

    pub fn full(&self, shape: &[usize], dtype: DType, value: f32) -> Result<Tensor> {
        let out = self.empty(shape, dtype)?;
        self.each(Kernel::Fill, dtype, &[&out], &[], &[out.len()], &[value])?;
        Ok(out)
    }

    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.binary(Kernel::Add, a, b)
    }

    /// `a += b`.
    pub fn add_to(&self, a: &Tensor, b: &Tensor) -> Result<()> {
        same(a, b);
        // The kernel may write where it reads: each thread has a number of its own.
        self.each(Kernel::Add, a.dtype(), &[a], &[a, b], &[a.len()], &[])
    }

    pub fn mul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.binary(Kernel::Mul, a, b)
    }

    pub fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        self.unary(Kernel::Scale, x, &[factor])
    }

    pub fn relu(&self, x: &Tensor) -> Result<Tensor> {
        self.unary(Kernel::Relu, x, &[])
    }

    pub fn relu_back(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        self.binary(Kernel::ReluBack, x, dy)
    }

    pub fn gelu(&self, x: &Tensor) -> Result<Tensor> {
        self.unary(Kernel::Gelu, x, &[])
    }

    pub fn gelu_back(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        self.binary(Kernel::GeluBack, x, dy)
    }

    /// The numbers, stored as `dtype`; the same memory if they are. One of both sides must be `F32`.
    pub fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let out = self.empty(x.shape(), dtype)?;
        let (kernel, storage) =
            if dtype == DType::F32 { (Kernel::Widen, x.dtype()) } else { (Kernel::Narrow, dtype) };
        assert!(dtype == DType::F32 || x.dtype() == DType::F32, "one side of a cast is F32");
        self.each(kernel, storage, &[&out], &[x], &[x.len()], &[])?;
        Ok(out)
    }

    pub fn add_bias(&self, x: &Tensor, bias: &Tensor) -> Result<Tensor> {
        assert_eq!(bias.len(), x.cols(), "length of a bias");
        self.map(Kernel::AddBias, x.shape(), &[x, bias], &[x.len(), x.cols()], &[])
    }

    /// The sum of all rows.
    pub fn sum_rows(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.empty(&[x.cols()], x.dtype())?;
        let (ints, span) = ([x.rows(), x.cols()], Span::Columns(x.cols()));
        let (outs, ins) = (&[&out], &[x]);
        self.backend.run(&Call {
            kernel: Kernel::SumRows,
            storage: x.dtype(),
            span,
            outs,
            ins,
            ints: &ints,
            floats: &[],
        })?;
        Ok(out)
    }

    /// `a · b` for two matrices, or for as many as there are; see [`Product`].
    pub fn matmul(&self, a: &Tensor, b: &Tensor, transposed: (bool, bool), factor: f32) -> Result<Tensor> {
        let side = |x: &Tensor, flip: bool| {
            let [.., rows, cols] = *x.shape() else { panic!("a matrix has two axes: {:?}", x.shape()) };
            if flip { (cols, rows) } else { (rows, cols) }
        };
        let ((rows, inner), (inner_b, columns)) = (side(a, transposed.0), side(b, transposed.1));
        let leading = &a.shape()[..a.shape().len() - 2];
        assert_eq!(inner, inner_b, "inner sides of {:?} and {:?}", a.shape(), b.shape());
        assert_eq!(leading, &b.shape()[..b.shape().len() - 2], "numbers of matrices");
        assert_eq!(a.dtype(), b.dtype(), "storage of two factors");
        let out = self.empty(&[leading, &[rows, columns]].concat(), a.dtype())?;
        let batch = leading.iter().product();
        self.backend.multiply(&Product { out: &out, a, b, rows, columns, inner, batch, transposed, factor })?;
        Ok(out)
    }

    /// Softmax of each row times `factor`. If `causal`, each of `queries` consecutive rows sees one column more than the
    /// one before, and the last all.
    pub fn softmax(&self, x: &Tensor, queries: usize, causal: bool, factor: f32) -> Result<Tensor> {
        assert!(!causal || x.cols() >= queries, "as many columns as queries");
        let out = self.empty(x.shape(), x.dtype())?;
        let ints = [x.rows(), x.cols(), queries, usize::from(causal)];
        self.rows(Kernel::Softmax, &[&out], &[x], &ints, &[factor])?;
        Ok(out)
    }

    pub fn softmax_back(&self, y: &Tensor, dy: &Tensor, factor: f32) -> Result<Tensor> {
        same(y, dy);
        let dx = self.empty(y.shape(), y.dtype())?;
        self.rows(Kernel::SoftmaxBack, &[&dx], &[y, dy], &[y.rows(), y.cols()], &[factor])?;
        Ok(dx)
    }

    /// One kernel with a block for each row of the first input, whose storage it takes.
    fn rows(
        &self,
        kernel: Kernel,
        outs: &[&Tensor],
        ins: &[&Tensor],
        ints: &[usize],
        floats: &[f32],
    ) -> Result<()> {
        let (storage, span) = (ins[0].dtype(), Span::Rows(ins[0].rows()));
        self.backend.run(&Call { kernel, storage, span, outs, ins, ints, floats })
    }

    /// The normalized rows, and their means and inverse deviations.
    pub fn layer_norm(&self, x: &Tensor, gain: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
        assert_eq!((gain.len(), bias.len()), (x.cols(), x.cols()), "factors of a layer norm");
        let out = self.empty(x.shape(), x.dtype())?;
        let stats = self.empty(&[x.rows(), 2], DType::F32)?;
        self.rows(Kernel::LayerNorm, &[&out, &stats], &[x, gain, bias], &[x.rows(), x.cols()], &[EPS])?;
        Ok((out, stats))
    }

    pub fn layer_norm_back(&self, x: &Tensor, gain: &Tensor, stats: &Tensor, dy: &Tensor) -> Result<Tensor> {
        same(x, dy);
        let dx = self.empty(x.shape(), x.dtype())?;
        self.rows(Kernel::LayerNormBack, &[&dx], &[x, gain, stats, dy], &[x.rows(), x.cols()], &[])?;
        Ok(dx)
    }

    /// The gradients of a norm's gain and bias; `stats` are by column or by row.
    pub fn norm_factors_back(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        by_column: bool,
    ) -> Result<(Tensor, Tensor)> {
        same(x, dy);
        let factors = || self.empty(&[x.cols()], x.dtype());
        let (gain, bias) = (factors()?, factors()?);
        self.backend.run(&Call {
            kernel: Kernel::NormFactorsBack,
            storage: x.dtype(),
            span: Span::Columns(x.cols()),
            outs: &[&gain, &bias],
            ins: &[x, stats, dy],
            ints: &[x.rows(), x.cols(), usize::from(by_column)],
            floats: &[],
        })?;
        Ok((gain, bias))
    }

    /// The normalized columns, and their means and inverse deviations.
    pub fn batch_norm(&self, x: &Tensor, gain: &Tensor, bias: &Tensor) -> Result<(Tensor, Tensor)> {
        assert_eq!((gain.len(), bias.len()), (x.cols(), x.cols()), "factors of a batch norm");
        let stats = self.empty(&[x.cols(), 2], DType::F32)?;
        self.backend.run(&Call {
            kernel: Kernel::BatchStats,
            storage: x.dtype(),
            span: Span::Columns(x.cols()),
            outs: &[&stats],
            ins: &[x],
            ints: &[x.rows(), x.cols()],
            floats: &[EPS],
        })?;
        let out = self.map(Kernel::BatchNorm, x.shape(), &[x, &stats, gain, bias], &[x.len(), x.cols()], &[])?;
        Ok((out, stats))
    }

    pub fn batch_norm_back(
        &self,
        x: &Tensor,
        stats: &Tensor,
        gain: &Tensor,
        dy: &Tensor,
        (dgain, dbias): (&Tensor, &Tensor),
    ) -> Result<Tensor> {
        same(x, dy);
        let ins = [x, stats, gain, dy, dgain, dbias];
        self.map(Kernel::BatchNormBack, x.shape(), &ins, &[x.len(), x.cols()], &[])
    }

    /// The loss of each row, and the gradient of their mean, times `factor`.
    pub fn cross_entropy(&self, x: &Tensor, targets: &Tensor, factor: f32) -> Result<(Tensor, Tensor)> {
        assert_eq!(targets.len(), x.rows(), "a target for each row");
        let loss = self.empty(&[x.rows()], DType::F32)?;
        let dx = self.empty(x.shape(), x.dtype())?;
        let factor = factor / x.rows() as f32;
        self.rows(Kernel::CrossEntropy, &[&loss, &dx], &[x, targets], &[x.rows(), x.cols()], &[factor])?;
        Ok((loss, dx))
    }

    pub fn embedding(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (rows, cols) = (ids.len(), table.cols());
        self.map(Kernel::Embedding, &[rows, cols], &[table, ids], &[rows * cols, cols], &[])
    }

    /// The gradient of a table of `words` rows: a product, so that the sum is the same in every run.
    pub fn embedding_back(&self, words: usize, ids: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let marks = self.counted_as(Kind::Workspace, || self.empty(&[ids.len(), words], dy.dtype()))?;
        self.each(Kernel::OneHot, dy.dtype(), &[&marks], &[ids], &[marks.len(), words], &[])?;
        self.matmul(&marks, &dy.reshape(&[ids.len(), dy.cols()]), (true, false), 1.0)
    }

    /// Swaps the middle two of four axes.
    pub fn swap_axes(&self, x: &Tensor) -> Result<Tensor> {
        let [a, b, c, d] = x.shape().try_into().expect("four axes");
        self.map(Kernel::SwapAxes, &[a, c, b, d], &[x], &[x.len(), b, c, d], &[])
    }

    /// A row for each position of the window, with what is under it.
    pub fn im2col(&self, x: &Tensor, window: Window) -> Result<Tensor> {
        let [images, height, width, channels] = window.output(x.shape());
        let shape = [images * height * width, window.side * window.side * channels];
        let sizes = window.sizes(shape[0] * shape[1], x.shape());
        self.counted_as(Kind::Workspace, || self.map(Kernel::Im2Col, &shape, &[x], &sizes, &[]))
    }

    /// Adds the rows up where they came from, into images of that shape.
    pub fn col2im(&self, columns: &Tensor, image: &[usize], window: Window) -> Result<Tensor> {
        let sizes = window.sizes(image.iter().product(), image);
        self.map(Kernel::Col2Im, image, &[columns], &sizes, &[])
    }

    /// The largest number under each position, and where it came from.
    pub fn max_pool(&self, x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
        let shape = window.output(x.shape());
        let (out, from) = (self.empty(&shape, x.dtype())?, self.empty(&shape, DType::U32)?);
        let sizes = window.sizes(out.len(), x.shape());
        self.each(Kernel::MaxPool, x.dtype(), &[&out, &from], &[x], &sizes, &[])?;
        Ok((out, from))
    }

    pub fn max_pool_back(&self, image: &[usize], from: &Tensor, dy: &Tensor, window: Window) -> Result<Tensor> {
        let dx = self.empty(image, dy.dtype())?;
        let sizes = window.sizes(dx.len(), image);
        self.each(Kernel::MaxPoolBack, dy.dtype(), &[&dx], &[from, dy], &sizes, &[])?;
        Ok(dx)
    }

    /// The mean over each image's pixels.
    pub fn average(&self, x: &Tensor) -> Result<Tensor> {
        let [images, height, width, channels] = x.shape().try_into().expect("images have four axes");
        let sizes = [images * channels, height * width, channels];
        self.map(Kernel::Average, &[images, channels], &[x], &sizes, &[])
    }

    pub fn average_back(&self, image: &[usize], dy: &Tensor) -> Result<Tensor> {
        let sizes = [image.iter().product(), image[1] * image[2], image[3]];
        self.map(Kernel::AverageBack, image, &[dy], &sizes, &[])
    }

    /// One step of gradient descent with momentum; the gradient counts `factor` times.
    pub fn sgd(
        &self,
        weights: &Tensor,
        velocity: &Tensor,
        grad: &Tensor,
        [rate, momentum, factor]: [f32; 3],
    ) -> Result<()> {
        assert_eq!((weights.len(), velocity.len()), (grad.len(), grad.len()), "sizes of a step");
        let (outs, ints) = ([weights, velocity], [grad.len()]);
        self.each(Kernel::Sgd, grad.dtype(), &outs, &[grad], &ints, &[rate, momentum, factor])
    }

    /// One step of Adam; `floats` are the rate, two decays, and how often the gradient counts.
    pub fn adam(
        &self,
        weights: &Tensor,
        mean: &Tensor,
        square: &Tensor,
        grad: &Tensor,
        floats: [f32; 4],
    ) -> Result<()> {
        assert_eq!([weights, mean, square].map(Tensor::len), [grad.len(); 3], "sizes of a step");
        self.each(Kernel::Adam, grad.dtype(), &[weights, mean, square], &[grad], &[grad.len()], &floats)
    }

    /// Sets `flag` to 1 if there is an infinity or a NaN.
    pub fn find_overflow(&self, flag: &Tensor, x: &Tensor) -> Result<()> {
        self.backend.run(&Call {
            kernel: Kernel::FindOverflow,
            storage: x.dtype(),
            span: Span::Each(x.len()),
            outs: &[flag],
            ins: &[x],
            ints: &[x.len()],
            floats: &[],
        })
    }

    /// Copies `rows` rows of `x`, beginning at row `from`, into `out`, beginning at row `at`.
    pub fn copy_rows(&self, out: &Tensor, at: usize, x: &Tensor, from: usize, rows: usize) -> Result<()> {
        assert_eq!((x.cols(), x.dtype()), (out.cols(), out.dtype()), "rows of one length");
        let row = (x.cols() * x.dtype().bytes()) as u64;
        self.backend.copy(out, at as u64 * row, x, from as u64 * row, rows as u64 * row)
    }
}
