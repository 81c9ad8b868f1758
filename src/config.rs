//! The allocator's configuration: by builder methods, or by a string in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
//!
//! ```
//! use vramalloc::Config;
//! let config: Config = "max_split_size_mb:128,garbage_collection_threshold:0.8".parse()?;
//! assert_eq!(config, Config::default().max_split_size(128 << 20).garbage_collection_threshold(0.8));
//! # Ok::<(), vramalloc::ConfigError>(())
//! ```

use crate::size::{MIB, SEGMENT_STEP_BYTES};
use std::fmt;
use std::str::FromStr;

/// The environment variable that [`Config::from_env`] reads.
pub const CONF_VARIABLE: &str = "VRAMALLOC_CONF";

/// [`Config::slack`] unless it is set: the knee of the curve in `docs/architecture.md`.
pub(crate) const DEFAULT_SLACK: f64 = 1.014;

/// How memory is reserved from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Segments {
    /// One driver allocation a segment (`cuMemAlloc`), as PyTorch's native allocator.
    #[default]
    Fixed,
    /// Ranges of addresses whose physical pages come, go and move.
    Expandable,
    /// Expandable where the device has virtual memory management, else fixed.
    Auto,
}

/// What a slow path does when memory would do but queued work may still touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnPending {
    /// Take fresh memory first; when that is refused, wait on the host for the oldest of that work.
    #[default]
    Grow,
    /// Expandable segments: wait for the oldest of that work rather than hold more than the slack allows; and, from the default
    /// slack on, spare the peak of reserved where that leaves no hole. Fixed segments: as `Grow`.
    Wait,
    /// Never wait: out of memory is reported instead.
    Fail,
}

/// `roundup_power2_divisions`: into how many steps the sizes between two powers of two are divided, by size.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct RoundupDivisions {
    /// Interval `i` holds sizes from `2^(20+i)`; the first also everything below, the last everything above.
    divisions: [u64; RoundupDivisions::INTERVALS],
    on: bool,
}

impl RoundupDivisions {
    const INTERVALS: usize = 16;

    /// The same number of steps for every size: 0 or 1 for none, else a power of two.
    #[must_use]
    pub const fn uniform(divisions: u64) -> Self {
        Self { divisions: [divisions; Self::INTERVALS], on: divisions > 1 }
    }

    #[inline]
    pub(crate) const fn is_off(&self) -> bool {
        !self.on
    }

    pub(crate) fn for_size(&self, bytes: u64) -> u64 {
        let interval = (63 - bytes.max(1).leading_zeros()).saturating_sub(20) as usize;
        self.divisions[interval.min(Self::INTERVALS - 1)]
    }

    fn parse(value: &Value<'_>) -> Result<Self, ConfigError> {
        let power_of_two = |text: &str| -> Result<u64, ConfigError> {
            let number: u64 =
                text.parse().map_err(|_| value.bad("a power of two, or [MiB:divisions,...,>:divisions]"))?;
            if number == 0 || number.is_power_of_two() { Ok(number) } else { Err(value.bad("a power of two")) }
        };
        let Some(list) = value.text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
            return Ok(Self::uniform(power_of_two(value.text)?));
        };
        let mut divisions = [0; Self::INTERVALS];
        let mut filled = 0;
        for (position, pair) in list.split(',').enumerate() {
            let (interval, steps) = pair.split_once(':').ok_or_else(|| value.bad("pairs of MiB:divisions"))?;
            let steps = power_of_two(steps)?;
            if interval == ">" {
                divisions[filled..].fill(steps);
                continue;
            }
            let mebibytes = power_of_two(interval)?;
            if mebibytes == 0 {
                return Err(value.bad("an interval of 1 MiB or more"));
            }
            let index = (mebibytes.trailing_zeros() as usize).min(Self::INTERVALS - 1);
            let first = if position == 0 { 0 } else { index };
            divisions[first..=index].fill(steps);
            filled = index + 1;
        }
        Ok(Self { divisions, on: divisions.iter().any(|&steps| steps > 1) })
    }
}

impl fmt::Display for RoundupDivisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.divisions.iter().all(|steps| *steps == self.divisions[0]) {
            return write!(f, "{}", self.divisions[0]);
        }
        let pairs: Vec<String> =
            self.divisions.iter().enumerate().map(|(i, steps)| format!("{}:{steps}", 1u64 << i)).collect();
        write!(f, "[{}]", pairs.join(","))
    }
}

/// The hard cap on reserved memory.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
#[non_exhaustive]
pub enum Limit {
    /// What the device has.
    #[default]
    None,
    /// Bytes.
    Bytes(u64),
    /// A part, 0 to 1, of the device's total memory (not of what happens to be free).
    Fraction(f64),
}

