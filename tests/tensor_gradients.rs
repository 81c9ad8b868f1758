//! The examples' tensor library: gradients against finite differences, optimizers against their formulas.

#[path = "../examples/tensor/mod.rs"]
mod tensor;

use std::rc::Rc;
use tensor::{
    Adam, DType, Device, Gpt, GptShape, How, Machine, Param, Random, Result, Sgd, Tape, Tensor, Var, Window,
};
use vramalloc::driver::sim::SimDriver;
use vramalloc::{Config, DeviceChoice};

/// The simulated device, or the first GPU if one is required.
fn machine() -> (Device, Rc<Machine>) {
    let choice = match std::env::var_os("VRAMALLOC_REQUIRE_GPU") {
        Some(_) => DeviceChoice::Cuda(0),
        None => DeviceChoice::Sim,
    };
    let device = Device::open(choice, SimDriver::builder().capacity(1 << 30)).expect("device");
    let machine = Machine::cached(&device, Config::default()).expect("machine");
    (device, Rc::new(machine))
}

type Body = dyn Fn(&Tape, &[Var]) -> Result<Var>;

/// Compares the gradients of `sum(body(inputs) · r)`, for some `r`, with differences, along random directions.
fn check(name: &str, shapes: &[&[usize]], body: &Body) {
    let (device, machine) = machine();
    let mut random = Random(7);
    let values: Vec<Vec<f32>> = shapes.iter().map(|shape| random.normals(shape.iter().product(), 0.7)).collect();
    let upload = |values: &[Vec<f32>]| -> Vec<Tensor> {
        let both = values.iter().zip(shapes);
        both.map(|(values, shape)| machine.tensor(values, shape, DType::F32).expect("tensor")).collect()
    };
    let run = |values: &[Vec<f32>]| {
        let tape = Tape::new(&machine);
        let leaves: Vec<Var> = upload(values).iter().map(|tensor| tape.leaf(tensor)).collect();
        let out = body(&tape, &leaves).expect(name);
        (tape, leaves, out)
    };
    let (tape, leaves, out) = run(&values);
    let weights = random.normals(out.value.len(), 1.0);
    let seed = machine.tensor(&weights, out.value.shape(), DType::F32).expect("seed");
    let mut grads = tape.backward(&out, seed).expect("backward");
    let grads: Vec<Vec<f32>> = leaves
        .iter()
        .map(|leaf| machine.to_vec(&grads.take(leaf).expect("gradient")).expect("download"))
        .collect();
    let sum = |values: &[Vec<f32>]| -> f64 {
        let out = machine.to_vec(&run(values).2.value).expect("download");
        out.iter().zip(&weights).map(|(out, weight)| f64::from(*out) * f64::from(*weight)).sum()
    };
    for (input, grad) in grads.iter().enumerate() {
        for _ in 0..4 {
            let direction = random.normals(grad.len(), 1.0);
            let h = 2e-3;
            let moved = |sign: f32| {
                let mut moved = values.clone();
                moved[input].iter_mut().zip(&direction).for_each(|(value, way)| *value += sign * h * way);
                sum(&moved)
            };
            let difference = (moved(1.0) - moved(-1.0)) / f64::from(2.0 * h);
            let slope: f64 = grad.iter().zip(&direction).map(|(g, way)| f64::from(*g) * f64::from(*way)).sum();
            let size: f64 = grad.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
            let error = (difference - slope).abs() / size.max(1e-3);
            assert!(error < 0.02, "{name}, input {input}: slope {slope}, by differences {difference} (of {size})");
        }
    }
    drop((leaves, out));
    device.assert_clean();
}

