//! Whether a lag lasts, in each of the last steps by about as much, or in most of many, and since when.

use std::collections::VecDeque;

/// Each of the last `STEADY_STEPS` steps must have a lag, and their ratios may differ by at most this part of the mean lag.
const STEADY_STEPS: usize = 5;
const STEADY_SPREAD: f64 = 0.5;
/// Or at least `LAGGING_STEPS` of the last `STEPS` steps must have a lag.
pub(super) const STEPS: usize = 20;
const LAGGING_STEPS: usize = 15;

/// The last steps of something that may lag.
#[derive(Debug, Default)]
pub(super) struct Lags(VecDeque<LagStep>);

/// A step.
#[derive(Debug, Clone, Copy)]
pub(super) struct LagStep {
    /// By how much it lagged, 1 if it did not.
    pub ratio: f64,
    pub begin_ns: i64,
    /// What the lag cost in it, as far as it is not reported yet, nanoseconds.
    pub lost_ns: i64,
}

impl Lags {
    pub fn push(&mut self, step: LagStep) {
        self.0.push_back(step);
        while self.0.len() > STEPS {
            self.0.pop_front();
        }
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_lasting(&self) -> bool {
        let lagging = self.0.iter().filter(|step| step.lags()).count();
        if lagging >= LAGGING_STEPS {
            return true;
        }
        let last: Vec<f64> = self.0.iter().rev().take(STEADY_STEPS).map(|step| step.ratio).collect();
        let (least, most) =
            last.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        #[allow(clippy::cast_precision_loss, reason = "five steps")]
        let mean = last.iter().sum::<f64>() / last.len().max(1) as f64;
        last.len() == STEADY_STEPS && least > 1.0 && most - least <= STEADY_SPREAD * (mean - 1.0)
    }

    /// When the lag began: with the earliest known step that lags and from which on three of four do.
    pub fn onset_ns(&self) -> Option<i64> {
        let mut lagging = 0;
        let from_newest = self.0.iter().rev().zip(1..).filter_map(|(step, steps)| {
            lagging += usize::from(step.lags());
            (step.lags() && lagging * STEPS >= steps * LAGGING_STEPS).then_some(step.begin_ns)
        });
        from_newest.last()
    }

    /// What the lag has cost since its onset and was not taken before, nanoseconds.
    pub fn take_lost_ns(&mut self) -> i64 {
        let onset_ns = self.onset_ns().unwrap_or(i64::MAX);
        let since = self.0.iter_mut().filter(|step| step.begin_ns >= onset_ns);
        since.map(|step| std::mem::take(&mut step.lost_ns)).fold(0, i64::saturating_add)
    }
}

impl LagStep {
    fn lags(self) -> bool {
        self.ratio > 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that begin at 0, 1, 2 and so on.
    fn lags(ratios: &[f64]) -> Lags {
        Lags(ratios.iter().zip(0..).map(|(ratio, begin_ns)| LagStep { ratio: *ratio, begin_ns, lost_ns: 10 }).collect())
    }

    #[test]
    fn a_lag_began_with_the_first_step_from_which_on_three_of_four_lag() {
        let onset = |ratios: &[f64]| lags(ratios).onset_ns();
        assert_eq!((onset(&[]), onset(&[1.0; 3]), onset(&[1.0, 1.0, 1.3, 1.3, 1.3, 1.3, 1.3])), (None, None, Some(2)));
        assert_eq!(onset(&[1.3, 1.0, 1.0, 1.3, 1.3, 1.3]), Some(3), "once before, by chance");
        assert_eq!(onset(&[1.0, 1.3, 1.0, 1.3, 1.3, 1.3]), Some(1));
        let mut long = Lags::default();
        (0..50).for_each(|nth| long.push(LagStep { ratio: 1.3, begin_ns: nth, lost_ns: 0 }));
        assert_eq!(long.onset_ns(), Some(30), "as far as is known");
    }

    #[test]
    fn what_a_lag_costs_is_taken_once_from_its_onset_on() {
        let mut lags = lags(&[1.3, 1.0, 1.0, 1.3, 1.3, 1.3]);
        assert_eq!((lags.take_lost_ns(), lags.take_lost_ns()), (30, 0));
        lags.push(LagStep { ratio: 1.3, begin_ns: 6, lost_ns: 4 });
        assert_eq!(lags.take_lost_ns(), 4);
    }

    #[test]
    fn five_steps_by_about_as_much_or_fifteen_of_twenty_last() {
        let lasts = |ratios: &[f64]| lags(ratios).is_lasting();
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
