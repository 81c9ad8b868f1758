//! Gradients in reverse mode: a tape of what was computed.

use super::memory::{DType, Kind, Tensor};
use super::ops::Window;
use super::{Machine, Result};
use std::cell::RefCell;
use std::rc::Rc;

/// A value on a tape.
#[derive(Clone)]
pub struct Var {
    pub value: Tensor,
    id: usize,
}

/// The number of all constants.
const CONSTANT: usize = usize::MAX;

/// What is known of the gradients so far, by variable.
pub struct Grads(Vec<Option<Tensor>>);

impl Grads {
    /// Takes a variable's gradient; `None` if nothing depends on it.
    pub fn take(&mut self, var: &Var) -> Option<Tensor> {
        self.0[var.id].take()
    }

    fn add(&mut self, machine: &Machine, id: usize, grad: Tensor) -> Result<()> {
        if id == CONSTANT {
            return Ok(());
        }
        match &self.0[id] {
            // Not in place: the same memory may be another variable's gradient as well.
            Some(sum) => self.0[id] = Some(machine.add(sum, &grad)?),
            None => self.0[id] = Some(grad),
        }
        Ok(())
    }
}

/// Turns the gradient of a node's output into those of its inputs.
type Backward = Box<dyn FnOnce(&Machine, &Tensor) -> Result<Vec<(usize, Tensor)>>>;

/// What was computed, to be gone through backwards. Each operation's entry keeps the tensors that its gradient needs.
pub struct Tape {
    pub machine: Rc<Machine>,
    nodes: RefCell<Vec<Option<Backward>>>,
}

impl Tape {
    pub fn new(machine: &Rc<Machine>) -> Self {
        Self { machine: Rc::clone(machine), nodes: RefCell::default() }
    }

    /// A value that was not computed here.
    pub fn leaf(&self, value: &Tensor) -> Var {
        self.push(value.clone(), None)
    }

    /// A value whose gradient nobody wants.
    pub fn constant(&self, value: &Tensor) -> Var {
        Var { value: value.clone(), id: CONSTANT }
    }

    fn push(&self, value: Tensor, backward: Option<Backward>) -> Var {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(backward);
        Var { value, id: nodes.len() - 1 }
    }

    fn node(
        &self,
        value: Tensor,
        backward: impl FnOnce(&Machine, &Tensor) -> Result<Vec<(usize, Tensor)>> + 'static,
    ) -> Var {
        self.push(value, Some(Box::new(backward)))
    }

    /// The gradients of what `grad` is the gradient of `of` for. Each entry's tensors are freed when it is passed.
    pub fn backward(self, of: &Var, grad: Tensor) -> Result<Grads> {
        let mut nodes = self.nodes.into_inner();
        let mut grads = Grads(nodes.iter().map(|_| None).collect());
        grads.0[of.id] = Some(grad);
        let machine = &self.machine;
        machine.counted_as(Kind::Gradients, || {
            while let Some(node) = nodes.pop() {
                let Some(backward) = node else { continue };
                // An inner node's gradient has served when it is passed.
                let Some(grad) = grads.0[nodes.len()].take() else { continue };
                for (id, grad) in backward(machine, &grad)? {
                    grads.add(machine, id, grad)?;
                }
            }
            Ok(grads)
        })
    }

    /// The gradients of the mean of a loss that [`cross_entropy`](Self::cross_entropy) gave.
    pub fn backward_of_loss(self, loss: &Var) -> Result<Grads> {
        let unused = loss.value.clone(); // the gradient was computed with the loss
        self.backward(loss, unused)
    }

    pub fn add(&self, a: &Var, b: &Var) -> Result<Var> {
        let ids = (a.id, b.id);
        let value = self.machine.add(&a.value, &b.value)?;
        Ok(self.node(value, move |_, dy| Ok(vec![(ids.0, dy.clone()), (ids.1, dy.clone())])))
    }

    pub fn mul(&self, a: &Var, b: &Var) -> Result<Var> {
        let value = self.machine.mul(&a.value, &b.value)?;
        let (a, b) = (a.clone(), b.clone());
        Ok(self.node(value, move |machine, dy| {
            Ok(vec![(a.id, machine.mul(dy, &b.value)?), (b.id, machine.mul(dy, &a.value)?)])
        }))
    }

