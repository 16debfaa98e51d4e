//! What the status says, and that it never says more than is known.

mod support;

use std::time::Duration;

use futures_util::StreamExt;
use streamvisor::{
    Child, Event, MissedEvents, Outcome, RestartPolicy, State, Subscription, SubscriptionStatus,
    Supervisor, SupervisorHandle, ractor,
};
use support::record::{GROUP, Gate, Recorder, SOON, stream_of, topology};
use support::*;

async fn state_is(supervisor: &SupervisorHandle, expected: State) {
    let deadline = std::time::Instant::now() + SOON;
    loop {
        let state = supervisor.status().await.subscriptions[0].state;
        if state == expected {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "the state stays {state:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_counts_what_was_read_and_what_came_of_it() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("orders", GROUP, "0");
    for body in ["ack", "ack", "reject", "dead", "leave", "held"] {
        server.xadd("orders", &[("_payload", body)]);
    }
    let gate = Gate::closed();
    let behind = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = behind.clone();
        async move {
            Ok(match call.text() {
                "ack" => Outcome::Ack,
                "reject" => Outcome::Reject,
                "dead" => Outcome::DeadLetter("no".to_owned()),
                "leave" => Outcome::LeavePending,
                _ => {
                    gate.passed().await;
                    Outcome::Ack
                }
            })
        }
    });
    let draft = Subscription::tail("orders")
        .named("orders")
        .dead_letter("dead");
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "only the held and the left one are pending", || {
        recorder.count() == 6 && server.xpending_count("orders", GROUP) == 2
    })
    .await;
    let status = eventually_status(&supervisor, |status| status.in_flight == 1).await;
    assert_eq!(&*status.name, "orders");
    assert_eq!(status.state, State::Running);
    assert_eq!(
        (
            status.read,
            status.recovered,
            status.running,
            status.waiting
        ),
        (6, 0, 1, 0)
    );
    let verdicts = status.verdicts;
    assert_eq!(
        (
            verdicts.acknowledged,
            verdicts.rejected,
            verdicts.dead_lettered,
            verdicts.left_pending
        ),
        (2, 1, 1, 1)
    );
    assert_eq!((status.lag, status.pending), (Some(0), Some(2)));
    assert!(status.oldest_idle.is_some());
    assert!(status.last_error.is_none());
    let text = serde_json::to_string(&supervisor.status().await).unwrap();
    assert!(
        text.contains(r#""state":"running""#) && text.contains(r#""stream":"orders""#),
        "{text}"
    );
    gate.open();
    supervisor.shutdown().await.unwrap();
}

