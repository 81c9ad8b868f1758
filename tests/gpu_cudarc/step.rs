//! One training step of a linear layer with a rectifier: once on `CudaSlice`s, once on our buffers.

use crate::gpu;
use cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig};
use cudarc::curand::CudaRng;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, LaunchArgs,
    LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::compile_ptx;
use std::sync::Arc;
use vramalloc::cuda::CudaAllocator;
use vramalloc::{Config, DeviceBuffer, Segments};

const BATCH: usize = 256;
const INPUTS: usize = 512;
const OUTPUTS: usize = 128;
const STEPS: usize = 5;

const KERNELS: &str = r#"
extern "C" __global__ void rectify(float *y, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && y[i] < 0.0f) y[i] = 0.0f;
}

extern "C" __global__ void gradient(float *dy, const float *y, const float *target, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dy[i] = y[i] > 0.0f ? 2.0f * (y[i] - target[i]) / n : 0.0f;
}

extern "C" __global__ void descend(float *w, const float *dw, float rate, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) w[i] -= rate * dw[i];
}
"#;

/// What a step needs of its memory: cudarc's traits, and nothing else.
trait Memory {
    type Slice: DevicePtr<f32> + DevicePtrMut<f32>;
    fn zeros(&self, len: usize, stream: &Arc<CudaStream>) -> Self::Slice;
}

/// cudarc's own.
struct Native;

impl Memory for Native {
    type Slice = CudaSlice<f32>;

    fn zeros(&self, len: usize, stream: &Arc<CudaStream>) -> CudaSlice<f32> {
        stream.alloc_zeros(len).expect("alloc_zeros")
    }
}

impl Memory for CudaAllocator {
    type Slice = DeviceBuffer<f32>;

    fn zeros(&self, len: usize, stream: &Arc<CudaStream>) -> DeviceBuffer<f32> {
        self.alloc_zeros(len, stream).expect("alloc_zeros")
    }
}

struct Program {
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    blas: CudaBlas,
    rectify: CudaFunction,
    gradient: CudaFunction,
    descend: CudaFunction,
}

