//! The fuzz target's properties over its corpus, and over mutated frames. `MEMQ_FUZZ_CASES` sets how many.
#[path = "../fuzz/scan_checks.rs"]
mod checks;

mod dice;

use checks::{check_scan, ADOPTED, STAMPED};
use dice::Dice;
use std::path::Path;

/// Bounds that allow all, and frames of one stream that follow on each other.
fn input(dice: &mut Dice) -> Vec<u8> {
    let mut input = vec![0, 0, 255, 255, 255, 0, STAMPED | ADOPTED, 0];
    let mut sequence = 5u64;
    for _ in 0..1 + dice.below(4) {
        let (count, codec) = (1 + dice.below(5) as u32, dice.below(3) as u32);
        let payload = 4 * count + dice.below(30) as u32;
        let raw = payload + if codec == 0 { 0 } else { dice.below(9) as u32 };
        let words = [72 + payload, 0x0001_0004, 100, 0, u32::from_le_bytes(*b"mqB1"), 0, 1 | codec << 8, payload, raw];
        words.iter().for_each(|word| input.extend_from_slice(&word.to_le_bytes()));
        [count, 2, 9].iter().for_each(|word| input.extend_from_slice(&word.to_le_bytes()));
        [7, sequence, 1_000, 0xFFFF_0000 << 32, 0].iter().for_each(|word| input.extend_from_slice(&word.to_le_bytes()));
        input.resize(input.len() + payload as usize, dice.next() as u8);
        sequence += u64::from(count);
    }
    input
}

fn mutate(input: &mut Vec<u8>, dice: &mut Dice) {
    for _ in 0..dice.below(4) {
        let at = dice.below(input.len());
        match dice.below(5) {
            0 => input[at] ^= 1 << dice.below(8),
            1 => input[at] = [0, 1, 127, 128, 255][dice.below(5)],
            2 => input.truncate(at + 1),
            3 => input[dice.below(8)] = dice.next() as u8,
            _ => {
                let piece = input[at..].iter().take(1 + dice.below(99)).copied().collect::<Vec<u8>>();
                let to = 8 + dice.below(input.len());
                input.splice(to.min(input.len())..to.min(input.len()), piece);
            }
        }
        if input.len() < 8 {
            return;
        }
    }
}

#[test]
fn what_a_scan_takes_of_mutated_frames_is_sound() {
    let cases = std::env::var("MEMQ_FUZZ_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(50_000);
    let (mut dice, mut taken) = (Dice(0x9E37_79B9_7F4A_7C15), 0);
    for _ in 0..cases {
        let mut input = input(&mut dice);
        mutate(&mut input, &mut dice);
        taken += check_scan(&input);
    }
    assert!(taken > cases / 2 && taken < 3 * cases, "{taken} blocks of {cases} cases");
}

#[test]
fn the_corpus_of_the_fuzz_target_has_frames_that_are_taken() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/scan");
    let taken: Vec<usize> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| check_scan(&std::fs::read(entry.unwrap().path()).unwrap()))
        .collect();
    assert!(taken.len() >= 8 && taken.iter().sum::<usize>() >= 8, "{taken:?}");
}
