//! What other tools hear: `tracing` events, and NVTX ranges and marks.

#[cfg(feature = "tracing")]
mod events {
    use std::fmt::Write;
    use std::sync::{Arc, Mutex};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};
    use vramalloc::driver::sim::SimDriver;
    use vramalloc::{CachingAllocator, Config};

    const MIB: u64 = 1 << 20;

    /// Keeps each event as a line, and uses the allocator meanwhile, as a subscriber may.
    struct Lines(Arc<Mutex<Vec<String>>>, CachingAllocator);

    struct Line(String);

    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            let _ = write!(self.0, " {field}={value:?}");
        }
    }

    impl Subscriber for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "vramalloc"
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut line = Line(event.metadata().level().to_string());
            event.record(&mut line);
            let _ = self.1.memory_stats();
            self.1.validate().unwrap();
            self.0.lock().unwrap().push(line.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn slow_paths_are_events() {
        let build =
            || CachingAllocator::new(SimDriver::builder().capacity(64 * MIB).build(), Config::default()).unwrap();
        let (allocator, lines) = (build(), Arc::new(Mutex::new(Vec::new())));
        tracing::subscriber::with_default(Lines(Arc::clone(&lines), allocator.clone()), || {
            let stream = allocator.default_stream().unwrap();
            drop(allocator.alloc(30 * MIB, &stream).unwrap());
            drop(allocator.alloc(30 * MIB, &stream).unwrap());
            let _oom = allocator.alloc(100 * MIB, &stream).unwrap_err();
            allocator.empty_cache().unwrap();
            let gone = build();
            let stream = gone.default_stream().unwrap();
            let kept = gone.alloc(1000, &stream).unwrap();
            drop(gone);
            drop(kept);
        });
        let lines = lines.lock().unwrap();
        let expected = [
            ("DEBUG", "requested=31457280 reserved=31457280"),
            ("WARN", "message=out of memory device=0 requested=104857600 allocated=0 reserved=31457280"),
            ("DEBUG", "freed=31457280 reserved=0"),
            ("DEBUG", "requested=1000 reserved=2097152"),
            ("WARN", "allocations=1 bytes=1024"),
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:#?}");
        for (line, (level, part)) in lines.iter().zip(expected) {
            assert!(line.starts_with(level) && line.contains(part), "{part}: {line}");
        }
    }
}

#[cfg(all(feature = "nvtx", target_os = "linux"))]
mod nvtx {
    use std::path::Path;
    use std::process::Command;
    use vramalloc::driver::sim::SimDriver;
    use vramalloc::{CachingAllocator, Config};

    /// A library with NVTX's symbols that writes down what it is called with.
    const LISTENER: &str = r#"
        use std::ffi::{CStr, c_char, c_void};
        use std::io::Write;
        #[repr(C)]
        pub struct Attributes { version: u16, size: u16, category: u32, color_type: i32, color: u32, payload_type: i32,
            reserved: i32, payload: u64, message_type: i32, message: *const c_char }
        fn note(line: String) {
            let path = std::env::var("LISTENER_FILE").unwrap();
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
            writeln!(file, "{line}").unwrap();
        }
        unsafe fn said(at: *const Attributes) -> String {
            let at = unsafe { &*at };
            assert_eq!((at.version, at.size, at.message_type), (2, 48, 1));
            let message = unsafe { CStr::from_ptr(at.message) }.to_str().unwrap();
            if at.payload_type == 1 { format!("{message} = {}", at.payload) } else { message.to_owned() }
        }
        #[unsafe(no_mangle)] pub unsafe extern "C" fn nvtxDomainCreateA(name: *const c_char) -> *mut c_void {
            note(format!("domain {}", unsafe { CStr::from_ptr(name) }.to_str().unwrap())); 0x77 as *mut c_void }
        #[unsafe(no_mangle)] pub unsafe extern "C" fn nvtxDomainRangeStartEx(domain: *mut c_void, at: *const Attributes) -> u64 {
            assert_eq!(domain as usize, 0x77); note(format!("start {}", unsafe { said(at) })); 42 }
        #[unsafe(no_mangle)] pub unsafe extern "C" fn nvtxDomainRangeEnd(domain: *mut c_void, range: u64) {
            assert_eq!((domain as usize, range), (0x77, 42)); note("end".to_owned()) }
        #[unsafe(no_mangle)] pub unsafe extern "C" fn nvtxDomainMarkEx(domain: *mut c_void, at: *const Attributes) {
            assert_eq!(domain as usize, 0x77); note(format!("mark {}", unsafe { said(at) })) }
    "#;

    /// Run by the next test in a process of its own, where the library is found.
    #[test]
    #[ignore = "a part of `scopes_are_ranges`"]
    fn in_a_process_of_its_own() {
        let allocator =
            CachingAllocator::new(SimDriver::builder().capacity(64 << 20).build(), Config::default()).unwrap();
        let stream = allocator.default_stream().unwrap();
        let _step = allocator.scope("step");
        drop(allocator.alloc(1000, &stream).unwrap());
        drop(allocator.alloc(1000, &stream).unwrap());
        let _ = allocator.alloc(1 << 30, &stream).unwrap_err();
    }

    #[test]
    fn scopes_are_ranges() {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvtx");
        std::fs::create_dir_all(&folder).unwrap();
        let (source, heard) = (folder.join("listener.rs"), folder.join("heard"));
        std::fs::write(&source, LISTENER).unwrap();
        let _ = std::fs::remove_file(&heard);
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
        let built = Command::new(rustc)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
            .arg(folder.join("libnvToolsExt.so.1"))
            .arg(&source)
            .status()
            .unwrap();
        assert!(built.success());
        let run = |path: &Path| {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["nvtx::in_a_process_of_its_own", "--exact", "--ignored"])
                .env("LD_LIBRARY_PATH", path)
                .env("LISTENER_FILE", &heard)
                .status()
                .unwrap();
            assert!(status.success());
        };
        run(Path::new("/nowhere"));
        assert!(!heard.exists(), "without the library nothing is called");
        run(&folder);
        let heard = std::fs::read_to_string(&heard).unwrap();
        let expected = [
            "domain vramalloc",
            "start step",
            "mark reserved bytes = 2097152",
            "mark out of memory, bytes requested = 1073741824",
            "mark reserved bytes = 2097152",
            "end",
        ];
        assert_eq!(heard.lines().collect::<Vec<_>>(), expected);
    }
}
