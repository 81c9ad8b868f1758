//! The two kinds of segments: the configurations that scenarios run under, and which driver calls are whose.

use crate::dsl::MIB;
use vramalloc::driver::Call;
use vramalloc::{Config, OnPending, RoundupDivisions, Segments};

/// The default configuration with expandable segments.
pub(crate) fn expandable() -> Config {
    Config::default().segments(Segments::Expandable)
}

/// Each kind of segments, by name; nothing else is set.
fn kinds() -> [(&'static str, Config); 2] {
    [("fixed segments", Config::default()), ("expandable segments", expandable())]
}

/// The configurations that every scenario without figures of its own must hold under.
pub(crate) fn configs() -> Vec<(String, Config)> {
    let mut configs = vec![
        ("fixed segments, max_split 32 MiB".to_owned(), Config::default().max_split_size(32 * MIB)),
        ("expandable segments, no slack".to_owned(), expandable().slack(1.0)),
        ("expandable segments, rather waiting".to_owned(), expandable().slack(1.0).on_pending(OnPending::Wait)),
    ];
    for (kind, config) in kinds() {
        configs.push((kind.to_owned(), config.clone()));
        configs.push((format!("{kind}, gc from 0.3"), config.clone().garbage_collection_threshold(0.3)));
        let divisions = RoundupDivisions::uniform(4);
        configs.push((format!("{kind}, four divisions"), config.roundup_power2_divisions(divisions)));
    }
    configs
}

/// Runs a scenario under each of [`configs`]; the last name printed is the one that failed.
pub(crate) fn each_config(scenario: impl Fn(Config)) {
    for (name, config) in configs() {
        println!("with {name}");
        scenario(config);
    }
}

/// Runs a scenario with figures of its own on each kind of segments; the last name printed is the one that failed.
pub(crate) fn each_kind(scenario: impl Fn(Config)) {
    for (name, config) in kinds() {
        println!("with {name}");
        scenario(config);
    }
}

/// Which driver calls a kind of segments makes.
pub(crate) trait Kind {
    fn is_expandable(&self) -> bool;

    /// What is expected of fixed segments, or of expandable ones.
    fn pick<T>(&self, fixed: T, expandable: T) -> T {
        if self.is_expandable() { expandable } else { fixed }
    }

    /// The call that asks the driver for memory.
    fn takes(&self) -> Call {
        self.pick(Call::Alloc, Call::CreatePages)
    }

    /// The call that takes memory away from its address, for good or for another one.
    fn gives(&self) -> Call {
        self.pick(Call::Free, Call::Unmap)
    }

    /// Every call that takes, moves or gives back memory.
    fn moves_memory(&self) -> Vec<Call> {
        let expandable = [Call::CreatePages, Call::Map, Call::SetAccess, Call::Unmap, Call::ReleasePages];
        self.pick(vec![Call::Alloc, Call::Free], expandable.into())
    }
}

impl Kind for Config {
    fn is_expandable(&self) -> bool {
        self.segments == Segments::Expandable
    }
}
