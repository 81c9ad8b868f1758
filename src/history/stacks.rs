//! Call stacks: captured as bare return addresses, resolved when somebody reads them.

#[cfg(feature = "stacks")]
use crate::sync::Mutex;
#[cfg(feature = "stacks")]
use rustc_hash::FxHashMap;

/// A stack's number in its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StackId(u32);

impl StackId {
    /// No stack was kept.
    pub(crate) const NONE: Self = Self(0);
}

/// A function of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Symbol {
    pub(crate) file: String,
    pub(crate) line: u32,
    pub(crate) name: String,
}

/// The distinct stacks of a session.
#[derive(Debug)]
pub(crate) struct StackTable {
    #[cfg(feature = "stacks")]
    known: Mutex<Known>,
}

#[cfg(feature = "stacks")]
#[derive(Debug, Default)]
struct Known {
    by_addresses: FxHashMap<Box<[usize]>, u32>,
    stacks: Vec<Box<[usize]>>,
}

/// The deepest frame that is kept.
#[cfg(feature = "stacks")]
const DEPTH_MAX: usize = 128;

/// Distinct stacks a session; what comes later has none. (A program has some thousands.)
#[cfg(feature = "stacks")]
const STACKS_MAX: usize = 1 << 20;

#[cfg(feature = "stacks")]
impl StackTable {
    /// Whether this build can capture stacks.
    pub(crate) const AVAILABLE: bool = true;

    pub(crate) fn new() -> Self {
        Self { known: Mutex::new(Known::default()) }
    }

    /// Captures the calling thread's stack.
    #[cold]
    #[inline(never)]
    pub(crate) fn capture(&self) -> StackId {
        let mut addresses = [0usize; DEPTH_MAX];
        let mut depth = 0;
        backtrace::trace(|frame| {
            addresses[depth] = frame.ip().addr();
            depth += 1;
            depth < DEPTH_MAX
        });
        let addresses = &addresses[..depth];
        let mut known = self.known.lock();
        if let Some(&number) = known.by_addresses.get(addresses) {
            return StackId(number);
        }
        if known.stacks.len() >= STACKS_MAX {
            return StackId::NONE;
        }
        known.stacks.push(addresses.into());
        let number = u32::try_from(known.stacks.len()).unwrap_or(0);
        known.by_addresses.insert(addresses.into(), number);
        StackId(number)
    }

    /// The functions of a stack, innermost first, without this crate's own at the inner end. Slow: reads debug
    /// information.
    pub(crate) fn resolve(&self, id: StackId) -> Vec<Symbol> {
        let Some(index) = (id.0 as usize).checked_sub(1) else { return Vec::new() };
        let Some(addresses) = self.known.lock().stacks.get(index).cloned() else { return Vec::new() };
        let mut symbols = Vec::new();
        for address in addresses {
            // A return address is behind the call; the call is what is wanted.
            let call = std::ptr::without_provenance_mut(address.saturating_sub(1));
            backtrace::resolve(call, |symbol| {
                symbols.push(Symbol {
                    file: symbol.filename().map(|file| file.display().to_string()).unwrap_or_default(),
                    line: symbol.lineno().unwrap_or(0),
                    name: symbol.name().map(|name| format!("{name:#}")).unwrap_or_default(),
                });
            });
        }
        let own = symbols.iter().take_while(|symbol| is_inner(symbol)).count();
        symbols.drain(..own);
        symbols
    }
}

/// Whether a function is between the capture and the user's call: by its file, since one that was inlined may have lost
/// its path, or by its path, without debug information.
#[cfg(feature = "stacks")]
fn is_inner(symbol: &Symbol) -> bool {
    let name = symbol.name.trim_start_matches('<');
    symbol.file.starts_with(concat!(env!("CARGO_MANIFEST_DIR"), "/src/"))
        || ["/backtrace-", "/library/core/src/", "/library/alloc/src/"]
            .iter()
            .any(|part| symbol.file.contains(part))
        || ["backtrace::", "vramalloc::", "core::", "alloc::"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(not(feature = "stacks"))]
impl StackTable {
    pub(crate) const AVAILABLE: bool = false;

    pub(crate) fn new() -> Self {
        Self {}
    }

    pub(crate) fn capture(&self) -> StackId {
        StackId::NONE
    }

    pub(crate) fn resolve(&self, _: StackId) -> Vec<Symbol> {
        Vec::new()
    }
}
