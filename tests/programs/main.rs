//! Programs of allocator operations, random and exhaustive, each checked after every step against a shadow of the
//! device's memory, a naive model of the statistics, and the simulated device's own judgement.

/// Ends a check with a message if a condition does not hold. Checks answer instead of panicking, so that a failing
/// program can be made smaller without a page of output for each attempt.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

mod determinism;
mod exhaustive;
mod faults;
mod machine;
mod marks;
mod model;
mod program;
mod properties;
mod shadow;

/// What a check answers: nothing, or what is wrong.
type Check<T = ()> = Result<T, String>;

const MIB: u64 = 1 << 20;
