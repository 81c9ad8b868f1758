//! Recorded runs from files of either kind.

use crate::Failure;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use vramalloc::pytorch::{Snapshot, Usage};
use vramalloc::trace::Trace;

/// A run on one device.
pub(crate) struct Input {
    pub(crate) trace: Trace,
    /// The highest figures of the run that was recorded, if the file has them.
    pub(crate) recorded: Option<Usage>,
}

/// What a file holds.
pub(crate) enum Kind {
    Trace(Trace),
    Snapshot(Snapshot),
}

/// Reads a file of either kind.
pub(crate) fn open(path: &Path) -> Result<Kind, Failure> {
    let usage = |error: &dyn std::error::Error| Failure::Usage(error.to_string());
    let start =
        start_of(path).map_err(|error| Failure::Usage(format!("{}: cannot be read: {error}", path.display())))?;
    if Snapshot::is_likely(&start) {
        Snapshot::read(path).map(Kind::Snapshot).map_err(|error| usage(&error))
    } else {
        Trace::read(path).map(Kind::Trace).map_err(|error| usage(&error))
    }
}

/// A file's name without what says its format.
pub(crate) fn name_of(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let ends = [".gz", ".pickle", ".json", ".csv"];
    ends.iter().fold(name.as_str(), |name, end| name.strip_suffix(end).unwrap_or(name)).to_owned()
}

/// The runs in a file: one of a trace, one a device of a snapshot.
pub(crate) fn read(path: &Path) -> Result<Vec<Input>, Failure> {
    let snapshot = match open(path)? {
        Kind::Trace(trace) => return Ok(vec![Input { trace, recorded: None }]),
        Kind::Snapshot(snapshot) => snapshot,
    };
    let name = name_of(path);
    let devices = 0..snapshot.device_traces.len();
    let runs: Vec<Input> = devices
        .filter_map(|device| {
            let name = if snapshot.device_traces.len() > 1 { format!("{name}:{device}") } else { name.clone() };
            let trace = snapshot.to_trace(device, &name)?;
            Some(Input { trace, recorded: Some(snapshot.peak_usage(device)) })
        })
        .collect();
    if runs.is_empty() {
        return Err(Failure::Usage(format!(
            "{}: the snapshot has neither events nor live blocks; record a history before taking it \
             (torch.cuda.memory._record_memory_history)",
            path.display()
        )));
    }
    Ok(runs)
}

/// The first bytes of a file, decompressed.
fn start_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = BufReader::new(File::open(path)?);
    let mut start = Vec::new();
    if file.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        // What is wrong with it is for the reader of the whole to say.
        let _ = MultiGzDecoder::new(file).take(64).read_to_end(&mut start);
    } else {
        file.take(64).read_to_end(&mut start)?;
    }
    Ok(start)
}
