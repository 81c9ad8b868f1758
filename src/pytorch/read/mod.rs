//! Reading snapshot files, from wherever they come: a hostile file gives an error. It can run no code, since nothing in
//! it is ever called, and takes no more memory than a fixed multiple of its own size, up to a fixed limit.

mod arena;
mod decode;
mod json;
mod pickle;

use super::{FILE_MAX_BYTES, Snapshot};
use flate2::bufread::MultiGzDecoder;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// A file that is no snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is too large, or expands to too much.
    #[error(
        "{}: more than {limit} {what}, the most that is read; record fewer entries (max_entries in PyTorch)",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Of what there is too much.
        what: &'static str,
        /// The most that is read.
        limit: u64,
    },
    /// The bytes are no pickle of plain data.
    #[error("{}: byte {offset} of the pickle: {problem}", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
        /// Where in the decompressed file, from 0.
        offset: usize,
        /// What is wrong there.
        problem: String,
    },
    /// The text is no JSON.
    #[error("{}: not JSON: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, and in which line and column.
        problem: String,
    },
    /// The data is not a snapshot's.
    #[error("{}: {place}: expected {expected}, found {found}", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// The key, as `segments[3].blocks[0].size`.
        place: String,
        /// What should have been there.
        expected: String,
        /// What was there.
        found: String,
    },
}

/// What went wrong, before the file's name is put to it.
#[derive(Debug)]
enum Problem {
    TooLarge { what: &'static str, limit: u64 },
    Pickle { offset: usize, problem: String },
    Json { problem: String },
    Schema { place: String, expected: String, found: String },
}

impl Problem {
    fn at(self, path: &Path) -> SnapshotError {
        let path = path.to_owned();
        match self {
            Self::TooLarge { what, limit } => SnapshotError::TooLarge { path, what, limit },
            Self::Pickle { offset, problem } => SnapshotError::Pickle { path, offset, problem },
            Self::Json { problem } => SnapshotError::Json { path, problem },
            Self::Schema { place, expected, found } => SnapshotError::Schema { path, place, expected, found },
        }
    }
}

impl Snapshot {
    /// Reads a snapshot file: a pickle of `torch.cuda.memory._dump_snapshot` or of this crate, or the same as JSON,
    /// gzipped or not.
    ///
    /// # Errors
    /// [`SnapshotError`] naming the file and the place in it.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, SnapshotError> {
        let path = path.as_ref();
        let io_error = |source| SnapshotError::Io { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(io_error)?;
        file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io_error)?;
        Self::parse(path, &bytes)
    }

    /// Reads a snapshot from a file's bytes; `path` is what errors name.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, SnapshotError> {
        let too_large = || Problem::TooLarge { what: "bytes", limit: FILE_MAX_BYTES }.at(path);
        if bytes.len() as u64 > FILE_MAX_BYTES {
            return Err(too_large());
        }
        if !bytes.starts_with(&[0x1f, 0x8b]) {
            return parse(bytes).map_err(|problem| problem.at(path));
        }
        let mut plain = Vec::new();
        MultiGzDecoder::new(bytes)
            .take(FILE_MAX_BYTES + 1)
            .read_to_end(&mut plain)
            .map_err(|source| SnapshotError::Io { path: path.to_owned(), source })?;
        if plain.len() as u64 > FILE_MAX_BYTES {
            return Err(too_large());
        }
        parse(&plain).map_err(|problem| problem.at(path))
    }

    /// Whether a file's first bytes (decompressed) are those of a snapshot rather than of a trace.
    #[must_use]
    pub fn is_likely(bytes: &[u8]) -> bool {
        bytes.starts_with(&[0x80]) || is_json(bytes)
    }
}

fn is_json(bytes: &[u8]) -> bool {
    matches!(bytes.iter().find(|byte| !byte.is_ascii_whitespace()), Some(b'{' | b'['))
}

fn parse(bytes: &[u8]) -> Result<Snapshot, Problem> {
    let (arena, root) = if is_json(bytes) { json::load(bytes)? } else { pickle::load(bytes)? };
    decode::snapshot(&arena, root)
}
