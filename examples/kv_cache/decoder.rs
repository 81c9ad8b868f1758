//! The model token by token, with the keys and values of what came before.

use crate::tensor::{DType, Gpt, GptShape, Machine, Result, Tensor};

/// By how many positions a cache grows at a time.
const CHUNK: usize = 16;

/// Keys or values of one layer: the first `used` rows of a tensor.
struct Rows {
    tensor: Tensor,
    used: usize,
}

/// What a request keeps.
pub struct Cache {
    /// Keys and values of each layer.
    layers: Vec<[Option<Rows>; 2]>,
    window: usize,
    position: usize,
}

impl Cache {
    pub fn new(layers: usize, window: usize) -> Self {
        Self::at(layers, window, 0)
    }

    /// Nothing is kept, and so many positions came before.
    pub fn at(layers: usize, window: usize, position: usize) -> Self {
        Self { layers: (0..layers).map(|_| [None, None]).collect(), window, position }
    }

    /// The most that a cache can hold, in bytes.
    pub fn most_bytes(shape: GptShape, window: usize) -> u64 {
        let rows = (window + 1).next_multiple_of(CHUNK);
        (shape.layers * 2 * rows * shape.width * DType::F32.bytes()) as u64
    }

    pub fn bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|rows| rows.tensor.bytes()).sum()
    }

    /// Appends rows and gives all that are in the window.
    fn push(&mut self, machine: &Machine, layer: usize, which: usize, rows: &Tensor) -> Result<Tensor> {
        let (window, count) = (self.window, rows.rows());
        let kept = self.layers[layer][which].take();
        let used = kept.as_ref().map_or(0, |kept| kept.used);
        let fits = kept.as_ref().is_some_and(|kept| used + count <= kept.tensor.rows());
        let mut held = match kept {
            Some(kept) if fits => kept,
            kept => {
                // Larger memory with what is still in the window; the old goes into the allocator's cache.
                let keep = used.min(window);
                let capacity = (keep + count).next_multiple_of(CHUNK);
                let tensor = machine.empty(&[capacity, rows.cols()], DType::F32)?;
                if let Some(kept) = kept {
                    machine.copy_rows(&tensor, 0, &kept.tensor, used - keep, keep)?;
                }
                Rows { tensor, used: keep }
            }
        };
        machine.copy_rows(&held.tensor, held.used, rows, 0, count)?;
        held.used += count;
        let seen = held.used.min(window.max(count));
        let view = held.tensor.row_range(held.used - seen, seen);
        self.layers[layer][which] = Some(held);
        Ok(view)
    }
}

/// Gives the model more tokens; the logits behind the last.
pub fn decode(machine: &Machine, gpt: &Gpt, cache: &mut Cache, ids: &[u32]) -> Result<Tensor> {
    let GptShape { length, width, heads, layers, .. } = gpt.shape;
    let param = |index: usize| &gpt.params[index].value;
    let linear = |x: &Tensor, index: usize| -> Result<Tensor> {
        machine.add_bias(&machine.matmul(x, param(index), (false, false), 1.0)?, param(index + 1))
    };
    let (count, size) = (ids.len(), width / heads);
    let positions: Vec<u32> = (0..count).map(|i| ((cache.position + i) % length) as u32).collect();
    cache.position += count;
    let words = machine.embedding(param(0), &machine.ids(ids)?)?;
    let mut x = machine.add(&words, &machine.embedding(param(1), &machine.ids(&positions)?)?)?;
    // Rows by position become rows by head and position, and back.
    let by_head = |x: &Tensor| -> Result<Tensor> {
        Ok(machine.swap_axes(&x.reshape(&[1, x.rows(), heads, size]))?.reshape(&[heads, x.rows(), size]))
    };
    for layer in 0..layers {
        let first = 2 + 16 * layer;
        let normal = machine.layer_norm(&x, param(first), param(first + 1))?.0;
        let q = by_head(&linear(&normal, first + 2)?)?;
        let k = by_head(&cache.push(machine, layer, 0, &linear(&normal, first + 4)?)?)?;
        let v = by_head(&cache.push(machine, layer, 1, &linear(&normal, first + 6)?)?)?;
        let scores = machine.matmul(&q, &k, (false, true), 1.0)?;
        let parts = machine.softmax(&scores, count, true, 1.0 / (size as f32).sqrt())?;
        let mixed = machine.matmul(&parts, &v, (false, false), 1.0)?;
        let mixed = machine.swap_axes(&mixed.reshape(&[1, heads, count, size]))?.reshape(&[count, width]);
        x = machine.add(&x, &linear(&mixed, first + 8)?)?;
        let normal = machine.layer_norm(&x, param(first + 10), param(first + 11))?.0;
        let hidden = machine.gelu(&linear(&normal, first + 12)?)?;
        x = machine.add(&x, &linear(&hidden, first + 14)?)?;
    }
    let tail = 2 + 16 * layers;
    let last = machine.layer_norm(&x.row_range(count - 1, 1), param(tail), param(tail + 1))?.0;
    machine.matmul(&last, param(tail + 2), (false, false), 1.0)
}

/// The likeliest next token.
pub fn likeliest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("words") as u32
}
