//! A kernel's argument that is gone before the launch.

use cudarc::driver::{LaunchArgs, LaunchConfig, PushKernelArg};
use vramalloc::DeviceBuffer;

fn launch(mut args: LaunchArgs<'_>, buffer: DeviceBuffer<f32>) {
    args.arg(&buffer);
    drop(buffer);
    unsafe { args.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
}

fn main() {}
