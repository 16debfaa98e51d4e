//! From what came of an entry to what the server is to do about it: arithmetic, no I/O.

use std::time::Duration;

use super::delays::Delays;
use crate::message::{self, Destination, Outcome, Received, Verdict};
use crate::state::{CopyJob, ParkedJob};
use crate::topology::{End, OnCrash, Place, RetryPolicy, Settings};

/// What is to be done with an entry.
#[derive(Debug)]
pub(crate) enum Step {
    Acknowledge,
    Copy(CopyJob),
    /// Wait here, then have the server copy it.
    Park(Duration, ParkedJob),
    /// Let it lie; with a reason where nobody asked for that.
    Leave(Option<String>),
}

/// What this verdict on this entry asks for.
pub(crate) fn step(received: &Received, verdict: Verdict, settings: &Settings) -> Step {
    let retry = &settings.retry;
    match verdict {
        Verdict::Said(Outcome::Ack | Outcome::Reject) => Step::Acknowledge,
        Verdict::Said(Outcome::LeavePending) => Step::Leave(None),
        Verdict::Said(Outcome::DeadLetter(reason)) => {
            dead_letter(received, received.attempt(), &reason, None, settings)
        }
        Verdict::Said(Outcome::Retry) => again(received, Duration::ZERO, None, settings),
        Verdict::Said(Outcome::RetryAfter(delay)) => again(received, delay, None, settings),
        Verdict::Failed(error) => again(received, delay(retry, received), Some(&error), settings),
        Verdict::Crashed(error) => match settings.on_crash {
            OnCrash::Retry => again(received, delay(retry, received), Some(&error), settings),
            OnCrash::LeavePending => Step::Leave(None),
            OnCrash::DeadLetter => {
                let attempts = received.attempt();
                dead_letter(
                    received,
                    attempts,
                    "its handler crashed",
                    Some(&error),
                    settings,
                )
            }
        },
        Verdict::Undecodable(error) => {
            let attempts = received.attempt();
            dead_letter(
                received,
                attempts,
                "cannot be decoded",
                Some(&error),
                settings,
            )
        }
        Verdict::Spent => end(
            received,
            received.attempt().saturating_sub(1),
            None,
            settings,
        ),
    }
}

/// Whether the attempts of an entry that was just read are spent: its handler was started often
/// enough, and every time the process died over it.
///
/// A count of one may be a mere fetch, so it is never enough.
pub(crate) fn is_spent(received: &Received, settings: &Settings) -> bool {
    !received.fresh
        && received.count_before() >= 2
        && settings
            .retry
            .end_after(received.attempt().saturating_sub(1))
            .is_some()
}

/// Whether it may be what ended the process that had it before: it was started twice without a verdict, or
/// this is its last attempt, and the start before that may have been one.
///
/// Such entries begin one at a time, see [`Turn`](message::Turn): of several that run when the process dies
/// none could be told from the one that it died of. What runs beside it for the first time may be counted
/// once more for it, and is a suspect itself then.
pub(crate) fn is_suspect(received: &Received, settings: &Settings) -> bool {
    let started = received.count_before();
    let is_last = || settings.retry.end_after(received.attempt()).is_some();
    !received.fresh && (started >= 2 || started == 1 && is_last())
}

fn delay(policy: &RetryPolicy, received: &Received) -> Duration {
    Delays::after(policy.initial, policy.max_delay, received.attempt())
}

fn again(received: &Received, delay: Duration, error: Option<&str>, settings: &Settings) -> Step {
    if settings.retry.end_after(received.attempt()).is_some() {
        return end(received, received.attempt(), error, settings);
    }
    match &settings.delayed_retry.place {
        _ if delay.is_zero() => copy(
            received,
            Destination::Stream,
            message::retry(received, error),
            delay,
        ),
        Place::Durable { set, ttl } => {
            let to = Destination::Delay {
                set: set.clone(),
                ttl: *ttl,
            };
            copy(received, to, message::retry(received, error), delay)
        }
        Place::InProcess => Step::Park(
            delay,
            ParkedJob {
                id: received.id(),
                owner: received.source.consumer.clone(),
                subscription: received.source.index,
                headers: message::retry_headers(received, error),
                refusals: 0,
            },
        ),
    }
}

fn end(received: &Received, attempts: u64, error: Option<&str>, settings: &Settings) -> Step {
    match settings.retry.end {
        Some(End::Reject) => Step::Acknowledge,
        Some(End::DeadLetter) | None => {
            let reason = format!("all {attempts} attempts are spent");
            dead_letter(received, attempts, &reason, error, settings)
        }
    }
}

