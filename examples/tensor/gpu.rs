//! The operations on a GPU: cuBLAS, and kernels.cu compiled by NVRTC, all queued on one stream.

use super::Result;
use super::call::{Backend, Call, Kernel, Product, Span};
use super::memory::{DType, Tensor};
use cudarc::cublas::result::gemm_strided_batched_ex;
use cudarc::cublas::sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
use cudarc::cublas::sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT;
use cudarc::cublas::sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
use cudarc::cublas::{CudaBlas, sys};
use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nvrtc::compile_ptx;
use libloading::Library;
use std::cell::OnceCell;
use std::ffi::CString;
use std::rc::Rc;
use std::sync::Arc;
use vramalloc::driver::cuda::{CudaDriver, CudaKernel, KernelArg, LaunchShape};
use vramalloc::{DevicePtr, StreamHandle};

use KernelArg::{F32, Ptr, U32};

const THREADS: usize = 256;

/// A stream of a GPU.
pub struct Cuda {
    driver: Arc<CudaDriver>,
    stream: Arc<CudaStream>,
    blas: CudaBlas,
    modules: Rc<Modules>,
}

/// The kernels for each kind of storage, compiled when first used.
#[derive(Default)]
struct Modules([OnceCell<Vec<CudaKernel>>; 3]);

impl Modules {
    fn get(&self, driver: &Arc<CudaDriver>, storage: DType) -> Result<&[CudaKernel]> {
        let index = match storage {
            DType::F32 | DType::U32 => 0,
            DType::BF16 => 1,
            DType::F16 => 2,
        };
        if self.0[index].get().is_none() {
            let source = format!("#define STORAGE {index}\n{}", include_str!("kernels.cu"));
            let ptx = compile_ptx(source).map_err(|error| format!("NVRTC: {error:?}"))?;
            let module = driver.load_ptx(&CString::new(ptx.to_src())?)?;
            let kernels: std::result::Result<_, _> =
                Kernel::ALL.iter().map(|kernel| module.kernel(kernel.name())).collect();
            let _ = self.0[index].set(kernels?);
        }
        Ok(self.0[index].get().expect("was set"))
    }
}

impl Cuda {
    /// The GPU of that ordinal.
    pub fn open(ordinal: u32) -> Result<Self> {
        CudaDriver::open(ordinal)?; // fails with words where cudarc would panic
        for library in ["cublas", "nvrtc"] {
            need_library(library)?;
        }
        let context = CudaContext::new(ordinal as usize)?;
        let driver = CudaDriver::from_context(&context)?;
        let stream = context.new_stream()?;
        let blas = CudaBlas::new(Arc::clone(&stream))?;
        Ok(Self { driver, stream, blas, modules: Rc::default() })
    }

    /// The same device with another stream.
    pub fn with_new_stream(&self) -> Result<Self> {
        let stream = self.stream.context().new_stream()?;
        let blas = CudaBlas::new(Arc::clone(&stream))?;
        Ok(Self { driver: Arc::clone(&self.driver), stream, blas, modules: Rc::clone(&self.modules) })
    }

    pub fn driver(&self) -> &Arc<CudaDriver> {
        &self.driver
    }

    pub fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.cu_stream() as u64)
    }

    /// The stream as cudarc knows it.
    pub fn cudarc_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

/// An error if cudarc would not find a library, which would be a panic there.
pub fn need_library(name: &str) -> Result<()> {
    let names: Vec<String> = std::iter::once(format!("lib{name}.so"))
        .chain((9..=13).map(|version| format!("lib{name}.so.{version}")))
        .collect();
    // SAFETY: NVIDIA's libraries are made to be loaded this way.
    if names.iter().any(|name| unsafe { Library::new(name) }.is_ok()) {
        return Ok(());
    }
    // NCCL is often installed by its full name alone, which cudarc does not try.
    Err(format!("no lib{name}.so (or a link of that name to lib{name}.so.N) is in a folder of LD_LIBRARY_PATH")
        .into())
}

fn number(value: usize) -> u32 {
    u32::try_from(value).expect("tensors have less than 2^32 numbers")
}

fn int(value: usize) -> i32 {
    i32::try_from(value).expect("sides of matrices are below 2^31")
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::U32 => panic!("products of whole numbers are not made here"),
    }
}

