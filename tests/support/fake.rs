//! Loads the fake `libcuda.so.1` where there is no real one.

use libloading::Library;
use std::ffi::CString;
use std::sync::OnceLock;

/// The fake driver's library, with the functions that are its own.
#[derive(Debug)]
pub(crate) struct Fake {
    library: Library,
}

/// The fake library, loaded such that whoever looks for `libcuda.so.1` finds it; `None`, with the reason, on a machine
/// that has a driver, or where the tests must run on a GPU. With `VRAMALLOC_REQUIRE_FAKE` set, a machine without a driver
/// must have it.
pub(crate) fn load() -> Result<&'static Fake, String> {
    static FAKE: OnceLock<Result<Fake, String>> = OnceLock::new();
    FAKE.get_or_init(try_load).as_ref().map_err(Clone::clone)
}

fn try_load() -> Result<Fake, String> {
    if std::env::var_os("VRAMALLOC_REQUIRE_GPU").is_some() {
        return Err("VRAMALLOC_REQUIRE_GPU is set, so the fake driver stays away".to_owned());
    }
    for name in ["libcuda.so", "libcuda.so.1"] {
        // SAFETY: the driver's library is made to be loaded this way.
        if unsafe { Library::new(name) }.is_ok() {
            return Err(format!("there is a {name} already, so the fake driver stays away"));
        }
    }
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    // Cargo builds the library beside the tests, as they depend on its package.
    let path = here.with_file_name("libvramalloc_fake_libcuda.so");
    // SAFETY: a library of this repository, without initializers of its own.
    let loaded = unsafe { Library::new(&path) };
    let loaded =
        loaded.map_err(|error| format!("the fake driver cannot be loaded from {}: {error}", path.display()));
    if let (Err(reason), true) = (&loaded, std::env::var_os("VRAMALLOC_REQUIRE_FAKE").is_some()) {
        panic!("VRAMALLOC_REQUIRE_FAKE is set, and {reason}; run the tests by cargo, which builds it beside them");
    }
    Ok(Fake { library: loaded? })
}

#[allow(dead_code, reason = "not every test binary that loads it asks it")]
impl Fake {
    /// How often a function of the driver was called.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        let function = CString::new(function).expect("a name");
        // SAFETY: the type is the function's, and the text ends in a zero byte.
        unsafe {
            let calls =
                self.library.get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>("fake_cuda_calls");
            calls.expect("the fake driver's own function")(function.as_ptr())
        }
    }

    /// Runs `hook` when a function of the driver is called next; what it answers, unless 0, is the call's answer.
    pub(crate) fn hook(&self, function: &str, hook: extern "C" fn() -> i32) {
        let function = CString::new(function).expect("a name");
        // SAFETY: the type is the function's, and the text ends in a zero byte.
        unsafe {
            type Hook = unsafe extern "C" fn(*const std::ffi::c_char, extern "C" fn() -> i32);
            let set = self.library.get::<Hook>("fake_cuda_hook");
            set.expect("the fake driver's own function")(function.as_ptr(), hook);
        }
    }

    /// How many misuses were seen since this was last asked; they are printed.
    pub(crate) fn violations(&self) -> u64 {
        // SAFETY: the type is the function's.
        unsafe {
            let violations = self.library.get::<unsafe extern "C" fn() -> u64>("fake_cuda_violations");
            violations.expect("the fake driver's own function")()
        }
    }
}
