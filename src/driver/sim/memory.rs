//! Physical memory: which bytes of the device belong to whom, and what is in them.

use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Contents are kept in frames of this size, each made at its first write.
const FRAME_BYTES: u64 = 64 << 10;

/// A piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Extent {
    pub(super) const fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.bytes && other.start < self.start + self.bytes
    }
}

/// The bytes of all pieces together.
pub(super) fn total(pieces: &[Extent]) -> usize {
    pieces.iter().map(|piece| piece.bytes as usize).sum()
}

/// Memory of one owner: a plain allocation or a handle.
#[derive(Debug)]
struct Chunk {
    bytes: u64,
    extents: Vec<Extent>,
    /// Whether anything was written to it, so that there is something to wipe.
    touched: bool,
}

/// The device's memory. A chunk is found again by its number; numbers are never reused.
#[derive(Debug)]
pub(super) struct PhysicalMemory {
    free: BTreeMap<u64, u64>,
    used_bytes: u64,
    chunks: FxHashMap<u64, Chunk>,
    next_chunk: u64,
    /// The bytes; `None` if none are kept.
    frames: Option<FxHashMap<u64, Box<[u8]>>>,
}

impl PhysicalMemory {
    pub(super) fn new(bytes: u64, first_chunk: u64, backing: bool) -> Self {
        let free = if bytes > 0 { BTreeMap::from([(0, bytes)]) } else { BTreeMap::new() };
        Self {
            free,
            used_bytes: 0,
            chunks: FxHashMap::default(),
            next_chunk: first_chunk,
            frames: backing.then(FxHashMap::default),
        }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(super) fn has_backing(&self) -> bool {
        self.frames.is_some()
    }

    pub(super) fn chunk_bytes(&self, chunk: u64) -> Option<u64> {
        self.chunks.get(&chunk).map(|chunk| chunk.bytes)
    }

    /// Takes the lowest free bytes, in as many pieces as that needs; `None` if there are not enough.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let mut extents = Vec::with_capacity(1);
        let mut missing = bytes;
        for (&start, &available) in &self.free {
            if missing == 0 {
                break;
            }
            let taken = available.min(missing);
            extents.push(Extent { start, bytes: taken });
            missing -= taken;
        }
        if missing > 0 {
            return None;
        }
        for extent in &extents {
            if let Some(available) = self.free.remove(&extent.start)
                && available > extent.bytes
            {
                self.free.insert(extent.start + extent.bytes, available - extent.bytes);
            }
        }
        self.used_bytes += bytes;
        let id = self.next_chunk;
        self.next_chunk += 1;
        self.chunks.insert(id, Chunk { bytes, extents, touched: false });
        Some(id)
    }

    /// Gives a chunk back and wipes it: the next owner reads zeros.
    pub(super) fn give_back(&mut self, chunk: u64) {
        let Some(chunk) = self.chunks.remove(&chunk) else { return };
        self.used_bytes -= chunk.bytes;
        for extent in chunk.extents {
            if let Some(frames) = self.frames.as_mut().filter(|_| chunk.touched) {
                wipe(frames, extent);
            }
            insert_free(&mut self.free, extent.start, extent.bytes);
        }
    }

    /// Adds the physical pieces of `bytes` at `offset` in a chunk to `pieces`.
    pub(super) fn locate(&self, chunk: u64, offset: u64, bytes: u64, pieces: &mut Vec<Extent>) {
        let Some(chunk) = self.chunks.get(&chunk) else { return };
        let (mut skip, mut left) = (offset, bytes);
        for extent in &chunk.extents {
            if skip >= extent.bytes {
                skip -= extent.bytes;
                continue;
            }
            let piece = left.min(extent.bytes - skip);
            if piece == 0 {
                return;
            }
            pieces.push(Extent { start: extent.start + skip, bytes: piece });
            skip = 0;
            left -= piece;
        }
    }

    pub(super) fn touch(&mut self, chunk: u64) {
        if let Some(chunk) = self.chunks.get_mut(&chunk) {
            chunk.touched = true;
        }
    }

