//! `cargo +nightly fuzz run scan`: any bytes are frames, any bounds are a scan's.
#![no_main]
use libfuzzer_sys::fuzz_target;

#[path = "../scan_checks.rs"]
mod checks;

fuzz_target!(|data: &[u8]| {
    checks::check_scan(data);
});
