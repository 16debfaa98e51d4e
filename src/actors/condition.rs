//! How the server is to a subscription: told once when it changes, however often it is met.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use crate::observe::{Announcer, Event, LastError, State};
use crate::server::ServerError;

/// How the server is to a subscription, by what its reader and its settler last heard.
pub(crate) struct Condition {
    name: Arc<str>,
    announcer: Announcer,
    inner: Mutex<BTreeMap<Part, Trouble>>,
    last_error: Mutex<Option<LastError>>,
}

/// Whose experience it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Reading,
    Settling,
}

struct Trouble {
    blocked: bool,
    since: Instant,
}

impl Condition {
    pub(crate) fn new(name: Arc<str>, announcer: Announcer) -> Self {
        Condition {
            name,
            announcer,
            inner: Mutex::default(),
            last_error: Mutex::default(),
        }
    }

    /// It works.
    pub(crate) fn well(&self, part: Part) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(trouble) = inner.remove(&part) else {
            return;
        };
        if !inner.is_empty() {
            return;
        }
        drop(inner);
        let subscription = self.name.clone();
        self.announcer.announce(if trouble.blocked {
            Event::Unblocked { subscription }
        } else {
            Event::ServerBack {
                subscription,
                after: trouble.since.elapsed(),
            }
        });
    }

    /// The server is away, or refuses. Said once, however often it happens.
    pub(crate) fn trouble(&self, part: Part, error: &ServerError) {
        let blocked = error.is_lasting();
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let known = inner.values().any(|trouble| trouble.blocked == blocked);
        let error = error.to_string();
        self.note(&error);
        let since = inner
            .get(&part)
            .map_or_else(Instant::now, |trouble| trouble.since);
        inner.insert(part, Trouble { blocked, since });
        drop(inner);
        if known {
            tracing::debug!(target: "streamvisor", subscription = %self.name, error, "still in trouble");
            return;
        }
        let subscription = self.name.clone();
        self.announcer.announce(if blocked {
            Event::Blocked {
                subscription,
                error,
            }
        } else {
            Event::ServerAway {
                subscription,
                error,
            }
        });
    }

    /// Whether the server is away, or refuses something, right now.
    pub(crate) fn state(&self) -> Option<State> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let blocked = inner.values().any(|trouble| trouble.blocked);
        match (blocked, inner.is_empty()) {
            (true, _) => Some(State::Blocked),
            (false, false) => Some(State::WaitingForServer),
            (false, true) => None,
        }
    }

    /// Remembers an error until the next one.
    pub(crate) fn note(&self, error: &str) {
        let last = LastError {
            at: SystemTime::now(),
            error: error.to_owned(),
        };
        *self
            .last_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    pub(crate) fn last_error(&self) -> Option<LastError> {
        self.last_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
