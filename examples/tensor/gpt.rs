//! A small transformer language model.

use super::memory::{DType, Kind, Tensor};
use super::optimizer::{Adam, Param};
use super::tape::{Tape, Var};
use super::{Machine, Random, Result};

/// Its sizes.
#[derive(Clone, Copy, Debug)]
pub struct GptShape {
    pub words: usize,
    pub length: usize,
    pub width: usize,
    pub heads: usize,
    pub layers: usize,
}

impl GptShape {
    /// Each head has as many of the width's numbers.
    pub fn check(&self) -> Result<()> {
        let Self { width, heads, .. } = *self;
        if width % heads == 0 {
            return Ok(());
        }
        Err(format!("--width {width}: must be a multiple of {heads}, so that each of as many heads has its part")
            .into())
    }
}

/// Parameters of a layer: two norms (2 each), query, key, value, output, two of the perceptron (2 each).
pub const OF_LAYER: usize = 16;

/// The model. Parameters lie in single precision; [`forward`](Self::forward) computes in the storage it is given.
pub struct Gpt {
    pub shape: GptShape,
    /// Token table, position table, `OF_LAYER` for each layer, last norm (2), output.
    pub params: Vec<Param>,
}

impl Gpt {
    /// Fails also if the [shape](GptShape::check) cannot be.
    pub fn new(machine: &Machine, shape: GptShape, seed: u64) -> Result<Self> {
        shape.check()?;
        let initial = Self::initial(shape, seed);
        let params = initial.iter().map(|(values, shape)| Param::new(machine, values, shape));
        Ok(Self { shape, params: params.collect::<Result<_>>()? })
    }

    /// What the parameters begin with, and their shapes.
    pub fn initial(shape: GptShape, seed: u64) -> Vec<(Vec<f32>, Vec<usize>)> {
        let GptShape { words, length, width, layers, .. } = shape;
        let mut random = Random(seed);
        let mut table =
            |rows: usize, cols: usize, deviation: f32| (random.normals(rows * cols, deviation), vec![rows, cols]);
        let vector = |len: usize, value: f32| (vec![value; len], vec![len]);
        let deviation = 1.0 / (width as f32).sqrt();
        let small = deviation / (2.0 * layers as f32).sqrt(); // what is added to the stream
        let mut params = vec![table(words, width, 0.1), table(length, width, 0.1)];
        for _ in 0..layers {
            params.extend([vector(width, 1.0), vector(width, 0.0)]);
            for deviation in [deviation, deviation, deviation, small] {
                params.extend([table(width, width, deviation), vector(width, 0.0)]);
            }
            params.extend([vector(width, 1.0), vector(width, 0.0)]);
            params.extend([table(width, 4 * width, deviation), vector(4 * width, 0.0)]);
            params.extend([table(4 * width, width, small / 2.0), vector(width, 0.0)]);
        }
        params.extend([vector(width, 1.0), vector(width, 0.0), table(width, words, deviation)]);
        params
    }

    /// How many numbers there are to learn.
    pub fn len(&self) -> usize {
        self.params.iter().map(|param| param.value.len()).sum()
    }

    /// The parameters on a tape.
    pub fn leaves(&self, tape: &Tape) -> Vec<Var> {
        self.params.iter().map(|param| tape.leaf(&param.value)).collect()
    }

    /// The loss at each position of a batch of ids, against `targets`, on a tape, in `storage`. Every `segment` layers
    /// are a checkpoint; 0: none. `factor` multiplies the gradients.
    pub fn loss(&self, tape: &Tape, leaves: &[Var], (ids, targets): (&Tensor, &Tensor), how: How) -> Result<Var> {
        let GptShape { length, layers, .. } = self.shape;
        let cast: Vec<Var> = tape.machine.counted_as(Kind::Parameters, || {
            leaves.iter().map(|leaf| tape.cast(leaf, how.storage)).collect::<Result<_>>()
        })?;
        let mut x = embed(tape, &cast[..2], ids, length)?;
        let of_layer = |layer: usize| &cast[2 + layer * OF_LAYER..][..OF_LAYER];
        let shape = self.shape;
        let step = if how.segment == 0 { 1 } else { how.segment };
        for first in (0..layers).step_by(step) {
            let last = (first + step).min(layers);
            if how.segment == 0 {
                x = layer(tape, &x, of_layer(first), shape)?;
                continue;
            }
            let inputs: Vec<Var> =
                std::iter::once(x.clone()).chain((first..last).flat_map(of_layer).cloned()).collect();
            x = tape.checkpoint(&inputs, move |tape, inputs| {
                let mut x = inputs[0].clone();
                for params in inputs[1..].chunks_exact(OF_LAYER) {
                    x = layer(tape, &x, params, shape)?;
                }
                Ok(x)
            })?;
        }
        head(tape, &cast[2 + layers * OF_LAYER..], &x, targets, how.factor)
    }

