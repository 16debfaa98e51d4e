//! The protocol, as a model that is checked in every order in which things can happen, at small sizes: two
//! or three entries, one group, one or two processes, and a few things that go wrong. What it covers is
//! written in ARCHITECTURE.md under "The model".

mod process;
mod properties;
mod protocol;
mod server;

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use self::properties::*;
use self::protocol::{Broken, Faults, World};

const NOTHING: Faults = Faults {
    crashes: 0,
    losses: 0,
    freezes: 0,
    stops: 0,
    destructions: 0,
};

/// One process that reads and recovers, alone.
fn alone(faults: Faults) -> World {
    World {
        processes: 1,
        entries: 3,
        credit: 3,
        reads: 2,
        reclaims: false,
        same_name: true,
        faults,
        broken: None,
    }
}

/// Two processes that read and take over what is left behind.
fn two(faults: Faults) -> World {
    World {
        processes: 2,
        entries: 2,
        credit: 2,
        reads: 1,
        reclaims: true,
        same_name: false,
        faults,
        broken: None,
    }
}

/// One process whose group may vanish.
fn group(faults: Faults) -> World {
    World {
        entries: 2,
        credit: 2,
        ..alone(faults)
    }
}

/// Two processes that share one entry.
fn one_entry(faults: Faults) -> World {
    World {
        entries: 1,
        credit: 1,
        ..two(faults)
    }
}

/// In every state that can be reached, every property holds.
fn check(name: &str, world: World) {
    let started = Instant::now();
    let checker = world.checker().threads(2).spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    eprintln!(
        "{name}: {states} states, up to {depth} steps, {:?}",
        started.elapsed()
    );
    checker.assert_properties();
}

/// Without this rule the property does not hold, in a world where it does with it.
fn needs(broken: Broken, property: &'static str, world: World) {
    let broken_world = World {
        broken: Some(broken),
        ..world
    };
    assert!(
        fails(property, broken_world),
        "{broken:?} should break: {property}"
    );
}

fn fails(property: &'static str, world: World) -> bool {
    let found = HasDiscoveries::AnyOf([property].into());
    let checker = world
        .checker()
        .threads(2)
        .finish_when(found)
        .spawn_bfs()
        .join();
    checker.discovery(property).is_some()
}

fn losses(losses: u8) -> Faults {
    Faults { losses, ..NOTHING }
}

const A_CRASH: Faults = Faults {
    crashes: 1,
    ..NOTHING
};
const A_FREEZE: Faults = Faults {
    freezes: 1,
    ..NOTHING
};
const THE_GROUP: Faults = Faults {
    destructions: 1,
    ..NOTHING
};

#[test]
fn replies_of_one_process_may_be_lost() {
    check("replies", alone(losses(2)));
}

#[test]
fn one_process_may_be_killed_and_goes_on_under_its_name() {
    let faults = Faults {
        losses: 1,
        ..A_CRASH
    };
    check("killed", alone(faults));
}

#[test]
fn the_group_may_vanish() {
    let replies = Faults {
        losses: 1,
        ..THE_GROUP
    };
    check("group, replies", group(replies));
    let credit = World {
        credit: 1,
        ..group(replies)
    };
    check("group, replies, little credit", credit);
    let killed = Faults {
        crashes: 1,
        ..THE_GROUP
    };
    check("group, killed", group(killed));
    let twice = Faults {
        destructions: 2,
        ..NOTHING
    };
    check("group, twice", group(twice));
}

#[test]
fn of_two_processes_one_may_be_killed() {
    check("two, killed", two(A_CRASH));
}

#[test]
fn of_two_processes_one_may_be_frozen() {
    check("two, frozen", two(A_FREEZE));
}

#[test]
fn of_two_processes_one_may_be_stopped() {
    let faults = Faults {
        stops: 1,
        losses: 1,
        ..NOTHING
    };
    check("two, stopped", two(faults));
}

#[test]
fn one_entry_may_meet_with_everything() {
    let faults = Faults {
        losses: 1,
        freezes: 1,
        ..A_CRASH
    };
    check("one entry", one_entry(faults));
}

