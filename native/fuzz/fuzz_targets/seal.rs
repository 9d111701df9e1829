//! `cargo +nightly fuzz run seal`: any bytes are records of an open block, which is sealed and unpacked.
#![no_main]
use libfuzzer_sys::fuzz_target;

#[path = "../seal_checks.rs"]
mod checks;

fuzz_target!(|data: &[u8]| {
    checks::check_seal(data);
});
