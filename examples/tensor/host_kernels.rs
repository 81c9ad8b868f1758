//! kernels.cu on the host: the same parameters in the same order.

use super::call::Kernel;

const GELU_A: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_B: f32 = 0.044_715;

/// Fills `outs`, which hold zeros, or for the optimizers what was there.
pub fn run(kernel: Kernel, outs: &mut [Vec<f32>], ins: &[Vec<f32>], ints: &[usize], factors: &[f32]) {
    use Kernel::*;
    let (out, rest) = outs.split_first_mut().expect("a kernel writes");
    match kernel {
        Fill => out.fill(factors[0]),
        Add => pairs(out, &ins[0], &ins[1], |a, b| a + b),
        Mul => pairs(out, &ins[0], &ins[1], |a, b| a * b),
        Scale => each(out, &ins[0], |x| x * factors[0]),
        Relu => each(out, &ins[0], |x| x.max(0.0)),
        ReluBack => pairs(out, &ins[0], &ins[1], |x, dy| if x > 0.0 { dy } else { 0.0 }),
        Widen | Narrow => out.copy_from_slice(&ins[0]),
        Gelu => each(out, &ins[0], |x| 0.5 * x * (1.0 + gelu_tanh(x))),
        GeluBack => pairs(out, &ins[0], &ins[1], |x, dy| dy * gelu_slope(x)),
        AddBias => rows(out, &ins[0], ints[1], |_, out, x| pairs(out, x, &ins[1], |x, bias| x + bias)),
        SumRows => ins[0].chunks_exact(ints[1]).for_each(|row| accumulate(out, row)),
        Softmax => rows(out, &ins[0], ints[1], |row, out, x| softmax(row, out, x, ints, factors[0])),
        SoftmaxBack => {
            let (cols, factor) = (ints[1], factors[0]);
            for ((dx, y), dy) in out.chunks_exact_mut(cols).zip(ins[0].chunks(cols)).zip(ins[1].chunks(cols)) {
                let dot = dot(y, dy);
                pairs(dx, y, dy, |y, dy| y * (dy - dot) * factor);
            }
        }
        LayerNorm => layer_norm(out, &mut rest[0], ins, ints[1], factors[0]),
        LayerNormBack => layer_norm_back(out, ins, ints[1]),
        NormFactorsBack => norm_factors_back(out, &mut rest[0], ins, ints[1], ints[2] != 0),
        BatchStats => batch_stats(out, &ins[0], ints[0], ints[1], factors[0]),
        BatchNorm => {
            let ([x, stats, gain, bias], cols) = (ins, ints[1]) else { unreachable!("four inputs") };
            for (i, out) in out.iter_mut().enumerate() {
                let c = i % cols;
                *out = (x[i] - stats[2 * c]) * stats[2 * c + 1] * gain[c] + bias[c];
            }
        }
        BatchNormBack => {
            let ([x, stats, gain, dy, dgain, dbias], cols) = (ins, ints[1]) else { unreachable!("six inputs") };
            let rows = (x.len() / cols) as f32;
            for (i, dx) in out.iter_mut().enumerate() {
                let c = i % cols;
                let normal = (x[i] - stats[2 * c]) * stats[2 * c + 1];
                *dx = gain[c] * stats[2 * c + 1] * (dy[i] - dbias[c] / rows - normal * dgain[c] / rows);
            }
        }
        CrossEntropy => cross_entropy(out, &mut rest[0], &ins[0], &ins[1], ints[1], factors[0]),
        Embedding => {
            for (out, &id) in out.chunks_exact_mut(ints[1]).zip(&ins[1]) {
                out.copy_from_slice(&ins[0][id as usize * ints[1]..][..ints[1]]);
            }
        }
        OneHot => {
            out.chunks_exact_mut(ints[1]).zip(&ins[0]).for_each(|(row, &id)| row[id as usize] = 1.0);
        }
        SwapAxes => {
            let [_, b, c, d] = ints.try_into().expect("four sizes");
            for (i, line) in out.chunks_exact_mut(d).enumerate() {
                let (k, j, rest) = (i % b, i / b % c, i / b / c);
                line.copy_from_slice(&ins[0][((rest * b + k) * c + j) * d..][..d]);
            }
        }
        Im2Col => Geometry::of(ints, ins[0].len()).each(|at| {
            at.place.into_iter().for_each(|place| out[at.column] = ins[0][place]);
        }),
        Col2Im => Geometry::of(ints, out.len()).each(|at| {
            at.place.into_iter().for_each(|place| out[place] += ins[0][at.column]);
        }),
        MaxPool => max_pool(out, &mut rest[0], &ins[0], ints),
        MaxPoolBack => {
            ins[0].iter().zip(&ins[1]).for_each(|(&place, dy)| out[place as usize] += dy);
        }
        Average => {
            let (pixels, channels) = (ints[1], ints[2]);
            for (out, image) in out.chunks_exact_mut(channels).zip(ins[0].chunks_exact(pixels * channels)) {
                image.chunks_exact(channels).for_each(|pixel| accumulate(out, pixel));
                out.iter_mut().for_each(|out| *out /= pixels as f32);
            }
        }
        AverageBack => {
            let (pixels, channels) = (ints[1], ints[2]);
            for (image, dy) in out.chunks_exact_mut(pixels * channels).zip(ins[0].chunks_exact(channels)) {
                image.chunks_exact_mut(channels).for_each(|pixel| each(pixel, dy, |dy| dy / pixels as f32));
            }
        }
        Sgd => {
            let [rate, momentum, factor] = factors.try_into().expect("three factors");
            let velocity = &mut rest[0];
            velocity.iter_mut().zip(&ins[0]).for_each(|(v, grad)| *v = momentum * *v + grad * factor);
            out.iter_mut().zip(velocity).for_each(|(weight, v)| *weight -= rate * *v);
        }
        Adam => {
            let [rate, decay1, decay2, factor] = factors.try_into().expect("four factors");
            let [mean, square] = rest else { unreachable!("two moments") };
            for (i, grad) in ins[0].iter().enumerate() {
                let grad = grad * factor;
                mean[i] = decay1 * mean[i] + (1.0 - decay1) * grad;
                square[i] = decay2 * square[i] + (1.0 - decay2) * grad * grad;
                out[i] -= rate * mean[i] / (square[i].sqrt() + 1e-8);
            }
        }
        FindOverflow => {
            if ins[0].iter().any(|x| !x.is_finite()) {
                out[0] = 1.0;
            }
        }
    }
}

