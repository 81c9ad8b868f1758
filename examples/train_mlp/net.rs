//! A multilayer perceptron, trained by gradient descent with momentum.
//!
//! Memory follows the pattern of every framework: weights (and, from the first update on, velocities) stay; what a
//! layer gives is kept until the backward pass has been there; gradients live until the update. Rust's ownership
//! does the freeing: a tensor that is moved into the last function that needs it is freed at that function's end.

use crate::data::{CLASSES, FEATURES, Random};
use crate::ops::{Factor, Machine, Op, Result, Tensor};

const HIDDEN: u32 = 768;
const RATE: f32 = 0.02;
const MOMENTUM: f32 = 0.9;

struct Layer {
    weights: Tensor,
    bias: Tensor,
    /// Of the weights and of the bias; made at the first update.
    velocity: Option<(Tensor, Tensor)>,
}

struct Gradients {
    weights: Tensor,
    bias: Tensor,
}

pub struct Mlp {
    layers: Vec<Layer>,
}

impl Mlp {
    pub fn new(machine: &Machine) -> Result<Self> {
        let mut random = Random(1);
        let mut layer = |inputs: u32, outputs: u32| -> Result<Layer> {
            let scale = (2.0 / inputs as f32).sqrt();
            let bytes: Vec<u8> =
                (0..inputs * outputs).flat_map(|_| (scale * random.normal()).to_ne_bytes()).collect();
            let weights = machine.upload(&bytes, inputs, outputs)?;
            Ok(Layer { weights, bias: machine.full(1, outputs, 0.0)?, velocity: None })
        };
        Ok(Self { layers: vec![layer(FEATURES, HIDDEN)?, layer(HIDDEN, CLASSES)?] })
    }

    /// The sizes of the layers, for people.
    pub fn shape(&self) -> String {
        let sizes: Vec<String> = self.layers.iter().map(|layer| layer.weights.cols.to_string()).collect();
        format!("{FEATURES} -> {}", sizes.join(" -> "))
    }

    /// One training step. Gives the scores of the batch (see [`Op::CrossEntropy`]); `note` is told how far it is.
    pub fn train(
        &mut self,
        machine: &Machine,
        x: Tensor,
        labels: Tensor,
        note: &mut dyn FnMut(&'static str),
    ) -> Result<Tensor> {
        note("batch uploaded");
        let mut inputs = vec![x];
        for index in 0..self.layers.len() {
            let output = self.forward_layer(machine, index, &inputs[index])?;
            inputs.push(output);
        }
        note("forward pass done");
        let logits = inputs.pop().expect("the last layer's output");
        let (score, grad) = cross_entropy(machine, logits, labels)?;
        note("loss computed");
        let gradients = self.backward(machine, inputs, grad)?;
        note("backward pass done");
        self.update(machine, gradients)?;
        note("weights updated");
        Ok(score)
    }

    /// The scores of a batch, without training. Each layer's input is freed once the next one has used it.
    pub fn score(&self, machine: &Machine, x: Tensor, labels: Tensor) -> Result<Tensor> {
        let mut output = x;
        for index in 0..self.layers.len() {
            output = self.forward_layer(machine, index, &output)?;
        }
        Ok(cross_entropy(machine, output, labels)?.0)
    }

    fn forward_layer(&self, machine: &Machine, index: usize, input: &Tensor) -> Result<Tensor> {
        let layer = &self.layers[index];
        let relu = index + 1 < self.layers.len();
        let mut x = machine.matmul(Factor::plain(input), Factor::plain(&layer.weights))?;
        machine.run(Op::AddBias { x: &mut x, bias: &layer.bias, relu })?;
        Ok(x)
    }

    /// From the last layer to the first. `inputs` (of every layer) and each `grad` are freed on the way.
    fn backward(&self, machine: &Machine, mut inputs: Vec<Tensor>, mut grad: Tensor) -> Result<Vec<Gradients>> {
        let mut gradients = Vec::new();
        for layer in self.layers.iter().rev() {
            let input = inputs.pop().expect("one input for every layer");
            let weights = machine.matmul(Factor::transposed(&input), Factor::plain(&grad))?;
            let mut bias = machine.empty(1, grad.cols)?;
            machine.run(Op::SumRows { x: &grad, out: &mut bias })?;
            gradients.push(Gradients { weights, bias });
            if inputs.is_empty() {
                break; // nobody asks for the gradient of the examples
            }
            grad = machine.matmul(Factor::plain(&grad), Factor::transposed(&layer.weights))?;
            machine.run(Op::ReluBackward { grad: &mut grad, output: &input })?;
        }
        gradients.reverse();
        Ok(gradients)
    }

    /// Takes the gradients, so they are freed here, as by PyTorch's `zero_grad(set_to_none=True)`.
    fn update(&mut self, machine: &Machine, gradients: Vec<Gradients>) -> Result<()> {
        for (layer, grads) in self.layers.iter_mut().zip(gradients) {
            if layer.velocity.is_none() {
                let zeros = |like: &Tensor| machine.full(like.rows, like.cols, 0.0);
                layer.velocity = Some((zeros(&layer.weights)?, zeros(&layer.bias)?));
            }
            let Some((velocity, bias_velocity)) = &mut layer.velocity else { continue };
            descend(machine, &mut layer.weights, velocity, &grads.weights)?;
            descend(machine, &mut layer.bias, bias_velocity, &grads.bias)?;
        }
        Ok(())
    }
}

fn descend(machine: &Machine, weights: &mut Tensor, velocity: &mut Tensor, grad: &Tensor) -> Result<()> {
    machine.run(Op::Sgd { weights, velocity, grad, rate: RATE, momentum: MOMENTUM })
}

/// The scores and the logits' gradient.
fn cross_entropy(machine: &Machine, logits: Tensor, labels: Tensor) -> Result<(Tensor, Tensor)> {
    let mut score = machine.empty(logits.rows, 2)?;
    let mut grad = machine.empty(logits.rows, logits.cols)?;
    machine.run(Op::CrossEntropy { logits: &logits, labels: &labels, score: &mut score, grad: &mut grad })?;
    Ok((score, grad))
}