impl Limit {
    /// The cap in bytes on a device of `total_bytes`: what fits in whole segment steps of 2 MiB.
    ///
    /// A fraction is rounded to the nearest byte before, so that `22 MiB / total` means 22 MiB.
    #[must_use]
    pub fn bytes(self, total_bytes: u64) -> Option<u64> {
        let bytes = match self {
            Self::None => return None,
            Self::Bytes(bytes) => bytes,
            #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Self::Fraction(part) => {
                if part >= 1.0 {
                    return None;
                }
                (part * total_bytes as f64).round() as u64
            }
        };
        Some(bytes - bytes % SEGMENT_STEP_BYTES)
    }
}

/// The allocator's configuration. Every field has a default; [`Config::default`] is PyTorch's.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Fixed or expandable segments. Key `segments`.
    pub segments: Segments,
    /// Blocks of this many bytes or more are never split, and serve only requests nearly as large. `None`: no
    /// such limit. Key `max_split_size_mb`.
    pub max_split_bytes: Option<u64>,
    /// How much larger than the request an unsplittable block may be. Key `max_non_split_rounding_mb`.
    pub max_non_split_rounding_bytes: u64,
    /// The segment for requests from 1 to 10 MiB. Key `large_segment_size_mb`.
    pub large_segment_bytes: u64,
    /// Rounding of requests. Key `roundup_power2_divisions`.
    pub roundup_power2_divisions: RoundupDivisions,
    /// When more than this part of the limit (or of the device, without one) is reserved, cached segments that
    /// were not used for long are released before the allocator grows. `None`: off. Key
    /// `garbage_collection_threshold`.
    pub gc_threshold: Option<f64>,
    /// The hard cap on what is reserved. Keys `limit` (bytes, or with a unit: `24GiB`) and
    /// `per_process_memory_fraction`.
    pub limit: Limit,
    /// From this many reserved bytes on, cached segments that were not used for long are released before the
    /// allocator grows. `None`: off. Key `soft_limit`.
    pub soft_limit_bytes: Option<u64>,
    /// The hard cap on page-locked host memory. Key `host_limit`.
    pub host_limit_bytes: Option<u64>,
    /// Bytes reserved at once, for the default stream. Key `initial`.
    pub initial_bytes: u64,
    /// What to do when only pending memory would do. Key `on_pending`.
    pub on_pending: OnPending,
    /// Expandable segments take fresh memory while reserved stays at or below this times the peak allocated;
    /// beyond it, idle pages are moved. At least 1. Key `slack`.
    pub slack: f64,
    /// Events that a [history](crate::CachingAllocator::record_history) keeps which is recorded from the start, without
    /// stacks. `None`: none is. Key `history`.
    pub history_events: Option<usize>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            segments: Segments::default(),
            max_split_bytes: None,
            max_non_split_rounding_bytes: 20 * MIB,
            large_segment_bytes: 20 * MIB,
            roundup_power2_divisions: RoundupDivisions::default(),
            gc_threshold: None,
            limit: Limit::None,
            soft_limit_bytes: None,
            host_limit_bytes: None,
            initial_bytes: 0,
            on_pending: OnPending::default(),
            slack: DEFAULT_SLACK,
            history_events: None,
        }
    }
}

/// What a key of the configuration string does; the list is printed when a key is unknown.
const KEYS: &[(&str, &str)] = &[
    ("segments", "fixed | expandable | auto"),
    ("expandable_segments", "True | False, PyTorch's name for segments"),
    ("slack", "number of 1 or more: reserved / peak allocated up to which expandable segments take fresh memory"),
    ("max_split_size_mb", "MiB, at least large_segment_size_mb: larger blocks are not split"),
    ("max_non_split_rounding_mb", "MiB, at least large_segment_size_mb: how much larger an unsplit block may be"),
    ("large_segment_size_mb", "MiB, more than 10: the segment for requests of 1 to 10 MiB"),
    ("roundup_power2_divisions", "power of two, or [MiB:divisions,...,>:divisions]"),
    ("garbage_collection_threshold", "number between 0 and 1"),
    ("limit", "bytes, or with a unit as in 24GiB: hard cap on reserved memory"),
    ("per_process_memory_fraction", "number from 0 to 1: hard cap as a part of the device"),
    ("soft_limit", "bytes, or with a unit: garbage is collected beyond"),
    ("host_limit", "bytes, or with a unit: hard cap on page-locked host memory"),
    ("initial", "bytes, or with a unit: reserved at once"),
    ("history", "a number: the newest events that are kept, from the start (64 bytes each)"),
    ("on_pending", "grow | wait | fail: what to do when memory is free but queued work may still use it"),
];