    /// One step of training; gives the loss at each position, still on the device.
    pub fn train(
        &mut self,
        machine: &std::rc::Rc<Machine>,
        adam: &mut Adam,
        batch: (&Tensor, &Tensor),
    ) -> Result<Tensor> {
        let (loss, grads) = self.gradients(machine, batch, How::PLAIN)?;
        adam.begin();
        for (param, grad) in self.params.iter_mut().zip(&grads) {
            adam.update(machine, param, grad, 1.0)?;
        }
        Ok(loss)
    }

    /// The losses, and the gradient of each parameter.
    pub fn gradients(
        &self,
        machine: &std::rc::Rc<Machine>,
        batch: (&Tensor, &Tensor),
        how: How,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let tape = Tape::new(machine);
        let leaves = self.leaves(&tape);
        let loss = self.loss(&tape, &leaves, batch, how)?;
        let losses = loss.value.clone();
        let mut grads = tape.backward_of_loss(&loss)?;
        let grads = leaves.iter().map(|leaf| grads.take(leaf).ok_or("a parameter without a gradient"));
        Ok((losses, grads.collect::<std::result::Result<_, _>>()?))
    }
}

/// How a step is computed.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub storage: DType,
    /// Every so many layers are a checkpoint; 0: none.
    pub segment: usize,
    /// What the gradients are multiplied with.
    pub factor: f32,
}

impl How {
    pub const PLAIN: Self = Self { storage: DType::F32, segment: 0, factor: 1.0 };
}

/// The sum of what the token table and the position table say about each id.
pub fn embed(tape: &Tape, tables: &[Var], ids: &Tensor, length: usize) -> Result<Var> {
    let positions: Vec<u32> = (0..ids.len()).map(|i| (i % length) as u32).collect();
    let positions = tape.embedding(&tables[1], &tape.machine.ids(&positions)?)?;
    tape.add(&tape.embedding(&tables[0], ids)?, &positions)
}

/// The last norm, the logits, and the loss at each position; `factor` multiplies the gradients.
pub fn head(tape: &Tape, params: &[Var], x: &Var, targets: &Tensor, factor: f32) -> Result<Var> {
    let x = tape.layer_norm(x, &params[0], &params[1])?;
    let logits = tape.matmul(&x, &params[2], false, 1.0)?;
    tape.cross_entropy(&logits, targets, factor)
}

/// One layer: attention and perceptron, each behind a norm and added to the stream.
pub fn layer(tape: &Tape, x: &Var, params: &[Var], shape: GptShape) -> Result<Var> {
    let GptShape { length, width, heads, .. } = shape;
    let batch = x.value.rows() / length;
    let attended = {
        let normal = tape.layer_norm(x, &params[0], &params[1])?;
        let head = |index: usize| {
            let x = tape.linear(&normal, &params[index], &params[index + 1])?;
            tape.swap_axes(&tape.reshape(&x, &[batch, length, heads, width / heads]))
        };
        let (q, k, v) = (head(2)?, head(4)?, head(6)?);
        let mixed = tape.swap_axes(&tape.attention(&q, &k, &v, true)?)?;
        let mixed = tape.reshape(&mixed, &[batch * length, width]);
        tape.linear(&mixed, &params[8], &params[9])?
    };
    let x = tape.add(x, &attended)?;
    drop(attended);
    let normal = tape.layer_norm(&x, &params[10], &params[11])?;
    let hidden = tape.gelu(&tape.linear(&normal, &params[12], &params[13])?)?;
    tape.add(&x, &tape.linear(&hidden, &params[14], &params[15])?)
}
