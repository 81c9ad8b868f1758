//! A text by characters: examples/data/harbour.txt, written for this repository.

use super::Random;

pub struct Text {
    ids: Vec<u32>,
    words: usize,
}

impl Text {
    /// The text, in numbers from 0 to how many different characters there are.
    pub fn load() -> Self {
        let text = include_str!("../data/harbour.txt");
        let mut letters: Vec<char> = text.chars().collect();
        letters.sort_unstable();
        letters.dedup();
        let id = |letter| letters.binary_search(&letter).expect("a letter of the text") as u32;
        Self { ids: text.chars().map(id).collect(), words: letters.len() }
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// How many different characters there are.
    pub fn words(&self) -> usize {
        self.words
    }

    /// The `step`th batch of pieces of the text, and of what comes next at each place: the same in every run.
    pub fn batch(&self, step: u64, size: usize, length: usize) -> (Vec<u32>, Vec<u32>) {
        let mut random = Random(step);
        let starts: Vec<usize> = (0..size).map(|_| random.below(self.ids.len() - length)).collect();
        let pieces = |offset: usize| starts.iter().flat_map(move |start| &self.ids[start + offset..][..length]);
        (pieces(0).copied().collect(), pieces(1).copied().collect())
    }
}
