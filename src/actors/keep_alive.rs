//! Keeps what this process has in hand fresh on the server, so that nobody takes it over.
//!
//! One per tree, on a thread, a runtime and a connection of its own: a handler that blocks its thread,
//! and with it perhaps the whole runtime of the application, does not stop it. Only entries that have been in
//! hand for a while are ever sent, so that what is handled quickly costs nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::sync::{oneshot, watch};

use super::lease::RENEW_EVERY;
use super::supervisor::{Message, SupervisorMessage};
use super::tree::{GroupState, Order, Tree, kept_for};
use crate::message::EntryId;
use crate::server::{Connection, Role, ServerError, keep_alive};

/// The most entries of one step: it holds the server for about a millisecond.
const STEP: usize = 150;
/// How long one try to connect may take.
const CONNECT: Duration = Duration::from_secs(1);

pub(crate) struct KeepAlive;

pub(crate) enum KeepAliveMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for KeepAliveMessage {}

pub(crate) struct KeepAliveState {
    tree: Arc<Tree>,
    connection: Option<Arc<Connection>>,
    /// When each group is due, by its number.
    due: HashMap<usize, Instant>,
    /// When the leases on consumers' names are due.
    leases_due: Instant,
    order: watch::Receiver<Order>,
    failing: bool,
}

/// Starts the actor on a thread of its own, linked to the supervisor.
pub(crate) async fn spawn(
    tree: Arc<Tree>,
    supervisor: ActorCell,
) -> Result<ActorRef<KeepAliveMessage>, ActorProcessingErr> {
    let (started, starting) = oneshot::channel();
    std::thread::Builder::new()
        .name("streamvisor-keep-alive".to_owned())
        .spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
            {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = started.send(Err(error.into()));
                    return;
                }
            };
            runtime.block_on(async move {
                match KeepAlive::spawn_linked(None, KeepAlive, tree, supervisor).await {
                    Ok((actor, ended)) => {
                        let _ = started.send(Ok(actor));
                        // The thread ends with the actor; the end itself is the supervisor's news.
                        let _ = ended.await;
                    }
                    Err(error) => {
                        let _ = started.send(Err(ActorProcessingErr::from(error)));
                    }
                }
            });
        })?;
    starting.await?
}

impl Actor for KeepAlive {
    type Msg = KeepAliveMessage;
    type State = KeepAliveState;
    type Arguments = Arc<Tree>;

