use super::lifetimes::NEVER;
use super::*;
use crate::driver::sim::SimDriver;
use crate::pytorch::{Action, Frame, Stack, TraceEntry};
use crate::{BlockState, CachingAllocator, Config, HistoryOptions, Segments};
use base64::Engine;
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Read;

/// The page's data, read back.
struct Data {
    head: Value,
    columns: Vec<u8>,
}

impl Data {
    fn of(snapshot: &Snapshot) -> Self {
        let mut page = Vec::new();
        snapshot.write_page("a run", &mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let (_, rest) = page.split_once("<script id=\"data\" type=\"application/octet-stream\">").unwrap();
        let packed = STANDARD.decode(rest.split_once("</script>").unwrap().0).unwrap();
        let mut plain = Vec::new();
        flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut plain).unwrap();
        let length = usize::try_from(u64::from_le_bytes(plain[..8].try_into().unwrap())).unwrap();
        assert_eq!(length % 8, 0, "columns are aligned");
        Self {
            head: serde_json::from_slice(&plain[8..8 + length]).unwrap(),
            columns: plain[8 + length..].to_vec(),
        }
    }

    fn array(&self, place: &Value) -> Vec<u64> {
        let number = |key: &str| usize::try_from(place[key].as_u64().unwrap()).unwrap();
        let (offset, count) = (number("offset"), number("count"));
        assert_eq!(offset % 8, 0);
        let width = match place["kind"].as_str().unwrap() {
            "u8" => 1,
            "u16" => 2,
            "u32" => 4,
            "u64" => 8,
            kind => panic!("{kind}"),
        };
        let element = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        self.columns[offset..offset + width * count].chunks(width).map(element).collect()
    }

    fn column(&self, place: &Value) -> Vec<u64> {
        let elements = self.array(place);
        match place.get("values") {
            Some(values) => {
                let values = self.array(values);
                elements.iter().map(|at| values[usize::try_from(*at).unwrap()]).collect()
            }
            None => elements,
        }
    }

    fn text(&self, at: u64) -> &str {
        self.head["texts"][usize::try_from(at).unwrap()].as_str().unwrap()
    }
}

/// Of a run with two streams, scopes, work in flight, a failure and pages that came and went.
fn recorded(segments: Segments) -> Snapshot {
    let sim = SimDriver::builder().capacity(256 << 20).build();
    let allocator = CachingAllocator::new(sim.clone(), Config::default().segments(segments)).unwrap();
    let streams = [allocator.default_stream().unwrap(), allocator.stream(sim.create_stream()).unwrap()];
    let before = allocator.alloc(3 << 20, &streams[0]).unwrap();
    let there = allocator.alloc(700, &streams[1]).unwrap();
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let mut live = Vec::new();
    let mut random = 7u64;
    for step in 0..400usize {
        random = random * 16807 % 2_147_483_647;
        let _scope = allocator.scope(["forward", "backward"][step / 20 % 2]);
        if random % 5 < 3 || live.is_empty() {
            let bytes = [600, 90_000, 1 << 20, 5 << 20][usize::try_from(random % 4).unwrap()] + random % 900;
            live.extend(allocator.alloc(bytes, &streams[step % 2]).ok());
        } else {
            live.swap_remove(usize::try_from(random).unwrap() % live.len());
        }
        if step == 200 {
            live.clear();
            allocator.empty_cache().unwrap();
            assert!(allocator.alloc(1 << 30, &streams[0]).is_err());
        }
    }
    drop(before);
    let snapshot = allocator.pytorch_snapshot();
    drop((live, there));
    snapshot
}

fn samples() -> Vec<(String, Snapshot)> {
    let mut samples = vec![
        ("fixed".to_owned(), recorded(Segments::Fixed)),
        ("expandable".to_owned(), recorded(Segments::Expandable)),
    ];
    for name in ["mlp", "mlp_expandable"] {
        let path = format!("{}/tests/data/snapshots/{name}.pickle.gz", env!("CARGO_MANIFEST_DIR"));
        samples.push((name.to_owned(), Snapshot::read(path).unwrap()));
    }
    samples
}

