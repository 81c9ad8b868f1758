//! Tensors, and the three ways to get memory for them.

use super::call::Backend;
use super::{Device, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use vramalloc::driver::{DevicePtr, Driver};
use vramalloc::{Allocation, CachingAllocator, Config, DeviceBuffer, PinnedBuffer, Stream, StreamHandle};

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    F32,
    BF16,
    F16,
    U32,
}

impl DType {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }
}

/// Where tensors' memory comes from.
pub trait Alloc {
    fn name(&self) -> &'static str;
    fn alloc(&self, bytes: u64) -> Result<Held>;
    /// The caching allocator and its stream, if it is that.
    fn cached(&self) -> Option<&Cached> {
        None
    }
}

/// Memory that is freed when dropped, by whoever it came from.
pub enum Held {
    Cached(Allocation),
    /// The same, typed.
    Ids(DeviceBuffer<u32>),
    Driver(DevicePtr, Arc<dyn Driver>),
    #[cfg(feature = "cuda")]
    Ordered(DevicePtr, Arc<vramalloc::driver::cuda::CudaDriver>, StreamHandle),
}

impl Held {
    fn ptr(&self) -> DevicePtr {
        match self {
            Self::Cached(allocation) => allocation.ptr(),
            Self::Ids(buffer) => buffer.ptr(),
            Self::Driver(ptr, _) => *ptr,
            #[cfg(feature = "cuda")]
            Self::Ordered(ptr, ..) => *ptr,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let freed = match self {
            Self::Cached(_) | Self::Ids(_) => return, // free themselves
            Self::Driver(ptr, driver) => driver.free(*ptr).map_err(|error| error.to_string()),
            #[cfg(feature = "cuda")]
            Self::Ordered(ptr, driver, stream) => {
                driver.free_async(*ptr, *stream).map_err(|error| error.to_string())
            }
        };
        if let Err(error) = freed {
            eprintln!("a tensor's memory was not freed: {error}");
        }
    }
}

/// vramalloc.
pub struct Cached {
    pub allocator: CachingAllocator,
    pub stream: Stream,
}

impl Cached {
    pub fn new(device: &Device, config: Config) -> Result<Self> {
        let allocator = CachingAllocator::new(Arc::clone(&device.driver), config)?;
        let stream = allocator.stream(device.stream)?;
        Ok(Self { allocator, stream })
    }
}

impl Alloc for Cached {
    fn name(&self) -> &'static str {
        "vramalloc"
    }

    fn alloc(&self, bytes: u64) -> Result<Held> {
        Ok(Held::Cached(self.allocator.alloc(bytes, &self.stream)?))
    }

    fn cached(&self) -> Option<&Cached> {
        Some(self)
    }
}

/// `cuMemAlloc` and `cuMemFree` for every tensor.
pub struct DriverAlloc(pub Arc<dyn Driver>);

impl Alloc for DriverAlloc {
    fn name(&self) -> &'static str {
        "cuMemAlloc/cuMemFree"
    }

    fn alloc(&self, bytes: u64) -> Result<Held> {
        Ok(Held::Driver(self.0.alloc(bytes)?, Arc::clone(&self.0)))
    }
}

/// `cuMemAllocAsync` and `cuMemFreeAsync` for every tensor.
pub struct OrderedAlloc {
    name: &'static str,
    #[cfg(feature = "cuda")]
    driver: Arc<vramalloc::driver::cuda::CudaDriver>,
    stream: StreamHandle,
}

impl OrderedAlloc {
    /// CUDA's default pool: as it is, or told to keep all memory. `None` on the simulated device, which has none.
    pub fn new(device: &Device, keeps: bool) -> Result<Option<Self>> {
        #[cfg(feature = "cuda")]
        if let Some(driver) = &device.cuda_driver {
            driver.set_default_pool_release_threshold(if keeps { u64::MAX } else { 0 })?;
            driver.trim_default_pool(0)?;
            let name = if keeps { "cuMemAllocAsync, keeps all" } else { "cuMemAllocAsync" };
            return Ok(Some(Self { name, driver: Arc::clone(driver), stream: device.stream }));
        }
        let _ = (device, keeps);
        Ok(None)
    }
}

