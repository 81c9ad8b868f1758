//! Writing pickles: protocol 2, with only such opcodes as PyTorch's web page reads, and no code in them.

use super::write::Sink;
use rustc_hash::FxHashMap;
use std::io::{self, Write};

/// Items that are appended at a time: the page hands them to a function as so many arguments.
const BATCH: usize = 1000;

/// Texts of at most this length are written once and recalled after.
const SHARED_MAX: usize = 256;

/// Writes a pickle.
pub(super) struct Pickle<W> {
    to: W,
    /// Numbers of what can be recalled, in the order of being remembered.
    memo: u32,
    strings: FxHashMap<Box<str>, u32>,
    stacks: FxHashMap<usize, u32>,
    /// Items of the open batch of each open list; `None` before the first.
    lists: Vec<Option<usize>>,
}

impl<W: Write> Pickle<W> {
    pub(super) fn begin(mut to: W) -> io::Result<Self> {
        to.write_all(b"\x80\x02")?;
        Ok(Self { to, memo: 0, strings: FxHashMap::default(), stacks: FxHashMap::default(), lists: Vec::new() })
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.to.write_all(b".")
    }

    /// `BINPUT` or `LONG_BINPUT`.
    fn put(&mut self) -> io::Result<u32> {
        let number = self.memo;
        self.memo = number.checked_add(1).ok_or_else(|| io::Error::other("more than 2^32 distinct values"))?;
        self.numbered(b'q', b'r', number)?;
        Ok(number)
    }

    /// `BINGET` or `LONG_BINGET`.
    fn get(&mut self, number: u32) -> io::Result<()> {
        self.numbered(b'h', b'j', number)
    }

    fn numbered(&mut self, short: u8, long: u8, number: u32) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(number) => self.to.write_all(&[short, number]),
            Err(_) => {
                self.to.write_all(&[long])?;
                self.to.write_all(&number.to_le_bytes())
            }
        }
    }
}

impl<W: Write> Sink for Pickle<W> {
    fn begin_dict(&mut self) -> io::Result<()> {
        self.to.write_all(b"}(")
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.str(key)
    }

    fn end_dict(&mut self) -> io::Result<()> {
        self.to.write_all(b"u")
    }

    fn begin_list(&mut self) -> io::Result<()> {
        self.lists.push(None);
        self.to.write_all(b"]")
    }

    fn item(&mut self) -> io::Result<()> {
        let Some(open) = self.lists.last_mut() else { return Err(io::Error::other("an item without a list")) };
        match open {
            Some(items) if *items < BATCH => *items += 1,
            _ => {
                let opcodes: &[u8] = if open.is_some() { b"e(" } else { b"(" };
                *open = Some(1);
                self.to.write_all(opcodes)?;
            }
        }
        Ok(())
    }

    fn end_list(&mut self) -> io::Result<()> {
        if self.lists.pop().flatten().is_some() { self.to.write_all(b"e") } else { Ok(()) }
    }

    fn none(&mut self) -> io::Result<()> {
        self.to.write_all(b"N")
    }

    fn bool(&mut self, value: bool) -> io::Result<()> {
        self.to.write_all(if value { b"\x88" } else { b"\x89" })
    }

    fn int(&mut self, value: i128) -> io::Result<()> {
        if let Ok(value) = u8::try_from(value) {
            return self.to.write_all(&[b'K', value]);
        }
        if let Ok(value) = u16::try_from(value) {
            self.to.write_all(b"M")?;
            return self.to.write_all(&value.to_le_bytes());
        }
        if let Ok(value) = i32::try_from(value) {
            self.to.write_all(b"J")?;
            return self.to.write_all(&value.to_le_bytes());
        }
        // The fewest bytes whose sign bit is right: the page takes up to eight for a number.
        let bytes = value.to_le_bytes();
        let bits = 128 - if value < 0 { (!value).leading_zeros() } else { value.leading_zeros() };
        let length = bits as usize / 8 + 1;
        self.to.write_all(&[0x8a, length as u8])?;
        self.to.write_all(&bytes[..length])
    }

    fn float(&mut self, value: f64) -> io::Result<()> {
        self.to.write_all(b"G")?;
        self.to.write_all(&value.to_be_bytes())
    }

    fn str(&mut self, value: &str) -> io::Result<()> {
        if let Some(&number) = self.strings.get(value) {
            return self.get(number);
        }
        let length = u32::try_from(value.len()).map_err(|_| io::Error::other("a text of more than 4 GiB"))?;
        self.to.write_all(b"X")?;
        self.to.write_all(&length.to_le_bytes())?;
        self.to.write_all(value.as_bytes())?;
        if value.len() <= SHARED_MAX {
            let number = self.put()?;
            self.strings.insert(value.into(), number);
        }
        Ok(())
    }

    fn pair(&mut self, (a, b): (u64, u64)) -> io::Result<()> {
        self.int(a.into())?;
        self.int(b.into())?;
        self.to.write_all(b"\x86")
    }

    fn recall(&mut self, address: usize) -> io::Result<bool> {
        match self.stacks.get(&address) {
            Some(&number) if address != 0 => self.get(number).map(|()| true),
            _ => Ok(false),
        }
    }

    fn remember(&mut self, address: usize) -> io::Result<()> {
        if address != 0 {
            let number = self.put()?;
            self.stacks.insert(address, number);
        }
        Ok(())
    }
}
