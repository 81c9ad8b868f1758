//! Which stream a kernel is about to be launched on.
//!
//! cudarc's `LaunchArgs` has the stream in a field that nobody else can read, and shows it nowhere but in its `Debug`
//! text. So that text is read, no further than needed. Should a later cudarc print something else, nothing is found, and
//! the memory counts as used by work that only the device can tell the end of: slower, never wrong.

use crate::driver::StreamHandle;
use cudarc::driver::LaunchArgs;
use std::fmt::{self, Write as _};

/// The context that a kernel will run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchContext {
    pub(super) address: u64,
    /// Whether it orders streams by events.
    pub(super) is_tracking: bool,
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

impl Beginning {
    /// The text of `args` up to `until`.
    fn of(args: &LaunchArgs<'_>, until: &'static str) -> Self {
        let mut beginning = Self { text: [0; ROOM], len: 0, until };
        // It ends with an error by design; what was written until then counts.
        let _ = write!(beginning, "{args:?}");
        beginning
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.text[..self.len]).unwrap_or_default()
    }
}

/// The stream that `args` will be launched on; `None` if the text says nothing that is known.
pub(super) fn stream_of(args: &LaunchArgs<'_>) -> Option<StreamHandle> {
    stream_in(Beginning::of(args, ", ctx").as_str())
}

/// The context that `args` will be launched in. Takes a longer text than [`stream_of`].
pub(super) fn context_of(args: &LaunchArgs<'_>) -> Option<LaunchContext> {
    context_in(Beginning::of(args, ", error_state").as_str())
}

fn stream_in(text: &str) -> Option<StreamHandle> {
    let rest = text.strip_prefix("LaunchArgs { stream: CudaStream { ")?;
    Some(StreamHandle(address(field(rest, "cu_stream: ")?)?))
}

fn context_in(text: &str) -> Option<LaunchContext> {
    let address = address(field(text, " cu_ctx: ")?)?;
    let streams: u64 = field(text, " num_streams: ")?.parse().ok()?;
    let events: bool = field(text, " event_tracking: ")?.parse().ok()?;
    Some(LaunchContext { address, is_tracking: events && streams > 0 })
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
        assert_eq!(stream_in(TEXT), Some(StreamHandle(0x5c0)));
        let begin = &TEXT[..TEXT.find(", ctx").expect("there") + 5];
        assert_eq!(stream_in(begin), Some(StreamHandle(0x5c0)));
        assert_eq!(context_in(TEXT), Some(LaunchContext { address: 0x7f10, is_tracking: true }));
        let off = TEXT.replace("event_tracking: true", "event_tracking: false");
        assert_eq!(context_in(&off), Some(LaunchContext { address: 0x7f10, is_tracking: false }));
        let alone = TEXT.replace("num_streams: 2", "num_streams: 0");
        assert_eq!(context_in(&alone), Some(LaunchContext { address: 0x7f10, is_tracking: false }));
    }

    #[test]
    fn another_text_says_nothing() {
        for cut in [45, 40, 10, 0] {
            assert_eq!(stream_in(&TEXT[..cut]), None, "{}", &TEXT[..cut]);
        }
        for cut in [TEXT.len() - 20, 100, 60, 0] {
            assert_eq!(context_in(&TEXT[..cut]), None, "{}", &TEXT[..cut]);
        }
        assert_eq!(stream_in(&TEXT.replace("cu_stream", "stream")), None);
        assert_eq!(stream_in(&TEXT.replace("0x5c0", "1472")), None);
    }

    #[test]
    fn no_more_is_written_than_needed() {
        let mut beginning = Beginning { text: [0; ROOM], len: 0, until: ", x" };
        assert!(["a", ",", " ", "b, "].iter().all(|piece| beginning.write_str(piece).is_ok()));
        assert!(beginning.write_str("x").is_err());
        assert!(Beginning { text: [0; ROOM], len: ROOM - 1, until: "u" }.write_str("ab").is_err());
    }
}
