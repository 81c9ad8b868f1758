//! Random programs under every configuration.
//!
//! `VRAMALLOC_PROGRAMS=n` runs n programs over all configurations instead of 10,000; `VRAMALLOC_SEED=n` runs one.

use crate::machine::Machine;
use crate::program::{Program, configs, programs};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Over all configurations.
const PROGRAMS: u64 = 10_000;
/// Operations in the longest program.
const LENGTH: usize = 32;

fn from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// A runner whose every choice follows from `seed`.
pub(crate) fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, max_shrink_iters: 5_000, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

fn run_all(name: &str) {
    let setups = configs();
    let setup = setups.iter().find(|setup| setup.name == name).expect("one of the configurations");
    let count = from_environment("VRAMALLOC_PROGRAMS").unwrap_or(PROGRAMS).div_ceil(setups.len() as u64);
    let seeds = match from_environment("VRAMALLOC_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    };
    for seed in seeds {
        let mut runner = runner(seed);
        let tree = programs(setup, LENGTH).new_tree(&mut runner).expect("the strategy has no filter");
        let result = runner
            .run_one(tree, |program: Program| Machine::new(setup).run(&program).map_err(TestCaseError::fail));
        if let Err(TestError::Fail(why, program)) = result {
            panic!(
                "configuration {name:?}, seed {seed}: {why}\nsmallest program: {program:#?}\n\
                 again: VRAMALLOC_SEED={seed} cargo test --test programs properties::{name}"
            );
        }
        assert!(result.is_ok(), "configuration {name:?}, seed {seed}: {result:?}");
    }
}

macro_rules! for_every_configuration {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run_all(stringify!($name));
        })*

        #[test]
        fn no_configuration_is_left_out() {
            assert_eq!([$(stringify!($name)),*], configs().map(|setup| setup.name));
        }
    };
}

for_every_configuration! { fixed max_split roundup gc soft_limit limit limit_beyond_device small_device expandable expandable_small expandable_tight never_wait }
