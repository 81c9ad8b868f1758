//! Which stream a kernel is about to be launched on.
//!
//! cudarc's `LaunchArgs` has the stream in a field that nobody else can read, and shows it nowhere but in its `Debug`
//! text. So that text is read, no further than needed. Should a later cudarc print something else, nothing is found, and
//! the memory counts as used by work that only the device can tell the end of: slower, never wrong.

use cudarc::driver::LaunchArgs;
use std::fmt::{self, Write as _};

use crate::driver::StreamHandle;

/// Where a kernel will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaunchStream {
    /// On a stream of the buffer's context; and whether that context orders streams by events.
    Here { stream: StreamHandle, is_tracking: bool },
    /// In another context.
    Elsewhere,
    /// The text says nothing that is known.
    Unclear,
}

/// Room for the text up to the context's last field that matters.
const ROOM: usize = 512;

/// The beginning of a text; writing on after `until` has been seen fails, which ends the formatting.
struct Beginning {
    text: [u8; ROOM],
    len: usize,
    until: &'static str,
}

impl fmt::Write for Beginning {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        let piece = piece.as_bytes();
        let room = &mut self.text[self.len..];
        let taken = piece.len().min(room.len());
        room[..taken].copy_from_slice(&piece[..taken]);
        let before = self.len.saturating_sub(self.until.len());
        self.len += taken;
        let until = self.until.as_bytes();
        let is_done = self.text[before..self.len].windows(until.len()).any(|window| window == until);
        if is_done || taken < piece.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// Where `args` will be launched; `is_here` says whether the context at an address is the buffer's.
pub(super) fn stream_of(args: &LaunchArgs<'_>, is_here: impl Fn(u64) -> bool) -> LaunchStream {
    let mut beginning = Beginning { text: [0; ROOM], len: 0, until: ", error_state" };
    // It ends with an error by design; what was written until then counts.
    let _ = write!(beginning, "{args:?}");
    let text = std::str::from_utf8(&beginning.text[..beginning.len]).unwrap_or_default();
    parse(text, is_here).unwrap_or(LaunchStream::Unclear)
}

fn parse(text: &str, is_here: impl Fn(u64) -> bool) -> Option<LaunchStream> {
    let rest = text.strip_prefix("LaunchArgs { stream: CudaStream { ")?;
    let stream = StreamHandle(address(field(rest, "cu_stream: ")?)?);
    if !is_here(address(field(rest, " cu_ctx: ")?)?) {
        return Some(LaunchStream::Elsewhere);
    }
    let streams: u64 = field(rest, " num_streams: ")?.parse().ok()?;
    let events: bool = field(rest, " event_tracking: ")?.parse().ok()?;
    Some(LaunchStream::Here { stream, is_tracking: events && streams > 0 })
}

/// What follows `name`, up to the next comma.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(name)?;
    rest.split_once(',').map(|(value, _)| value)
}

fn address(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "LaunchArgs { stream: CudaStream { cu_stream: 0x5c0, ctx: CudaContext { cu_device: 0, \
                        cu_ctx: 0x7f10, ordinal: 0, has_async_alloc: true, is_primary: true, num_streams: 2, \
                        event_tracking: true, error_state";

    #[test]
    fn finds_stream_and_tracking() {
        let seen = parse(TEXT, |context| context == 0x7f10);
        assert_eq!(seen, Some(LaunchStream::Here { stream: StreamHandle(0x5c0), is_tracking: true }));
        let off = TEXT.replace("event_tracking: true", "event_tracking: false");
        let seen = parse(&off, |_| true);
        assert_eq!(seen, Some(LaunchStream::Here { stream: StreamHandle(0x5c0), is_tracking: false }));
        assert_eq!(parse(TEXT, |_| false), Some(LaunchStream::Elsewhere));
    }

    #[test]
    fn another_text_is_unclear() {
        for cut in [TEXT.len() - 20, 60, 40, 10, 0] {
            assert_eq!(parse(&TEXT[..cut], |_| true), None, "{}", &TEXT[..cut]);
        }
        assert_eq!(parse(&TEXT.replace("cu_stream", "stream"), |_| true), None);
        assert_eq!(parse(&TEXT.replace("0x5c0", "1472"), |_| true), None);
    }

    #[test]
    fn no_more_is_written_than_needed() {
        let mut beginning = Beginning { text: [0; ROOM], len: 0, until: ", x" };
        assert!(["a", ",", " ", "b, "].iter().all(|piece| beginning.write_str(piece).is_ok()));
        assert!(beginning.write_str("x").is_err());
        assert!(Beginning { text: [0; ROOM], len: ROOM - 1, until: "u" }.write_str("ab").is_err());
    }
}
