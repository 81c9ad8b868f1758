//! What must not compile: use after free, overlapping mutable views, sending what may not be sent, and their like.
//!
//! The compiler's words are beside each program; after a change of either, `TRYBUILD=overwrite cargo test --test
//! compile_fail` writes them anew.

#[test]
fn misuse_does_not_compile() {
    let programs = trybuild::TestCases::new();
    programs.compile_fail("tests/compile_fail/*.rs");
    #[cfg(feature = "cuda")]
    programs.compile_fail("tests/compile_fail/cuda/*.rs");
}
