//! Dynamic loss scaling: gradients are multiplied so that small ones do not vanish; when some overflow, the step is
//! skipped and the factor halved, and after a while without it is doubled.

use crate::tensor::{DType, Machine, Result, Tensor};

/// Steps without an overflow after which the factor is doubled.
const PATIENCE: usize = 50;

pub struct Scaler {
    factor: f32,
    is_on: bool,
    good: usize,
    skipped: usize,
}

impl Scaler {
    pub fn new(factor: f32) -> Self {
        Self { factor, is_on: true, good: 0, skipped: 0 }
    }

    /// Always 1.
    pub fn off() -> Self {
        Self { is_on: false, ..Self::new(1.0) }
    }

    pub fn factor(&self) -> f32 {
        self.factor
    }

    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Whether the gradients can be used; adapts the factor for the next.
    pub fn accepts(&mut self, machine: &Machine, grads: &[Tensor]) -> Result<bool> {
        if !self.is_on {
            return Ok(true);
        }
        let flag = machine.full(&[1], DType::F32, 0.0)?;
        for grad in grads {
            machine.find_overflow(&flag, grad)?;
        }
        if machine.to_vec(&flag)?[0] != 0.0 {
            self.factor /= 2.0;
            self.good = 0;
            self.skipped += 1;
            return Ok(false);
        }
        self.good += 1;
        if self.good == PATIENCE {
            self.factor *= 2.0;
            self.good = 0;
        }
        Ok(true)
    }
}
