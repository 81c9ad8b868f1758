//! A part of the model on a device of its own.

use crate::tensor::{
    DType, Device, GptShape, Grads, Machine, OF_LAYER, Param, Result, Sgd, Tape, Tensor, Var, embed, head, layer,
};
use std::ops::Range;
use std::rc::Rc;
use vramalloc::Config;

/// What goes from one stage to the next, by way of the host.
pub enum Passed {
    Ids(Vec<u32>),
    /// Rows of the stream; from the last stage, the loss of each row.
    Values(Vec<f32>),
}

/// What a part of a batch keeps on its way back.
struct Kept {
    tape: Tape,
    input: Option<Var>,
    leaves: Vec<Var>,
    output: Var,
}

pub struct Stage {
    pub machine: Rc<Machine>,
    shape: GptShape,
    layers: Range<usize>,
    params: Vec<Param>,
    kept: Vec<Kept>,
    /// Sums over the parts of a batch.
    grads: Vec<Option<Tensor>>,
}

impl Stage {
    /// The `index`th of `count` stages. The first also embeds, the last has the loss.
    pub fn new(
        device: &Device,
        shape: GptShape,
        initial: &[(Vec<f32>, Vec<usize>)],
        (index, count): (usize, usize),
    ) -> Result<Self> {
        let machine = Rc::new(Machine::cached(device, Config::from_env()?)?);
        let layers = shape.layers * index / count..shape.layers * (index + 1) / count;
        let at = |layer: usize| 2 + layer * OF_LAYER;
        let begin = if layers.start == 0 { 0 } else { at(layers.start) };
        let end = if layers.end == shape.layers { initial.len() } else { at(layers.end) };
        let mut params = Vec::new();
        for (values, shape) in &initial[begin..end] {
            params.push(Param::new(&machine, values, shape)?);
        }
        let grads = params.iter().map(|_| None).collect();
        Ok(Self { machine, shape, layers, params, kept: Vec::new(), grads })
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// How many numbers it learns.
    pub fn len(&self) -> usize {
        self.params.iter().map(|param| param.value.len()).sum()
    }

    pub fn forward(&mut self, passed: &Passed, targets: &[u32], factor: f32) -> Result<Passed> {
        let machine = &self.machine;
        let tape = Tape::new(machine);
        let leaves: Vec<Var> = self.params.iter().map(|param| tape.leaf(&param.value)).collect();
        let width = self.shape.width;
        let (input, mut x, mut rest) = match passed {
            Passed::Ids(ids) => {
                let ids = machine.ids(ids)?;
                (None, embed(&tape, &leaves[..2], &ids, self.shape.length)?, &leaves[2..])
            }
            Passed::Values(values) => {
                let input = machine.tensor(values, &[values.len() / width, width], DType::F32)?;
                let input = tape.leaf(&input);
                (Some(input.clone()), input, &leaves[..])
            }
        };
        for _ in self.layers.clone() {
            x = layer(&tape, &x, &rest[..OF_LAYER], self.shape)?;
            rest = &rest[OF_LAYER..];
        }
        if !rest.is_empty() {
            x = head(&tape, rest, &x, &machine.ids(targets)?, factor)?;
        }
        let values = machine.to_vec(&x.value)?;
        self.kept.push(Kept { tape, input, leaves, output: x });
        Ok(Passed::Values(values))
    }

    /// The way back of the part that came last. `grad`: of the output; `None` for the loss. Gives that of the input.
    pub fn backward(&mut self, grad: Option<Vec<f32>>) -> Result<Option<Vec<f32>>> {
        let Kept { tape, input, leaves, output } = self.kept.pop().ok_or("a part that went forward")?;
        let mut grads: Grads = match grad {
            None => tape.backward_of_loss(&output)?,
            Some(grad) => {
                let grad = self.machine.tensor(&grad, output.value.shape(), DType::F32)?;
                tape.backward(&output, grad)?
            }
        };
        for (sum, leaf) in self.grads.iter_mut().zip(&leaves) {
            let grad = grads.take(leaf).ok_or("a parameter without a gradient")?;
            match sum {
                Some(sum) => self.machine.add_to(sum, &grad)?,
                None => *sum = Some(grad),
            }
        }
        let Some(input) = input else { return Ok(None) };
        let grad = grads.take(&input).ok_or("an input without a gradient")?;
        Ok(Some(self.machine.to_vec(&grad)?))
    }

    /// Takes a step with the sums.
    pub fn learn(&mut self, sgd: &Sgd) -> Result<()> {
        for (param, grad) in self.params.iter_mut().zip(&mut self.grads) {
            let grad = grad.take().ok_or("a parameter without a gradient")?;
            sgd.step(&self.machine, param, &grad, 1.0)?;
        }
        Ok(())
    }

    pub fn params(&self) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        for param in &self.params {
            values.extend(self.machine.to_vec(&param.value)?);
        }
        Ok(values)
    }
}