#[test]
fn the_data_is_the_snapshots_to_the_byte() {
    for (name, snapshot) in samples() {
        let data = Data::of(&snapshot);
        let device = &data.head["devices"][0];
        let entries = &snapshot.device_traces[0];
        assert_eq!(device["events"], entries.len());
        let column = |table: &str, name: &str| data.column(&device[table][name]);
        let (born, freed, waited) =
            (column("allocations", "born"), column("allocations", "freed"), column("allocations", "waited"));
        let bytes = column("allocations", "bytes");
        let sum =
            |is: &dyn Fn(usize) -> bool| (0..born.len()).filter(|at| is(*at)).map(|at| bytes[at]).sum::<u64>();
        let (from, to) = (column("segments", "from"), column("segments", "to"));
        let mapped = column("segments", "bytes");
        let (changed, reserved) = (column("reserved", "at"), column("reserved", "bytes"));
        let mut now = device["reserved_at_start"].as_u64().unwrap();
        for (moment, (entry, usage)) in (1u64..).zip(snapshot.usage_over_time(0)) {
            let place = format!("{name}, event {moment}: {:?}", entry.action);
            let live = |at: usize| born[at] <= moment && freed[at] > moment;
            assert_eq!(sum(&live), usage.allocated, "{place}");
            let active = |at: usize| born[at] <= moment && freed[at] + waited[at] > moment;
            assert_eq!(sum(&active), usage.active, "{place}");
            let there = (0..from.len()).filter(|at| from[*at] <= moment && to[*at] > moment);
            assert_eq!(there.map(|at| mapped[at]).sum::<u64>(), usage.reserved, "{place}");
            if let Ok(at) = changed.binary_search(&moment) {
                now = reserved[at];
            }
            assert_eq!(now, usage.reserved, "{place}");
        }
        let mut time = 0u64;
        for (entry, step) in entries.iter().zip(column("times", "steps")) {
            time = time.wrapping_add(step);
            assert_eq!(time, entry.time_us, "{name}");
        }
        let ooms = entries.iter().filter(|entry| entry.action == Action::Oom);
        assert!(ooms.map(|entry| entry.size).eq(column("ooms", "bytes")), "{name}");
    }
}

#[test]
fn every_allocation_keeps_its_numbers_tag_and_stack() {
    for (name, snapshot) in samples() {
        let data = Data::of(&snapshot);
        let device = &data.head["devices"][0];
        let column = |name: &str| data.column(&device["allocations"][name]);
        let [address, requested, stream, born, tag, stack] =
            ["address", "requested", "stream", "born", "tag", "stack"].map(column);
        let stacks = &data.head["stacks"];
        let [starts, frames, names, files, lines] =
            ["starts", "frames", "name", "file", "line"].map(|name| data.column(&stacks[name]));
        let mut allocations = (0..born.len()).filter(|at| born[*at] > 0);
        for (moment, entry) in (1u64..).zip(&snapshot.device_traces[0]) {
            if entry.action != Action::Alloc {
                continue;
            }
            let at = allocations.next().expect("one for each");
            assert_eq!(
                (address[at], requested[at], stream[at], born[at]),
                (entry.addr, entry.size, entry.stream, moment),
                "{name}"
            );
            assert_eq!(data.text(tag[at]), &*entry.user_metadata, "{name}");
            let number = usize::try_from(stack[at]).unwrap();
            let range = usize::try_from(starts[number]).unwrap()..usize::try_from(starts[number + 1]).unwrap();
            let shown = frames[range].iter().map(|frame| {
                let frame = usize::try_from(*frame).unwrap();
                (data.text(names[frame]), data.text(files[frame]), lines[frame])
            });
            let there =
                entry.frames.frames().iter().map(|frame| (&*frame.name, &*frame.filename, u64::from(frame.line)));
            assert!(shown.eq(there), "{name}, event {moment}");
        }
        assert_eq!(allocations.next(), None, "{name}");
    }
}

#[test]
fn columns_of_many_and_of_few_values_come_back() {
    for different in [1u64, 256, 257, 65_536, 65_537] {
        let numbers: Vec<u64> = (0..70_000).map(|at| u64::MAX - at % different * 3).collect();
        let mut columns = columns::Columns::default();
        let place = columns.u64(numbers.iter().copied());
        let packed = columns.packed(&place).unwrap();
        let mut plain = Vec::new();
        flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut plain).unwrap();
        let length = usize::try_from(u64::from_le_bytes(plain[..8].try_into().unwrap())).unwrap();
        let head: Value = serde_json::from_slice(&plain[8..8 + length]).unwrap();
        let data = Data { columns: plain[8 + length..].to_vec(), head };
        assert_eq!(data.column(&data.head), numbers, "{different}");
    }
}

