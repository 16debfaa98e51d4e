//! Names of consumers that the user gave: one process at a time may use one.
//!
//! Two processes of one consumer name would take each other's entries for their own, and no check of the
//! owner could tell them apart. So such a name is held under a lease on the server, which is renewed for as
//! long as the process lives and runs out soon after.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::message::StreamKey;
use crate::server::lease::{self, Renewal};
use crate::server::{Connection, Group, ServerError};
use crate::state::Confirmed;

/// How long a lease lasts from its last renewal. A process that is started again with the name of one that
/// crashed waits for as long.
const LASTS: Duration = Duration::from_millis(1500);
/// How often it is renewed.
pub(crate) const RENEW_EVERY: Duration = Duration::from_millis(300);
/// How often a lease that another process has is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// A lease that has so much more left than it should have was renewed.
const RENEWED: Duration = Duration::from_millis(200);

/// The lease on the name of one subscription's consumer.
#[derive(Debug)]
pub(crate) struct Lease {
    key: StreamKey,
    token: String,
    pub held: Confirmed,
    lost: AtomicBool,
}

impl Lease {
    /// Takes the lease, and waits for that of a process that has ended to run out. `None`: another process
    /// renews it.
    pub(crate) async fn take(
        connection: &Connection,
        group: &Group,
        consumer: &str,
    ) -> Result<Option<Lease>, ServerError> {
        let key = lease::key(group, consumer);
        let token = format!("{:032x}", rand::random::<u128>());
        let mut runs_out: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if lease::take(connection, &key, &token, LASTS).await? {
                let held = Confirmed::new(Duration::ZERO);
                held.confirm(now, LASTS);
                return Ok(Some(Lease {
                    key,
                    token,
                    held,
                    lost: AtomicBool::new(false),
                }));
            }
            if let Some(left) = lease::time_left(connection, &key).await? {
                let runs_out = *runs_out.get_or_insert(now + left);
                if now + left > runs_out + RENEWED {
                    return Ok(None);
                }
                tokio::time::sleep(left.min(LOOK_AGAIN)).await;
            }
        }
    }

    /// Renews it. `false`: another process has it now. One that merely ran out is taken again.
    pub(crate) async fn renew(&self, connection: &Connection) -> Result<bool, ServerError> {
        let now = Instant::now();
        let ours = match lease::renew(connection, &self.key, &self.token, LASTS).await? {
            Renewal::Renewed => true,
            Renewal::Vanished => lease::take(connection, &self.key, &self.token, LASTS).await?,
            Renewal::Anothers => false,
        };
        if ours {
            self.held.confirm(now, LASTS);
        } else {
            self.lost.store(true, Ordering::Release);
        }
        Ok(ours)
    }

    /// Another process has it, for good.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Gives it up, so that the next process of this name need not wait.
    pub(crate) async fn release(&self, connection: &Connection) -> Result<(), ServerError> {
        lease::release(connection, &self.key, &self.token).await
    }
}
