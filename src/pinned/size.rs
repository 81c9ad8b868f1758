//! Size classes of page-locked memory.

/// The least alignment of every block, and the step of the smallest classes.
pub(super) const GRANULE: u64 = 64;
/// From here on an octave has eight steps.
const FIRST_OCTAVE: u64 = 512;

/// The class of a request: an eighth more at most, or up to the next multiple of 64 below 512. `None` beyond 2^60.
pub(super) fn class_of(bytes: u64) -> Option<u64> {
    if bytes > 1 << 60 {
        return None;
    }
    let step = if bytes <= FIRST_OCTAVE { GRANULE } else { octave(bytes) / 8 };
    Some(bytes.max(1).next_multiple_of(step))
}

/// The largest power of two below `bytes`.
fn octave(bytes: u64) -> u64 {
    1 << (63 - (bytes - 1).leading_zeros())
}

/// The largest block that may serve a request of a class: a quarter more.
pub(super) fn largest_for(class: u64) -> u64 {
    class + class / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_no_more_than_an_eighth_larger() {
        let mut bytes = 2;
        while bytes < 1 << 40 {
            for near in [bytes - 1, bytes, bytes + 1] {
                let class = class_of(near).expect("small enough");
                assert!(class >= near && class.is_multiple_of(GRANULE), "{near} {class}");
                assert!(class - near < GRANULE || (class - near) * 8 <= near, "{near} {class}");
                assert_eq!(class_of(class), Some(class), "a class is its own");
                assert!(near < FIRST_OCTAVE || largest_for(class) < 2 * near, "{near} {class}");
            }
            bytes += bytes / 7 + 1;
        }
    }

    #[test]
    fn an_octave_has_eight_classes() {
        let mut classes: Vec<u64> = (1025..=2048).filter_map(class_of).collect();
        classes.dedup();
        assert_eq!(classes, [1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]);
        assert_eq!(largest_for(1024), 1280, "two classes more");
        assert_eq!(class_of((1 << 60) + 1), None);
    }
}
