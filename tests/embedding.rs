//! A tree as a branch of the application's own.

mod support;

use std::collections::HashSet;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use streamvisor::{
    Failure, Outcome, RestartPolicy, Subscription, Supervisor, SupervisorHandle, Topology, ractor,
};
use support::record::{GROUP, Gate, Recorder, SOON, topology};
use support::*;
use tokio::sync::mpsc;

const STREAM: &str = "orders";

/// What happened to the branch, as its parent was told.
#[derive(Debug)]
enum Told {
    Failed(Failure),
    Terminated,
}

/// The application's root: starts a topology as a branch of its own.
struct Root;

struct RootState {
    topology: Topology,
    handle: SupervisorHandle,
    told: mpsc::UnboundedSender<Told>,
    /// Starts the topology again when it failed.
    again: bool,
}

enum RootMessage {
    Panic,
    Handle(ractor::RpcReplyPort<SupervisorHandle>),
}

#[cfg(feature = "cluster")]
impl ractor::Message for RootMessage {}

impl Actor for Root {
    type Msg = RootMessage;
    type State = RootState;
    type Arguments = (Topology, mpsc::UnboundedSender<Told>, bool);

    async fn pre_start(
        &self,
        myself: ActorRef<RootMessage>,
        (topology, told, again): Self::Arguments,
    ) -> Result<RootState, ActorProcessingErr> {
        let handle = Supervisor::start_linked(topology.clone(), myself.get_cell()).await?;
        Ok(RootState {
            topology,
            handle,
            told,
            again,
        })
    }

    async fn handle(
        &self,
        _: ActorRef<RootMessage>,
        message: RootMessage,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RootMessage::Panic => panic!("the application's root panics, as this test wants"),
            RootMessage::Handle(port) => port.send(state.handle.clone())?,
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMessage>,
        event: SupervisionEvent,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(branch, error) => {
                assert_eq!(branch.get_id(), state.handle.actor().get_id());
                let failure = error
                    .downcast_ref::<Failure>()
                    .expect("a failure of the tree")
                    .clone();
                if std::mem::take(&mut state.again) {
                    state.handle =
                        Supervisor::start_linked(state.topology.clone(), myself.get_cell()).await?;
                }
                let _ = state.told.send(Told::Failed(failure));
            }
            SupervisionEvent::ActorTerminated(..) => {
                let _ = state.told.send(Told::Terminated);
            }
            _ => {}
        }
        Ok(())
    }
}

/// How the parent ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Stop,
    Kill,
    Panic,
    /// The task that runs it is dropped.
    Drop,
}

