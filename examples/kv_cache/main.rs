//! A serving loop: requests of different lengths on several streams, each with a key-value cache that grows with it; beyond
//! a window the oldest entries go. Then the same with the driver's own calls for every tensor.
//!
//! `cargo run --release --example kv_cache`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod decoder;
#[path = "../tensor/mod.rs"]
mod tensor;

use decoder::{Cache, decode, likeliest};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use tensor::{
    Alloc, Cached, Device, DriverAlloc, Gpt, GptShape, Machine, Options, OrderedAlloc, Pace, Random, Result,
    Tensor, Text, memory_calls,
};
use vramalloc::driver::CallCounts;
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{CachingAllocator, Config, Segments};

/// How long operations take on the simulated device, so that the host runs ahead of the streams as it does on a GPU. About
/// what small kernels take; chosen, not measured.
const PACE: Pace = Pace { launch_nanos: 4_000, kernel_nanos: 5_000 };

/// After at most so many rounds of the same requests the allocator needs no more memory.
const MOST_ROUNDS: usize = 8;

/// Of the raw calls to the driver at most one in so many is left, questions how far streams are included.
const FEWER_CALLS: u64 = 1000;

fn main() -> ExitCode {
    let numbers = [
        ("requests", "in all [simulated: 32, GPU: 48]"),
        ("streams", "[4]"),
        ("active", "requests at a time [16]"),
        ("window", "positions that a cache keeps [48, 96]"),
        ("width", "numbers for each position [96, 512]"),
        ("layers", "[2, 4]"),
    ];
    tensor::main_of("kv_cache", &numbers, run)
}

struct Plan {
    shape: GptShape,
    requests: usize,
    active: usize,
    window: usize,
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?.paced(Some(PACE));
    device.print();
    let text = Text::load();
    let pick = options.sizes_on(&device);
    let width = pick("width", 96, 512);
    let window = pick("window", 48, 96);
    if window < 8 {
        return Err(format!("--window {window}: must be 8 at least, so that a prompt fits").into());
    }
    let (words, layers) = (text.words(), pick("layers", 2, 4));
    let shape = GptShape { words, length: 4 * window, width, heads: (width / 64).max(2), layers };
    let plan = Plan { shape, requests: pick("requests", 32, 48), active: pick("active", 16, 16), window };
    let mut devices = vec![device];
    for _ in 1..pick("streams", 4, 4) {
        devices.push(devices[0].with_new_stream()?);
    }
    println!(
        "serving     {} requests, {} at a time, on {} streams; window {window}, {layers} layers of width {width}",
        plan.requests,
        plan.active,
        devices.len()
    );
    agrees_with_full_attention(&devices[0], &text, &plan)?;
    forgets_what_left_the_window(&devices[0], &text, &plan)?;

    let config = if std::env::var_os("VRAMALLOC_CONF").is_some() {
        Config::from_env()?
    } else {
        Config::default().segments(Segments::Auto)
    };
    let mut results = Vec::new();
    {
        let allocator = CachingAllocator::new(Arc::clone(&devices[0].driver), config)?;
        let mut alloc = |device: &Device| -> Result<Rc<dyn Alloc>> {
            let stream = allocator.stream(device.stream)?;
            Ok(Rc::new(Cached { allocator: allocator.clone(), stream }))
        };
        // At first everything is fetched from the driver. Where memory lies, and which streams are how far when more is
        // wanted, differs from round to round, so a later one may still need a page.
        let served = settle(|| serve(&devices, &text, &plan, &mut alloc))?;
        let (allocated, reserved) = (allocator.max_memory_allocated(), allocator.max_memory_reserved());
        let ratio = reserved as f64 / allocated as f64;
        println!(
            "memory      peak allocated {}, peak reserved {}: ratio {ratio:.3}; the caches held at most {}",
            human_bytes(allocated),
            human_bytes(reserved),
            human_bytes(served.peak_cache)
        );
        assert_eq!(allocator.memory_allocated(), 0, "all is freed");
        results.push(("vramalloc", served));
    }
    let driver = Arc::clone(&devices[0].driver);
    let raw = serve(&devices, &text, &plan, &mut |_| Ok(Rc::new(DriverAlloc(Arc::clone(&driver)))))?;
    results.push(("cuMemAlloc/cuMemFree", raw));
    if OrderedAlloc::new(&devices[0], true)?.is_some() {
        let mut alloc = |device: &Device| -> Result<Rc<dyn Alloc>> {
            Ok(Rc::new(OrderedAlloc::new(device, true)?.ok_or("no pool")?))
        };
        serve(&devices, &text, &plan, &mut alloc)?;
        results.push(("cuMemAllocAsync", serve(&devices, &text, &plan, &mut alloc)?));
    }
    print(&results, devices[0].is_simulated())?;
    devices[0].assert_clean();
    Ok(())
}