async fn eventually_status(
    supervisor: &SupervisorHandle,
    accept: impl Fn(&streamvisor::SubscriptionStatus) -> bool,
) -> streamvisor::SubscriptionStatus {
    let deadline = std::time::Instant::now() + SOON;
    loop {
        let status = supervisor.status().await.subscriptions.swap_remove(0);
        if accept(&status) {
            return status;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "the status stays {status:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lag_that_the_server_does_not_know_is_unknown() {
    let server = Server::start(Version::Redis70);
    let ids: Vec<String> = (0..4)
        .map(|_| server.xadd("orders", &[("a", "b")]))
        .collect();
    // A group in the middle of a stream has no lag that the server could tell.
    server.xgroup_create("orders", GROUP, &ids[1]);
    server.command(&["XDEL", "orders", &ids[3]]);
    let gate = Gate::closed();
    let draft = Subscription::tail("orders")
        .workers(1)
        .batch(1)
        .max_in_flight(1);
    let topology = topology(&server.url()).subscribe(Recorder::behind(&gate).on(draft));
    let supervisor = Supervisor::start(topology).await.unwrap();
    // What the server says is a moment older than what this process knows.
    let both = |status: &SubscriptionStatus| status.running == 1 && status.pending == Some(1);
    let status = eventually_status(&supervisor, both).await;
    assert_eq!(status.lag, None);
    gate.open();
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_shown_with_its_error_and_what_only_it_knows_is_unknown() {
    let server = Server::start(Version::Redis70);
    let topology =
        topology(&server.url()).subscribe(Recorder::acking().on(Subscription::tail("orders")));
    let supervisor = Supervisor::start(topology).await.unwrap();
    state_is(&supervisor, State::Running).await;
    server.kill();
    state_is(&supervisor, State::WaitingForServer).await;
    let status = supervisor.status().await.subscriptions.swap_remove(0);
    assert_eq!(
        (status.lag, status.pending, status.oldest_idle),
        (None, None, None)
    );
    assert!(status.last_error.is_some());
    server.restart();
    state_is(&supervisor, State::Running).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_is_blocked_and_what_was_given_up_has_failed() {
    let server = Server::start(Version::Redis70);
    let policy = RestartPolicy::default().max_restarts(1).isolate();
    let draft = Subscription::tail("orders").create_group(false);
    server.xgroup_create("orders", GROUP, "0");
    let topology = topology(&server.url())
        .restart(policy)
        .subscribe(Recorder::acking().on(draft))
        .subscribe(Recorder::acking().on(Subscription::tail("others")));
    let supervisor = Supervisor::start(topology).await.unwrap();
    state_is(&supervisor, State::Running).await;
    server.command(&["XGROUP", "DESTROY", "orders", GROUP]);
    state_is(&supervisor, State::Failed).await;
    let status = supervisor.status().await;
    assert_eq!(status.subscriptions[0].restarts, 1);
    let [restarted] = &status.restarts[..] else {
        panic!("{:?}", status.restarts)
    };
    assert!(
        matches!(&restarted.child, Child::Reader { subscription } if **subscription == *"orders/g/tail")
    );
    let error = &status.subscriptions[0].last_error.as_ref().unwrap().error;
    assert!(error.contains("NOGROUP"), "{error}");

    assert_eq!(status.subscriptions[1].state, State::Running);
    server.command(&["SET", "others", "no stream any more"]);
    let deadline = std::time::Instant::now() + SOON;
    while supervisor.status().await.subscriptions[1].state != State::Blocked {
        assert!(std::time::Instant::now() < deadline, "it is never blocked");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    supervisor.shutdown().await.unwrap();
}

/// An actor that notes the events that it is sent.
struct Monitor;

struct Happened(Result<Event, MissedEvents>);

impl From<Result<Event, MissedEvents>> for Happened {
    fn from(event: Result<Event, MissedEvents>) -> Self {
        Happened(event)
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for Happened {}

impl ractor::Actor for Monitor {
    type Msg = Happened;
    type State = tokio::sync::mpsc::UnboundedSender<Event>;
    type Arguments = Self::State;

    async fn pre_start(
        &self,
        _: ractor::ActorRef<Happened>,
        sender: Self::State,
    ) -> Result<Self::State, ractor::ActorProcessingErr> {
        Ok(sender)
    }

    async fn handle(
        &self,
        _: ractor::ActorRef<Happened>,
        Happened(event): Happened,
        sender: &mut Self::State,
    ) -> Result<(), ractor::ActorProcessingErr> {
        sender.send(event?)?;
        Ok(())
    }
}

#[tokio::test]
async fn events_reach_an_actor_and_a_stream_until_the_tree_ends() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "told");
    let draft = Subscription::tail(&stream).named("told");
    let topology = topology(&server.url()).subscribe(Recorder::acking().on(draft));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
    let (monitor, _) = ractor::Actor::spawn(None, Monitor, sender).await.unwrap();
    supervisor.events().forward_to(monitor.clone());
    let streamed = supervisor.events().into_stream();
    supervisor.pause("told").await.unwrap();
    supervisor.resume("told").await.unwrap();
    supervisor.shutdown().await.unwrap();
    let streamed: Vec<_> = streamed.map(Result::unwrap).collect().await;
    let subscription = || "told".into();
    let expected = [
        Event::Paused {
            subscription: subscription(),
        },
        Event::Resumed {
            subscription: subscription(),
        },
    ];
    assert!(
        streamed.windows(2).any(|two| two == expected),
        "{streamed:?}"
    );
    assert!(matches!(streamed.last(), Some(Event::Drained { .. })));
    let mut heard = Vec::new();
    while !matches!(heard.last(), Some(Event::Drained { .. })) {
        heard.push(told.recv().await.unwrap());
    }
    assert!(heard.windows(2).any(|two| two == expected), "{heard:?}");
    monitor.stop(None);
}
