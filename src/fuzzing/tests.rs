//! Runs each target over its committed corpus and over mutations of it: this takes seconds, on the stable compiler.

use highwater_core::fuzzing::SEPARATOR;
use std::fs;
use std::path::Path;

/// Mutated inputs per target.
const MADE: usize = 3_000;
/// The longest of them, bytes.
const LONGEST: usize = 4_096;

/// Runs one target over its corpus in `fuzz/corpus`, and over mutations of it.
fn run(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut corpus: Vec<_> =
        fs::read_dir(&folder).expect("a corpus").map(|file| file.expect("listed").path()).collect();
    corpus.sort();
    let corpus: Vec<Vec<u8>> = corpus.iter().map(|path| fs::read(path).expect("read")).collect();
    assert!(!corpus.is_empty(), "{} is empty", folder.display());
    corpus.iter().for_each(|input| target(input));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..MADE {
        target(&random.mutated(&corpus));
    }
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            run(stringify!($name), super::$name);
        })*

        /// A target without a test, or a test without a target, would go unnoticed.
        #[test]
        fn every_target_has_its_test() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
            let files = fs::read_dir(folder).expect("targets").map(|file| file.expect("listed").path());
            let mut found: Vec<String> =
                files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect();
            found.sort();
            assert_eq!(found, [$(stringify!($name)),*]);
        }
    };
}

targets!(
    annotations,
    event_log,
    framework,
    http,
    import,
    kubelet,
    otlp_reply,
    recording,
    replay,
    ring,
    scenario,
    settings
);

/// A random generator that returns the same numbers in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).expect("below a usize")
    }

    /// One input of the corpus with up to eight changes.
    fn mutated(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut input = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(8) {
            self.mutate(&mut input, corpus);
        }
        input.truncate(LONGEST);
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        const STRUCTURE: [&[u8]; 9] = [
            b"0",
            b"-1",
            b"18446744073709551615",
            b"9223372036854775807",
            b"1e308",
            b"null",
            b"[]",
            b"\x00",
            b"\xff\xff",
        ];
        let at = self.below(input.len() + 1);
        let end = at + self.below((input.len() - at).min(64) + 1);
        match self.below(7) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.next().to_le_bytes()[0],
            2 => drop(input.drain(at..end)),
            3 => {
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            4 => drop(input.splice(at..end, STRUCTURE[self.below(STRUCTURE.len())].iter().copied())),
            5 => input.insert(at, SEPARATOR),
            _ => {
                let other = &corpus[self.below(corpus.len())];
                let from = self.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
        }
    }
}