/// A request that is being served.
struct Active {
    number: usize,
    stream: usize,
    cache: Cache,
    last: u32,
    left: usize,
}

/// What serving all requests took, and what came out.
struct Served {
    tokens: usize,
    seconds: f64,
    calls: CallCounts,
    answers: Vec<Vec<u32>>,
    peak_cache: u64,
}

/// Serves the same requests until a round takes, moves and gives back no memory.
fn settle(mut round: impl FnMut() -> Result<Served>) -> Result<Served> {
    for number in 1..=MOST_ROUNDS {
        let served = round()?;
        let calls = memory_calls(&served.calls);
        println!(
            "round {number}     {calls} driver calls for memory, {} others",
            served.calls.total().calls - calls
        );
        if calls == 0 {
            assert!(number > 1, "the first round has to get its memory");
            return Ok(served);
        }
    }
    panic!("the same requests still need other memory after {MOST_ROUNDS} rounds")
}

/// Serves all requests. As many as may be are active; each gets a token in turn.
fn serve(
    devices: &[Device],
    text: &Text,
    plan: &Plan,
    alloc: &mut dyn FnMut(&Device) -> Result<Rc<dyn Alloc>>,
) -> Result<Served> {
    let calls = devices[0].driver.calls();
    let machines: Vec<Machine> =
        devices.iter().map(|device| Ok(Machine::new(device, alloc(device)?))).collect::<Result<_>>()?;
    let gpt = Gpt::new(&machines[0], plan.shape, 5)?;
    share(&gpt, &machines)?;
    machines[0].backend.wait()?;
    let (begin, virtual_begin) = (Instant::now(), devices[0].virtual_nanos());
    let mut random = Random(99);
    let mut answers: Vec<Vec<u32>> = vec![Vec::new(); plan.requests];
    let (mut active, mut next, mut tokens, mut peak_cache): (Vec<Active>, _, _, _) = (Vec::new(), 0, 0, 0);
    while next < plan.requests || !active.is_empty() {
        while active.len() < plan.active && next < plan.requests {
            let (prompt, _) = text.batch(next as u64, 1, 4 + random.below(plan.window / 2));
            let left = plan.window / 4 + random.below(plan.window * 3 / 2);
            let stream = next % machines.len();
            let mut cache = Cache::new(plan.shape.layers, plan.window);
            let logits = decode(&machines[stream], &gpt, &mut cache, &prompt)?;
            let last = likeliest(&machines[stream].to_vec(&logits)?);
            active.push(Active { number: next, stream, cache, last, left });
            next += 1;
        }
        // All are queued before the first is waited for, so that the streams run side by side.
        let logits: Vec<Tensor> = active
            .iter_mut()
            .map(|request| decode(&machines[request.stream], &gpt, &mut request.cache, &[request.last]))
            .collect::<Result<_>>()?;
        for (request, logits) in active.iter_mut().zip(&logits) {
            answers[request.number].push(request.last);
            request.last = likeliest(&machines[request.stream].to_vec(logits)?);
            request.left -= 1;
            tokens += 1;
        }
        let most = Cache::most_bytes(plan.shape, plan.window);
        assert!(
            active.iter().all(|request| request.cache.bytes() <= most),
            "a cache keeps no more than its window"
        );
        peak_cache = peak_cache.max(active.iter().map(|request| request.cache.bytes()).sum());
        active.retain(|request| request.left > 0); // a cache goes when its request has ended
    }
    let seconds = match (virtual_begin, devices[0].virtual_nanos()) {
        (Some(begin), Some(end)) => (end - begin) as f64 / 1e9,
        _ => begin.elapsed().as_secs_f64(),
    };
    for machine in &machines {
        machine.backend.wait()?;
    }
    Ok(Served { tokens, seconds, calls: devices[0].driver.calls().since(&calls), answers, peak_cache })
}

