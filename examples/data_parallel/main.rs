//! The same model on several devices, each with its own allocator and its part of the batch; gradients are summed with
//! NCCL. The result is that of one device with the whole batch.
//!
//! `cargo run --release --example data_parallel`: a thread for each GPU. For several processes or machines start one for
//! each GPU with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun sets them, and LOCAL_RANK for the GPU.
//! Without GPUs the devices are simulated, and a stand-in sums over TCP.

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod collective;
mod star;
#[path = "../tensor/mod.rs"]
mod tensor;

use collective::Collective;
use star::{Place, Star};
use std::net::TcpListener;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;
use tensor::{Device, Gpt, GptShape, How, Machine, Options, Result, Sgd, Tensor, Text};
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{Config, DeviceChoice};

fn main() -> ExitCode {
    let numbers = [
        ("devices", "how many, without WORLD_SIZE [simulated: 2, GPU: all]"),
        ("steps", "training steps [8, 50]"),
        ("batch", "sequences for each device [4, 16]"),
        ("width", "numbers for each position [32, 512]"),
        ("length", "characters in a sequence [16, 128]"),
        ("layers", "[2, 6]"),
    ];
    tensor::main_of("data_parallel", &numbers, run)
}

#[derive(Clone, Copy)]
struct Plan {
    shape: GptShape,
    batch: usize,
    steps: usize,
}

/// What a rank has in the end.
struct Outcome {
    losses: Vec<f32>,
    params: Vec<f32>,
    line: String,
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?;
    device.print();
    let is_sim = device.is_simulated();
    let (gpus, libraries) = gpus();
    println!("collective  {libraries}");
    let pick = options.sizes_on(&device);
    let (width, length, layers) = (pick("width", 32, 512), pick("length", 16, 128), pick("layers", 2, 6));
    let shape = GptShape { words: Text::load().words(), length, width, heads: (width / 64).max(2), layers };
    let plan = Plan { shape, batch: pick("batch", 4, 16), steps: pick("steps", 8, 50) };
    drop(device);

    let choice = |local: usize| {
        if is_sim {
            DeviceChoice::Sim
        } else {
            DeviceChoice::Cuda(u32::try_from(local % gpus.max(1)).unwrap_or(0))
        }
    };
    let (world, outcome) = match Place::from_env()? {
        Some(place) => {
            println!("process     rank {} of {}, meeting at {}", place.rank, place.world, place.address);
            let listener = if place.rank == 0 { Some(TcpListener::bind(&*place.address)?) } else { None };
            (place.world, rank(choice(place.local), &place, listener, plan)?)
        }
        None => {
            let world = options.size("devices", if is_sim { 2 } else { gpus.max(1) });
            if !is_sim && world > gpus {
                return Err(format!("{world} devices are asked for, and there are {gpus} GPUs").into());
            }
            (world, threads(world, &choice, plan)?)
        }
    };
    println!("{}", outcome.line);
    compare(choice(0), world, plan, &outcome)
}

/// How many GPUs can be used, and what will sum gradients.
fn gpus() -> (usize, String) {
    #[cfg(feature = "cuda")]
    if let Ok(count) = vramalloc::driver::cuda::CudaDriver::device_count() {
        let nccl = match tensor::need_library("nccl") {
            Ok(()) => "NCCL".to_owned(),
            Err(error) => format!("needs NCCL for more than one GPU: {error}"),
        };
        return (count as usize, format!("{count} GPUs; {nccl}"));
    }
    (0, "a stand-in over TCP: NCCL would need NVIDIA GPUs and libnccl".to_owned())
}

/// One thread for each rank; what rank 0 has, after a look at the others.
fn threads(world: usize, choice: &(dyn Fn(usize) -> DeviceChoice + Sync), plan: Plan) -> Result<Outcome> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let mut listener = Some(listener);
    let outcomes: Vec<std::result::Result<Outcome, String>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|number| {
                let place = Place { rank: number, local: number, world, address: address.clone() };
                let listener = listener.take();
                scope.spawn(move || {
                    rank(choice(number), &place, listener, plan).map_err(|error| format!("rank {number}: {error}"))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".to_owned()))).collect()
    });
    let mut outcomes: Vec<Outcome> = outcomes.into_iter().collect::<std::result::Result<_, _>>()?;
    for outcome in &outcomes[1..] {
        println!("{}", outcome.line);
        assert!(outcome.params == outcomes[0].params, "all ranks must have the same parameters");
    }
    Ok(outcomes.swap_remove(0))
}