impl Alloc for OrderedAlloc {
    fn name(&self) -> &'static str {
        self.name
    }

    #[cfg(feature = "cuda")]
    fn alloc(&self, bytes: u64) -> Result<Held> {
        let ptr = self.driver.alloc_async(bytes, self.stream)?;
        Ok(Held::Ordered(ptr, Arc::clone(&self.driver), self.stream))
    }

    #[cfg(not(feature = "cuda"))]
    fn alloc(&self, _: u64) -> Result<Held> {
        Err("this build has no CUDA".into())
    }
}

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Parameters,
    Gradients,
    OptimizerState,
    Activations,
    Workspace,
}

impl Kind {
    pub const ALL: [Self; 5] =
        [Self::Parameters, Self::Gradients, Self::OptimizerState, Self::Activations, Self::Workspace];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer state",
            Self::Activations => "activations",
            Self::Workspace => "workspace",
        }
    }
}

/// Bytes that tensors hold, as asked for, by kind.
#[derive(Default)]
pub struct Meter {
    now: [Cell<u64>; 5],
    peak: [Cell<u64>; 5],
}

impl Meter {
    fn change(&self, kind: Kind, change: impl FnOnce(u64) -> u64) {
        let (now, peak) = (&self.now[kind as usize], &self.peak[kind as usize]);
        now.set(change(now.get()));
        peak.set(peak.get().max(now.get()));
    }

    pub fn now(&self, kind: Kind) -> u64 {
        self.now[kind as usize].get()
    }

    /// The most that there was of one kind at a time.
    pub fn peak(&self, kind: Kind) -> u64 {
        self.peak[kind as usize].get()
    }
}

struct Memory {
    held: Held,
    bytes: u64,
    kind: Kind,
    meter: Rc<Meter>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.meter.change(self.kind, |now| now - self.bytes);
    }
}

/// Numbers in device memory, row by row. A clone is the same memory.
#[derive(Clone)]
pub struct Tensor {
    memory: Rc<Memory>,
    /// Where it begins in the memory, in bytes.
    offset: u64,
    shape: Rc<[usize]>,
    dtype: DType,
}

impl Tensor {
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The length of the last axis.
    pub fn cols(&self) -> usize {
        *self.shape.last().expect("a tensor has an axis")
    }

    /// All other axes together.
    pub fn rows(&self) -> usize {
        self.len() / self.cols()
    }

    pub fn bytes(&self) -> u64 {
        (self.len() * self.dtype.bytes()) as u64
    }

    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.memory.held.ptr().0 + self.offset)
    }

    /// The same memory in another shape.
    pub fn reshape(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.len(), "numbers of a shape");
        Self { shape: shape.into(), ..self.clone() }
    }

    /// Some consecutive rows of a matrix: the same memory.
    pub fn row_range(&self, from: usize, rows: usize) -> Self {
        assert!(rows > 0 && from + rows <= self.rows(), "rows {from} to {} of {}", from + rows, self.rows());
        let offset = self.offset + (from * self.cols() * self.dtype.bytes()) as u64;
        Self { offset, shape: [rows, self.cols()].into(), ..self.clone() }
    }

    /// The allocation, for other streams' uses to be recorded.
    pub fn allocation(&self) -> Option<&Allocation> {
        match &self.memory.held {
            Held::Cached(allocation) => Some(allocation),
            _ => None,
        }
    }
}

/// A device's stream and where memory for it comes from.
pub struct Machine {
    pub alloc: Rc<dyn Alloc>,
    pub backend: Rc<dyn Backend>,
    pub meter: Rc<Meter>,
    kind: Cell<Kind>,
}

