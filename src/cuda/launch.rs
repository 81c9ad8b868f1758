//! Which stream a kernel is about to be launched on.
//!
//! cudarc's `LaunchArgs` has the stream in a field that nobody else can read, and shows it nowhere but in its `Debug`
//! text. So that text is read, no further than needed. Should a later cudarc print something else, nothing is found, and
//! the memory counts as used by work that only the device can tell the end of: slower, never wrong.

use crate::driver::StreamHandle;
use cudarc::driver::LaunchArgs;
use std::fmt::{self, Write as _};

/// Where a kernel will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaunchStream {
    /// On a stream that is known, or a default stream, of this context.
    Known(StreamHandle),
    /// On another stream of this context; and whether that orders streams by events.
    Unknown { stream: StreamHandle, is_tracking: bool },
    /// In another context.
    Elsewhere,
}

/// Room for the text up to the context's last field that matters.
const ROOM: usize = 512;

const BEGIN: &[u8] = b"LaunchArgs { stream: CudaStream { cu_stream: 0x";

/// Reads the text as it is written, and makes writing fail as soon as enough is known.
struct Reader<F> {
    text: [u8; ROOM],
    len: usize,
    /// What has to be read next ends with this.
    until: &'static [u8],
    /// Whether the allocator knows a stream.
    is_known: F,
    /// The context of the memory.
    here: u64,
    stream: Option<StreamHandle>,
    answer: Option<LaunchStream>,
}

impl<F: Fn(StreamHandle) -> bool> Reader<F> {
    fn new(here: u64, is_known: F) -> Self {
        Self { text: [0; ROOM], len: 0, until: b", ctx", is_known, here, stream: None, answer: None }
    }

    /// Looks at a text that ends with what was waited for. `None` if it says nothing that is known; else whether more is
    /// needed.
    fn look(&mut self) -> Option<bool> {
        let text = self.text[..self.len].strip_suffix(self.until)?;
        let Some(stream) = self.stream else {
            let stream = StreamHandle(address(text.strip_prefix(BEGIN)?)?);
            self.stream = Some(stream);
            self.until = b", ordinal";
            if !is_default(stream) && (self.is_known)(stream) {
                self.answer = Some(LaunchStream::Known(stream)); // no other context has such a handle
            }
            return Some(self.answer.is_none());
        };
        if self.until == b", ordinal" {
            let digits = text.iter().rposition(|&byte| byte == b'x')? + 1;
            text[..digits].strip_suffix(b"cu_ctx: 0x")?;
            self.until = b", error_state";
            if address(&text[digits..])? != self.here {
                self.answer = Some(LaunchStream::Elsewhere);
            } else if is_default(stream) {
                self.answer = Some(LaunchStream::Known(stream));
            }
            return Some(self.answer.is_none());
        }
        let (text, events) = match text.strip_suffix(b", event_tracking: true") {
            Some(text) => (text, true),
            None => (text.strip_suffix(b", event_tracking: false")?, false),
        };
        let digits = text.iter().rposition(|&byte| byte == b' ')? + 1;
        text[..digits].strip_suffix(b"num_streams: ")?;
        let has_streams = text[digits..] != *b"0";
        self.answer = Some(LaunchStream::Unknown { stream, is_tracking: events && has_streams });
        Some(false)
    }
}

impl<F: Fn(StreamHandle) -> bool> fmt::Write for Reader<F> {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        let piece = piece.as_bytes();
        let room = self.text.get_mut(self.len..self.len + piece.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(piece);
        self.len += piece.len();
        // A name ends a piece.
        if !self.text[..self.len].ends_with(self.until) || self.look() == Some(true) {
            Ok(())
        } else {
            Err(fmt::Error)
        }
    }
}

fn is_default(stream: StreamHandle) -> bool {
    stream.0 <= StreamHandle::PER_THREAD_DEFAULT.0
}

/// The number in hexadecimal digits.
fn address(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Where `args` will be launched, seen from the context at the address `here`; `None` if the text says nothing that is
/// known.
pub(super) fn stream_of(
    args: &LaunchArgs<'_>,
    here: u64,
    is_known: impl Fn(StreamHandle) -> bool,
) -> Option<LaunchStream> {
    let mut reader = Reader::new(here, is_known);
    // It ends with an error by design.
    let _ = write!(reader, "{args:?}");
    reader.answer
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECES: [&str; 12] = [
        "LaunchArgs { stream: CudaStream { cu_stream: 0x5c0, ",
        "ctx",
        ": CudaContext { cu_device: 0, cu_ctx: 0x7f10, ",
        "ordinal",
        ": 0, has_async_alloc: true, is_primary: true, num_streams: ",
        "2",
        ", event_tracking: ",
        "true",
        ", ",
        "error_state",
        ": 0 }, owned: true }, ",
        "func: ...",
    ];

    /// The answer, and how many pieces were written for it.
    fn read(pieces: &[&str], is_known: bool) -> (Option<LaunchStream>, usize) {
        let mut reader = Reader::new(0x7f10, |_| is_known);
        let written = pieces.iter().take_while(|piece| reader.write_str(piece).is_ok()).count();
        (reader.answer, written)
    }

    fn changed(from: &str, to: &str) -> Vec<String> {
        PIECES.iter().map(|piece| piece.replace(from, to)).collect()
    }

    fn read_changed(from: &str, to: &str) -> Option<LaunchStream> {
        let pieces = changed(from, to);
        read(&pieces.iter().map(String::as_str).collect::<Vec<_>>(), false).0
    }

    #[test]
    fn reads_no_more_than_needed() {
        let stream = StreamHandle(0x5c0);
        assert_eq!(read(&PIECES, true), (Some(LaunchStream::Known(stream)), 1));
        assert_eq!(read(&PIECES, false), (Some(LaunchStream::Unknown { stream, is_tracking: true }), 9));
    }

    #[test]
    fn streams_contexts_and_tracking_differ() {
        let stream = StreamHandle(0x5c0);
        let untracked = Some(LaunchStream::Unknown { stream, is_tracking: false });
        assert_eq!(read_changed("true", "false"), untracked);
        assert_eq!(read_changed("2", "0"), untracked);
        assert_eq!(read_changed("0x7f10", "0x7f20"), Some(LaunchStream::Elsewhere));
        assert_eq!(read_changed("0x5c0", "0x2"), Some(LaunchStream::Known(StreamHandle::PER_THREAD_DEFAULT)));
        assert_eq!(read_changed("0x5c0", "0x0"), Some(LaunchStream::Known(StreamHandle::DEFAULT)));
    }

    #[test]
    fn another_text_says_nothing() {
        for (from, to) in [
            ("LaunchArgs", "Launch"),
            ("cu_stream", "stream"),
            ("0x5c0", "1472"),
            ("cu_ctx", "context"),
            ("ordinal", "number"),
            ("num_streams", "streams"),
            ("event_tracking", "tracking"),
            ("error_state", "errors"),
        ] {
            assert_eq!(read_changed(from, to), None, "{from}");
        }
        let long = "x".repeat(ROOM + 1);
        assert_eq!(read(&[&long], true), (None, 0));
    }
}
