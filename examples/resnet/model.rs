//! ResNet-50 (the variant whose 3 by 3 convolutions have the stride), and what its shapes say about memory.

use crate::tensor::{Machine, Param, Random, Result, Tape, Tensor, Var, Window};

pub const CLASSES: usize = 1000;
/// Blocks of each stage, and the channels inside; they leave four times as many.
const STAGES: [(usize, usize); 4] = [(3, 64), (4, 128), (6, 256), (3, 512)];
const EXPANSION: usize = 4;
const STEM: Window = Window { side: 7, stride: 2, padding: 3 };
const POOL: Window = Window { side: 3, stride: 2, padding: 1 };

const fn window(side: usize, stride: usize) -> Window {
    Window { side, stride, padding: side / 2 }
}

/// A bottleneck: three convolutions, and one beside them where the shape changes.
#[derive(Clone, Copy)]
pub struct Block {
    from: usize,
    width: usize,
    stride: usize,
    has_shortcut: bool,
}

/// Bytes by the shapes.
#[derive(Default)]
pub struct Theory {
    pub activations: u64,
    pub workspace: u64,
}

impl Theory {
    /// Convolution and norm: the output is kept for the norm, with mean and deviation of each channel. Returns the side.
    fn convolution(&mut self, batch: usize, side: usize, from: usize, to: usize, window: Window) -> usize {
        let out = window.positions(side);
        let pixels = (batch * out * out) as u64;
        self.activations += 4 * (pixels * to as u64 + 2 * to as u64);
        if window.side > 1 || window.stride > 1 {
            let columns = 4 * pixels * (window.side * window.side * from) as u64;
            self.workspace = self.workspace.max(columns);
        }
        out
    }

    /// A rectifier's output is kept, and is what the next layer keeps as its input.
    fn rectifier(&mut self, batch: usize, side: usize, channels: usize) {
        self.activations += 4 * (batch * side * side * channels) as u64;
    }
}

impl Block {
    fn all() -> impl Iterator<Item = Self> {
        let mut from = 64;
        STAGES.iter().enumerate().flat_map(move |(stage, &(count, width))| {
            let before = from;
            from = EXPANSION * width;
            (0..count).map(move |index| Self {
                from: if index == 0 { before } else { EXPANSION * width },
                width,
                stride: if index == 0 && stage > 0 { 2 } else { 1 },
                has_shortcut: index == 0,
            })
        })
    }

    /// What is kept between forward and backward, and the largest matrix of columns.
    pub fn theory(batch: usize, side: usize) -> Theory {
        let mut theory = Theory::default();
        let mut side = theory.convolution(batch, side, 3, 64, STEM);
        theory.rectifier(batch, side, 64);
        side = POOL.positions(side);
        theory.activations += 2 * 4 * (batch * side * side * 64) as u64; // what it took, and from where
        for Self { from, width, stride, has_shortcut } in Self::all() {
            let to = EXPANSION * width;
            theory.convolution(batch, side, from, width, window(1, 1));
            theory.rectifier(batch, side, width);
            let out = theory.convolution(batch, side, width, width, window(3, stride));
            theory.rectifier(batch, out, width);
            theory.convolution(batch, out, width, to, window(1, 1));
            if has_shortcut {
                theory.convolution(batch, side, from, to, window(1, stride));
            }
            theory.rectifier(batch, out, to);
            side = out;
        }
        // The mean of the pixels, the logits' gradient, and the losses.
        theory.activations += 4 * (batch * (EXPANSION * STAGES[3].1 + CLASSES + 1)) as u64;
        theory
    }
}

pub struct ResNet {
    /// Weight, gain and bias of each convolution in the order of use, the shortcut's last; the classifier's two.
    pub params: Vec<Param>,
}

impl ResNet {
    pub fn new(machine: &Machine, seed: u64) -> Result<Self> {
        let mut random = Random(seed);
        let mut params = Vec::new();
        let mut convolution = |from: usize, to: usize, side: usize, gain: f32| -> Result<()> {
            let inputs = side * side * from;
            params.push(Param::normal(machine, &mut random, &[inputs, to], (2.0 / inputs as f32).sqrt())?);
            params.push(Param::full(machine, to, gain)?);
            params.push(Param::full(machine, to, 0.0)?);
            Ok(())
        };
        convolution(3, 64, STEM.side, 1.0)?;
        for Block { from, width, has_shortcut, .. } in Block::all() {
            convolution(from, width, 1, 1.0)?;
            convolution(width, width, 3, 1.0)?;
            convolution(width, EXPANSION * width, 1, 0.5)?; // so that a sum of many blocks stays small
            if has_shortcut {
                convolution(from, EXPANSION * width, 1, 1.0)?;
            }
        }
        let last = EXPANSION * STAGES[3].1;
        params.push(Param::normal(machine, &mut random, &[last, CLASSES], 0.01)?);
        params.push(Param::full(machine, CLASSES, 0.0)?);
        Ok(Self { params })
    }

    pub fn len(&self) -> usize {
        self.params.iter().map(|param| param.value.len()).sum()
    }

    pub fn leaves(&self, tape: &Tape) -> Vec<Var> {
        self.params.iter().map(|param| tape.leaf(&param.value)).collect()
    }

    pub fn loss(&self, tape: &Tape, leaves: &[Var], images: &Tensor, labels: &Tensor) -> Result<Var> {
        let mut next = leaves.chunks(3);
        let mut convolution = |x: &Var, window: Window| -> Result<Var> {
            let [weight, gain, bias] = next.next().expect("a convolution's parameters") else {
                unreachable!("three of them")
            };
            tape.batch_norm(&tape.convolution(x, weight, window)?, gain, bias)
        };
        let mut x = tape.relu(&convolution(&tape.constant(images), STEM)?)?;
        x = tape.max_pool(&x, POOL)?;
        for Block { stride, has_shortcut, .. } in Block::all() {
            let inner = tape.relu(&convolution(&x, window(1, 1))?)?;
            let inner = tape.relu(&convolution(&inner, window(3, stride))?)?;
            let inner = convolution(&inner, window(1, 1))?;
            if has_shortcut {
                x = convolution(&x, window(1, stride))?;
            }
            x = tape.relu(&tape.add(&inner, &x)?)?;
        }
        let [.., weight, bias] = leaves else { unreachable!("a classifier") };
        let logits = tape.linear(&tape.average(&x)?, weight, bias)?;
        tape.cross_entropy(&logits, labels, 1.0)
    }
}
