//! A small tensor library that the examples share: tensors in an allocator's memory, the operations that a neural network
//! needs, gradients in reverse mode.
//!
//! On a GPU products are cuBLAS's and the rest are kernels compiled at run time (kernels.cu); on the simulated device the
//! host does the same arithmetic on the bytes of the simulated memory. Who uses it declares
//! `#[path = "../tensor/mod.rs"] mod tensor;`.

#![allow(dead_code, unused_imports)] // no program uses all of it
#![allow(unreachable_pub, missing_debug_implementations)] // a program exports nothing

mod call;
mod command_line;
mod device;
mod gpt;
#[cfg(feature = "cuda")]
mod gpu;
mod host;
mod host_kernels;
mod memory;
mod ops;
mod optimizer;
mod random;
mod tape;
mod text;

pub use command_line::{Options, main_of};
pub use device::{Device, memory_calls};
pub use gpt::{Gpt, GptShape, How, OF_LAYER, embed, head, layer};
#[cfg(feature = "cuda")]
pub use gpu::{Cuda, need_library};
pub use host::Pace;
pub use memory::{Alloc, Cached, DType, DriverAlloc, Kind, Machine, Meter, OrderedAlloc, Tensor};
pub use ops::Window;
pub use optimizer::{Adam, Param, Sgd};
pub use random::Random;
pub use tape::{Grads, Tape, Var};
pub use text::Text;

/// Whatever went wrong: an allocator's error is found in it by `downcast_ref`.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The out-of-memory report in an error, if that is what it is.
pub fn out_of_memory<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a vramalloc::OutOfMemory> {
    error.downcast_ref::<vramalloc::Error>().and_then(vramalloc::Error::out_of_memory)
}