    pub fn scale(&self, x: &Var, factor: f32) -> Result<Var> {
        let id = x.id;
        let value = self.machine.scale(&x.value, factor)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.scale(dy, factor)?)])))
    }

    pub fn relu(&self, x: &Var) -> Result<Var> {
        let id = x.id;
        let value = self.machine.relu(&x.value)?;
        let y = value.clone(); // positive where the input is
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.relu_back(&y, dy)?)])))
    }

    pub fn gelu(&self, x: &Var) -> Result<Var> {
        let value = self.machine.gelu(&x.value)?;
        let x = x.clone();
        Ok(self.node(value, move |machine, dy| Ok(vec![(x.id, machine.gelu_back(&x.value, dy)?)])))
    }

    /// The same numbers in another shape.
    pub fn reshape(&self, x: &Var, shape: &[usize]) -> Var {
        let (id, before) = (x.id, x.value.shape().to_vec());
        self.node(x.value.reshape(shape), move |_, dy| Ok(vec![(id, dy.reshape(&before))]))
    }

    /// The numbers stored as `dtype`; the gradient goes back as they were stored.
    pub fn cast(&self, x: &Var, dtype: DType) -> Result<Var> {
        let (id, before) = (x.id, x.value.dtype());
        let value = self.machine.cast(&x.value, dtype)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.cast(dy, before)?)])))
    }

    pub fn add_bias(&self, x: &Var, bias: &Var) -> Result<Var> {
        let ids = (x.id, bias.id);
        let value = self.machine.add_bias(&x.value, &bias.value)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(ids.0, dy.clone()), (ids.1, machine.sum_rows(dy)?)])))
    }

    /// `factor · a · b`, `b` transposed in memory if said so; for matrices or as many as there are.
    pub fn matmul(&self, a: &Var, b: &Var, b_transposed: bool, factor: f32) -> Result<Var> {
        let value = self.machine.matmul(&a.value, &b.value, (false, b_transposed), factor)?;
        let (a, b) = (a.clone(), b.clone());
        Ok(self.node(value, move |machine, dy| {
            let da = machine.matmul(dy, &b.value, (false, !b_transposed), factor)?;
            let db = if b_transposed {
                machine.matmul(dy, &a.value, (true, false), factor)?
            } else {
                machine.matmul(&a.value, dy, (true, false), factor)?
            };
            Ok(vec![(a.id, da), (b.id, db)])
        }))
    }

    /// `x · weight + bias`.
    pub fn linear(&self, x: &Var, weight: &Var, bias: &Var) -> Result<Var> {
        let product = self.matmul(x, weight, false, 1.0)?;
        self.add_bias(&product, bias)
    }

    /// See [`Machine::softmax`].
    pub fn softmax(&self, x: &Var, queries: usize, causal: bool, factor: f32) -> Result<Var> {
        let id = x.id;
        let value = self.machine.softmax(&x.value, queries, causal, factor)?;
        let y = value.clone();
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.softmax_back(&y, dy, factor)?)])))
    }

    pub fn layer_norm(&self, x: &Var, gain: &Var, bias: &Var) -> Result<Var> {
        let (value, stats) = self.machine.layer_norm(&x.value, &gain.value, &bias.value)?;
        let (x, gain, bias) = (x.clone(), gain.clone(), bias.id);
        Ok(self.node(value, move |machine, dy| {
            let (dgain, dbias) = machine.norm_factors_back(&x.value, &stats, dy, false)?;
            let dx = machine.layer_norm_back(&x.value, &gain.value, &stats, dy)?;
            Ok(vec![(x.id, dx), (gain.id, dgain), (bias, dbias)])
        }))
    }

    /// Over all rows; there are no running means, as nothing here is evaluated alone.
    pub fn batch_norm(&self, x: &Var, gain: &Var, bias: &Var) -> Result<Var> {
        let (value, stats) = self.machine.batch_norm(&x.value, &gain.value, &bias.value)?;
        let (x, gain, bias) = (x.clone(), gain.clone(), bias.id);
        Ok(self.node(value, move |machine, dy| {
            let (dgain, dbias) = machine.norm_factors_back(&x.value, &stats, dy, true)?;
            let dx = machine.batch_norm_back(&x.value, &stats, &gain.value, dy, (&dgain, &dbias))?;
            Ok(vec![(x.id, dx), (gain.id, dgain), (bias, dbias)])
        }))
    }

    pub fn embedding(&self, table: &Var, ids: &Tensor) -> Result<Var> {
        let (id, words, ids) = (table.id, table.value.rows(), ids.clone());
        let value = self.machine.embedding(&table.value, &ids)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.embedding_back(words, &ids, dy)?)])))
    }

    /// See [`Machine::swap_axes`].
    pub fn swap_axes(&self, x: &Var) -> Result<Var> {
        let id = x.id;
        let value = self.machine.swap_axes(&x.value)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.swap_axes(dy)?)])))
    }

    /// Scaled dot product attention for batch×heads×length×size.
    pub fn attention(&self, q: &Var, k: &Var, v: &Var, causal: bool) -> Result<Var> {
        let (queries, size) = (q.value.shape()[2], q.value.cols());
        let scores = self.matmul(q, k, true, 1.0)?;
        let parts = self.softmax(&scores, queries, causal, 1.0 / (size as f32).sqrt())?;
        drop(scores); // its gradient needs only the softmax
        self.matmul(&parts, v, false, 1.0)
    }

    /// The loss of each row. Its gradient, that of their mean times `factor`, is computed at once.
    pub fn cross_entropy(&self, x: &Var, targets: &Tensor, factor: f32) -> Result<Var> {
        let id = x.id;
        let (loss, dx) = self.machine.cross_entropy(&x.value, targets, factor)?;
        Ok(self.node(loss, move |_, _| Ok(vec![(id, dx)])))
    }

    /// `weight`: side·side·channels by output channels. The columns are made again for the gradient, not kept.
    pub fn convolution(&self, x: &Var, weight: &Var, window: Window) -> Result<Var> {
        let machine = &self.machine;
        let image = x.value.shape().to_vec();
        let out = [image[0], window.positions(image[1]), window.positions(image[2]), weight.value.cols()];
        let is_plain = window == Window { side: 1, stride: 1, padding: 0 };
        let columns = move |machine: &Machine, x: &Tensor| -> Result<Tensor> {
            if is_plain { Ok(x.reshape(&[x.rows(), x.cols()])) } else { machine.im2col(x, window) }
        };
        let value =
            machine.matmul(&columns(machine, &x.value)?, &weight.value, (false, false), 1.0)?.reshape(&out);
        let (x, weight) = (x.clone(), weight.clone());
        Ok(self.node(value, move |machine, dy| {
            let dy = dy.reshape(&[dy.rows(), dy.cols()]);
            let dweight = machine.matmul(&columns(machine, &x.value)?, &dy, (true, false), 1.0)?;
            if x.id == CONSTANT {
                return Ok(vec![(weight.id, dweight)]);
            }
            let back = || machine.matmul(&dy, &weight.value, (false, true), 1.0);
            let dx = if is_plain {
                back()?.reshape(&image)
            } else {
                let dcolumns = machine.counted_as(Kind::Workspace, back)?;
                machine.col2im(&dcolumns, &image, window)?
            };
            Ok(vec![(x.id, dx), (weight.id, dweight)])
        }))
    }

    pub fn max_pool(&self, x: &Var, window: Window) -> Result<Var> {
        let (id, image) = (x.id, x.value.shape().to_vec());
        let (value, from) = self.machine.max_pool(&x.value, window)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.max_pool_back(&image, &from, dy, window)?)])))
    }

    /// The mean over each image's pixels.
    pub fn average(&self, x: &Var) -> Result<Var> {
        let (id, image) = (x.id, x.value.shape().to_vec());
        let value = self.machine.average(&x.value)?;
        Ok(self.node(value, move |machine, dy| Ok(vec![(id, machine.average_back(&image, dy)?)])))
    }

    /// Computes `body` of `inputs` and keeps only those: the rest is computed again when its gradient is asked for.
    pub fn checkpoint(
        &self,
        inputs: &[Var],
        body: impl Fn(&Tape, &[Var]) -> Result<Var> + 'static,
    ) -> Result<Var> {
        fn run(
            machine: &Rc<Machine>,
            inputs: &[Var],
            body: impl Fn(&Tape, &[Var]) -> Result<Var>,
        ) -> Result<(Tape, Vec<Var>, Var)> {
            let tape = Tape::new(machine);
            let leaves: Vec<Var> = inputs.iter().map(|input| tape.leaf(&input.value)).collect();
            let output = body(&tape, &leaves)?;
            Ok((tape, leaves, output))
        }
        let value = run(&self.machine, inputs, &body)?.2.value;
        let (inputs, machine) = (inputs.to_vec(), Rc::clone(&self.machine));
        Ok(self.node(value, move |_, dy| {
            let (tape, leaves, output) =
                machine.counted_as(Kind::Activations, || run(&machine, &inputs, &body))?;
            let mut grads = tape.backward(&output, dy.clone())?;
            let pairs = inputs.iter().zip(&leaves);
            Ok(pairs.filter_map(|(input, leaf)| Some((input.id, grads.take(leaf)?))).collect())
        }))
    }
}
