//! Ranges and marks for Nsight Systems (NVTX), in a domain named `vramalloc`. The library is looked for once; without it,
//! or without a tool that listens, a call does nothing.

use libloading::Library;
use std::ffi::{CString, c_char, c_void};
use std::sync::LazyLock;

/// The library of CUDA 12, and those of CUDA 13.
#[cfg(not(windows))]
const LIBRARIES: [&str; 3] = ["libnvToolsExt.so.1", "libnvtx3interop.so.1", "libnvtx3interop.so"];
#[cfg(windows)]
const LIBRARIES: [&str; 2] = ["nvToolsExt64_1.dll", "nvtx3interop.dll"];

/// `nvtxEventAttributes_t` of version 2, which version 3 takes, too.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

const _: () = assert!(std::mem::size_of::<Attributes>() == 48, "as the header has it");

/// `NVTX_PAYLOAD_TYPE_UNSIGNED_INT64`.
const PAYLOAD_U64: i32 = 1;
/// `NVTX_MESSAGE_TYPE_ASCII`.
const MESSAGE_ASCII: i32 = 1;

/// The functions in use.
struct Api {
    domain: usize,
    start: unsafe extern "C" fn(*mut c_void, *const Attributes) -> u64,
    end: unsafe extern "C" fn(*mut c_void, u64),
    mark: unsafe extern "C" fn(*mut c_void, *const Attributes),
    /// Keeps the functions loaded.
    _library: Library,
}

static API: LazyLock<Option<Api>> = LazyLock::new(|| LIBRARIES.iter().find_map(|name| Api::load(name)));

impl Api {
    fn load(name: &str) -> Option<Self> {
        type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
        // SAFETY: the library is made to be loaded this way; its initializers ask nothing of us.
        let library = unsafe { Library::new(name) }.ok()?;
        // SAFETY: the types are those that NVTX's header declares for these symbols; the copies live no longer than
        // the library, which is never unloaded.
        let (create, start, end, mark) = unsafe {
            (
                *library.get::<Create>("nvtxDomainCreateA").ok()?,
                *library.get("nvtxDomainRangeStartEx").ok()?,
                *library.get("nvtxDomainRangeEnd").ok()?,
                *library.get("nvtxDomainMarkEx").ok()?,
            )
        };
        // SAFETY: the name is a C string that lives as long as the program.
        let domain = unsafe { create(c"vramalloc".as_ptr()) };
        Some(Self { domain: domain.expose_provenance(), start, end, mark, _library: library })
    }

    fn domain(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.domain)
    }
}

fn attributes(message: &CString, payload: Option<u64>) -> Attributes {
    Attributes {
        version: 2,
        size: 48,
        category: 0,
        color_type: 0,
        color: 0,
        payload_type: if payload.is_some() { PAYLOAD_U64 } else { 0 },
        reserved: 0,
        payload: payload.unwrap_or(0),
        message_type: MESSAGE_ASCII,
        message: message.as_ptr(),
    }
}

/// A range that ends when it is dropped, in whatever order and thread.
#[derive(Debug)]
pub(crate) struct Range(u64);

impl Range {
    /// Starts a range; none without the library.
    pub(crate) fn start(name: &str) -> Option<Self> {
        let api = API.as_ref()?;
        let name = CString::new(name.replace('\0', " ")).ok()?;
        let attributes = attributes(&name, None);
        // SAFETY: the domain is the library's, the attributes and their text are valid for the call.
        Some(Self(unsafe { (api.start)(api.domain(), &raw const attributes) }))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(api) = &*API {
            // SAFETY: the domain is the library's, and the range is one that it started and has not ended.
            unsafe { (api.end)(api.domain(), self.0) };
        }
    }
}

/// Marks an instant with a figure, which the tool draws as its payload.
pub(crate) fn mark(name: &str, value: u64) {
    let Some(api) = &*API else { return };
    let Ok(name) = CString::new(name) else { return };
    let attributes = attributes(&name, Some(value));
    // SAFETY: the domain is the library's, the attributes and their text are valid for the call.
    unsafe { (api.mark)(api.domain(), &raw const attributes) };
}