#[test]
fn elementwise() {
    check("add", &[&[3, 5], &[3, 5]], &|tape, x| tape.add(&x[0], &x[1]));
    check("mul", &[&[3, 5], &[3, 5]], &|tape, x| tape.mul(&x[0], &x[1]));
    check("scale", &[&[7]], &|tape, x| tape.scale(&x[0], -1.5));
    check("gelu", &[&[40]], &|tape, x| tape.gelu(&x[0]));
    // Moved away from the kink: 0.7 squared is far from the step taken.
    check("relu", &[&[5]], &|tape, x| tape.relu(&tape.mul(&x[0], &x[0])?));
    check("used twice", &[&[6]], &|tape, x| tape.add(&tape.mul(&x[0], &x[0])?, &x[0]));
}

#[test]
fn products() {
    check("matmul", &[&[3, 4], &[4, 5]], &|tape, x| tape.matmul(&x[0], &x[1], false, 0.5));
    check("transposed", &[&[2, 3, 4], &[2, 5, 4]], &|tape, x| tape.matmul(&x[0], &x[1], true, 1.0));
    check("linear", &[&[3, 4], &[4, 5], &[5]], &|tape, x| tape.linear(&x[0], &x[1], &x[2]));
    check("swap_axes", &[&[2, 3, 4, 5]], &|tape, x| tape.swap_axes(&x[0]));
}

#[test]
fn softmax_and_attention() {
    check("softmax", &[&[4, 6]], &|tape, x| tape.softmax(&x[0], 1, false, 0.7));
    check("causal", &[&[2, 3, 3]], &|tape, x| tape.softmax(&x[0], 3, true, 1.0));
    check("attention", &[&[2, 2, 4, 3], &[2, 2, 4, 3], &[2, 2, 4, 3]], &|tape, x| {
        tape.attention(&x[0], &x[1], &x[2], true)
    });
}

#[test]
fn norms() {
    check("layer norm", &[&[4, 9], &[9], &[9]], &|tape, x| tape.layer_norm(&x[0], &x[1], &x[2]));
    check("batch norm", &[&[8, 5], &[5], &[5]], &|tape, x| tape.batch_norm(&x[0], &x[1], &x[2]));
}

#[test]
fn images() {
    let window = Window { side: 3, stride: 2, padding: 1 };
    check("convolution", &[&[2, 5, 6, 3], &[27, 4]], &move |tape, x| tape.convolution(&x[0], &x[1], window));
    let plain = Window { side: 1, stride: 1, padding: 0 };
    check("of one pixel", &[&[2, 3, 3, 4], &[4, 5]], &move |tape, x| tape.convolution(&x[0], &x[1], plain));
    check("max pool", &[&[1, 5, 5, 2]], &move |tape, x| tape.max_pool(&x[0], window));
    check("average", &[&[2, 3, 2, 4]], &|tape, x| tape.average(&x[0]));
}

#[test]
fn lookups_and_loss() {
    check("embedding", &[&[6, 4]], &|tape, x| tape.embedding(&x[0], &tape.machine.ids(&[1, 5, 1, 0])?));
    let (_device, machine) = machine();
    let logits = [0.3_f32, -0.2, 0.9, 1.4, 0.0, -0.7];
    let targets = machine.ids(&[2, 0]).expect("targets");
    let loss = |logits: &[f32]| {
        let tape = Tape::new(&machine);
        let x = tape.leaf(&machine.tensor(logits, &[2, 3], DType::F32).expect("logits"));
        let loss = tape.cross_entropy(&x, &targets, 1.0).expect("loss");
        let mean = machine.to_vec(&loss.value).expect("download").iter().sum::<f32>() / 2.0;
        let grad = tape.backward_of_loss(&loss).expect("backward").take(&x).expect("gradient");
        (mean, machine.to_vec(&grad).expect("download"))
    };
    let grad = loss(&logits).1;
    for (i, slope) in grad.iter().enumerate() {
        let moved = |by: f32| {
            let mut moved = logits;
            moved[i] += by;
            loss(&moved).0
        };
        let difference = (moved(1e-2) - moved(-1e-2)) / 2e-2;
        assert!((difference - slope).abs() < 1e-3, "{i}: {slope}, by differences {difference}");
    }
}