/// A parent of a tree that has 1,000 entries in hand, some of them running, ends. What runs finishes,
/// what waits is given back at once, and nobody is left.
async fn ends_with_entries_in_flight(end: End) {
    let server = Server::start(Version::Redis70);
    server.xgroup_create(STREAM, GROUP, "0");
    let gate = Gate::closed();
    let behind = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = behind.clone();
        async move {
            if call.text() != "quick" {
                gate.passed().await;
            }
            Ok(Outcome::Ack)
        }
    });
    let draft = Subscription::tail(STREAM).workers(10).max_in_flight(2000);
    let (told, _told) = mpsc::unbounded_channel();
    let arguments = (
        topology(&server.url()).subscribe(recorder.on(draft)),
        told,
        false,
    );
    let (root, running) = Actor::spawn(None, Root, arguments).await.unwrap();
    // What is known to be quick may have many entries in hand.
    let bodies = |of: &'static [&'static str]| {
        of.iter()
            .map(|body| vec![("_payload".to_owned(), (*body).to_owned())])
    };
    server.xadd_many(STREAM, bodies(&["quick"; 1000]));
    eventually(SOON, "the quick ones are settled", || {
        recorder.count() == 1000 && server.xpending_count(STREAM, GROUP) == 0
    })
    .await;
    server.xadd_many(STREAM, bodies(&["slow"; 1000]));
    eventually(SOON, "1,000 are in flight", || {
        recorder.count() == 1010 && server.xpending_count(STREAM, GROUP) == 1000
    })
    .await;
    match end {
        End::Stop => root.stop(None),
        End::Kill => root.kill(),
        End::Panic => root.cast(RootMessage::Panic).unwrap(),
        End::Drop => running.abort(),
    }
    assert_eq!(running.await.is_ok(), !matches!(end, End::Drop));
    // A consumer with a long min_idle has to wait for everything that was not given back.
    let elsewhere = Recorder::acking();
    let draft =
        Subscription::reclaim(STREAM, Duration::from_secs(600)).block(Duration::from_millis(50));
    let other = Supervisor::start(topology(&server.url()).subscribe(elsewhere.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "what was not started is handled elsewhere", || {
        elsewhere.count() == 990
    })
    .await;
    assert!(elsewhere.calls().iter().all(|call| call.attempt == 1));
    gate.open();
    eventually(SOON, "nothing is pending", || {
        server.xpending_count(STREAM, GROUP) == 0
    })
    .await;
    other.shutdown().await.unwrap();
    eventually(SOON, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
    let all: HashSet<_> = recorder.ids().into_iter().chain(elsewhere.ids()).collect();
    assert_eq!(
        (all.len(), recorder.count(), elsewhere.count()),
        (2000, 1010, 990)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_stops_leaves_nothing_undone() {
    ends_with_entries_in_flight(End::Stop).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_is_killed_leaves_nothing_undone() {
    ends_with_entries_in_flight(End::Kill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_panics_leaves_nothing_undone() {
    ends_with_entries_in_flight(End::Panic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_is_dropped_leaves_nothing_undone() {
    ends_with_entries_in_flight(End::Drop).await;
}

/// Two runtimes of one process, each with a tree of the same topology. One of them is torn down with all
/// that runs on it, and the other takes over what it had.
#[test]
fn two_runtimes_do_not_disturb_each_other() {
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    let runtime = || {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(1).enable_all().build().unwrap()
    };
    let (one, other) = (runtime(), runtime());
    let gate = Gate::closed();
    let (stuck, recorder) = (Recorder::behind(&gate), Recorder::acking());
    let of = |recorder: &Recorder| {
        let tail = Subscription::tail(STREAM).workers(2).max_in_flight(10);
        let reclaim = Subscription::reclaim(STREAM, Duration::from_millis(600));
        let reclaim = reclaim.block(Duration::from_millis(50));
        topology(&server.url())
            .subscribe(recorder.on(tail.block(Duration::from_millis(100))))
            .subscribe(recorder.on(reclaim))
    };
    let first = one.block_on(Supervisor::start(of(&stuck))).unwrap();
    server.add_numbers(STREAM, 0..10);
    one.block_on(stuck.reaches(2));
    let second = other.block_on(Supervisor::start(of(&recorder))).unwrap();
    server.add_numbers(STREAM, 10..20);
    other.block_on(recorder.reaches(10));
    one.shutdown_background();
    other.block_on(recorder.reaches(20));
    assert_eq!((recorder.count(), recorder.distinct()), (20, 20));
    other.block_on(async {
        eventually(SOON, "nothing is pending", || {
            server.xpending_count(STREAM, GROUP) == 0
        })
        .await;
        second.shutdown().await.unwrap();
    });
    // Dropped where nothing of it runs any more.
    drop(first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_fails_is_news_to_its_parent_which_may_start_it_again() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create(STREAM, GROUP, "0");
    let recorder = Recorder::acking();
    let topology = topology(&server.url())
        .restart(RestartPolicy::default().max_restarts(1))
        .subscribe(
            recorder.on(Subscription::tail(STREAM)
                .create_group(false)
                .block(Duration::from_millis(50))),
        );
    // The second start would be refused without a group, so the parent finds one again.
    let (told, mut telling) = mpsc::unbounded_channel();
    let (root, running) = Actor::spawn(None, Root, (topology, told, true))
        .await
        .unwrap();
    let handle = ractor::call_t!(root, RootMessage::Handle, 5000).unwrap();
    server.command(&["XGROUP", "DESTROY", STREAM, GROUP]);
    let failure = handle.wait().await.unwrap_err();
    assert!(failure.error.contains("NOGROUP"), "{failure}");
    server.xgroup_create(STREAM, GROUP, "0");
    let told = tokio::time::timeout(SOON, telling.recv()).await;
    match told {
        Ok(Some(Told::Failed(told))) => {
            assert_eq!(told, failure);
            server.xadd(STREAM, &[("_payload", "1")]);
            eventually(SOON, "the tree works again", || recorder.count() == 1).await;
        }
        // The group came too late for the second start: then the parent fails as any actor would.
        other => panic!("{other:?}"),
    }
    let again = ractor::call_t!(root, RootMessage::Handle, 5000).unwrap();
    again.shutdown().await.unwrap();
    assert!(matches!(telling.recv().await, Some(Told::Terminated)));
    root.stop(None);
    running.await.unwrap();
    eventually(SOON, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_trees_of_one_topology_live_side_by_side_in_one_process() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create(STREAM, GROUP, "0");
    let recorder = Recorder::acking();
    let topology = topology(&server.url()).subscribe(recorder.on(Subscription::tail(STREAM)));
    let first = Supervisor::start(topology.clone()).await.unwrap();
    let second = Supervisor::start(topology.clone()).await.unwrap();
    // A third one on a runtime of its own.
    let elsewhere = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let third = Supervisor::start(topology).await.unwrap();
            third.wait().await.unwrap()
        })
    });
    let bodies = (0..3000).map(|n| vec![("_payload".to_owned(), n.to_string())]);
    server.xadd_many(STREAM, bodies);
    eventually(SOON, "all are handled", || recorder.count() == 3000).await;
    first.shutdown().await.unwrap();
    server.xadd(STREAM, &[("_payload", "late")]);
    eventually(SOON, "the others go on", || recorder.count() == 3001).await;
    second.shutdown().await.unwrap();
    eventually(SOON, "nothing is pending", || {
        server.xpending_count(STREAM, GROUP) == 0
    })
    .await;
    assert_eq!(
        recorder.ids().into_iter().collect::<HashSet<_>>().len(),
        3001
    );
    // The third one belongs to a thread that waits for it, and nothing else holds it.
    server.kill();
    drop(elsewhere);
}
