//! The operations on the simulated device: its memory holds real bytes, on which the host does the arithmetic.

use crate::ops::{Backend, Factor, Op, Result, Tensor};
use std::sync::Arc;
use vramalloc::driver::sim::SimDriver;

pub struct Host {
    driver: Arc<SimDriver>,
}

impl Host {
    pub fn new(driver: &Arc<SimDriver>) -> Self {
        Self { driver: Arc::clone(driver) }
    }

    /// A copy of a tensor. The device checks that the whole range is memory that may be read.
    fn load<T>(&self, x: &Tensor, number: fn([u8; 4]) -> T) -> Result<Vec<T>> {
        let numbers = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&word| number(word)).collect();
        Ok(self.driver.with_bytes(x.ptr(), x.bytes(), numbers)?)
    }

    fn floats(&self, x: &Tensor) -> Result<Vec<f32>> {
        self.load(x, f32::from_ne_bytes)
    }

    /// Lets `change` work on a tensor in place.
    fn update(&self, x: &mut Tensor, change: impl FnOnce(&mut [f32])) -> Result<()> {
        let mut values = self.floats(x)?;
        change(&mut values);
        self.store(x, &values)
    }

    fn store(&self, x: &mut Tensor, values: &[f32]) -> Result<()> {
        let fill = |bytes: &mut [u8]| {
            for (word, value) in bytes.chunks_exact_mut(4).zip(values) {
                word.copy_from_slice(&value.to_ne_bytes());
            }
        };
        Ok(self.driver.with_bytes_mut(x.ptr(), x.bytes(), fill)?)
    }

    /// A factor, row by row as the product sees it.
    fn factor(&self, factor: Factor<'_>) -> Result<Vec<f32>> {
        let values = self.floats(factor.tensor)?;
        if !factor.transposed {
            return Ok(values);
        }
        let (rows, cols) = (factor.tensor.rows as usize, factor.tensor.cols as usize);
        let mut turned = vec![0.0; values.len()];
        for (row, line) in values.chunks_exact(cols).enumerate() {
            for (col, value) in line.iter().enumerate() {
                turned[col * rows + row] = *value;
            }
        }
        Ok(turned)
    }

    fn cross_entropy(
        &self,
        logits: &Tensor,
        labels: &Tensor,
        score: &mut Tensor,
        grad: &mut Tensor,
    ) -> Result<()> {
        let mut rows = self.floats(logits)?;
        let labels = self.load(labels, u32::from_ne_bytes)?;
        let mut scores = Vec::with_capacity(2 * labels.len());
        let scale = 1.0 / labels.len() as f32;
        for (row, &label) in rows.chunks_exact_mut(logits.cols as usize).zip(&labels) {
            let (loss, hit) = row_cross_entropy(row, label as usize, scale);
            scores.extend([loss, if hit { 1.0 } else { 0.0 }]);
        }
        self.store(score, &scores)?;
        self.store(grad, &rows)
    }
}

impl Backend for Host {
    fn run(&self, op: Op<'_>) -> Result<()> {
        op.check();
        match op {
            Op::Fill { out, value } => self.store(out, &vec![value; out.len() as usize]),
            Op::MatMul { a, b, out } => {
                let inner = a.shape().1 as usize;
                let product = product(&self.factor(a)?, &self.factor(b)?, inner, out.cols as usize);
                self.store(out, &product)
            }
            Op::AddBias { x, bias, relu } => {
                let bias = self.floats(bias)?;
                let floor = if relu { 0.0 } else { f32::NEG_INFINITY };
                self.update(x, |values| {
                    for row in values.chunks_exact_mut(bias.len()) {
                        row.iter_mut().zip(&bias).for_each(|(x, bias)| *x = (*x + bias).max(floor));
                    }
                })
            }
            Op::ReluBackward { grad, output } => {
                let output = self.floats(output)?;
                let keep = |grad: f32, output: f32| if output > 0.0 { grad } else { 0.0 };
                self.update(grad, |grads| {
                    grads.iter_mut().zip(&output).for_each(|(grad, &output)| *grad = keep(*grad, output));
                })
            }
            Op::SumRows { x, out } => {
                let mut sums = vec![0.0; out.len() as usize];
                for row in self.floats(x)?.chunks_exact(sums.len()) {
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
                self.store(out, &sums)
            }
            Op::CrossEntropy { logits, labels, score, grad } => self.cross_entropy(logits, labels, score, grad),
            Op::Sgd { weights, velocity, grad, rate, momentum } => {
                let grad = self.floats(grad)?;
                self.update(velocity, |velocity| {
                    velocity.iter_mut().zip(&grad).for_each(|(v, grad)| *v = momentum * *v + grad);
                })?;
                let velocity = self.floats(velocity)?;
                self.update(weights, |weights| {
                    weights.iter_mut().zip(&velocity).for_each(|(weight, v)| *weight -= rate * v);
                })
            }
        }
    }

    fn upload(&self, bytes: &[u8], out: &mut Tensor) -> Result<()> {
        Ok(self.driver.write(out.ptr(), bytes)?)
    }

    fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        self.floats(x) // everything was done at once: there is nothing to wait for
    }
}

/// `a b`, both row by row. The inner loop goes along rows, which the compiler turns into vector instructions.
fn product(a: &[f32], b: &[f32], inner: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; a.len() / inner * cols];
    for (row, out) in a.chunks_exact(inner).zip(out.chunks_exact_mut(cols)) {
        for (factor, line) in row.iter().zip(b.chunks_exact(cols)) {
            out.iter_mut().zip(line).for_each(|(out, value)| *out += factor * value);
        }
    }
    out
}

/// The loss of one row of logits and whether it is a hit; leaves the gradient, times `scale`, in place of the row.
fn row_cross_entropy(row: &mut [f32], label: usize, scale: f32) -> (f32, bool) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let hit = row[label] >= largest;
    // Taking the largest off first keeps `exp` in range and changes nothing in the result.
    let own = row[label] - largest;
    row.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|exp| *exp *= scale / sum);
    row[label] -= scale;
    (sum.ln() - own, hit)
}