/// A configuration that was refused: the key, what is wrong with it, and what there is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not of the form `key:value,key:value`.
    #[error("configuration '{text}': expected key:value pairs separated by commas, found '{found}'")]
    Syntax {
        /// The whole text.
        text: String,
        /// The part that is not understood.
        found: String,
    },
    /// There is no such key.
    #[error("unknown configuration key '{key}'; there are:{}", key_list())]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// The key's value is not of its kind.
    #[error("configuration key '{key}': expected {expected}, got '{value}'")]
    BadValue {
        /// The key.
        key: String,
        /// What was given.
        value: String,
        /// What the key takes.
        expected: String,
    },
}

fn key_list() -> String {
    KEYS.iter().map(|(key, takes)| format!("\n  {key}: {takes}")).collect()
}

/// One `key:value` of the text.
struct Value<'a> {
    key: &'a str,
    text: &'a str,
}

impl Value<'_> {
    fn bad(&self, expected: &str) -> ConfigError {
        ConfigError::BadValue {
            key: self.key.to_owned(),
            value: self.text.to_owned(),
            expected: expected.to_owned(),
        }
    }

    fn mebibytes(&self) -> Result<u64, ConfigError> {
        let number: u64 = self.text.parse().map_err(|_| self.bad("a whole number of MiB"))?;
        number.checked_mul(MIB).ok_or_else(|| self.bad("a number of MiB that fits in 64 bits of bytes"))
    }

    fn bytes(&self) -> Result<u64, ConfigError> {
        parse_bytes(self.text).ok_or_else(|| self.bad("bytes, or a number with a unit such as 24GiB"))
    }

    fn number(&self) -> Result<f64, ConfigError> {
        self.text.parse().map_err(|_| self.bad("a number"))
    }

    fn boolean(&self) -> Result<bool, ConfigError> {
        match self.text {
            "True" | "true" => Ok(true),
            "False" | "false" => Ok(false),
            _ => Err(self.bad("True or False")),
        }
    }
}

/// Bytes from `123`, `1.5GiB`, `24GB`; binary and decimal units.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let number: f64 = number.parse().ok()?;
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bytes = (number * factor as f64).round();
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    (bytes < u64::MAX as f64).then_some(bytes as u64)
}

impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut config = Self::default();
        let mut rest = compact.as_str();
        while !rest.is_empty() {
            let syntax = |found: &str| ConfigError::Syntax { text: text.to_owned(), found: found.to_owned() };
            let (key, after) = rest.split_once(':').ok_or_else(|| syntax(rest))?;
            if key.is_empty() || key.contains([',', '[', ']']) {
                return Err(syntax(rest));
            }
            let end = if after.starts_with('[') {
                after.find(']').ok_or_else(|| syntax(after))? + 1
            } else {
                after.find(',').unwrap_or(after.len())
            };
            let (value, tail) = after.split_at(end);
            rest = match tail.strip_prefix(',') {
                Some(more) => more,
                None if tail.is_empty() => "",
                None => return Err(syntax(tail)),
            };
            config.set(&Value { key, text: value })?;
        }
        config.check()?;
        Ok(config)
    }
}