fn each(out: &mut [f32], x: &[f32], f: impl Fn(f32) -> f32) {
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = f(x));
}

fn pairs(out: &mut [f32], a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    out.iter_mut().zip(a).zip(b).for_each(|((out, &a), &b)| *out = f(a, b));
}

fn rows(out: &mut [f32], x: &[f32], cols: usize, f: impl Fn(usize, &mut [f32], &[f32])) {
    let both = out.chunks_exact_mut(cols).zip(x.chunks_exact(cols));
    both.enumerate().for_each(|(row, (out, x))| f(row, out, x));
}

fn accumulate(out: &mut [f32], x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out += x);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn largest(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn gelu_tanh(x: f32) -> f32 {
    (GELU_A * (x + GELU_B * x * x * x)).tanh()
}

fn gelu_slope(x: f32) -> f32 {
    let t = gelu_tanh(x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_A * (1.0 + 3.0 * GELU_B * x * x)
}

fn softmax(row: usize, out: &mut [f32], x: &[f32], ints: &[usize], factor: f32) {
    let (cols, queries, causal) = (ints[1], ints[2], ints[3] != 0);
    let limit = if causal { cols - queries + row % queries + 1 } else { cols };
    let most = largest(&x[..limit]) * factor; // factors are positive
    each(&mut out[..limit], &x[..limit], |x| (x * factor - most).exp());
    let sum: f32 = out[..limit].iter().sum();
    out[..limit].iter_mut().for_each(|out| *out /= sum);
}

fn mean_and_inverse(x: impl Iterator<Item = f32> + Clone, count: usize, eps: f32) -> (f32, f32) {
    let mean = x.clone().sum::<f32>() / count as f32;
    let variance = x.map(|x| (x - mean) * (x - mean)).sum::<f32>() / count as f32;
    (mean, 1.0 / (variance + eps).sqrt())
}

fn layer_norm(out: &mut [f32], stats: &mut [f32], ins: &[Vec<f32>], cols: usize, eps: f32) {
    let [x, gain, bias] = ins else { unreachable!("three inputs") };
    for ((out, x), stats) in out.chunks_exact_mut(cols).zip(x.chunks_exact(cols)).zip(stats.as_chunks_mut().0) {
        let (mean, inverse) = mean_and_inverse(x.iter().copied(), cols, eps);
        *stats = [mean, inverse];
        for i in 0..cols {
            out[i] = (x[i] - mean) * inverse * gain[i] + bias[i];
        }
    }
}

fn layer_norm_back(dx: &mut [f32], ins: &[Vec<f32>], cols: usize) {
    let [x, gain, stats, dy] = ins else { unreachable!("four inputs") };
    for (row, dx) in dx.chunks_exact_mut(cols).enumerate() {
        let (x, dy) = (&x[row * cols..][..cols], &dy[row * cols..][..cols]);
        let (mean, inverse) = (stats[2 * row], stats[2 * row + 1]);
        let normal = |i: usize| (x[i] - mean) * inverse;
        let sum = dot(dy, gain) / cols as f32;
        let dot = (0..cols).map(|i| dy[i] * gain[i] * normal(i)).sum::<f32>() / cols as f32;
        for i in 0..cols {
            dx[i] = (dy[i] * gain[i] - sum - normal(i) * dot) * inverse;
        }
    }
}

fn norm_factors_back(dgain: &mut [f32], dbias: &mut [f32], ins: &[Vec<f32>], cols: usize, by_column: bool) {
    let [x, stats, dy] = ins else { unreachable!("three inputs") };
    for (i, (x, dy)) in x.iter().zip(dy).enumerate() {
        let (row, col) = (i / cols, i % cols);
        let s = if by_column { col } else { row };
        dbias[col] += dy;
        dgain[col] += dy * (x - stats[2 * s]) * stats[2 * s + 1];
    }
}

fn batch_stats(stats: &mut [f32], x: &[f32], rows: usize, cols: usize, eps: f32) {
    for (col, stats) in stats.as_chunks_mut().0.iter_mut().enumerate() {
        let (mean, inverse) = mean_and_inverse(x.iter().skip(col).step_by(cols).copied(), rows, eps);
        *stats = [mean, inverse];
    }
}

fn cross_entropy(loss: &mut [f32], dx: &mut [f32], x: &[f32], targets: &[f32], cols: usize, factor: f32) {
    for (((loss, dx), x), &target) in
        loss.iter_mut().zip(dx.chunks_exact_mut(cols)).zip(x.chunks_exact(cols)).zip(targets)
    {
        let most = largest(x);
        each(dx, x, |x| (x - most).exp());
        let sum: f32 = dx.iter().sum();
        *loss = sum.ln() + most - x[target as usize];
        dx.iter_mut().for_each(|dx| *dx *= factor / sum);
        dx[target as usize] -= factor;
    }
}

fn max_pool(out: &mut [f32], from: &mut [f32], x: &[f32], ints: &[usize]) {
    out.fill(f32::NEG_INFINITY);
    Geometry::of(ints, x.len()).each(|at| {
        if let Some(place) = at.place
            && x[place] > out[at.output]
        {
            out[at.output] = x[place];
            from[at.output] = place as f32;
        }
    });
}

/// A window that is moved over images: sizes as in kernels.cu.
struct Geometry {
    images: usize,
    height: usize,
    width: usize,
    channels: usize,
    side: usize,
    stride: usize,
    padding: usize,
    out_height: usize,
    out_width: usize,
}

/// One number under one position of the window.
struct At {
    /// Its index in the matrix of columns.
    column: usize,
    /// The index of the output pixel's channel.
    output: usize,
    /// Its index in the images, unless it is in the padding.
    place: Option<usize>,
}

impl Geometry {
    /// `len`: of the images.
    fn of(ints: &[usize], len: usize) -> Self {
        let [_, height, width, channels, side, stride, padding, out_height, out_width] =
            ints.try_into().expect("nine sizes");
        let images = len / (height * width * channels);
        Self { images, height, width, channels, side, stride, padding, out_height, out_width }
    }

    fn each(&self, mut visit: impl FnMut(&At)) {
        let Self { side, channels, .. } = *self;
        for pixel in 0..self.images * self.out_height * self.out_width {
            let (ox, oy) = (pixel % self.out_width, pixel / self.out_width % self.out_height);
            let image = pixel / self.out_width / self.out_height;
            for window in 0..side * side {
                let y = (oy * self.stride + window / side).checked_sub(self.padding).filter(|&y| y < self.height);
                let x = (ox * self.stride + window % side).checked_sub(self.padding).filter(|&x| x < self.width);
                let place = y.zip(x).map(|(y, x)| ((image * self.height + y) * self.width + x) * channels);
                for channel in 0..channels {
                    visit(&At {
                        column: (pixel * side * side + window) * channels + channel,
                        output: pixel * channels + channel,
                        place: place.map(|place| place + channel),
                    });
                }
            }
        }
    }
}