/// The weights are allocated on the first stream and read on all: the allocator is told, once.
fn share(gpt: &Gpt, machines: &[Machine]) -> Result<()> {
    for machine in &machines[1..] {
        let Some(Cached { stream, .. }) = machine.alloc.cached() else { continue };
        for param in &gpt.params {
            param.value.allocation().expect("of the caching allocator").record_stream(stream)?;
        }
    }
    Ok(())
}

/// A cache changes nothing: token by token the logits are those of the whole text at once.
fn agrees_with_full_attention(device: &Device, text: &Text, plan: &Plan) -> Result<()> {
    let machine = Machine::cached(device, Config::default())?;
    let gpt = Gpt::new(&machine, plan.shape, 5)?;
    let (ids, _) = text.batch(1, 1, plan.window / 2);
    let whole = decode(&machine, &gpt, &mut Cache::new(plan.shape.layers, plan.window), &ids)?;
    let whole = machine.to_vec(&whole)?;
    let mut cache = Cache::new(plan.shape.layers, plan.window);
    let mut single = Vec::new();
    for id in &ids {
        single = machine.to_vec(&decode(&machine, &gpt, &mut cache, &[*id])?)?;
    }
    let error = furthest(&whole, &single);
    println!("checked     logits token by token and at once differ by {error:.1e} at most");
    assert!(error < 1e-3, "the cache must not change the result: {error}");
    Ok(())
}

/// Beyond the window the oldest positions go: after twice as many, one layer knows what it would know had it seen the last
/// ones alone. (Deeper layers remember more, through what the layers below have made of it.)
fn forgets_what_left_the_window(device: &Device, text: &Text, plan: &Plan) -> Result<()> {
    let machine = Machine::cached(device, Config::default())?;
    let gpt = Gpt::new(&machine, GptShape { layers: 1, ..plan.shape }, 5)?;
    let (ids, _) = text.batch(2, 1, 2 * plan.window);
    let (old, recent) = ids.split_at(plan.window);
    let mut cache = Cache::new(1, plan.window);
    let mut single = Vec::new();
    for id in &ids {
        single = machine.to_vec(&decode(&machine, &gpt, &mut cache, &[*id])?)?;
    }
    let mut fresh = Cache::at(1, plan.window, old.len());
    let alone = machine.to_vec(&decode(&machine, &gpt, &mut fresh, recent)?)?;
    let error = furthest(&single, &alone);
    println!("checked     what left the window changes logits by {error:.1e} at most");
    assert!(error < 1e-3, "the window must forget: {error}");
    Ok(())
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "as many logits");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn print(results: &[(&str, Served)], is_sim: bool) -> Result<()> {
    println!(
        "\n{:24}{:>9}{:>13}{:>15}{:>14}{:>14}",
        "memory by", "tokens", "tokens a s", "memory calls", "other calls", "vramalloc is"
    );
    let rate = |served: &Served| served.tokens as f64 / served.seconds;
    for (name, served) in results {
        let ratio = rate(&results[0].1) / rate(served);
        let (memory, all) = (memory_calls(&served.calls), served.calls.total().calls);
        let [memory, others] = if name.contains("Async") {
            ["not counted".to_owned(), String::new()]
        } else {
            [memory.to_string(), (all - memory).to_string()]
        };
        let (tokens, rate) = (served.tokens, rate(served));
        println!("{name:24}{tokens:>9}{rate:>13.0}{memory:>15}{others:>14}{:>14}", format!("{ratio:.2} x"));
    }
    for (name, served) in results {
        assert!(served.answers == results[0].1.answers, "the same answers with memory by {name}");
    }
    if is_sim {
        let Pace { launch_nanos, kernel_nanos } = PACE;
        println!(
            "(virtual time: {launch_nanos} ns to queue a kernel, {kernel_nanos} ns to run it, the driver's calls as on an H200)"
        );
    }
    let [ours, raw] = [0, 1].map(|index: usize| results[index].1.calls.total().calls);
    assert!(ours * FEWER_CALLS <= raw, "{ours} driver calls of any kind instead of {raw}");
    let ratio = rate(&results[0].1) / rate(&results[1].1);
    assert!(ratio > 1.0, "faster than cuMemAlloc: {ratio}");
    Ok(())
}
