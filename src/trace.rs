//! Recorded allocation traces: the replay format, and a strict reader.
//!
//! One event a line, the file gzipped or not:
//!
//! ```text
//! a,ID,BYTES,STREAM     allocate BYTES on stream number STREAM and call it ID
//! f,ID                  free it
//! ```
//!
//! IDs count up from 0. What is never freed was live at the end. Anything else in the file is an error that names
//! the file, the line and what was expected.

use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The longest line that is read; a real one has about 30 bytes.
const LINE_MAX: u64 = 256;

/// One step of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Allocate; the allocation's number is the count of allocations before it.
    Alloc {
        /// As requested.
        bytes: u64,
        /// Index into [`Trace::streams`].
        stream: u32,
    },
    /// Free the allocation of that number.
    Free {
        /// The allocation's number.
        id: u32,
    },
}

/// A recorded run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trace {
    /// The file's name without its endings.
    pub name: String,
    /// The steps.
    pub events: Vec<Event>,
    /// Allocations in it.
    pub allocations: usize,
    /// The stream numbers that occur, in the order of first use; one may occur for itself and for private pools.
    pub streams: Vec<u32>,
    /// Of each of these, the private pool that its allocations came from, by a number; `None` for ordinary memory. Trace
    /// files have none.
    pub private: Vec<Option<u32>>,
    /// The highest sum of live requested bytes.
    pub peak_requested: u64,
}

/// A file that is no trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is not an event.
    #[error("{}:{line}: expected {expected}, found {found}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What should have been there.
        expected: String,
        /// What was there.
        found: String,
    },
}

impl Trace {
    /// Reads a trace file; gzipped if it begins like one.
    ///
    /// # Errors
    /// [`TraceError`] naming the file, and the line with what was expected there.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let io_error = |source| TraceError::Io { path: path.to_owned(), source };
        let mut file = BufReader::new(File::open(path).map_err(io_error)?);
        let gzipped = file.fill_buf().map_err(io_error)?.starts_with(&[0x1f, 0x8b]);
        if gzipped {
            Self::parse(path, BufReader::new(MultiGzDecoder::new(file)))
        } else {
            Self::parse(path, file)
        }
    }

    /// Reads a trace from its text; `path` is what errors name.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(path: &Path, mut text: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = Reader { path, line: 0, trace: Self::empty(path), live: Vec::new(), live_bytes: 0 };
        let mut line = Vec::new();
        loop {
            line.clear();
            reader.line += 1;
            let read = text.by_ref().take(LINE_MAX).read_until(b'\n', &mut line);
            let read = read.map_err(|error| reader.expected("more of the file", error.to_string()))?;
            if read == 0 {
                break;
            }
            if line.last() == Some(&b'\n') {
                line.pop();
            } else if read as u64 == LINE_MAX {
                return Err(reader.expected("a line of an event", format!("one of more than {LINE_MAX} bytes")));
            }
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            match std::str::from_utf8(&line) {
                Ok(line) => reader.event(line)?,
                Err(_) => return Err(reader.expected(EVENT, "bytes that are not text")),
            }
        }
        if reader.trace.events.is_empty() {
            return Err(reader.expected(EVENT, "an empty file"));
        }
        Ok(reader.trace)
    }

    fn empty(path: &Path) -> Self {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let name = name.strip_suffix(".csv").unwrap_or(name).to_owned();
        Self {
            name,
            events: Vec::new(),
            allocations: 0,
            streams: Vec::new(),
            private: Vec::new(),
            peak_requested: 0,
        }
    }
}

const EVENT: &str = "'a,ID,BYTES,STREAM' or 'f,ID'";

struct Reader<'a> {
    path: &'a Path,
    line: usize,
    trace: Trace,
    /// The bytes of each allocation; `None` once it is freed.
    live: Vec<Option<u64>>,
    live_bytes: u64,
}

