//! Snapshot files that are cut off, damaged or made to do harm: an error each, no panic, and no more memory than a fixed
//! multiple of the file. (Every allocation of this program is counted; one test at a time looks at the count.)
#![cfg(feature = "replay")]

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use vramalloc::pytorch::{Snapshot, SnapshotError};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it came; the counters change nothing about it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Parses, and returns how many bytes that took at most.
fn measured(bytes: &[u8]) -> (Result<Snapshot, SnapshotError>, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = Snapshot::parse(Path::new("hostile.pickle"), bytes);
    (result, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}

/// Bytes of memory that a byte of a file may take.
const FACTOR: usize = 100;

fn refused(bytes: &[u8]) -> String {
    let (result, peak) = measured(bytes);
    assert!(peak <= FACTOR * bytes.len() + (1 << 20), "{peak} bytes for a file of {}", bytes.len());
    result.expect_err("not a snapshot").to_string()
}

fn sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots").join(name);
    let mut plain = Vec::new();
    GzDecoder::new(&*std::fs::read(path).unwrap()).read_to_end(&mut plain).unwrap();
    plain
}

/// A pickle of protocol 4 around these opcodes.
fn pickle(opcodes: &[u8]) -> Vec<u8> {
    [b"\x80\x04", opcodes].concat()
}

/// `X` and a text.
fn text(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).unwrap().to_le_bytes();
    [b"X", &length[..], text.as_bytes()].concat()
}

#[test]
fn code_is_refused_wherever_it_is_named() {
    let _alone = alone();
    for opcodes in [
        &b"cos\nsystem\n(S'touch /tmp/owned'\ntR."[..],
        b"\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
        b"(ios\nsystem\n.",
        b"}\x81.",
        b"]b.",
        b"\x82\x01.",
        b"Pname\n.",
        b"\x97.",
    ] {
        let error = refused(&pickle(opcodes));
        assert!(error.starts_with("hostile.pickle: byte "), "{error}");
        assert!(error.contains("opcode 0x"), "{error}");
    }
    let error = refused(&pickle(b"cos\nsystem\n(S'id'\ntR."));
    assert!(error.contains("byte 2 of the pickle: opcode 0x63 names or calls a Python object"), "{error}");
}

