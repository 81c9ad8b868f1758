//! Random numbers, the same in every run.

/// SplitMix64: small, good enough, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// From 0 to 1.
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// About normally distributed: a sum of four uniform numbers, with the deviation asked for.
    pub fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 3.0_f32.sqrt() * deviation
    }

    pub fn normals(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        (0..count).map(|_| self.normal(deviation)).collect()
    }
}
