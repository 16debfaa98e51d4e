//! What to run: plain data and its validation. Nothing here speaks to a server.

mod handling;
mod plan;
mod redis;
mod restart;
mod retry;
mod subscription;
#[allow(clippy::module_inception)] // the file of the type of that name
mod topology;

pub use handling::{BatchHandler, Handler, Worker};
pub use plan::InvalidTopology;
pub use redis::{InvalidRedis, Redis};
pub use restart::RestartPolicy;
pub use retry::{DelayedRetry, OnCrash, RetryPolicy};
pub use subscription::{AfterAck, Draft, Start, Subscription};
pub use topology::Topology;

pub(crate) use handling::{Code, Forwards, MessageType, Runner, Supply, Target, WorkPlace};
pub(crate) use plan::{Defaults, MOST_WORKERS, PlannedSubscription, bounds, plan, set_keep_alives};
pub(crate) use retry::{End, Place};
pub(crate) use subscription::{ReadMode, Settings};