fn dead_letter(
    received: &Received,
    attempts: u64,
    reason: &str,
    error: Option<&str>,
    settings: &Settings,
) -> Step {
    match &settings.dead_letter {
        Some(stream) => copy(
            received,
            Destination::DeadLetter {
                stream: stream.clone(),
            },
            message::dead_letter(received, attempts, reason, error),
            Duration::ZERO,
        ),
        None => Step::Leave(Some(match error {
            Some(error) => format!("{reason}: {error}; no dead-letter stream is set"),
            None => format!("{reason}; no dead-letter stream is set"),
        })),
    }
}

fn copy(received: &Received, to: Destination, fields: Vec<bytes::Bytes>, delay: Duration) -> Step {
    Step::Copy(CopyJob {
        id: received.id(),
        owner: received.source.consumer.clone(),
        subscription: received.source.index,
        to,
        fields,
        delay,
        attempt: received.attempt(),
        copied: false,
        refusals: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Context, Entry, EntryId, test_source};
    use crate::topology::{DelayedRetry, Draft, Subscription};

    fn settings(draft: Draft) -> Settings {
        draft
            .handle_fn(|_: u64, _: Context| async { Ok(Outcome::Ack) })
            .settings
    }

    fn fresh(copies: &'static str) -> Received {
        let entry = Entry::new(EntryId::new(1, 0), [("h:retry-count", copies)]);
        Received::fresh(entry, &test_source(0))
    }

    fn recovered(count: u64) -> Received {
        let entry = Entry::new(EntryId::new(1, 0), [("a", "b")]);
        Received::recovered(entry, &test_source(0), count, Duration::ZERO)
    }

    fn capped(attempts: u64) -> Draft {
        let policy = RetryPolicy::exponential(Duration::from_secs(1)).max_attempts(attempts);
        Subscription::tail("s")
            .retry(policy.then_dead_letter())
            .dead_letter("d")
    }

    fn destination(step: Step) -> Option<Destination> {
        match step {
            Step::Copy(job) => Some(job.to),
            _ => None,
        }
    }

    #[test]
    fn every_way_to_fail_ends_after_the_same_number_of_attempts() {
        let settings = settings(capped(3));
        let dead = Destination::DeadLetter { stream: "d".into() };
        for verdict in [
            || Verdict::Said(Outcome::Retry),
            || Verdict::Said(Outcome::RetryAfter(Duration::from_secs(1))),
            || Verdict::Failed("no".into()),
            || Verdict::Crashed("boom".into()),
        ] {
            assert_ne!(
                destination(step(&fresh("1"), verdict(), &settings)).as_ref(),
                Some(&dead)
            );
            assert_eq!(
                destination(step(&fresh("2"), verdict(), &settings)).as_ref(),
                Some(&dead)
            );
        }
    }

    #[test]
    fn attempts_are_spent_on_arrival_only_after_two_starts_that_the_server_counted() {
        let three = settings(capped(3));
        assert!(!is_spent(&recovered(2), &three));
        assert!(is_spent(&recovered(3), &three));
        let one = settings(capped(1));
        assert!(!is_spent(&recovered(1), &one));
        assert!(is_spent(&recovered(2), &one));
        assert!(!is_spent(&fresh("9"), &one));
    }

    #[test]
    fn delays_wait_where_the_subscription_says_and_no_delay_waits_nowhere() {
        let later = || Verdict::Said(Outcome::RetryAfter(Duration::from_secs(9)));
        let here = settings(Subscription::tail("s"));
        assert!(
            matches!(step(&fresh("0"), later(), &here), Step::Park(delay, _) if delay.as_secs() == 9)
        );
        let durable = settings(Subscription::tail("s").delayed_retry(DelayedRetry::durable("z")));
        let Step::Copy(job) = step(&fresh("0"), later(), &durable) else {
            panic!("not a copy")
        };
        assert_eq!(
            job.to,
            Destination::Delay {
                set: "z".into(),
                ttl: None
            }
        );
        assert_eq!(job.delay.as_secs(), 9);
        let now = step(&fresh("0"), Verdict::Said(Outcome::Retry), &durable);
        assert_eq!(destination(now), Some(Destination::Stream));
    }

    #[test]
    fn without_a_dead_letter_stream_the_entry_is_left_and_the_reason_said() {
        let none = settings(Subscription::tail("s"));
        let left = step(&fresh("0"), Verdict::Undecodable("bad".into()), &none);
        assert!(matches!(left, Step::Leave(Some(reason)) if reason.contains("bad")));
        assert!(matches!(
            step(&fresh("0"), Verdict::Said(Outcome::LeavePending), &none),
            Step::Leave(None)
        ));
    }
}
