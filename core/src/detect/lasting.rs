//! Whether a lag lasts: in each of the last steps by about as much, or in most of many.

use std::collections::VecDeque;

/// Each of the last `STEADY_STEPS` steps must have a lag, and their ratios may differ by at most this part of the mean lag.
const STEADY_STEPS: usize = 5;
const STEADY_SPREAD: f64 = 0.5;
/// Or at least `LAGGING_STEPS` of the last `STEPS` steps must have a lag.
pub(super) const STEPS: usize = 20;
const LAGGING_STEPS: usize = 15;

/// By how much something lagged in each of its last steps; 1 where it did not.
#[derive(Debug, Default)]
pub(super) struct Lags(VecDeque<f64>);

impl Lags {
    pub fn push(&mut self, ratio: f64) {
        self.0.push_back(ratio);
        while self.0.len() > STEPS {
            self.0.pop_front();
        }
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_lasting(&self) -> bool {
        let lagging = self.0.iter().filter(|ratio| **ratio > 1.0).count();
        if lagging >= LAGGING_STEPS {
            return true;
        }
        let last: Vec<f64> = self.0.iter().rev().take(STEADY_STEPS).copied().collect();
        let (least, most) =
            last.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        #[allow(clippy::cast_precision_loss, reason = "five steps")]
        let mean = last.iter().sum::<f64>() / last.len().max(1) as f64;
        last.len() == STEADY_STEPS && least > 1.0 && most - least <= STEADY_SPREAD * (mean - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_steps_by_about_as_much_or_fifteen_of_twenty_last() {
        let lasts = |ratios: &[f64]| Lags(ratios.iter().copied().collect()).is_lasting();
        assert!(lasts(&[1.3; 5]) && !lasts(&[1.3; 4]) && !lasts(&[]));
        assert!(!lasts(&[1.3, 1.3, 1.0, 1.3, 1.3]) && lasts(&[1.0, 1.3, 1.3, 1.3, 1.3, 1.3]));
        // Apart by half of their mean lag, and by more.
        assert!(lasts(&[1.75, 2.0, 2.25, 2.0, 2.0]) && !lasts(&[1.75, 2.0, 2.26, 2.0, 2.0]));
        let in_turn = |lagging: usize| {
            let of = |nth| if nth >= lagging { 1.0 } else { [1.2, 3.0][nth % 2] };
            lasts(&(0..STEPS).map(of).collect::<Vec<f64>>())
        };
        assert!(in_turn(15) && !in_turn(14));
        assert!(!lasts(&[1.2, 1.2, 1.2, 1.2, 1.4]), "apart by most of it");
    }
}