impl Reader<'_> {
    fn expected(&self, expected: impl Into<String>, found: impl Into<String>) -> TraceError {
        TraceError::Line {
            path: self.path.to_owned(),
            line: self.line,
            expected: expected.into(),
            found: found.into(),
        }
    }

    fn event(&mut self, line: &str) -> Result<(), TraceError> {
        let mut fields = line.split(',');
        match (fields.next(), fields.next(), fields.next(), fields.next(), fields.next()) {
            (Some("a"), Some(id), Some(bytes), Some(stream), None) => self.alloc(id, bytes, stream),
            (Some("f"), Some(id), None, None, None) => self.free(id),
            _ => Err(self.expected(EVENT, format!("'{line}'"))),
        }
    }

    fn number<T: std::str::FromStr>(&self, text: &str, what: &str) -> Result<T, TraceError> {
        text.parse().map_err(|_| self.expected(what, format!("'{text}'")))
    }

    fn alloc(&mut self, id: &str, bytes: &str, stream: &str) -> Result<(), TraceError> {
        let next = self.live.len();
        if self.number::<usize>(id, "an allocation's number")? != next {
            return Err(
                self.expected(format!("allocation number {next} (they count up from 0)"), format!("'{id}'"))
            );
        }
        let bytes: u64 = self.number(bytes, "a number of bytes")?;
        let stream: u32 = self.number(stream, "a stream's number")?;
        let index = match self.trace.streams.iter().position(|known| *known == stream) {
            Some(index) => index,
            None => {
                self.trace.streams.push(stream);
                self.trace.private.push(None);
                self.trace.streams.len() - 1
            }
        };
        let sum = self.live_bytes.checked_add(bytes).filter(|sum| *sum < 1 << 60);
        let sum = sum.ok_or_else(|| self.expected("live bytes below 2^60", format!("{bytes} bytes more")))?;
        self.live_bytes = sum;
        self.trace.peak_requested = self.trace.peak_requested.max(sum);
        self.live.push(Some(bytes));
        self.trace.allocations += 1;
        self.trace.events.push(Event::Alloc { bytes, stream: u32::try_from(index).unwrap_or(u32::MAX) });
        Ok(())
    }

    fn free(&mut self, id: &str) -> Result<(), TraceError> {
        let number: u32 = self.number(id, "an allocation's number")?;
        match self.live.get_mut(number as usize).and_then(Option::take) {
            Some(bytes) => self.live_bytes -= bytes,
            None => return Err(self.expected("the number of a live allocation", format!("'{id}'"))),
        }
        self.trace.events.push(Event::Free { id: number });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, String> {
        Trace::parse(Path::new("dir/run.csv.gz"), text.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_trace_is_read() {
        let trace = parse("a,0,1000,0\na,1,24,7\nf,0\na,2,8,0\n").unwrap();
        assert_eq!((trace.name.as_str(), trace.allocations, trace.peak_requested), ("run", 3, 1024));
        assert_eq!(trace.streams, [0, 7]);
        assert_eq!(trace.events[1], Event::Alloc { bytes: 24, stream: 1 });
        assert_eq!(trace.events[2], Event::Free { id: 0 });
        assert_eq!(parse("a,0,1,0").unwrap().events.len(), 1, "the last line may lack its end");
    }

    #[test]
    fn errors_name_file_line_and_expectation() {
        for (text, line, expected) in [
            ("", 1, "'a,ID,BYTES,STREAM' or 'f,ID', found an empty file"),
            ("a,0,1,0\nx,1", 2, "'a,ID,BYTES,STREAM' or 'f,ID', found 'x,1'"),
            ("a,0,1,0\n\n", 2, "found ''"),
            ("a,0,1", 1, "found 'a,0,1'"),
            ("a,0,1,0,9", 1, "found 'a,0,1,0,9'"),
            ("a,1,1,0", 1, "allocation number 0 (they count up from 0), found '1'"),
            ("a,0,-5,0", 1, "a number of bytes, found '-5'"),
            ("a,0,5,z", 1, "a stream's number, found 'z'"),
            ("a,0,5,0\nf,0\nf,0", 3, "the number of a live allocation, found '0'"),
            ("f,9", 1, "the number of a live allocation, found '9'"),
            ("a,0,1152921504606846976,0", 1, "live bytes below 2^60"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("dir/run.csv.gz:{line}: expected ")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
        let long = parse(&"a".repeat(1000)).unwrap_err();
        assert!(long.contains("more than 256 bytes"), "{long}");
        assert!(Trace::parse(Path::new("t"), &b"\xff\xfe\n"[..]).unwrap_err().to_string().contains("not text"));
    }
}
