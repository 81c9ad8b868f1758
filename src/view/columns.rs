//! Tables as typed arrays: a JSON head that says where each column is, then the columns, all deflated.

use flate2::Compression;
use flate2::write::ZlibEncoder;
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::io::{self, Write};

/// Where a column is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Place {
    #[serde(flatten)]
    elements: Array,
    /// If there are few different values: an element is one of these, by its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<Array>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Array {
    /// u8, u16, u32 or u64.
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
    /// A column of distinct numbers, or nearly so.
    pub(super) fn u32(&mut self, values: impl IntoIterator<Item = u32>) -> Place {
        Place { elements: self.array("u32", values.into_iter().map(u32::to_le_bytes)), values: None }
    }

    /// A column of any numbers.
    pub(super) fn u64(&mut self, numbers: impl IntoIterator<Item = u64>) -> Place {
        let numbers: Vec<u64> = numbers.into_iter().collect();
        let mut places: FxHashMap<u64, u16> = FxHashMap::default();
        let mut distinct = Vec::new();
        for &number in &numbers {
            if let Entry::Vacant(vacant) = places.entry(number) {
                let Ok(next) = u16::try_from(distinct.len()) else {
                    let elements = self.array("u64", numbers.iter().map(|number| number.to_le_bytes()));
                    return Place { elements, values: None };
                };
                vacant.insert(next);
                distinct.push(number);
            }
        }
        let elements = if distinct.len() <= 256 {
            // They are below 256.
            self.array("u8", numbers.iter().map(|number| [places[number].to_le_bytes()[0]]))
        } else {
            self.array("u16", numbers.iter().map(|number| places[number].to_le_bytes()))
        };
        Place { elements, values: Some(self.array("u64", distinct.iter().map(|number| number.to_le_bytes()))) }
    }

    fn array<const N: usize>(&mut self, kind: &'static str, values: impl Iterator<Item = [u8; N]>) -> Array {
        let offset = self.bytes.len();
        let mut count = 0;
        for value in values {
            self.bytes.extend(value);
            count += 1;
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        Array { kind, offset, count }
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
