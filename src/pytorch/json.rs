//! Writing JSON.

use super::write::Sink;
use std::io::{self, Write};

/// Writes JSON without white space.
pub(super) struct Json<W> {
    to: W,
    /// Whether the innermost list or dictionary has nothing in it yet.
    first: bool,
}

impl<W: Write> Json<W> {
    pub(super) fn new(to: W) -> Self {
        Self { to, first: true }
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.to.write_all(b"\n")
    }

    fn comma(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.first, false) { Ok(()) } else { self.to.write_all(b",") }
    }

    fn close(&mut self, bracket: &[u8]) -> io::Result<()> {
        self.first = false;
        self.to.write_all(bracket)
    }
}

/// Writes a text with its quotes.
pub(crate) fn quoted(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(b"\"")?;
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escaped = match byte {
            b'"' => "\\\"".to_owned(),
            b'\\' => "\\\\".to_owned(),
            b'\n' => "\\n".to_owned(),
            0..=0x1f => format!("\\u{byte:04x}"),
            _ => continue,
        };
        to.write_all(&text.as_bytes()[plain..at])?;
        to.write_all(escaped.as_bytes())?;
        plain = at + 1;
    }
    to.write_all(&text.as_bytes()[plain..])?;
    to.write_all(b"\"")
}

impl<W: Write> Sink for Json<W> {
    fn begin_dict(&mut self) -> io::Result<()> {
        self.first = true;
        self.to.write_all(b"{")
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.comma()?;
        quoted(&mut self.to, key)?;
        self.to.write_all(b":")
    }

    fn end_dict(&mut self) -> io::Result<()> {
        self.close(b"}")
    }

    fn begin_list(&mut self) -> io::Result<()> {
        self.first = true;
        self.to.write_all(b"[")
    }

    fn item(&mut self) -> io::Result<()> {
        self.comma()
    }

    fn end_list(&mut self) -> io::Result<()> {
        self.close(b"]")
    }

    fn none(&mut self) -> io::Result<()> {
        self.to.write_all(b"null")
    }

    fn bool(&mut self, value: bool) -> io::Result<()> {
        self.to.write_all(if value { b"true" } else { b"false" })
    }

    fn int(&mut self, value: i128) -> io::Result<()> {
        write!(self.to, "{value}")
    }

    fn float(&mut self, value: f64) -> io::Result<()> {
        // JSON has no infinities.
        if value.is_finite() { write!(self.to, "{value:?}") } else { self.none() }
    }

    fn str(&mut self, value: &str) -> io::Result<()> {
        quoted(&mut self.to, value)
    }

    fn pair(&mut self, (a, b): (u64, u64)) -> io::Result<()> {
        write!(self.to, "[{a},{b}]")
    }

    fn recall(&mut self, _: usize) -> io::Result<bool> {
        Ok(false)
    }

    fn remember(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}
