//! Sums of tensors over all ranks: by NCCL on GPUs, by the stand-in on simulated devices.

use crate::star::{Place, Star};
use crate::tensor::{DType, Device, Machine, Result, Tensor};

pub enum Collective {
    /// There is only one rank.
    Alone,
    StandIn(Star),
    #[cfg(feature = "cuda")]
    Nccl(nccl::Communicator),
}

impl Collective {
    pub fn new(device: &Device, place: &Place, star: Star) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &device.cuda {
            let has_nccl = crate::tensor::need_library("nccl");
            return match has_nccl {
                Ok(()) => Ok(Self::Nccl(nccl::Communicator::new(cuda, place, &star)?)),
                Err(_) if place.world == 1 => Ok(Self::Alone),
                Err(error) => Err(error),
            };
        }
        let _ = device;
        Ok(if place.world == 1 { Self::Alone } else { Self::StandIn(star) })
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::StandIn(_) => "stand-in",
            #[cfg(feature = "cuda")]
            Self::Nccl(_) => "NCCL",
        }
    }

    /// Replaces each tensor by its sum over all ranks.
    pub fn sum(&self, machine: &Machine, tensors: &[Tensor]) -> Result<()> {
        match self {
            Self::Alone => Ok(()),
            Self::StandIn(star) => tensors.iter().try_for_each(|tensor| {
                assert_eq!(tensor.dtype(), DType::F32, "sums are of single precision");
                let mut values = machine.to_vec(tensor)?;
                star.sum(&mut values)?;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                machine.backend.upload(&bytes, tensor)
            }),
            #[cfg(feature = "cuda")]
            Self::Nccl(communicator) => communicator.sum(tensors),
        }
    }
}

#[cfg(feature = "cuda")]
mod nccl {
    use super::{DType, Place, Result, Star, Tensor};
    use crate::tensor::Cuda;
    use cudarc::driver::CudaStream;
    use cudarc::nccl::result::NcclError;
    use cudarc::nccl::{result, sys};
    use std::mem::MaybeUninit;
    use std::rc::Rc;
    use std::sync::Arc;

    pub struct Communicator {
        raw: sys::ncclComm_t,
        stream: Arc<CudaStream>,
    }

    /// cudarc's error says nothing when printed but its name.
    fn named(error: NcclError) -> String {
        format!("NCCL: {error:?}")
    }

    impl Communicator {
        /// Waits for all ranks, to which rank 0 tells where to meet.
        pub fn new(cuda: &Rc<Cuda>, place: &Place, star: &Star) -> Result<Self> {
            let stream = Arc::clone(cuda.cudarc_stream());
            stream.context().bind_to_thread()?;
            let mut bytes = [0_u8; 128];
            if place.rank == 0 {
                bytes = result::get_uniqueid().map_err(named)?.internal.map(|byte| byte as u8);
            }
            star.broadcast(&mut bytes)?;
            let id = sys::ncclUniqueId { internal: bytes.map(|byte| byte as _) };
            let mut raw = MaybeUninit::uninit();
            let (world, rank) = (i32::try_from(place.world)?, i32::try_from(place.rank)?);
            // SAFETY: the pointer is valid for the call, which fills it if it succeeds.
            let raw = unsafe {
                result::comm_init_rank(raw.as_mut_ptr(), world, id, rank).map_err(named)?;
                raw.assume_init()
            };
            Ok(Self { raw, stream })
        }

        pub fn sum(&self, tensors: &[Tensor]) -> Result<()> {
            let (kind, operation) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
            result::group_start().map_err(named)?;
            for tensor in tensors {
                assert_eq!(tensor.dtype(), DType::F32, "sums are of single precision");
                let address = tensor.ptr().0 as *mut std::ffi::c_void;
                let stream = self.stream.cu_stream() as sys::cudaStream_t;
                // SAFETY: the tensor's memory, so long; in order with all else on the stream.
                unsafe { result::all_reduce(address, address, tensor.len(), kind, operation, self.raw, stream) }
                    .map_err(named)?;
            }
            result::group_end().map_err(named)?;
            Ok(())
        }
    }

    impl Drop for Communicator {
        fn drop(&mut self) {
            // What is queued ends first; what fails now harms nobody.
            let _ = self.stream.synchronize();
            // SAFETY: made by `new`, and not used again.
            let _ = unsafe { result::comm_destroy(self.raw) };
        }
    }
}