impl Backend for Cuda {
    fn run(&self, call: &Call<'_>) -> Result<()> {
        let kernels = self.modules.get(&self.driver, call.storage)?;
        let shape = match call.span {
            Span::Each(count) => LaunchShape::row(number(count.div_ceil(THREADS)), THREADS as u32),
            Span::Rows(rows) => LaunchShape::row(number(rows), THREADS as u32),
            Span::Columns(columns) => {
                LaunchShape { grid: [number(columns.div_ceil(32)), 1, 1], block: [32, 32, 1], shared_bytes: 0 }
            }
        };
        let pointers = call.outs.iter().chain(call.ins).map(|tensor| Ptr(tensor.ptr()));
        let ints = call.ints.iter().map(|&value| U32(number(value)));
        let args: Vec<KernelArg> =
            pointers.chain(ints).chain(call.floats.iter().map(|&value| F32(value))).collect();
        // SAFETY: ops.rs, which alone makes calls, gives each kernel its parameters and has compared the tensors'
        // sizes. Memory that is freed before the kernel has run goes only to work behind it on this stream.
        unsafe { kernels[call.kernel as usize].launch(self.stream(), shape, &args) }?;
        Ok(())
    }

    fn multiply(&self, p: &Product<'_>) -> Result<()> {
        let op = |transposed| if transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
        let (a_transposed, b_transposed) = p.transposed;
        let (zero, dtype) = (0.0_f32, data_type(p.out.dtype()));
        self.stream.context().bind_to_thread()?;
        // cuBLAS is column-major: the transposed product, with the factors swapped.
        // SAFETY: the sizes are those of the tensors (checked by ops.rs); the scalars are read during the call.
        unsafe {
            gemm_strided_batched_ex(
                *self.blas.handle(),
                op(b_transposed),
                op(a_transposed),
                int(p.columns),
                int(p.rows),
                int(p.inner),
                (&raw const p.factor).cast(),
                p.b.ptr().0 as *const _,
                dtype,
                int(if b_transposed { p.inner } else { p.columns }),
                (p.inner * p.columns) as i64,
                p.a.ptr().0 as *const _,
                dtype,
                int(if a_transposed { p.rows } else { p.inner }),
                (p.rows * p.inner) as i64,
                (&raw const zero).cast(),
                p.out.ptr().0 as *mut _,
                dtype,
                int(p.columns),
                (p.rows * p.columns) as i64,
                int(p.batch),
                CUBLAS_COMPUTE_32F,
                CUBLAS_GEMM_DFALT,
            )
        }?;
        Ok(())
    }

    fn upload(&self, bytes: &[u8], out: &Tensor) -> Result<()> {
        assert_eq!(bytes.len() as u64, out.bytes(), "bytes of an upload");
        // SAFETY: the tensor's memory, so long. Memory that is not page-locked has been read when the call returns.
        unsafe { self.driver.memcpy_htod_async(out.ptr(), bytes.as_ptr(), out.bytes(), self.stream()) }?;
        Ok(())
    }

    fn download(&self, x: &Tensor) -> Result<Vec<u8>> {
        let mut bytes = vec![0; x.bytes() as usize];
        // SAFETY: the tensor's memory, so long; the vector lives until the stream was waited for.
        let copied =
            unsafe { self.driver.memcpy_dtoh_async(bytes.as_mut_ptr(), x.ptr(), x.bytes(), self.stream()) };
        self.wait()?;
        copied?;
        Ok(bytes)
    }

    fn copy(&self, out: &Tensor, out_offset: u64, x: &Tensor, x_offset: u64, bytes: u64) -> Result<()> {
        assert!(out_offset + bytes <= out.bytes() && x_offset + bytes <= x.bytes(), "a copy inside its tensors");
        let (target, source) = (out.ptr().0 + out_offset, x.ptr().0 + x_offset);
        // SAFETY: inside the tensors; in order with all else on the stream.
        unsafe { self.driver.memcpy_dtod_async(DevicePtr(target), DevicePtr(source), bytes, self.stream()) }?;
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        Ok(self.driver.synchronize_stream(self.stream())?)
    }
}