/// Millions of states.
#[test]
#[ignore = "millions of states: run it in a release build"]
fn larger_worlds() {
    let killed = Faults {
        losses: 1,
        ..A_CRASH
    };
    check("two, killed, replies", two(killed));
    let frozen = Faults {
        losses: 1,
        ..A_FREEZE
    };
    check("two, frozen, replies", two(frozen));
    let stopped = Faults {
        stops: 1,
        freezes: 1,
        ..NOTHING
    };
    check("two, stopped, frozen", two(stopped));
    let everything = Faults {
        losses: 1,
        freezes: 1,
        stops: 1,
        ..A_CRASH
    };
    check("one entry, everything", one_entry(everything));
    let group_of_three = World {
        entries: 3,
        credit: 3,
        ..group(Faults {
            losses: 1,
            crashes: 1,
            ..THE_GROUP
        })
    };
    check("group of three, killed, replies", group_of_three);
    check("replies, three", alone(losses(3)));
}

#[test]
fn nothing_is_lost_for_these_rules() {
    needs(Broken::VerdictSentOnce, NOT_STUCK, alone(losses(1)));
    needs(Broken::FloorDropped, NOT_STUCK, alone(losses(1)));
    needs(Broken::FloorMoved, NOT_STUCK, alone(losses(2)));
    needs(Broken::RegisteredBehindUnknown, NOT_STUCK, alone(losses(1)));
    needs(Broken::OneLook, NOT_STUCK, alone(losses(1)));
    needs(Broken::NameTakenEarly, NOT_STUCK, alone(A_CRASH));
    let stop = Faults {
        stops: 1,
        ..NOTHING
    };
    needs(Broken::ConsumerRemoved, NOT_LOST, two(stop));
}

#[test]
fn nothing_is_done_twice_for_these_rules() {
    needs(Broken::CopyUnchecked, ONE_COPY, alone(losses(1)));
    needs(Broken::RecoversOverReads, ONCE, alone(losses(1)));
}

#[test]
fn nobody_takes_what_is_worked_on_for_these_rules() {
    needs(Broken::NoKeepAlive, KEPT, two(NOTHING));
    needs(Broken::NoKeepAlive, NO_OVERLAP, two(NOTHING));
    needs(Broken::IdleUnchecked, KEPT, two(NOTHING));
    needs(Broken::KeepAliveUnchecked, KEPT, two(A_FREEZE));
    let frozen = Faults {
        freezes: 1,
        ..THE_GROUP
    };
    assert!(!fails(KEPT, one_entry(frozen)));
    needs(Broken::RegisterUnchecked, KEPT, one_entry(frozen));
}

#[test]
fn a_count_means_starts_for_these_rules() {
    needs(Broken::CountsNotPutBack, STARTS, two(A_CRASH));
    needs(Broken::CountsNotPutBack, INNOCENT, two(A_CRASH));
    let killed = Faults {
        crashes: 1,
        ..THE_GROUP
    };
    needs(Broken::RegisteredAsStarted, STARTS, group(killed));
}

#[test]
fn a_group_is_made_again_without_loss_for_these_rules() {
    needs(Broken::NotRegistered, NOT_LOST, group(THE_GROUP));
    let replies = Faults {
        losses: 1,
        ..THE_GROUP
    };
    needs(Broken::RegisteredOnce, NOT_LOST, group(replies));
    needs(Broken::SettlesMeanwhile, NOT_LOST, group(THE_GROUP));
    needs(Broken::SettlesMeanwhile, NOT_STUCK, group(THE_GROUP));
    let credit = World {
        credit: 1,
        ..group(THE_GROUP)
    };
    needs(Broken::OnlyReadsNotice, NOT_STUCK, credit);
}

/// A limit, and no promise: a process that did not see its group missing, because another one had made it
/// again by then, finds what it has in hand pending for nobody, as if it had been settled.
#[test]
fn a_group_that_vanished_unseen_takes_verdicts_with_it() {
    assert!(fails(NOT_LOST, two(THE_GROUP)));
}