/// What is in the page beside the data is the same for every snapshot.
#[test]
fn no_text_of_the_file_is_in_the_page() {
    let evil = "</script><img src=x onerror=alert(1)>{{data}}<!--";
    let frame = Frame { filename: evil.into(), line: 1, name: evil.into() };
    let mut alloc = entry(Action::Alloc, 1 << 20, 4096);
    alloc.frames = Stack::new(vec![frame]);
    alloc.user_metadata = evil.into();
    let mut free = entry(Action::Other(evil.into()), 1 << 20, 4096);
    free.stream = 9;
    let snapshot = Snapshot { device_traces: vec![vec![alloc, free]], ..Snapshot::default() };
    let parts = |snapshot: &Snapshot, title: &str| {
        let mut page = Vec::new();
        snapshot.write_page(title, &mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let (before, rest) = page.split_once("octet-stream\">").unwrap();
        let (data, after) = rest.split_once("</script>").unwrap();
        assert!(data.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte)));
        (before.to_owned(), after.to_owned())
    };
    assert_eq!(parts(&snapshot, evil), parts(&Snapshot::default(), ""));
    // And it is all there.
    let data = Data::of(&snapshot);
    let tag = data.column(&data.head["devices"][0]["allocations"]["tag"])[0];
    assert_eq!(data.text(tag), evil);
}

#[test]
fn the_page_loads_nothing_and_its_parts_end_nothing() {
    for part in SCRIPT.iter().chain([&STYLE]) {
        for bad in ["</script", "</style", "<!--", "http:", "https:", "innerHTML", "outerHTML", "eval(", "@import"]
        {
            assert!(!part.contains(bad), "{bad}");
        }
    }
    assert!(FRAME.contains("default-src 'none'") && !FRAME.contains("http:") && !FRAME.contains("https:"));
    let names: Vec<_> = FRAME.split("{{").skip(1).map(|rest| rest.split_once("}}").unwrap().0).collect();
    assert_eq!(names, ["style", "data", "script"]);
}

fn entry(action: Action, addr: u64, size: u64) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        block_size: 0,
        stream: 0,
        time_us: 0,
        frames: Stack::default(),
        user_metadata: "".into(),
        pool_id: (0, 0),
    }
}

/// Entries in any order, of few addresses and some that are absurd.
fn any_entry() -> impl Strategy<Value = TraceEntry> {
    let action = prop::sample::select(vec![
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Oom,
    ]);
    let addr = prop_oneof![8 => (0u64..12).prop_map(|page| page << 20), 1 => Just(u64::MAX), 1 => any::<u64>()];
    let size = prop_oneof![8 => (0u64..5).prop_map(|pages| pages << 20), 1 => Just(u64::MAX), 1 => any::<u64>()];
    (action, addr, size, any::<u64>())
        .prop_map(|(action, addr, size, time_us)| TraceEntry { time_us, ..entry(action, addr, size) })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_that_contradict_each_other_keep_their_order(entries in prop::collection::vec(any_entry(), 0..60)) {
        let block = |address, state| crate::pytorch::Block {
            address, size: 1 << 20, requested_size: u64::MAX, state, frames: Stack::default(),
        };
        let segment = crate::pytorch::Segment {
            address: 2 << 20,
            total_size: 3 << 20,
            blocks: vec![block(2 << 20, BlockState::Live), block(3 << 20, BlockState::Pending)],
            ..Default::default()
        };
        let snapshot =
            Snapshot { device_traces: vec![entries], segments: vec![segment], ..Snapshot::default() };
        let lifetimes = lifetimes::of(&snapshot, 0);
        prop_assert!(lifetimes.is_sorted_by_key(|lifetime| lifetime.born));
        let mut freed = BTreeSet::new();
        for lifetime in &lifetimes {
            prop_assert!(lifetime.born <= lifetime.freed && lifetime.freed <= lifetime.gone, "{lifetime:?}");
            // The page keeps one for each event.
            let is_by_event = lifetime.freed > 0 && lifetime.freed != NEVER;
            prop_assert!(!is_by_event || freed.insert(lifetime.freed), "{lifetime:?}");
        }
        let mapped = mapped::of(&snapshot, 0);
        for (at, one) in mapped.iter().enumerate() {
            prop_assert!(one.from <= one.to && one.bytes > 0, "{one:?}");
            // What was there before the first event is what the events say; these may have it end twice.
            for other in mapped[at + 1..].iter().filter(|other| one.from > 0 && other.from > 0) {
                let in_time = one.from.max(other.from) < one.to.min(other.to);
                let in_space = other.address < one.address.saturating_add(one.bytes);
                prop_assert!(!(in_time && in_space), "{one:?} and {other:?}");
            }
        }
        let data = Data::of(&snapshot);
        prop_assert_eq!(data.head["devices"].as_array().unwrap().len(), 1);
    }
}