impl Config {
    /// The configuration in the environment variable `VRAMALLOC_CONF`; the default if it is not set.
    ///
    /// # Errors
    /// [`ConfigError`] naming the key that is not understood.
    pub fn from_env() -> Result<Self, ConfigError> {
        match std::env::var(CONF_VARIABLE) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(text)) => {
                let text = text.to_string_lossy().into_owned();
                Err(ConfigError::Syntax { found: text.clone(), text })
            }
        }
    }

    fn set(&mut self, value: &Value<'_>) -> Result<(), ConfigError> {
        match value.key {
            "segments" => {
                self.segments = match value.text {
                    "fixed" => Segments::Fixed,
                    "expandable" => Segments::Expandable,
                    "auto" => Segments::Auto,
                    _ => return Err(value.bad("fixed, expandable or auto")),
                }
            }
            "expandable_segments" => {
                self.segments = if value.boolean()? { Segments::Expandable } else { Segments::Fixed }
            }
            "slack" => self.slack = value.number()?,
            "max_split_size_mb" => self.max_split_bytes = Some(value.mebibytes()?),
            "max_non_split_rounding_mb" => self.max_non_split_rounding_bytes = value.mebibytes()?,
            "large_segment_size_mb" => self.large_segment_bytes = value.mebibytes()?,
            "roundup_power2_divisions" => self.roundup_power2_divisions = RoundupDivisions::parse(value)?,
            "garbage_collection_threshold" => self.gc_threshold = Some(value.number()?),
            "limit" => self.limit = Limit::Bytes(value.bytes()?),
            "per_process_memory_fraction" => self.limit = Limit::Fraction(value.number()?),
            "soft_limit" => self.soft_limit_bytes = Some(value.bytes()?),
            "host_limit" => self.host_limit_bytes = Some(value.bytes()?),
            "initial" => self.initial_bytes = value.bytes()?,
            "history" => {
                let events = value.text.parse().map_err(|_| value.bad("a whole number of events"))?;
                self.history_events = Some(events);
            }
            "on_pending" => {
                self.on_pending = match value.text {
                    "grow" => OnPending::Grow,
                    "wait" => OnPending::Wait,
                    "fail" => OnPending::Fail,
                    _ => return Err(value.bad("grow, wait or fail")),
                }
            }
            key => return Err(ConfigError::UnknownKey { key: key.to_owned() }),
        }
        Ok(())
    }

    /// Refuses values that cannot be meant. Called by the parser and by [`CachingAllocator::new`].
    ///
    /// # Errors
    /// [`ConfigError::BadValue`] for the first such field.
    ///
    /// [`CachingAllocator::new`]: crate::CachingAllocator::new
    pub fn check(&self) -> Result<(), ConfigError> {
        let bad = |key: &str, value: String, expected: &str| {
            Err(ConfigError::BadValue { key: key.to_owned(), value, expected: expected.to_owned() })
        };
        let large = self.large_segment_bytes;
        if large <= 10 * MIB || !large.is_multiple_of(SEGMENT_STEP_BYTES) {
            return bad("large_segment_size_mb", (large / MIB).to_string(), "an even number of MiB above 10");
        }
        for (key, bytes) in [
            ("max_split_size_mb", self.max_split_bytes.unwrap_or(u64::MAX)),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ] {
            if bytes < large {
                let expected = format!("at least large_segment_size_mb ({})", large / MIB);
                return bad(key, (bytes / MIB).to_string(), &expected);
            }
        }
        if let Some(threshold) = self.gc_threshold
            && !(threshold > 0.0 && threshold < 1.0)
        {
            return bad(
                "garbage_collection_threshold",
                threshold.to_string(),
                "a number between 0 and 1, both excluded",
            );
        }
        match self.limit {
            Limit::Fraction(part) if !(0.0..=1.0).contains(&part) => {
                return bad("per_process_memory_fraction", part.to_string(), "a number from 0 to 1");
            }
            Limit::Bytes(bytes) if bytes < SEGMENT_STEP_BYTES => {
                return bad("limit", bytes.to_string(), "at least 2 MiB, the smallest segment");
            }
            _ => {}
        }
        if !(self.slack >= 1.0 && self.slack.is_finite()) {
            return bad("slack", self.slack.to_string(), "a number of 1 or more");
        }
        for steps in self.roundup_power2_divisions.divisions {
            if steps != 0 && !steps.is_power_of_two() {
                return bad("roundup_power2_divisions", steps.to_string(), "a power of two");
            }
        }
        Ok(())
    }

    /// Sets [`segments`](Self::segments).
    #[must_use]
    pub fn segments(self, segments: Segments) -> Self {
        Self { segments, ..self }
    }

    /// Sets [`max_split_bytes`](Self::max_split_bytes).
    #[must_use]
    pub fn max_split_size(self, bytes: u64) -> Self {
        Self { max_split_bytes: Some(bytes), ..self }
    }

    /// Sets [`roundup_power2_divisions`](Self::roundup_power2_divisions).
    #[must_use]
    pub fn roundup_power2_divisions(self, divisions: RoundupDivisions) -> Self {
        Self { roundup_power2_divisions: divisions, ..self }
    }

    /// Sets [`gc_threshold`](Self::gc_threshold).
    #[must_use]
    pub fn garbage_collection_threshold(self, part: f64) -> Self {
        Self { gc_threshold: Some(part), ..self }
    }

    /// Sets [`limit`](Self::limit).
    #[must_use]
    pub fn limit(self, limit: Limit) -> Self {
        Self { limit, ..self }
    }

    /// Sets [`soft_limit_bytes`](Self::soft_limit_bytes).
    #[must_use]
    pub fn soft_limit(self, bytes: u64) -> Self {
        Self { soft_limit_bytes: Some(bytes), ..self }
    }

    /// Sets [`host_limit_bytes`](Self::host_limit_bytes).
    #[must_use]
    pub fn host_limit(self, bytes: u64) -> Self {
        Self { host_limit_bytes: Some(bytes), ..self }
    }

    /// Sets [`initial_bytes`](Self::initial_bytes).
    #[must_use]
    pub fn initial(self, bytes: u64) -> Self {
        Self { initial_bytes: bytes, ..self }
    }

    /// Sets [`on_pending`](Self::on_pending).
    #[must_use]
    pub fn on_pending(self, on_pending: OnPending) -> Self {
        Self { on_pending, ..self }
    }

    /// Sets [`slack`](Self::slack).
    #[must_use]
    pub fn slack(self, slack: f64) -> Self {
        Self { slack, ..self }
    }

    /// Sets [`history_events`](Self::history_events).
    #[must_use]
    pub fn history(self, events: usize) -> Self {
        Self { history_events: Some(events), ..self }
    }

    /// `max_split_bytes` with "no limit" as the largest number.
    #[inline]
    pub(crate) fn max_split(&self) -> u64 {
        self.max_split_bytes.unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Config>().unwrap_err().to_string()
    }

    #[test]
    fn every_key_parses() {
        let config: Config =
            "segments:expandable, slack:1.05, max_split_size_mb:64, max_non_split_rounding_mb:32, \
             large_segment_size_mb:24, roundup_power2_divisions:[256:1,512:2,1024:4,>:8], \
             garbage_collection_threshold:0.6, limit:24GiB, soft_limit:1.5GiB, host_limit:2GiB, initial:4MiB, on_pending:fail, \
             history:1000"
                .parse()
                .unwrap();
        assert_eq!(config.segments, Segments::Expandable);
        assert_eq!(config.limit, Limit::Bytes(24 << 30));
        assert_eq!((config.soft_limit_bytes, config.host_limit_bytes), (Some(3 << 29), Some(2 << 30)));
        assert_eq!(config.history_events, Some(1000));
        let steps = |mib: u64| config.roundup_power2_divisions.for_size(mib << 20);
        assert_eq!([1, 256, 300, 512, 1024, 2048, 1 << 20].map(steps), [1, 1, 1, 2, 4, 8, 8]);
        assert!("".parse::<Config>().unwrap() == Config::default());
    }

    #[test]
    fn pytorchs_spelling_is_understood() {
        let config: Config = "expandable_segments:True,garbage_collection_threshold:0.8".parse().unwrap();
        assert_eq!((config.segments, config.gc_threshold), (Segments::Expandable, Some(0.8)));
    }

    #[test]
    fn errors_name_the_key_and_the_choices() {
        let unknown = error("max_split:20");
        assert!(unknown.contains("'max_split'") && unknown.contains("max_split_size_mb"), "{unknown}");
        assert_eq!(
            error("garbage_collection_threshold:1.2"),
            "configuration key 'garbage_collection_threshold': expected a number between 0 and 1, both excluded, \
             got '1.2'"
        );
        assert!(error("max_split_size_mb:2").contains("at least large_segment_size_mb (20)"));
        assert!(error("expandable_segments:yes").contains("True or False"));
        assert!(error("per_process_memory_fraction:NaN").contains("from 0 to 1"));
        assert!(error("per_process_memory_fraction:-0.1").contains("from 0 to 1"));
        assert!(error("roundup_power2_divisions:3").contains("power of two"));
        assert!(error("roundup_power2_divisions:[256:1").contains("expected key:value"));
        assert!(error("nonsense").contains("'nonsense'"));
        assert!(error("limit:1").contains("at least 2 MiB"));
        assert!(error("history:on").contains("a whole number of events"));
        assert!(error("slack:0.9").contains("1 or more"));
    }

    #[test]
    fn a_fraction_is_not_truncated() {
        for (total, mebibytes) in [(85_024_112_640u64, 22u64), (150_123_446_272, 782)] {
            let part = (mebibytes * MIB) as f64 / total as f64;
            assert_eq!(Limit::Fraction(part).bytes(total), Some(mebibytes * MIB));
        }
        assert_eq!(Limit::Bytes(3 * MIB + 1).bytes(0), Some(2 * MIB));
        assert_eq!(Limit::Fraction(1.0).bytes(100), None);
    }

    #[test]
    fn byte_sizes() {
        assert_eq!(parse_bytes("24GiB"), Some(24 << 30));
        assert_eq!(parse_bytes("24 gb"), Some(24_000_000_000));
        assert_eq!(parse_bytes("1.5k"), Some(1536));
        assert_eq!(parse_bytes("12"), Some(12));
        for bad in ["", "GiB", "-1", "1x", "1..2", "99999999999TiB"] {
            assert_eq!(parse_bytes(bad), None, "{bad}");
        }
    }
}