    async fn pre_start(
        &self,
        myself: ActorRef<KeepAliveMessage>,
        tree: Arc<Tree>,
    ) -> Result<KeepAliveState, ActorProcessingErr> {
        myself.cast(KeepAliveMessage::Next)?;
        Ok(KeepAliveState {
            order: tree.order.subscribe(),
            tree,
            connection: None,
            due: HashMap::new(),
            leases_due: Instant::now() + RENEW_EVERY,
            failing: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<KeepAliveMessage>,
        KeepAliveMessage::Next: KeepAliveMessage,
        state: &mut KeepAliveState,
    ) -> Result<(), ActorProcessingErr> {
        if state.order.borrow().stop {
            if let Some(connection) = state.connection.take() {
                connection.close().await;
            }
            myself.stop(None);
            return Ok(());
        }
        let next = state.next_due();
        tokio::select! {
            () = tokio::time::sleep_until(next.into()) => {
                state.renew_leases(&myself).await;
                state.round().await?;
            }
            _ = state.order.changed() => {}
        }
        myself.cast(KeepAliveMessage::Next)?;
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<KeepAliveMessage>,
        state: &mut KeepAliveState,
    ) -> Result<(), ActorProcessingErr> {
        // Its tasks live on this thread's runtime, which ends now.
        if let Some(connection) = state.connection.take() {
            connection.abort();
        }
        Ok(())
    }
}

/// How often a group is looked at, and how old an entry is that is then kept fresh: half the interval
/// each, so that no entry is idle for longer than the interval.
fn turn(group: &GroupState) -> Duration {
    group.keep_alive() / 2
}

impl KeepAliveState {
    /// When the next group is due. What there is may have changed since the last look, and the intervals
    /// with it.
    fn next_due(&mut self) -> Instant {
        let now = Instant::now();
        let due = self.tree.groups().into_iter().map(|group| {
            let latest = now + turn(&group);
            let due = self
                .due
                .get(&group.number)
                .map_or(latest, |due| latest.min(*due));
            (group.number, due)
        });
        self.due = due.collect();
        let leased = self
            .tree
            .subscriptions()
            .iter()
            .any(|it| it.lease.is_some());
        let leases_due = leased.then_some(self.leases_due);
        let next = self.due.values().copied().chain(leases_due).min();
        next.unwrap_or_else(|| now + Duration::from_secs(3600))
    }

    async fn round(&mut self) -> Result<(), ActorProcessingErr> {
        for group in &self.tree.groups() {
            let now = Instant::now();
            if self.due.get(&group.number).is_none_or(|due| *due > now) {
                continue;
            }
            self.due.insert(group.number, now + turn(group));
            if group.given_up.load(Ordering::Acquire) {
                continue;
            }
            let aging = group.in_flight.aging(turn(group), now);
            if aging.is_empty() {
                group.kept.confirm(now, kept_for(group.keep_alive()));
                continue;
            }
            group.at("keep_alive.before");
            let refreshed = self.refresh(group, &aging).await;
            group.at("keep_alive.kept");
            match refreshed {
                Ok(()) => {
                    self.failing = false;
                    group.kept.confirm(now, kept_for(group.keep_alive()));
                }
                Err(error @ ServerError::Malformed(_)) => return Err(error.into()),
                Err(error) => {
                    if matches!(error, ServerError::GroupGone(_)) {
                        group.notice_missing();
                    }
                    // Tried again at the next turn; said once.
                    if !std::mem::replace(&mut self.failing, true) {
                        let entries = aging.len();
                        tracing::warn!(target: "streamvisor", %error, entries, "entries in hand cannot be kept fresh");
                    }
                }
            }
        }
        Ok(())
    }

    /// Renews the leases on the names of consumers. One that another process has ends its subscription.
    async fn renew_leases(&mut self, myself: &ActorRef<KeepAliveMessage>) {
        if self.leases_due > Instant::now() {
            return;
        }
        self.leases_due = Instant::now() + RENEW_EVERY;
        for subscription in self.tree.subscriptions() {
            let Some(lease) = subscription.lease.as_ref().filter(|it| !it.is_lost()) else {
                continue;
            };
            let renewed = match self.connection().await {
                Ok(connection) => lease.renew(&connection).await,
                Err(error) => Err(error),
            };
            match renewed {
                Ok(true) => {}
                Ok(false) => {
                    subscription.lose_name();
                    let lost = SupervisorMessage(Message::NameLost(subscription.number));
                    // A supervisor that is gone needs no word.
                    if let Some(supervisor) = myself.get_cell().try_get_supervisor() {
                        let _ = supervisor.send_message(lost);
                    }
                }
                // Tried again at the next turn; meanwhile nothing is read or started.
                Err(error) => {
                    let consumer = &subscription.source.consumer;
                    tracing::debug!(target: "streamvisor", %consumer, %error, "the lease on the consumer's name was not renewed");
                }
            }
        }
    }

    async fn connection(&mut self) -> Result<Arc<Connection>, ServerError> {
        if let Some(connection) = &self.connection {
            return Ok(Arc::clone(connection));
        }
        let connection = self.tree.connect(Role::KeepAlive, "keep-alive", CONNECT);
        let connection = connection.await?;
        Ok(self.connection.insert(connection).clone())
    }

    async fn refresh(
        &mut self,
        group: &GroupState,
        aging: &[(EntryId, Arc<str>)],
    ) -> Result<(), ServerError> {
        let connection = self.connection().await?;
        for step in aging.chunks(STEP) {
            let now = Instant::now();
            let not_kept = keep_alive::keep_alive(&connection, &group.group, step).await?;
            let ids: Vec<EntryId> = step.iter().map(|(id, _)| *id).collect();
            group.in_flight.refreshed(&ids, now);
            group.lose(&not_kept.anothers);
        }
        Ok(())
    }
}