/// A checkpoint changes no gradient, and half precision not much.
#[test]
fn a_model_in_three_ways() {
    let (device, machine) = machine();
    let shape = GptShape { words: 11, length: 6, width: 8, heads: 2, layers: 4 };
    let gpt = Gpt::new(&machine, shape, 3).expect("model");
    let ids = machine.ids(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1]).expect("ids");
    let targets = machine.ids(&[2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2]).expect("targets");
    let gradients = |how: How| -> Vec<Vec<f32>> {
        let (_, grads) = gpt.gradients(&machine, (&ids, &targets), how).expect("gradients");
        grads.iter().map(|grad| machine.to_vec(grad).expect("download")).collect()
    };
    let plain = gradients(How::PLAIN);
    assert!(gradients(How { segment: 2, ..How::PLAIN }) == plain, "a checkpoint changes nothing");
    for storage in [DType::BF16, DType::F16] {
        let half = gradients(How { storage, ..How::PLAIN });
        let error = |(a, b): (&f32, &f32)| f64::from(a - b) * f64::from(a - b);
        let both = plain.iter().flatten().zip(half.iter().flatten());
        let size: f64 = plain.iter().flatten().map(|a| f64::from(*a) * f64::from(*a)).sum();
        let error = both.map(error).sum::<f64>().sqrt() / size.sqrt();
        let bound = if storage == DType::BF16 { 0.05 } else { 0.01 };
        assert!(error > 0.0 && error < bound, "{storage:?}: off by {error}");
    }
    drop((gpt, ids, targets));
    assert_eq!(machine.allocator().memory_allocated(), 0, "all is freed");
    device.assert_clean();
}

/// Three steps with momentum and of Adam, as the papers have them, in double precision.
#[test]
fn optimizers() {
    let (device, machine) = machine();
    let values = [0.5_f32, -1.0, 2.0];
    let grads = [[0.3_f32, -0.2, 4.0], [0.1, 0.5, -4.0], [-0.7, 0.0, 1.0]];
    let (sgd, mut adam) = (Sgd { rate: 0.1, momentum: 0.9 }, Adam::new(0.1));
    let mut by_sgd = Param::new(&machine, &values, &[3]).expect("parameter");
    let mut by_adam = Param::new(&machine, &values, &[3]).expect("parameter");
    for grad in &grads {
        let grad = machine.tensor(grad, &[3], DType::F32).expect("gradient");
        sgd.step(&machine, &mut by_sgd, &grad, 0.5).expect("step");
        adam.begin();
        adam.update(&machine, &mut by_adam, &grad, 0.5).expect("step");
    }
    let (got_sgd, got_adam) =
        (machine.to_vec(&by_sgd.value).expect("values"), machine.to_vec(&by_adam.value).expect("values"));
    for i in 0..values.len() {
        let (mut plain, mut velocity) = (f64::from(values[i]), 0.0);
        let (mut adaptive, mut mean, mut square) = (f64::from(values[i]), 0.0, 0.0);
        for (step, grad) in (1..).zip(&grads) {
            let grad = f64::from(grad[i]) * 0.5;
            velocity = 0.9 * velocity + grad;
            plain -= 0.1 * velocity;
            mean = 0.9 * mean + 0.1 * grad;
            square = 0.99 * square + 0.01 * grad * grad;
            let (mean, square) = (mean / (1.0 - 0.9_f64.powi(step)), square / (1.0 - 0.99_f64.powi(step)));
            adaptive -= 0.1 * mean / (square.sqrt() + 1e-8);
        }
        assert!((f64::from(got_sgd[i]) - plain).abs() < 1e-5, "momentum, {i}: {} and {plain}", got_sgd[i]);
        assert!((f64::from(got_adam[i]) - adaptive).abs() < 1e-4, "Adam, {i}: {} and {adaptive}", got_adam[i]);
    }
    drop((by_sgd, by_adam));
    device.assert_clean();
}