    pub(super) fn read(&self, pieces: &[Extent], out: &mut [u8]) {
        let Some(frames) = &self.frames else { return };
        each_span(pieces, |frame, within, at| match frames.get(&frame) {
            Some(bytes) => out[at].copy_from_slice(&bytes[within]),
            None => out[at].fill(0),
        });
    }

    pub(super) fn write(&mut self, pieces: &[Extent], data: &[u8]) {
        let Some(frames) = &mut self.frames else { return };
        each_span(pieces, |frame, within, at| frame_mut(frames, frame)[within].copy_from_slice(&data[at]));
    }

    pub(super) fn fill(&mut self, pieces: &[Extent], byte: u8) {
        let Some(frames) = &mut self.frames else { return };
        each_span(pieces, |frame, within, _| frame_mut(frames, frame)[within].fill(byte));
    }
}

fn frame_mut(frames: &mut FxHashMap<u64, Box<[u8]>>, frame: u64) -> &mut [u8] {
    frames.entry(frame).or_insert_with(|| vec![0; FRAME_BYTES as usize].into_boxed_slice())
}

/// Cuts pieces at the frames' borders: which frame, which of its bytes, and which bytes of the whole.
fn each_span(pieces: &[Extent], mut visit: impl FnMut(u64, std::ops::Range<usize>, std::ops::Range<usize>)) {
    let mut at = 0;
    for piece in pieces {
        let end = piece.start + piece.bytes;
        let mut start = piece.start;
        while start < end {
            let within = (start % FRAME_BYTES) as usize;
            let span = (FRAME_BYTES - start % FRAME_BYTES).min(end - start) as usize;
            visit(start / FRAME_BYTES, within..within + span, at..at + span);
            at += span;
            start += span as u64;
        }
    }
}

/// Forgets contents. A frame at the edge that the extent shares with a neighbour is zeroed in part.
fn wipe(frames: &mut FxHashMap<u64, Box<[u8]>>, extent: Extent) {
    each_span(&[extent], |frame, within, _| {
        if within.len() as u64 == FRAME_BYTES {
            frames.remove(&frame);
        } else if let Some(bytes) = frames.get_mut(&frame) {
            bytes[within].fill(0);
        }
    });
}

/// Adds a free piece to a map of start to length and joins it with its neighbours.
pub(super) fn insert_free(free: &mut BTreeMap<u64, u64>, start: u64, bytes: u64) {
    let (mut start, mut bytes) = (start, bytes);
    if let Some((&before, &length)) = free.range(..start).next_back()
        && before + length == start
    {
        free.remove(&before);
        start = before;
        bytes += length;
    }
    if let Some(length) = free.remove(&(start + bytes)) {
        bytes += length;
    }
    free.insert(start, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_from_several_holes_and_joins_them_again() {
        let mut memory = PhysicalMemory::new(100, 0, true);
        let chunks: Vec<_> = (0..10).filter_map(|_| memory.take(10)).collect();
        memory.give_back(chunks[1]);
        memory.give_back(chunks[3]);
        assert_eq!(memory.take(21), None);
        let scattered = memory.take(20).expect("two holes of ten");
        let mut pieces = Vec::new();
        memory.locate(scattered, 5, 10, &mut pieces);
        assert_eq!(pieces, [Extent { start: 15, bytes: 5 }, Extent { start: 30, bytes: 5 }]);
        chunks.iter().chain([&scattered]).for_each(|&chunk| memory.give_back(chunk));
        assert_eq!((memory.free, memory.used_bytes), (BTreeMap::from([(0, 100)]), 0));
    }

    #[test]
    fn a_new_owner_reads_zeros() {
        let mut memory = PhysicalMemory::new(4 * FRAME_BYTES, 0, true);
        let chunk = memory.take(3 * FRAME_BYTES / 2).expect("there is room");
        let mut pieces = Vec::new();
        memory.locate(chunk, 0, 3 * FRAME_BYTES / 2, &mut pieces);
        memory.touch(chunk);
        memory.fill(&pieces, 7);
        memory.give_back(chunk);
        let mut bytes = vec![1; 2 * FRAME_BYTES as usize];
        memory.read(&[Extent { start: 0, bytes: 2 * FRAME_BYTES }], &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
}