impl Machine {
    pub fn new(device: &Device, alloc: Rc<dyn Alloc>) -> Self {
        let backend = Rc::clone(&device.backend);
        Self { alloc, backend, meter: Rc::default(), kind: Cell::new(Kind::Activations) }
    }

    /// With the caching allocator.
    pub fn cached(device: &Device, config: Config) -> Result<Self> {
        Ok(Self::new(device, Rc::new(Cached::new(device, config)?)))
    }

    /// The caching allocator.
    ///
    /// # Panics
    /// If memory comes from elsewhere.
    pub fn allocator(&self) -> &CachingAllocator {
        &self.alloc.cached().expect("memory of the caching allocator").allocator
    }

    /// What is allocated in `body` counts as of that kind.
    pub fn counted_as<T>(&self, kind: Kind, body: impl FnOnce() -> T) -> T {
        let before = self.kind.replace(kind);
        let result = body();
        self.kind.set(before);
        result
    }

    /// A tensor with whatever was in the memory before.
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let len: usize = shape.iter().product();
        assert!(u32::try_from(len).is_ok_and(|len| len > 0), "the kernels count in 32 bits: {shape:?}");
        let bytes = (len * dtype.bytes()) as u64;
        Ok(self.tensor_in(self.alloc.alloc(bytes)?, shape, dtype))
    }

    fn tensor_in(&self, held: Held, shape: &[usize], dtype: DType) -> Tensor {
        let (bytes, kind) = ((shape.iter().product::<usize>() * dtype.bytes()) as u64, self.kind.get());
        self.meter.change(kind, |now| now + bytes);
        let memory = Memory { held, bytes, kind, meter: Rc::clone(&self.meter) };
        Tensor { memory: Rc::new(memory), offset: 0, shape: shape.into(), dtype }
    }

    /// Numbers from the host, stored as `dtype`.
    pub fn tensor(&self, values: &[f32], shape: &[usize], dtype: DType) -> Result<Tensor> {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "numbers of a shape");
        let out = self.empty(shape, dtype)?;
        self.backend.upload(&stored(values, dtype), &out)?;
        Ok(out)
    }

    /// Whole numbers from the host.
    pub fn ids(&self, values: &[u32]) -> Result<Tensor> {
        let out = self.empty(&[values.len()], DType::U32)?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.backend.upload(&bytes, &out)?;
        Ok(out)
    }

    /// Whole numbers from page-locked memory, which is copied while the host goes on.
    pub fn pinned_ids(&self, values: &PinnedBuffer<u32>) -> Result<Tensor> {
        let Cached { allocator, stream } = self.alloc.cached().ok_or("memory of the caching allocator")?;
        let mut buffer = allocator.alloc_uninit(values.len(), stream)?;
        buffer.copy_from_pinned(values)?;
        if self.backend.is_immediate() {
            allocator.driver().synchronize()?; // what follows is not queued behind the copy, but done
        }
        Ok(self.tensor_in(Held::Ids(buffer), &[values.len()], DType::U32))
    }

    /// The numbers, on the host. Waits for them.
    pub fn to_vec(&self, x: &Tensor) -> Result<Vec<f32>> {
        Ok(floats(&self.backend.download(x)?, x.dtype))
    }
}

/// Stored numbers as the host knows them; whole numbers below 2²⁴ stay exact.
pub fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let words = || bytes.as_chunks::<4>().0.iter();
    let halves = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F32 => words().map(|&word| f32::from_ne_bytes(word)).collect(),
        DType::U32 => words().map(|&word| u32::from_ne_bytes(word) as f32).collect(),
        DType::BF16 => halves().map(|&word| half::bf16::from_ne_bytes(word).to_f32()).collect(),
        DType::F16 => halves().map(|&word| half::f16::from_ne_bytes(word).to_f32()).collect(),
    }
}

/// The host's numbers as they are stored.
pub fn stored(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        DType::U32 => values.iter().flat_map(|&value| (value as u32).to_ne_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_ne_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_ne_bytes()).collect(),
    }
}
