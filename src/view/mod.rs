//! A snapshot as one HTML page that needs nothing else: style, program and data are in it, and it loads nothing.
//!
//! What comes from the snapshot is in the page only as compressed columns in base64, and the program shows texts as
//! texts; so whatever a file has for names can neither end an element nor run.

mod columns;
mod lifetimes;
mod mapped;
mod run;

use crate::pytorch::Snapshot;
use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use std::io::{self, Write};

const FRAME: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
/// The program, in the order of its parts.
const SCRIPT: [&str; 6] = [
    include_str!("page/data.js"),
    include_str!("page/colors.js"),
    include_str!("page/timeline.js"),
    include_str!("page/map.js"),
    include_str!("page/panels.js"),
    include_str!("page/app.js"),
];

impl Snapshot {
    /// Writes one self-contained HTML page to look at: memory over time by allocation, tag, stack, size or stream, the
    /// segments and their blocks at any moment, fragmentation over time, what held the memory at the peak, and a search.
    /// The browser needs `DecompressionStream` (all since 2023). O(events); buffer the writer.
    ///
    /// # Errors
    /// What the writer says; `InvalidInput` from 2³² events of a device on.
    pub fn write_page(&self, title: &str, mut to: impl Write) -> io::Result<()> {
        let data = run::encode(self, title)?;
        let mut rest = FRAME;
        while let Some((before, after)) = rest.split_once("{{") {
            to.write_all(before.as_bytes())?;
            let (name, after) = after.split_once("}}").unwrap_or_default();
            match name {
                "style" => to.write_all(STYLE.as_bytes())?,
                "script" => SCRIPT.iter().try_for_each(|part| to.write_all(part.as_bytes()))?,
                _ => write!(to, "{}", Base64Display::new(&data, &STANDARD))?,
            }
            rest = after;
        }
        to.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests;
