//! What must hold in every state.

use stateright::Property;

use super::process::{Held, Stage};
use super::protocol::{Faults, State, World};
use super::server::{Id, at};

pub const NOT_LOST: &str = "no entry is lost";
pub const NOT_STUCK: &str = "when all is quiet, every entry was handled and nothing is pending";
pub const ONE_COPY: &str = "a verdict makes one copy at most";
pub const KEPT: &str = "nobody takes what is being worked on";
pub const NO_OVERLAP: &str = "two run an entry only if one of them was frozen";
pub const ONCE: &str = "where nobody is killed or frozen, an entry is run once";
pub const STARTS: &str = "a count means starts";
pub const DONE: &str = "all can be handled";
pub const INNOCENT: &str = "nobody gives up on an entry that was never started";

pub fn all() -> Vec<Property<World>> {
    vec![
        Property::always(NOT_LOST, |_: &World, state: &State| {
            state.server.ids().all(|id| is_somewhere(state, id))
        }),
        Property::always(NOT_STUCK, |world: &World, state: &State| {
            is_done(state) || goes_on(world, state)
        }),
        Property::always(ONE_COPY, |_: &World, state: &State| {
            let history = &state.history;
            let most = |id| history.retries[at(id)] + history.again[at(id)];
            state
                .server
                .ids()
                .all(|id| state.server.copies[at(id)] <= most(id))
        }),
        Property::always(KEPT, |_: &World, state: &State| {
            !state.history.stolen && (state.history.destroyed || is_kept(state))
        }),
        Property::always(NO_OVERLAP, |_: &World, state: &State| {
            state.server.ids().all(|id| {
                let runs = |held: &Held| held.stage == Stage::Running && !held.frozen;
                let held = state
                    .processes
                    .iter()
                    .filter_map(|process| process.held(id));
                held.filter(runs).count() <= 1
            })
        }),
        Property::always(ONCE, |world: &World, state: &State| {
            let Faults {
                crashes,
                freezes,
                destructions,
                ..
            } = world.faults;
            crashes + freezes + destructions > 0 || state.history.runs.iter().all(|runs| *runs <= 1)
        }),
        Property::always(STARTS, |_: &World, state: &State| {
            state.server.ids().all(|id| {
                let pending = state.server.pending(id);
                pending.is_none_or(|it| it.count <= state.history.starts[at(id)] + 1)
            })
        }),
        // So that what holds does not hold for want of anything that happens.
        Property::sometimes(DONE, |_: &World, state: &State| is_done(state)),
        Property::always(INNOCENT, |_: &World, state: &State| {
            !state.history.innocent_spent
        }),
    ]
}

fn is_handled(state: &State, id: Id) -> bool {
    let history = &state.history;
    history.acknowledged[at(id)] || state.server.copies[at(id)] > 0 || history.gone[at(id)]
}

/// Unread, pending, or handled; and in a group that was destroyed, in the hand of somebody who will register
/// it in the new one.
fn is_somewhere(state: &State, id: Id) -> bool {
    let server = &state.server;
    let in_hand = state.history.destroyed
        && state.processes.iter().any(|process| {
            process.is_alive() && (process.held(id).is_some() || process.expects(id))
        });
    !server.group
        || id > server.last_delivered
        || server.pending(id).is_some()
        || is_handled(state, id)
        || in_hand
}

/// An entry in hand is pending for who has it, or settled; unless a freeze gave others the right to it.
fn is_kept(state: &State) -> bool {
    state.processes.iter().all(|process| {
        process.each_held().all(|(id, held)| {
            let owner = state.server.pending(id).map(|pending| pending.owner);
            held.frozen || owner.is_none_or(|owner| owner == process.name)
        })
    })
}

fn is_done(state: &State) -> bool {
    let mut ids = state.server.ids();
    ids.all(|id| is_handled(state, id) && state.server.pending(id).is_none())
        && state
            .processes
            .iter()
            .all(|process| process.each_held().next().is_none())
}

/// Something can happen without anything going wrong.
fn goes_on(world: &World, state: &State) -> bool {
    let mut actions = Vec::new();
    world.goes_on(state, &mut actions);
    // A step that cannot be taken leaves everything as it was.
    let mut next = state.clone();
    actions
        .into_iter()
        .any(|action| world.step(&mut next, action).is_some())
}
