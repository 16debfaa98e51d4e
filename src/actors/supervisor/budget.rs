//! How often a child may be started again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::actors::delays::Delays;
use crate::topology::RestartPolicy;

/// How often one child was started again of late.
pub(super) struct Budget {
    max_restarts: u32,
    within: Duration,
    spent: VecDeque<Instant>,
    delays: Delays,
}

impl Budget {
    pub(super) fn new(policy: &RestartPolicy) -> Self {
        Budget {
            max_restarts: policy.max_restarts,
            within: policy.within,
            spent: VecDeque::new(),
            delays: Delays::new(policy.first_delay, policy.max_delay),
        }
    }

    /// How long to wait before the next restart; `None` when there were too many.
    pub(super) fn spend(&mut self, now: Instant) -> Option<Duration> {
        while self
            .spent
            .front()
            .is_some_and(|at| now.saturating_duration_since(*at) >= self.within)
        {
            self.spent.pop_front();
        }
        if self.spent.is_empty() {
            self.delays.reset();
        }
        self.spent.push_back(now);
        match self.spent.len() {
            spent if spent > self.max_restarts as usize => None,
            1 => Some(Duration::ZERO),
            _ => Some(self.delays.next()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_immediate_the_next_wait_and_one_too_many_is_refused() {
        let mut budget = Budget::new(&RestartPolicy::default().max_restarts(3));
        let start = Instant::now();
        assert_eq!(budget.spend(start), Some(Duration::ZERO));
        let second = budget.spend(start).unwrap();
        assert!(second > Duration::ZERO);
        assert!(budget.spend(start).unwrap() > second / 2);
        assert_eq!(budget.spend(start), None);
    }

    #[test]
    fn restarts_outside_the_window_are_forgotten() {
        let policy = RestartPolicy::default()
            .max_restarts(1)
            .within(Duration::from_secs(10));
        let mut budget = Budget::new(&policy);
        let start = Instant::now();
        assert_eq!(budget.spend(start), Some(Duration::ZERO));
        assert_eq!(
            budget.spend(start + Duration::from_secs(10)),
            Some(Duration::ZERO)
        );
        assert_eq!(budget.spend(start + Duration::from_secs(11)), None);
    }
}
