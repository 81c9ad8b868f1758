//! Tables as typed arrays: a JSON head that says where each column is, then the columns, all deflated.

use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Where a column is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Place {
    /// JavaScript's name of its elements.
    kind: &'static str,
    /// Bytes from the end of the head, a multiple of 8.
    offset: usize,
    count: usize,
}

/// Columns by name.
pub(super) type Table = BTreeMap<&'static str, Place>;

/// All columns, one after another.
#[derive(Debug, Default)]
pub(super) struct Columns {
    bytes: Vec<u8>,
}

impl Columns {
    pub(super) fn u32(&mut self, values: impl IntoIterator<Item = u32>) -> Place {
        self.column("u32", values.into_iter().map(u32::to_le_bytes))
    }

    pub(super) fn u64(&mut self, values: impl IntoIterator<Item = u64>) -> Place {
        self.column("u64", values.into_iter().map(u64::to_le_bytes))
    }

    fn column<const N: usize>(
        &mut self,
        kind: &'static str,
        values: impl Iterator<Item = [u8; N]>,
    ) -> Place {
        let offset = self.bytes.len();
        let mut count = 0;
        for value in values {
            self.bytes.extend(value);
            count += 1;
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        Place { kind, offset, count }
    }

    /// The whole: the length of the head (8 bytes, little-endian), the head padded to a multiple of 8, the columns.
    pub(super) fn packed(&self, head: &impl Serialize) -> io::Result<Vec<u8>> {
        let mut head = serde_json::to_vec(head)?;
        head.resize(head.len().next_multiple_of(8), b' ');
        let mut to = ZlibEncoder::new(Vec::new(), Compression::new(6));
        to.write_all(&(head.len() as u64).to_le_bytes())?;
        to.write_all(&head)?;
        to.write_all(&self.bytes)?;
        to.finish()
    }
}
