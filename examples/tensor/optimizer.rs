//! Parameters, and how they learn.

use super::memory::{DType, Kind, Tensor};
use super::{Machine, Random, Result};

/// A parameter, in single precision, and what an optimizer keeps for it.
pub struct Param {
    pub value: Tensor,
    state: Vec<Tensor>,
}

impl Param {
    /// From the host.
    pub fn new(machine: &Machine, values: &[f32], shape: &[usize]) -> Result<Self> {
        let value = machine.counted_as(Kind::Parameters, || machine.tensor(values, shape, DType::F32))?;
        Ok(Self { value, state: Vec::new() })
    }

    pub fn normal(machine: &Machine, random: &mut Random, shape: &[usize], deviation: f32) -> Result<Self> {
        Self::new(machine, &random.normals(shape.iter().product(), deviation), shape)
    }

    pub fn full(machine: &Machine, len: usize, value: f32) -> Result<Self> {
        Self::new(machine, &vec![value; len], &[len])
    }

    /// Makes `count` tensors of zeros when they are first needed.
    fn state(&mut self, machine: &Machine, count: usize) -> Result<&[Tensor]> {
        while self.state.len() < count {
            let zeros = || machine.full(self.value.shape(), DType::F32, 0.0);
            let zeros = machine.counted_as(Kind::OptimizerState, zeros)?;
            self.state.push(zeros);
        }
        Ok(&self.state)
    }
}

/// Gradient descent with momentum.
pub struct Sgd {
    pub rate: f32,
    pub momentum: f32,
}

impl Sgd {
    /// One step; gradients count `factor` times.
    pub fn step(&self, machine: &Machine, param: &mut Param, grad: &Tensor, factor: f32) -> Result<()> {
        let value = param.value.clone();
        let state = param.state(machine, 1)?;
        machine.sgd(&value, &state[0], grad, [self.rate, self.momentum, factor])
    }
}

/// Adam with the usual decays.
pub struct Adam {
    pub rate: f32,
    steps: i32,
}

const DECAYS: (f32, f32) = (0.9, 0.99);

impl Adam {
    pub fn new(rate: f32) -> Self {
        Self { rate, steps: 0 }
    }

    /// Begins a step, in which each parameter is given to [`update`](Self::update) once.
    pub fn begin(&mut self) {
        self.steps += 1;
    }

    /// Gradients count `factor` times.
    pub fn update(&self, machine: &Machine, param: &mut Param, grad: &Tensor, factor: f32) -> Result<()> {
        // Both moments begin at zero, which the rate makes up for.
        let correction = (1.0 - DECAYS.1.powi(self.steps)).sqrt() / (1.0 - DECAYS.0.powi(self.steps));
        let value = param.value.clone();
        let state = param.state(machine, 2)?;
        machine.adam(&value, &state[0], &state[1], grad, [self.rate * correction, DECAYS.0, DECAYS.1, factor])
    }
}
