//! The same events as a Chrome trace, which Perfetto, `chrome://tracing` and TensorBoard's trace viewer open.

use super::json::quoted;
use super::{Action, Annotation, Snapshot, TraceEntry, Usage, Value};
use std::collections::BTreeMap;
use std::io::{self, Write};

impl Snapshot {
    /// Writes a Chrome trace: a process for each device with counters of allocated, active and reserved bytes, scopes as
    /// slices of their threads, driver calls and out-of-memory errors as instants. Times are microseconds since 1970.
    /// O(events); buffer the writer.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write_chrome_trace(&self, to: impl Write) -> io::Result<()> {
        let mut writer = Writer { to, any: false };
        writer.to.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        for device in 0..self.device_traces.len() {
            let is_empty = self.device_traces[device].is_empty()
                && !self.segments.iter().any(|segment| segment.device as usize == device);
            if is_empty {
                continue;
            }
            writer.begin("process_name", 'M', device, None)?;
            write!(writer.to, ",\"args\":{{\"name\":\"GPU {device} memory\"}}}}")?;
            writer.begin("thread_name", 'M', device, None)?;
            write!(writer.to, ",\"tid\":{DRIVER},\"args\":{{\"name\":\"driver\"}}}}")?;
            self.counters(device, &mut writer)?;
            for entry in &self.device_traces[device] {
                writer.instant(device, entry)?;
            }
            let end = self.device_traces[device].last().map_or(0, |entry| entry.time_us);
            slices(device, &self.external_annotations, end, &mut writer)?;
        }
        writer.to.write_all(b"\n]}\n")
    }

    /// The counters at every moment, and where they were higher within it, that before.
    fn counters(&self, device: usize, writer: &mut Writer<impl Write>) -> io::Result<()> {
        let mut over_time = self.usage_over_time(device).peekable();
        let mut highest: Option<Usage> = None;
        while let Some((entry, usage)) = over_time.next() {
            let peak = highest.map_or(usage, |highest| highest.max(usage));
            if over_time.peek().is_some_and(|(next, _)| next.time_us == entry.time_us) {
                highest = Some(peak);
                continue;
            }
            if peak != usage {
                writer.counter(device, entry.time_us, peak)?;
            }
            writer.counter(device, entry.time_us, usage)?;
            highest = None;
        }
        Ok(())
    }
}

/// The thread that driver calls are drawn on; the program's follow.
const DRIVER: u64 = 0;

struct Writer<W> {
    to: W,
    any: bool,
}

impl<W: Write> Writer<W> {
    /// Begins an event; the caller ends its object.
    fn begin(&mut self, name: &str, phase: char, device: usize, time_us: Option<u64>) -> io::Result<()> {
        self.to.write_all(if std::mem::replace(&mut self.any, true) {
            b",\n{\"name\":"
        } else {
            b"\n{\"name\":"
        })?;
        quoted(&mut self.to, name)?;
        write!(self.to, ",\"ph\":\"{phase}\",\"pid\":{device}")?;
        match time_us {
            Some(time_us) => write!(self.to, ",\"ts\":{time_us}"),
            None => Ok(()),
        }
    }

    fn counter(&mut self, device: usize, time_us: u64, usage: Usage) -> io::Result<()> {
        self.begin("memory (bytes)", 'C', device, Some(time_us))?;
        let Usage { allocated, active, reserved } = usage;
        write!(self.to, ",\"args\":{{\"allocated\":{allocated},\"active\":{active},\"reserved\":{reserved}}}}}")
    }

    fn instant(&mut self, device: usize, entry: &TraceEntry) -> io::Result<()> {
        let TraceEntry { addr, size, stream, time_us, .. } = entry;
        if entry.action == Action::Oom {
            self.begin("out of memory", 'i', device, Some(*time_us))?;
            return write!(
                self.to,
                ",\"tid\":{DRIVER},\"s\":\"p\",\"args\":{{\"requested\":{size},\"device_free\":{addr},\"stream\":{stream}}}}}"
            );
        }
        let name = match entry.action {
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {
                entry.action.name()
            }
            _ => return Ok(()),
        };
        self.begin(name, 'i', device, Some(*time_us))?;
        write!(
            self.to,
            ",\"tid\":{DRIVER},\"s\":\"t\",\"args\":{{\"address\":\"{addr:#x}\",\"bytes\":{size},\"stream\":{stream}}}}}"
        )
    }
}

/// Scopes as slices. An end without a beginning (it was before the first event) is left out; what was not left yet ends
/// with the events.
fn slices(device: usize, annotations: &[Annotation], end: u64, writer: &mut Writer<impl Write>) -> io::Result<()> {
    let number = |annotation: &Annotation, key| match annotation.get(key) {
        Some(Value::Int(value)) => u64::try_from(*value).ok(),
        _ => None,
    };
    let text = |annotation: &'_ Annotation, key| match annotation.get(key) {
        Some(Value::Str(text)) => Some(text.clone()),
        _ => None,
    };
    // The names of the open slices of each thread.
    let mut open: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut last = end;
    for annotation in annotations {
        if number(annotation, "device").is_some_and(|of| of != device as u64) {
            continue;
        }
        let (Some(name), Some(time)) = (text(annotation, "name"), number(annotation, "time_us")) else { continue };
        last = last.max(time);
        let thread = DRIVER + 1 + number(annotation, "thread").unwrap_or(0);
        let slices = open.entry(thread).or_default();
        match text(annotation, "stage").as_deref() {
            Some("START") => {
                writer.begin(&name, 'B', device, Some(time))?;
                write!(writer.to, ",\"tid\":{thread}}}")?;
                slices.push(name);
            }
            Some("END") => {
                // Dropped out of order, an outer one ends those within it.
                let Some(at) = slices.iter().rposition(|open| *open == name) else { continue };
                for name in slices.drain(at..).rev() {
                    writer.begin(&name, 'E', device, Some(time))?;
                    write!(writer.to, ",\"tid\":{thread}}}")?;
                }
            }
            _ => {
                writer.begin(&name, 'i', device, Some(time))?;
                write!(writer.to, ",\"tid\":{thread},\"s\":\"t\"}}")?;
            }
        }
    }
    for (thread, slices) in open {
        for name in slices.into_iter().rev() {
            writer.begin(&name, 'E', device, Some(last))?;
            write!(writer.to, ",\"tid\":{thread}}}")?;
        }
    }
    Ok(())
}
