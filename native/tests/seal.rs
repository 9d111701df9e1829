//! The properties of a sealed block over random records. `MEMQ_FUZZ_CASES` sets how many.
#[path = "../fuzz/seal_checks.rs"]
mod checks;

mod dice;

use checks::check_seal;
use dice::Dice;
use std::path::Path;

#[test]
fn a_sealed_block_has_the_records_that_were_added() {
    let cases = std::env::var("MEMQ_FUZZ_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000);
    let (mut dice, mut records) = (Dice(0x2545_F491_4F6C_DD1D), 0);
    for _ in 0..cases {
        let size = dice.below(400);
        let spread = 1 + dice.below(256); // small bytes make blocks that shrink
        let input: Vec<u8> = (0..size).map(|_| dice.below(spread) as u8).collect();
        records += check_seal(&input);
    }
    assert!(records > cases, "{records} records of {cases} cases");
}

#[test]
fn the_corpus_of_the_fuzz_target_has_records() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/seal");
    let records: Vec<usize> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| check_seal(&std::fs::read(entry.unwrap().path()).unwrap()))
        .collect();
    assert!(records.len() >= 8 && records.iter().sum::<usize>() >= 50, "{records:?}");
}
