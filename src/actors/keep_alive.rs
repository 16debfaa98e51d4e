//! Keeps what this process has in hand fresh on the server, so that nobody takes it over.
//!
//! One per tree, on a thread, a runtime and a connection of its own: a handler that blocks its thread,
//! and with it perhaps the whole runtime of the application, does not stop it. Only entries that have been in
//! hand for a while are ever sent, so that what is handled quickly costs nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::sync::{oneshot, watch};

use super::tree::{GroupState, Order, Tree};
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
    /// When each group is due.
    due: Vec<Instant>,
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
        let due = tree
            .groups
            .iter()
            .map(|group| Instant::now() + turn(group))
            .collect();
        Ok(KeepAliveState {
            order: tree.order.subscribe(),
            tree,
            connection: None,
            due,
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
        let next = state
            .due
            .iter()
            .min()
            .copied()
            .unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            () = tokio::time::sleep_until(next.into()) => state.round().await?,
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
    group.keep_alive / 2
}

impl KeepAliveState {
    async fn round(&mut self) -> Result<(), ActorProcessingErr> {
        let groups = self.tree.groups.clone();
        for (at, group) in groups.iter().enumerate() {
            let now = Instant::now();
            let Some(due) = self.due.get_mut(at) else {
                continue;
            };
            if *due > now {
                continue;
            }
            *due = now + turn(group);
            if group.given_up.load(Ordering::Acquire) {
                continue;
            }
            let aging = group.in_flight.aging(turn(group), now);
            if aging.is_empty() {
                continue;
            }
            group.at("keep_alive.before");
            let refreshed = self.refresh(group, &aging).await;
            group.at("keep_alive.kept");
            match refreshed {
                Ok(()) => self.failing = false,
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

    async fn refresh(
        &mut self,
        group: &GroupState,
        aging: &[(EntryId, Arc<str>)],
    ) -> Result<(), ServerError> {
        let connection = match &self.connection {
            Some(connection) => Arc::clone(connection),
            None => {
                let connection = self
                    .tree
                    .connect(Role::KeepAlive, "keep-alive", CONNECT)
                    .await?;
                self.connection.insert(connection).clone()
            }
        };
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
