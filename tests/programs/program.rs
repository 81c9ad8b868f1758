//! Programs: the operations, how they are generated, and the configurations that they run under.

use crate::MIB;
use proptest::collection::vec;
use proptest::prelude::*;

/// Streams that a program uses at a time; number 0 is the default stream.
pub(crate) const SLOTS: u8 = 3;

/// One operation. Indices into what is live wrap around, so that every program is meaningful.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Alloc {
        bytes: u64,
        slot: u8,
    },
    Aligned {
        bytes: u64,
        /// Of the alignment.
        log2: u8,
        slot: u8,
    },
    /// Zero bytes.
    Zero {
        slot: u8,
    },
    /// More than the device has, or than can be counted.
    Huge {
        bytes: u64,
        slot: u8,
    },
    Free {
        index: u8,
        /// As an address; and once more, which must be refused.
        raw: bool,
    },
    /// Queues a use on another stream and records it.
    Use {
        index: u8,
        slot: u8,
    },
    /// Queues work that touches none of the memory.
    Work {
        slot: u8,
    },
    Complete {
        slot: u8,
    },
    CompleteOne {
        slot: u8,
    },
    Poll,
    EmptyCache,
    /// Retires and destroys a stream, with its work going on, and creates another in its place.
    Replace {
        slot: u8,
    },
    ResetPeaks,
    ResetSums,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) ops: Vec<Op>,
    /// At the end the allocator goes before its allocations.
    pub(crate) abrupt: bool,
}

/// A configuration and a device to run it on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) config: &'static str,
    pub(crate) capacity: u64,
    /// The largest request that is not meant to fail.
    pub(crate) largest: u64,
}

/// Every configuration that the random programs run under.
pub(crate) fn configs() -> [Setup; 12] {
    let setup = |name, config, capacity_mib, largest_mib| Setup {
        name,
        config,
        capacity: capacity_mib * MIB,
        largest: largest_mib * MIB,
    };
    [
        setup("fixed", "", 2048, 40),
        setup("max_split", "max_split_size_mb:20,max_non_split_rounding_mb:22", 2048, 64),
        setup("roundup", "roundup_power2_divisions:[1:8,2:4,8:2,>:4]", 2048, 40),
        setup("gc", "garbage_collection_threshold:0.2", 256, 30),
        setup("soft_limit", "soft_limit:48MiB,max_split_size_mb:24", 256, 30),
        setup("limit", "limit:60MiB", 2048, 30),
        setup("limit_beyond_device", "limit:60MiB", 54, 30),
        setup("small_device", "", 64, 40),
        setup("expandable", "segments:expandable", 2048, 40),
        setup("expandable_small", "segments:expandable,slack:1.5", 64, 40),
        setup("expandable_tight", "segments:expandable,slack:1.0", 256, 60),
        setup("never_wait", "on_pending:fail", 64, 30),
    ]
}

fn bytes(largest: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1u64..4096,
        2 => (1u64..2048, 0u64..3).prop_map(|(granules, off)| granules * 512 + off - 1),
        2 => 4096u64..MIB,
        1 => MIB - 513..MIB + 514,
        3 => MIB..10 * MIB,
        1 => 10 * MIB - 513..10 * MIB + 514,
        3 => 10 * MIB..largest,
    ]
}

fn op(setup: &Setup) -> impl Strategy<Value = Op> + use<> {
    let largest = setup.largest;
    let beyond = setup.capacity + 1;
    let slot = || 0..SLOTS;
    prop_oneof![
        10 => (bytes(largest), slot()).prop_map(|(bytes, slot)| Op::Alloc { bytes, slot }),
        2 => (bytes(largest), 0u8..22, slot()).prop_map(|(bytes, log2, slot)| Op::Aligned { bytes, log2, slot }),
        8 => (any::<u8>(), any::<bool>()).prop_map(|(index, raw)| Op::Free { index, raw }),
        4 => (any::<u8>(), slot()).prop_map(|(index, slot)| Op::Use { index, slot }),
        1 => slot().prop_map(|slot| Op::Work { slot }),
        2 => slot().prop_map(|slot| Op::Complete { slot }),
        2 => slot().prop_map(|slot| Op::CompleteOne { slot }),
        1 => Just(Op::Poll),
        1 => Just(Op::EmptyCache),
        1 => (1..SLOTS).prop_map(|slot| Op::Replace { slot }),
        1 => prop_oneof![
            slot().prop_map(|slot| Op::Zero { slot }),
            (prop_oneof![beyond..1 << 40, (1 << 60) - 513..u64::MAX], slot())
                .prop_map(|(bytes, slot)| Op::Huge { bytes, slot }),
            Just(Op::ResetPeaks),
            Just(Op::ResetSums),
        ],
    ]
}

/// Random programs of up to `length` operations.
pub(crate) fn programs(setup: &Setup, length: usize) -> impl Strategy<Value = Program> + use<> {
    (vec(op(setup), 1..=length), any::<bool>()).prop_map(|(ops, abrupt)| Program { ops, abrupt })
}