fn program(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Program {
    let (compute, copies) = (context.new_stream().expect("stream"), context.new_stream().expect("stream"));
    let blas = CudaBlas::new(Arc::clone(&compute)).expect("cuBLAS");
    let [rectify, gradient, descend] =
        ["rectify", "gradient", "descend"].map(|name| module.load_function(name).expect(name));
    Program { compute, copies, blas, rectify, gradient, descend }
}

/// Row-major `c = a · b` of `rows`×`inner` and `inner`×`columns`, with `a` or `b` transposed in memory if said so.
fn gemm<S: DevicePtr<f32> + DevicePtrMut<f32>>(
    blas: &CudaBlas,
    [rows, columns, inner]: [usize; 3],
    (a, a_transposed): (&S, bool),
    (b, b_transposed): (&S, bool),
    c: &mut S,
) {
    let op = |transposed| if transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
    let int = |number: usize| i32::try_from(number).expect("small");
    // cuBLAS is column-major: the transposed product, with the factors swapped.
    let config = GemmConfig {
        transa: op(b_transposed),
        transb: op(a_transposed),
        m: int(columns),
        n: int(rows),
        k: int(inner),
        alpha: 1.0,
        lda: int(if b_transposed { inner } else { columns }),
        ldb: int(if a_transposed { rows } else { inner }),
        beta: 0.0,
        ldc: int(columns),
    };
    // SAFETY: the sizes are those of the matrices.
    unsafe { blas.gemm(config, b, a, c) }.expect("gemm");
}

/// Trains, and returns the bits of the weights and of the last outputs.
fn train<M: Memory>(memory: &M, program: &Program, targets: &[f32]) -> (Vec<u32>, Vec<u32>)
where
    for<'a> LaunchArgs<'a>: PushKernelArg<&'a M::Slice> + PushKernelArg<&'a mut M::Slice>,
{
    let Program { compute, copies, blas, rectify, gradient, descend } = program;
    let rng = CudaRng::new(42, Arc::clone(compute)).expect("cuRAND");
    let mut weights = memory.zeros(INPUTS * OUTPUTS, compute);
    rng.fill_with_normal(&mut weights, 0.0, 0.05).expect("weights");
    let mut outputs_on_host = vec![0.0_f32; BATCH * OUTPUTS];
    let outputs = u32::try_from(BATCH * OUTPUTS).expect("small");
    let parameters = u32::try_from(INPUTS * OUTPUTS).expect("small");
    for _ in 0..STEPS {
        // All of a step's memory comes and goes with it.
        let mut x = memory.zeros(BATCH * INPUTS, compute);
        rng.fill_with_uniform(&mut x).expect("inputs");
        let mut target = memory.zeros(BATCH * OUTPUTS, copies);
        copies.memcpy_htod(targets, &mut target).expect("targets");
        let mut y = memory.zeros(BATCH * OUTPUTS, compute);
        gemm(blas, [BATCH, OUTPUTS, INPUTS], (&x, false), (&weights, false), &mut y);
        let mut dy = memory.zeros(BATCH * OUTPUTS, compute);
        let mut dw = memory.zeros(INPUTS * OUTPUTS, compute);
        // SAFETY: the parameters are the kernels', and so many values are there.
        unsafe {
            let mut args = compute.launch_builder(rectify);
            args.arg(&mut y).arg(&outputs).launch(LaunchConfig::for_num_elems(outputs)).expect("rectify");
            // The target comes from the other stream: cudarc's events order that.
            let mut args = compute.launch_builder(gradient);
            args.arg(&mut dy).arg(&y).arg(&target).arg(&outputs);
            args.launch(LaunchConfig::for_num_elems(outputs)).expect("gradient");
        }
        gemm(blas, [INPUTS, OUTPUTS, BATCH], (&x, true), (&dy, false), &mut dw);
        // SAFETY: as above.
        unsafe {
            let mut args = compute.launch_builder(descend);
            args.arg(&mut weights).arg(&dw).arg(&0.5_f32).arg(&parameters);
            args.launch(LaunchConfig::for_num_elems(parameters)).expect("descend");
        }
        // Read on the other stream, and dropped right after.
        copies.memcpy_dtoh(&y, &mut outputs_on_host).expect("outputs");
    }
    copies.synchronize().expect("synchronize");
    let weights = compute.clone_dtoh(&weights).expect("weights");
    compute.synchronize().expect("synchronize");
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    (bits(weights), bits(outputs_on_host))
}

#[test]
fn a_training_step_agrees_with_cudarcs_own_memory() {
    let test = "a_training_step_agrees_with_cudarcs_own_memory";
    let Some(gpu) = gpu(test, &["nvrtc", "cublas", "curand"]) else { return };
    let context = &gpu.context;
    let module = context.load_module(compile_ptx(KERNELS).expect("NVRTC")).expect("module");
    let targets: Vec<f32> = (0..BATCH * OUTPUTS).map(|i| (i % 17) as f32 / 17.0).collect();
    let (weights, outputs) = train(&Native, &program(context, &module), &targets);
    assert!(outputs.iter().any(|&bits| bits != outputs[0]), "something was computed");
    for segments in [Segments::Fixed, Segments::Expandable] {
        for is_tracking in [true, false] {
            let memory = CudaAllocator::new(context, Config::default().segments(segments)).expect("allocator");
            let program = program(context, &module);
            if !is_tracking {
                // cudarc then orders nothing between streams, so one stream does all.
                // SAFETY: one stream.
                unsafe { context.disable_event_tracking() };
            }
            let one = Program { copies: Arc::clone(&program.compute), ..program };
            let two = if is_tracking { Some(self::program(context, &module)) } else { None };
            let (our_weights, our_outputs) = train(&memory, two.as_ref().unwrap_or(&one), &targets);
            // SAFETY: nothing is under way.
            unsafe { context.enable_event_tracking() };
            assert!(our_weights == weights, "{segments:?}, tracking {is_tracking}: the weights differ");
            assert!(our_outputs == outputs, "{segments:?}, tracking {is_tracking}: the outputs differ");
            let stats = memory.memory_stats();
            eprintln!(
                "{segments:?}, tracking {is_tracking}: bit-equal after {STEPS} steps; {} allocations, {} calls to the \
                 driver for memory",
                stats.allocation.all.allocated, stats.num_device_alloc
            );
        }
    }
}