#[test]
fn what_is_no_pickle_says_so() {
    let _alone = alone();
    for (bytes, expected) in [
        (&b""[..], "not a pickle"),
        (b"hello", "not a pickle"),
        (b"\x80\x01.", "protocol 1"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02", "the file ends before the pickle does"),
        (b"\x80\x02.", "there is none"),
        (b"\x80\x02NN.", "left over"),
        (b"\x80\x02e.", "a mark"),
        (b"\x80\x02(a", "there is none"),
        (b"\x80\x02]K\x01(a.", "there is none"),
        (b"\x80\x02K\x01K\x02a.", "no list"),
        (b"\x80\x02}(K\x01u.", "a key without a value"),
        (b"\x80\x02h\x07.", "not remembered"),
        (b"\x80\x02\x8a\xff", "255 bytes expected"),
        (b"\x80\x02\x8b\xff\xff\xff\xffabc", "4294967295 bytes expected"),
        (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc", "bytes expected"),
        (b"\x80\x02X\xff\xff\xff\xffabc", "the file ends after 3"),
        (b"\x80\x02\x8a\x0a0123456789.", "64 bits are the most"),
        (b"\x80\x02]q\x00h\x00a.", "segments[0]: expected a dictionary"),
        (b"\x80\x02K\x01.", "expected a dictionary"),
    ] {
        let error = refused(bytes);
        assert!(error.contains(expected), "{bytes:?}: {error}");
    }
}

#[test]
fn sharing_does_not_multiply() {
    let _alone = alone();
    // A billion laughs: thirty lists, each of ten times the one before.
    let mut laughs = b"]q\x00".to_vec();
    for level in 0..30u8 {
        laughs.extend_from_slice(b"](");
        for _ in 0..10 {
            laughs.extend_from_slice(&[b'h', level]);
        }
        laughs.extend_from_slice(&[b'e', b'q', level + 1]);
    }
    laughs.push(b'.');
    refused(&pickle(&laughs));

    // One segment, a hundred thousand times.
    let mut same = b"}(".to_vec();
    same.extend(text("segments"));
    same.extend_from_slice(b"](}(");
    for (key, value) in [("address", b"K\x00"), ("total_size", b"K\x00"), ("blocks", b"])")] {
        same.extend(text(key));
        same.extend_from_slice(if key == "blocks" { b"]" } else { value });
    }
    same.extend_from_slice(b"uq\x01");
    same.extend(b"h\x01".repeat(100_000));
    same.extend_from_slice(b"eu.");
    let error = refused(&pickle(&same));
    assert!(error.contains("segments[1]: expected a dictionary of its own"), "{error}");

    // A text of a megabyte, a hundred thousand times, where texts are kept as they are.
    let mut texts = b"}(".to_vec();
    texts.extend(text("segments"));
    texts.extend_from_slice(b"]");
    texts.extend(text("allocator_settings"));
    texts.extend_from_slice(b"}(");
    texts.extend(text("k"));
    texts.extend_from_slice(b"](");
    texts.extend(text(&"x".repeat(1 << 20)));
    texts.extend_from_slice(b"q\x05");
    texts.extend(b"h\x05".repeat(100_000));
    texts.extend_from_slice(b"euu.");
    let error = refused(&pickle(&texts));
    assert!(error.contains("a million in all"), "{error}");

    // An action of a megabyte in a thousand entries is kept once.
    let mut actions = b"}(".to_vec();
    actions.extend(text("segments"));
    actions.extend_from_slice(b"]");
    actions.extend(text("device_traces"));
    actions.extend_from_slice(b"](](}(");
    actions.extend(text("action"));
    actions.extend(text(&"x".repeat(1 << 20)));
    actions.extend_from_slice(b"q\x03");
    actions.extend(text("size"));
    actions.extend_from_slice(b"K\x01u");
    for _ in 0..1_000 {
        actions.extend_from_slice(b"}(");
        actions.extend(text("action"));
        actions.extend_from_slice(b"h\x03");
        actions.extend(text("size"));
        actions.extend_from_slice(b"K\x01u");
    }
    actions.extend_from_slice(b"eeu.");
    let bytes = pickle(&actions);
    let (result, peak) = measured(&bytes);
    assert_eq!(result.unwrap().device_traces[0].len(), 1_001);
    assert!(peak <= FACTOR * bytes.len(), "{peak} bytes for a file of {}", bytes.len());

    // A stack of a thousand functions in a hundred thousand blocks is kept once.
    let mut stacks = b"}(".to_vec();
    stacks.extend(text("segments"));
    stacks.extend_from_slice(b"]");
    stacks.extend(text("device_traces"));
    stacks.extend_from_slice(b"](](}(");
    for (key, value) in [("action", text("oom")), ("size", b"K\x01".to_vec())] {
        stacks.extend(text(key));
        stacks.extend(value);
    }
    stacks.extend(text("frames"));
    stacks.extend_from_slice(b"](}(");
    for key in ["filename", "name"] {
        stacks.extend(text(key));
        stacks.extend(text("f"));
    }
    stacks.extend_from_slice(b"uq\x01");
    stacks.extend(b"h\x01".repeat(1000));
    stacks.extend_from_slice(b"eq\x02u");
    for _ in 0..100_000 {
        stacks.extend_from_slice(b"}(");
        for (key, value) in [("action", text("oom")), ("size", b"K\x01".to_vec()), ("frames", b"h\x02".to_vec())] {
            stacks.extend(text(key));
            stacks.extend(value);
        }
        stacks.push(b'u');
    }
    stacks.extend_from_slice(b"eeu.");
    let bytes = pickle(&stacks);
    let (result, peak) = measured(&bytes);
    let snapshot = result.unwrap();
    assert_eq!(snapshot.device_traces[0].len(), 100_001);
    assert_eq!(snapshot.device_traces[0][99_999].frames.frames().len(), 1001);
    assert!(peak <= FACTOR * bytes.len(), "{peak} bytes for a file of {}", bytes.len());
}

#[test]
fn depth_and_numbers_are_bounded() {
    let _alone = alone();
    let error = refused(&pickle(&b"(".repeat(1 << 20)));
    assert!(error.contains("nested too deeply"), "{error}");
    let error = refused(&vec![b'['; 1 << 20]);
    assert!(error.contains("recursion limit"), "{error}");
    // Nested a million times by appending, which no reader of it may follow.
    let mut deep = b"]".repeat(1 << 20);
    deep.extend(b"a".repeat((1 << 20) - 1));
    deep.push(b'.');
    let error = refused(&pickle(&deep));
    assert!(error.contains("segments[0]: expected a dictionary"), "{error}");
    let mut wide = b"](".to_vec();
    wide.extend(b"N".repeat(1 << 20));
    wide.extend_from_slice(b"e.");
    refused(&pickle(&wide));
    refused(&pickle(&b"]".repeat(1 << 20)));
    refused(&pickle(&b"}r\xff\xff\xff\xff".repeat(1 << 18)));
}

#[test]
fn a_compressed_bomb_stops_at_the_limit() {
    let _alone = alone();
    let mut bomb = GzEncoder::new(Vec::new(), Compression::best());
    let zeros = vec![b'0'; 1 << 20];
    bomb.write_all(b"\x80\x04").unwrap();
    for _ in 0..1100 {
        bomb.write_all(&zeros).unwrap();
    }
    let bomb = bomb.finish().unwrap();
    assert!(bomb.len() < 2 << 20);
    let (result, peak) = measured(&bomb);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("more than 1073741824 bytes"), "{error}");
    // The buffer doubles, and is held twice while it does.
    assert!(peak <= 4 << 30, "{peak}");
}

#[test]
fn a_file_that_is_cut_off_is_an_error() {
    let _alone = alone();
    let whole = sample("mlp.pickle.gz");
    assert!(measured(&whole).0.is_ok());
    for cut in (0..200).chain((200..whole.len()).step_by(211)).chain([whole.len() - 1]) {
        let error = refused(&whole[..cut]);
        assert!(error.contains("byte ") || error.contains("not a pickle"), "cut at {cut}: {error}");
    }
    let mut json = Vec::new();
    Snapshot::parse(Path::new("s"), &whole).unwrap().write_json(&mut json).unwrap();
    for cut in (0..200).chain((200..json.len()).step_by(4001)) {
        refused(&json[..cut]);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots/mlp.pickle.gz");
    let gzipped = std::fs::read(path).unwrap();
    for cut in (2..gzipped.len()).step_by(97) {
        let error = Snapshot::parse(Path::new("cut.gz"), &gzipped[..cut]).unwrap_err();
        assert!(matches!(error, SnapshotError::Io { .. }), "cut at {cut}: {error}");
    }
}

/// Snapshots are read, or refused; what is read can be used.
fn survives(bytes: &[u8]) {
    let (result, peak) = measured(bytes);
    assert!(peak <= FACTOR * bytes.len() + (1 << 20), "{peak} bytes for a file of {}", bytes.len());
    if let Ok(snapshot) = result {
        for device in 0..snapshot.device_traces.len() {
            let _ = snapshot.peak_usage(device);
            let _ = snapshot.to_trace(device, "damaged");
        }
        snapshot.write_json(std::io::sink()).unwrap();
        snapshot.write_pickle(std::io::sink()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bytes of a real file overwritten, dropped and doubled.
    #[test]
    fn damage_is_survived(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..12),
        expandable: bool,
    ) {
        let _alone = alone();
        let mut bytes = sample(if expandable { "mlp_expandable.pickle.gz" } else { "mlp.pickle.gz" });
        for (index, byte, how) in damage {
            let at = index.index(bytes.len());
            match how {
                0 => drop(bytes.remove(at)),
                1 => bytes.insert(at, byte),
                2 => bytes[at] ^= 1 << (byte % 8),
                _ => bytes[at] = byte,
            }
        }
        survives(&bytes);
    }

    /// Opcodes at random, of those that a pickle has.
    #[test]
    fn random_opcodes_are_survived(opcodes in prop::collection::vec(prop_oneof![
        8 => prop::sample::select(&b"N\x88\x89]})(aesu.\x85\x86\x87tld\x94\x95"[..]).prop_map(|opcode| vec![opcode]),
        4 => (prop::sample::select(&b"Kqh\x8a\x8c"[..]), any::<u8>()).prop_map(|(opcode, byte)| vec![opcode, byte % 8]),
        2 => prop::sample::select(vec!["segments", "device_traces", "action", "alloc", "size", "blocks", "frames"]).prop_map(text),
        1 => any::<u8>().prop_map(|byte| vec![byte]),
    ], 0..200)) {
        let _alone = alone();
        survives(&pickle(&opcodes.concat()));
    }
}
