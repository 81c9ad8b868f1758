//! A made-up data set, the same in every run: points in clouds, three clouds to a class.
//!
//! Clouds of different classes lie between one another, so the classes overlap a little: no network gets them all.

/// Numbers in an example.
pub const FEATURES: u32 = 32;
pub const CLASSES: u32 = 10;
pub const TRAIN_ROWS: u32 = 5000;
pub const TEST_ROWS: u32 = 1000;

const CLOUDS_PER_CLASS: u32 = 3;
/// How wide a cloud is; the clouds' centres have a spread of 1 in each feature.
const NOISE: f32 = 1.15;

/// Examples on the host: `features` row by row, and the class of each row.
pub struct Examples {
    features: Vec<f32>,
    labels: Vec<u32>,
}

/// Consecutive rows of [`Examples`], as bytes for the device.
pub struct Batch {
    pub rows: u32,
    pub features: Vec<u8>,
    pub labels: Vec<u8>,
}

/// The training set and the held-out set.
pub fn make() -> (Examples, Examples) {
    let mut random = Random(0x5eed);
    let count = CLASSES * CLOUDS_PER_CLASS * FEATURES;
    let centres: Vec<f32> = (0..count).map(|_| random.normal()).collect();
    let train = sample(&centres, TRAIN_ROWS, &mut random);
    let test = sample(&centres, TEST_ROWS, &mut random);
    (train, test)
}

fn sample(centres: &[f32], rows: u32, random: &mut Random) -> Examples {
    let mut examples = Examples { features: Vec::new(), labels: Vec::new() };
    for _ in 0..rows {
        let cloud = random.below(CLASSES * CLOUDS_PER_CLASS);
        let start = (cloud * FEATURES) as usize;
        let centre = &centres[start..start + FEATURES as usize];
        examples.features.extend(centre.iter().map(|middle| middle + NOISE * random.normal()));
        examples.labels.push(cloud % CLASSES);
    }
    examples
}

impl Examples {
    /// The whole set in batches, in order. The last one is smaller unless the size divides the set.
    pub fn batches(&self, size: u32) -> impl Iterator<Item = Batch> + Clone + '_ {
        let size = size as usize;
        let features = self.features.chunks(size * FEATURES as usize);
        features.zip(self.labels.chunks(size)).map(|(features, labels)| Batch {
            rows: labels.len() as u32,
            features: features.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            labels: labels.iter().flat_map(|label| label.to_ne_bytes()).collect(),
        })
    }
}

/// SplitMix64: small, good enough, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    /// From 0 to 1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// About normally distributed with a spread of 1: a sum of twelve uniform numbers has that variance.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}
