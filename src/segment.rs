//! Segments: what a pool holds of the driver's memory.

use crate::block::{BlockId, NONE};
use crate::size::SizeClass;

/// One reservation from the driver, tiled by blocks.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    /// Device address.
    pub(crate) base: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    pub(crate) class: SizeClass,
    /// The block at `base`. Splits keep the front's id and merges the front's, so it is the same all along.
    pub(crate) first: BlockId,
}

impl Segment {
    pub(crate) fn new(base: u64, bytes: u64, class: SizeClass) -> Self {
        Self { base, bytes, class, first: NONE }
    }
}

/// A pool's segments, by number.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<Segment>>,
    vacant: Vec<u32>,
}

impl SegmentTable {
    pub(crate) fn insert(&mut self, segment: Segment) -> u32 {
        if let Some(number) = self.vacant.pop() {
            self.slots[number as usize] = Some(segment);
            return number;
        }
        self.slots.push(Some(segment));
        u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 segments")
    }

    pub(crate) fn remove(&mut self, number: u32) -> Segment {
        self.vacant.push(number);
        self.slots[number as usize].take().expect("a segment in use")
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Segment> {
        self.slots.get(number as usize).and_then(Option::as_ref)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(number, slot)| slot.as_ref().map(|segment| (number as u32, segment)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }
}

impl std::ops::Index<u32> for SegmentTable {
    type Output = Segment;

    #[inline]
    fn index(&self, number: u32) -> &Segment {
        self.slots[number as usize].as_ref().expect("a segment in use")
    }
}

impl std::ops::IndexMut<u32> for SegmentTable {
    fn index_mut(&mut self, number: u32) -> &mut Segment {
        self.slots[number as usize].as_mut().expect("a segment in use")
    }
}
