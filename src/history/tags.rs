//! Tags: names of what a thread is doing, put on what it allocates meanwhile.

use crate::sync::Mutex;
use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// A tag's number; the same all over the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TagId(u32);

impl TagId {
    /// No scope was open.
    pub(crate) const NONE: Self = Self(0);
}

/// Distinct tags; further ones count as [`OTHER`].
const TAGS_MAX: usize = 1 << 16;

/// The tag of what came after [`TAGS_MAX`] different ones.
pub(crate) const OTHER: &str = "(other tags)";

/// All tags, as paths: a scope within another has both names.
#[derive(Debug, Default)]
struct Tags {
    paths: Vec<Arc<str>>,
    /// By the outer tag, and the name.
    by_name: FxHashMap<TagId, FxHashMap<Box<str>, TagId>>,
}

static TAGS: LazyLock<Mutex<Tags>> = LazyLock::new(|| Mutex::new(Tags::default()));

thread_local! {
    static CURRENT: Cell<TagId> = const { Cell::new(TagId::NONE) };
    /// The open scopes, outermost first: a number of their own, and the tag.
    static OPEN: RefCell<Vec<(u64, TagId)>> = const { RefCell::new(Vec::new()) };
    static OPENED: Cell<u64> = const { Cell::new(0) };
}

/// The calling thread's tag.
#[inline]
pub(crate) fn current() -> TagId {
    CURRENT.try_with(Cell::get).unwrap_or_default()
}

/// A tag's path; none for [`TagId::NONE`].
pub(crate) fn tag_name(tag: TagId) -> Option<Arc<str>> {
    let index = (tag.0 as usize).checked_sub(1)?;
    TAGS.lock().paths.get(index).cloned()
}

/// A small number for the calling thread, the same all its life.
pub(super) fn thread_number() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.try_with(|number| *number).unwrap_or(u64::MAX)
}

fn intern(outer: TagId, name: &str) -> TagId {
    let mut tags = TAGS.lock();
    if let Some(known) = tags.by_name.get(&outer).and_then(|inner| inner.get(name)) {
        return *known;
    }
    let full = tags.paths.len() >= TAGS_MAX;
    if full && tags.paths.len() > TAGS_MAX {
        return TagId(TAGS_MAX as u32 + 1);
    }
    let path: Arc<str> = match (outer.0 as usize).checked_sub(1).map(|index| &tags.paths[index]) {
        _ if full => OTHER.into(),
        Some(outer) => format!("{outer}/{name}").into(),
        None => name.into(),
    };
    tags.paths.push(path);
    let tag = TagId(u32::try_from(tags.paths.len()).unwrap_or(u32::MAX));
    if !full {
        tags.by_name.entry(outer).or_default().insert(name.into(), tag);
    }
    tag
}

/// An open scope: what the thread allocates until it is dropped carries its tag.
///
/// Stays in its thread. Dropping an outer scope ends the inner ones, too.
#[must_use = "the scope ends when this value is dropped"]
pub struct Scope {
    number: u64,
    tag: TagId,
    /// Told when the scope ends.
    ended: Option<Box<dyn FnOnce(TagId)>>,
    #[cfg(feature = "nvtx")]
    _range: Option<crate::nvtx::Range>,
    thread: PhantomData<*const ()>,
}

impl Scope {
    /// Opens a scope within the thread's present one.
    pub(crate) fn open(name: &str) -> Self {
        let tag = intern(current(), name);
        let number = OPENED.with(|opened| {
            opened.set(opened.get() + 1);
            opened.get()
        });
        OPEN.with(|open| open.borrow_mut().push((number, tag)));
        CURRENT.with(|current| current.set(tag));
        Self {
            number,
            tag,
            ended: None,
            #[cfg(feature = "nvtx")]
            _range: crate::nvtx::Range::start(name),
            thread: PhantomData,
        }
    }

    pub(crate) fn tag(&self) -> TagId {
        self.tag
    }

    pub(crate) fn on_end(&mut self, ended: impl FnOnce(TagId) + 'static) {
        self.ended = Some(Box::new(ended));
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // At a thread's end its values may be gone before this one.
        let _ = OPEN.try_with(|open| {
            let mut open = open.borrow_mut();
            if let Some(at) = open.iter().position(|(number, _)| *number == self.number) {
                open.truncate(at);
                let outer = open.last().map_or(TagId::NONE, |(_, tag)| *tag);
                let _ = CURRENT.try_with(|current| current.set(outer));
            }
        });
        if let Some(ended) = self.ended.take() {
            ended(self.tag);
        }
    }
}

impl std::fmt::Debug for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("tag", &tag_name(self.tag)).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Option<String> {
        tag_name(current()).map(|path| path.to_string())
    }

    #[test]
    fn scopes_nest_and_end_in_any_order() {
        assert_eq!(now(), None);
        let step = Scope::open("step");
        let forward = Scope::open("forward");
        assert_eq!(now().as_deref(), Some("step/forward"));
        drop(forward);
        assert_eq!(now().as_deref(), Some("step"));
        let (a, b) = (Scope::open("a"), Scope::open("b"));
        drop(a); // b lies within it
        assert_eq!(now().as_deref(), Some("step"));
        let c = Scope::open("c");
        drop(b); // ended already
        assert_eq!(now().as_deref(), Some("step/c"));
        drop(c);
        drop(step);
        assert_eq!(now(), None);
        assert_eq!(std::thread::spawn(now).join().unwrap(), None, "each thread has its own");
    }

    #[test]
    fn the_same_path_is_the_same_tag() {
        let first = Scope::open("same").tag();
        assert_eq!(Scope::open("same").tag(), first);
    }
}