/// Trains on one device as one of several.
fn rank(choice: DeviceChoice, place: &Place, listener: Option<TcpListener>, plan: Plan) -> Result<Outcome> {
    let star = Star::join(place, listener)?;
    let device = Device::open(choice, SimDriver::builder().capacity(1 << 30))?;
    let machine = Rc::new(Machine::cached(&device, Config::from_env()?)?);
    let collective = Collective::new(&device, place, star)?;
    let begin = Instant::now();
    let share = (place.rank, place.world);
    let (losses, params) = train(&machine, plan, share, |grads| collective.sum(&machine, grads))?;
    let allocator = machine.allocator();
    let line = format!(
        "rank {:<7}{} on {}: {:.1} ms a step, peak allocated {}, reserved {}; page-locked {} in {} blocks",
        place.rank,
        collective.name(),
        device.driver.label(),
        begin.elapsed().as_secs_f64() * 1e3 / plan.steps as f64,
        human_bytes(allocator.max_memory_allocated()),
        human_bytes(allocator.max_memory_reserved()),
        human_bytes(allocator.host_memory_stats().reserved_bytes.peak),
        allocator.host_memory_stats().num_host_alloc
    );
    device.assert_clean();
    Ok(Outcome { losses, params, line })
}

/// Trains on the `share`th part of each batch; `sum` makes the gradients those of all.
fn train(
    machine: &Rc<Machine>,
    plan: Plan,
    (part, parts): (usize, usize),
    sum: impl Fn(&[Tensor]) -> Result<()>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let text = Text::load();
    let mut gpt = Gpt::new(machine, plan.shape, 1)?;
    // Not Adam: it would make a large step of what is only rounding, and so hide whether two runs agree.
    let sgd = Sgd { rate: 0.01, momentum: 0.9 };
    let count = plan.batch * plan.shape.length;
    let mut losses = Vec::new();
    for step in 0..plan.steps {
        let (ids, targets) = text.batch(step as u64, plan.batch * parts, plan.shape.length);
        let upload = |values: &[u32]| -> Result<Tensor> {
            // Page-locked, from the cache from the second step on.
            let pinned = machine.allocator().pin_slice(&values[part * count..][..count])?;
            machine.pinned_ids(&pinned)
        };
        let batch = (upload(&ids)?, upload(&targets)?);
        let (loss, grads) = gpt.gradients(machine, (&batch.0, &batch.1), How::PLAIN)?;
        sum(&grads)?;
        for (param, grad) in gpt.params.iter_mut().zip(&grads) {
            sgd.step(machine, param, grad, 1.0 / parts as f32)?;
        }
        // The other parts' losses matter as much; they are summed in the same way.
        let mean = machine.sum_rows(&loss.reshape(&[loss.len(), 1]))?;
        sum(std::slice::from_ref(&mean))?;
        losses.push(machine.to_vec(&mean)?[0] / (parts * count) as f32);
    }
    let mut params = Vec::new();
    for param in &gpt.params {
        params.extend(machine.to_vec(&param.value)?);
    }
    Ok((losses, params))
}

/// One device with the whole batch.
fn compare(choice: DeviceChoice, world: usize, plan: Plan, outcome: &Outcome) -> Result<()> {
    let device = Device::open(choice, SimDriver::builder().capacity(1 << 30))?;
    let machine = Rc::new(Machine::cached(&device, Config::from_env()?)?);
    let whole = Plan { batch: plan.batch * world, ..plan };
    let (losses, params) = train(&machine, whole, (0, 1), |_| Ok(()))?;
    let furthest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let (loss, param) = (furthest(&losses, &outcome.losses), furthest(&params, &outcome.params));
    let last = losses.len() - 1;
    println!("\nloss        {:.4} to {:.4} in {} steps", outcome.losses[0], outcome.losses[last], plan.steps);
    println!(
        "compared    with one device and {} sequences a step: losses differ by {loss:.1e} at most, parameters by \
         {param:.1e}",
        whole.batch
    );
    assert!(loss < 1e-3 && param < 1e-3, "{world} devices must agree with one but for rounding");
    assert!(plan.steps < 8 || losses[last] < losses[0], "the loss must fall");
    device.assert_clean();
    Ok(())
}
