//! The protocol as a model for the checker: what may happen next, and what it does.

use stateright::{Model, Property};

use super::process::{Life, Process, Read, Recovery, Stage, Step};
use super::properties;
use super::server::{Id, MOST, Outcome, Server, at};

/// A rule of the protocol that does not hold, so that a test can show what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Broken {
    /// A copy is made whoever owns the original.
    CopyUnchecked,
    /// A verdict is sent once, and forgotten when there is no answer.
    VerdictSentOnce,
    /// A read of unknown outcome is not looked after.
    FloorDropped,
    /// A second read of unknown outcome begins with a floor of its own.
    FloorMoved,
    /// A reply behind a read of unknown outcome is registered.
    RegisteredBehindUnknown,
    /// What is pending is looked through while a read is on its way.
    RecoversOverReads,
    /// A recovery looks once.
    OneLook,
    /// A process takes its old name while reads of its former self may still reach the server.
    NameTakenEarly,
    /// Being reclaimed counts as a start.
    CountsNotPutBack,
    /// Nothing is kept fresh.
    NoKeepAlive,
    /// The keep-alive does not look who owns an entry.
    KeepAliveUnchecked,
    /// Reclaiming does not look how long an entry was idle.
    IdleUnchecked,
    /// A consumer is removed with what it has pending.
    ConsumerRemoved,
    /// What is in hand is registered in a new group whoever has it there.
    RegisterUnchecked,
    /// A group is made again, and what is in hand is not registered in it.
    NotRegistered,
    /// What is in hand is registered once, and not again when there is no answer.
    RegisteredOnce,
    /// What is in hand is registered with the count of the coming start.
    RegisteredAsStarted,
    /// Verdicts are stored while a group is being made again.
    SettlesMeanwhile,
    /// Only a reader that reads notices that the group is gone.
    OnlyReadsNotice,
}

/// A small world: how much there is of everything, and how often each thing may go wrong.
#[derive(Debug, Clone)]
pub struct World {
    pub processes: usize,
    pub entries: Id,
    /// How many entries a process may have in hand or ask for.
    pub credit: usize,
    /// How many reads may be on their way.
    pub reads: usize,
    /// Every process takes over what others left, too.
    pub reclaims: bool,
    /// A process that starts again takes its old name.
    pub same_name: bool,
    pub faults: Faults,
    pub broken: Option<Broken>,
}

/// How often each thing may still go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Faults {
    /// A process is killed.
    pub crashes: u8,
    /// A reply is lost, or the reader dies that waits for it.
    pub losses: u8,
    /// A process stands still.
    pub freezes: u8,
    /// A process is stopped in order. It does not start again.
    pub stops: u8,
    /// The group is destroyed.
    pub destructions: u8,
}

/// What the properties have to know of the past.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct History {
    /// A run ended with an acknowledgement, and it is stored.
    pub acknowledged: [bool; MOST],
    /// How often it was run.
    pub runs: [u8; MOST],
    /// How many runs ended with a copy to be made.
    pub retries: [u8; MOST],
    /// The one exception: copies that may be made again, because their group vanished before the answer came.
    pub again: [u8; MOST],
    /// How often a worker asked to start it.
    pub starts: [u8; MOST],
    /// It went with its group, and nobody alive knew of it.
    pub gone: [bool; MOST],
    /// The group was destroyed once.
    pub destroyed: bool,
    /// An entry was given up on that nobody had asked to start.
    pub innocent_spent: bool,
    /// Registering took an entry from its owner.
    pub stolen: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    pub server: Server,
    pub processes: [Process; 2],
    pub left: Faults,
    pub history: History,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    Ack,
    Retry,
}

/// The process comes first wherever there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A read from `>`.
    SendRead(usize),
    RunRead(usize),
    TakeReply(usize),
    /// A read that nobody waits for any more reaches the server, or never will.
    RunLate(usize),
    EndLate(usize),
    /// A recovery.
    List(usize),
    TakeListed(usize),
    TakeRecovered(usize),
    LookAgain(usize),
    Reclaim(usize, Id),
    TakeReclaimed(usize),
    /// An entry in hand.
    Start(usize, Id),
    LetGo(usize, Id),
    Say(usize, Id, Verdict),
    Settle(usize, Id),
    KeepAlive(usize),
    Remake(usize),
    Register(usize),
    GiveBack(usize, Id),
    End(usize),
    Restart(usize),
    Thaw(usize),
    /// `min_idle` is over.
    Age(Id),

    // What goes wrong.
    LoseReads(usize),
    /// The reader has put the entry into hand and dies before the cursor knows.
    DieHandingOver(usize),
    LoseStep(usize),
    LoseReclaimed(usize),
    /// The server has run it, and the answer is lost.
    LoseStart(usize, Id),
    LoseSettled(usize, Id),
    LoseRemade(usize),
    /// Lost before it came to the server.
    LoseRegister(usize),
    Crash(usize),
    Freeze(usize),
    Stop(usize),
    Destroy,
}

impl World {
    pub fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    /// What goes on by itself.
    pub fn goes_on(&self, state: &State, actions: &mut Vec<Action>) {
        use Action::*;
        let ids = || state.server.ids();
        for at in 0..self.processes {
            actions.extend([
                SendRead(at),
                RunRead(at),
                TakeReply(at),
                RunLate(at),
                EndLate(at),
                List(at),
                TakeListed(at),
                TakeRecovered(at),
                LookAgain(at),
                TakeReclaimed(at),
                KeepAlive(at),
                Remake(at),
                Register(at),
                End(at),
                Restart(at),
                Thaw(at),
            ]);
            if self.reclaims {
                actions.extend(ids().map(|id| Reclaim(at, id)));
            }
            for (id, held) in state.processes[at].each_held() {
                match held.stage {
                    Stage::Waiting => {
                        actions.extend([Start(at, id), LetGo(at, id), GiveBack(at, id)]);
                    }
                    Stage::Running => {
                        actions.extend([Say(at, id, Verdict::Ack), Say(at, id, Verdict::Retry)])
                    }
                    Stage::Ack | Stage::Retry => actions.push(Settle(at, id)),
                }
            }
        }
        actions.extend(ids().map(Age));
    }

    fn goes_wrong(&self, state: &State, actions: &mut Vec<Action>) {
        use Action::*;
        let left = state.left;
        for at in 0..self.processes {
            if left.losses > 0 {
                actions.extend([
                    LoseReads(at),
                    DieHandingOver(at),
                    LoseStep(at),
                    LoseReclaimed(at),
                    LoseRemade(at),
                    LoseRegister(at),
                ]);
                for id in state.server.ids() {
                    actions.extend([LoseStart(at, id), LoseSettled(at, id)]);
                }
            }
            if left.crashes > 0 {
                actions.push(Crash(at));
            }
            if left.freezes > 0 {
                actions.push(Freeze(at));
            }
            if left.stops > 0 {
                actions.push(Stop(at));
            }
        }
        if left.destructions > 0 {
            actions.push(Destroy);
        }
    }

    /// Whether the process would have room for one more entry.
    fn has_room(&self, process: &Process) -> bool {
        process.used() < self.credit
    }

    /// A read's outcome is unknown.
    fn lose_track(&self, process: &mut Process) {
        process.leave_reads();
        process.step = None;
        if !self.is(Broken::FloorDropped) {
            process.lose_track(!self.is(Broken::FloorMoved));
        }
    }

    /// The server has said that there is no group.
    fn notice(&self, process: &mut Process) -> Option<()> {
        if self.is(Broken::OnlyReadsNotice) || process.missing {
            return None;
        }
        process.missing = true;
        Some(())
    }

    /// Whether the settler may send this. It sends nothing while a group is made again, and nothing that
    /// looks whose an entry is before what is in hand was registered there.
    fn settles(&self, process: &Process, looks: bool) -> bool {
        let remaking = matches!(process.step, Some(Step::Registering(_)));
        let stands_still = remaking || (looks && process.missing);
        process.acts() && (!stands_still || self.is(Broken::SettlesMeanwhile))
    }

    /// What the process knows of and no pending list does is gone with it.
    fn forget(&self, state: &mut State, at_process: usize) {
        let State {
            server,
            processes,
            history,
            ..
        } = state;
        if !history.destroyed {
            return;
        }
        let process = &processes[at_process];
        for id in server.ids() {
            if (process.held(id).is_some() || process.expects(id)) && server.pending(id).is_none() {
                history.gone[at(id)] = true;
            }
        }
    }

    /// Takes in what was left behind.
    fn take_recovered(&self, state: &mut State, process: usize, id: Id, count: u8, frozen: bool) {
        let process = &mut state.processes[process];
        if process.held(id).is_some() {
            return;
        }
        process.take(id, false, count, frozen);
        // Two attempts are the most, and a count of one may be a mere fetch.
        if count >= 2 {
            process.change(id).stage = Stage::Retry;
            state.history.retries[at(id)] += 1;
            state.history.innocent_spent |= state.history.starts[at(id)] == 0;
        }
    }

    /// One step. `None` where it cannot be taken, or changes nothing.
    pub fn step(&self, state: &mut State, action: Action) -> Option<()> {
        use Action::*;
        let State {
            server,
            processes,
            left,
            history,
        } = state;
        match action {
            SendRead(p) => {
                let process = &mut processes[p];
                let waits = process.reads.iter().flatten().count();
                // A read that finds nothing changes nothing.
                let worth_it = usize::from(server.unread()) > waits || !server.group;
                let goes = process.life == Life::Up
                    && process.acts()
                    && !process.is_recovering()
                    && !process.missing
                    && process.step.is_none()
                    && waits < self.reads
                    && self.has_room(process)
                    && worth_it;
                let free = process.reads.iter_mut().find(|read| read.is_none())?;
                *free = goes.then_some(Read::Sent);
                goes.then_some(())
            }
            RunRead(p) => {
                let process = &mut processes[p];
                let (name, frozen) = (process.name, process.frozen);
                let read = process
                    .reads
                    .iter_mut()
                    .flatten()
                    .find(|read| **read == Read::Sent)?;
                *read = match server.read(name) {
                    Ok(brought) => Read::Brought(brought, frozen),
                    Err(_) => Read::NoGroup,
                };
                Some(())
            }
            TakeReply(p) => {
                let process = &mut processes[p];
                let [Some(reply), next] = process.reads else {
                    return None;
                };
                if !process.acts() || reply == Read::Sent {
                    return None;
                }
                process.reads = [next, None];
                match reply {
                    Read::NoGroup => {
                        self.lose_track(process);
                        process.missing = true;
                        self.forget(state, p);
                    }
                    Read::Brought(Some(id), frozen) => {
                        process.take(id, true, 0, frozen);
                        process.registered = process.registered.max(id);
                    }
                    Read::Brought(None, _) | Read::Sent => {}
                }
                Some(())
            }
            RunLate(p) => {
                let late = processes[p].late.iter_mut().find(|late| late.is_some())?;
                let _ = server.read(late.take()?);
                Some(())
            }
            EndLate(p) => {
                let late = processes[p].late.iter_mut().find(|late| late.is_some())?;
                late.take().map(|_| ())
            }
            List(p) => {
                let process = &mut processes[p];
                let (floor, _) = process.recovery?;
                let goes = process.life == Life::Up
                    && process.acts()
                    && process.is_recovering()
                    && (process.reads == [None; 2] || self.is(Broken::RecoversOverReads))
                    && process.step.is_none()
                    && process.claimed.is_none()
                    && !process.missing
                    && self.has_room(process);
                if !goes {
                    return None;
                }
                if !server.group {
                    self.lose_track(process);
                    process.missing = true;
                    return Some(());
                }
                let (mut listed, mut more) = ([None; MOST], false);
                let mut room = self.credit - process.used();
                for id in server.ids().filter(|id| *id > floor) {
                    let Some(pending) = server.pending(id) else {
                        continue;
                    };
                    if pending.owner != process.name || process.held(id).is_some() {
                        continue;
                    }
                    if room == 0 {
                        more = true;
                        break;
                    }
                    room -= 1;
                    listed[at(id)] = Some(pending.count);
                }
                if listed == [None; MOST] {
                    process.recovered(!self.is(Broken::OneLook));
                } else {
                    process.step = Some(Step::Listed(listed, more));
                }
                Some(())
            }
            TakeListed(p) => {
                let process = &mut processes[p];
                let Some(Step::Listed(mut listed, more)) = process.step.filter(|_| process.acts())
                else {
                    return None;
                };
                for id in server.ids() {
                    let Some(count) = listed[at(id)] else {
                        continue;
                    };
                    match server.set_count(id, process.name, count) {
                        Err(_) => {
                            self.lose_track(process);
                            process.missing = true;
                            return Some(());
                        }
                        Ok(Outcome::Done) => {}
                        Ok(_) => listed[at(id)] = None,
                    }
                }
                process.step = Some(Step::Taken(listed, more, false));
                Some(())
            }
            TakeRecovered(p) => {
                let process = &mut processes[p];
                let Some(Step::Taken(taken, more, frozen)) =
                    process.step.filter(|_| process.acts())
                else {
                    return None;
                };
                process.step = None;
                if !more {
                    process.recovered(!self.is(Broken::OneLook));
                }
                for id in state.server.ids() {
                    if let Some(count) = taken[at(id)] {
                        self.take_recovered(state, p, id, count, frozen);
                    }
                }
                Some(())
            }
            LookAgain(p) => {
                let process = &mut processes[p];
                let (floor, stage) = process.recovery?;
                // A block later no read can be waiting any more.
                if stage != Recovery::Waiting || !process.acts() || process.has_late(process.name) {
                    return None;
                }
                process.recovery = Some((floor, Recovery::Second));
                Some(())
            }
            Reclaim(p, id) => {
                let process = &mut processes[p];
                let mut pending = server.pending(id)?;
                let goes = process.life == Life::Up
                    && process.acts()
                    && process.claimed.is_none()
                    && process.step.is_none()
                    && self.has_room(process)
                    && process.held(id).is_none()
                    // One consumer does both here, and does not take from itself what is on its way to it.
                    && !process.expects(id)
                    && (pending.old || self.is(Broken::IdleUnchecked))
                    && (pending.old || pending.owner != process.name);
                if !goes {
                    return None;
                }
                pending.owner = process.name;
                pending.old = false;
                pending.count += u8::from(self.is(Broken::CountsNotPutBack));
                server.set(id, pending);
                process.claimed = Some((id, pending.count, false));
                Some(())
            }
            TakeReclaimed(p) => {
                let process = &mut processes[p];
                let (id, count, frozen) = process.claimed.filter(|_| process.acts())?;
                process.claimed = None;
                self.take_recovered(state, p, id, count, frozen);
                Some(())
            }
            Start(p, id) | LoseStart(p, id) => {
                let lost = matches!(action, LoseStart(..));
                let process = &mut processes[p];
                let held = process.held(id)?;
                let goes = process.life == Life::Up
                    && held.stage == Stage::Waiting
                    && !held.lost
                    && if held.fresh {
                        process.acts() && !lost
                    } else {
                        self.settles(process, true)
                    };
                if !goes {
                    return None;
                }
                let outcome = if held.fresh {
                    Ok(Outcome::Done)
                } else {
                    server.set_count(id, process.name, held.count())
                };
                match outcome {
                    Err(_) if lost => return None,
                    Err(_) => return self.notice(process),
                    Ok(Outcome::Done) => {
                        history.starts[at(id)] += u8::from(!held.asked);
                        process.change(id).asked = true;
                        if lost {
                            left.losses -= 1;
                        } else {
                            process.change(id).stage = Stage::Running;
                            history.runs[at(id)] += 1;
                        }
                    }
                    Ok(_) if lost => return None,
                    // Another's, or settled.
                    Ok(_) => process.release(id),
                }
                Some(())
            }
            LetGo(p, id) => {
                let process = &mut processes[p];
                let held = process.held(id)?;
                let goes = process.acts() && held.stage == Stage::Waiting && held.lost;
                goes.then(|| process.release(id))
            }
            Say(p, id, verdict) => {
                let process = &mut processes[p];
                let held = process.held(id)?;
                if !process.acts() || held.stage != Stage::Running {
                    return None;
                }
                match verdict {
                    Verdict::Ack => process.change(id).stage = Stage::Ack,
                    // Its owner gives a verdict of its own.
                    Verdict::Retry if held.lost => process.release(id),
                    Verdict::Retry => {
                        process.change(id).stage = Stage::Retry;
                        history.retries[at(id)] += 1;
                    }
                }
                Some(())
            }
            Settle(p, id) | LoseSettled(p, id) => {
                let lost = matches!(action, LoseSettled(..));
                let process = &mut processes[p];
                let held = process.held(id)?;
                if !self.settles(process, held.stage == Stage::Retry) {
                    return None;
                }
                if lost && self.is(Broken::VerdictSentOnce) {
                    // It never came to the server.
                    left.losses -= 1;
                    process.release(id);
                    return Some(());
                }
                match held.stage {
                    Stage::Ack => {
                        // A missing group is no error here: nothing is pending.
                        server.acknowledge(id);
                        history.acknowledged[at(id)] = true;
                    }
                    Stage::Retry => {
                        let checked = !self.is(Broken::CopyUnchecked);
                        if server.copy(id, process.name, checked).is_err() {
                            return if lost { None } else { self.notice(process) };
                        }
                    }
                    _ => return None,
                }
                if lost {
                    left.losses -= 1;
                } else {
                    process.release(id);
                }
                Some(())
            }
            KeepAlive(p) => {
                let process = &mut processes[p];
                if !process.acts() || !server.group {
                    return None;
                }
                let mut changed = false;
                for id in server.ids() {
                    let Some(held) = process.held(id).filter(|held| !held.lost) else {
                        continue;
                    };
                    match server.pending(id) {
                        None => {}
                        Some(pending) if pending.owner == process.name => {
                            changed |= pending.old;
                            server.set(
                                id,
                                super::server::Pending {
                                    old: false,
                                    ..pending
                                },
                            );
                        }
                        Some(pending) if self.is(Broken::KeepAliveUnchecked) => {
                            changed = true;
                            let owner = process.name;
                            server.set(
                                id,
                                super::server::Pending {
                                    owner,
                                    old: false,
                                    ..pending
                                },
                            );
                        }
                        Some(_) => {
                            changed = true;
                            process.change(id).lost = held.stage != Stage::Retry || held.lost;
                            if held.stage == Stage::Retry {
                                changed = false;
                            }
                        }
                    }
                }
                changed.then_some(())
            }
            Remake(p) | LoseRemade(p) => {
                let process = &mut processes[p];
                let goes = process.acts()
                    && process.life == Life::Up
                    && process.missing
                    && process.reads == [None; 2]
                    && process.step.is_none();
                if !goes {
                    return None;
                }
                let highest = process.each_held().map(|(id, _)| id).max().unwrap_or(0);
                let mark = process.registered;
                process.registered = server.remake(mark, mark.max(highest));
                if matches!(action, LoseRemade(_)) {
                    left.losses -= 1;
                    process.missing = !self.is(Broken::RegisteredOnce);
                    return Some(());
                }
                let mut counts = [None; MOST];
                for (id, held) in process.each_held() {
                    counts[at(id)] = Some(if self.is(Broken::RegisteredAsStarted) {
                        held.count()
                    } else {
                        held.count_now()
                    });
                }
                if self.is(Broken::NotRegistered) {
                    process.missing = false;
                } else {
                    process.step = Some(Step::Registering(counts));
                }
                Some(())
            }
            Register(p) => {
                let process = &mut processes[p];
                let Some(Step::Registering(counts)) = process.step.filter(|_| process.acts())
                else {
                    return None;
                };
                process.step = None;
                if !server.group {
                    // It is gone once more.
                    return Some(());
                }
                let only_if_nobodys = !self.is(Broken::RegisterUnchecked);
                for id in server.ids() {
                    let Some(count) = counts[at(id)] else {
                        continue;
                    };
                    let anothers = server
                        .pending(id)
                        .is_some_and(|it| it.owner != process.name);
                    history.stolen |= anothers && !only_if_nobodys;
                    server.register(id, process.name, count, only_if_nobodys);
                }
                process.missing = false;
                Some(())
            }
            LoseRegister(p) => {
                let process = &mut processes[p];
                if !matches!(process.step, Some(Step::Registering(_))) {
                    return None;
                }
                left.losses -= 1;
                process.step = None;
                process.missing = !self.is(Broken::RegisteredOnce);
                Some(())
            }
            GiveBack(p, id) => {
                let process = &mut processes[p];
                let held = process.held(id)?;
                if process.life != Life::Stopping || !process.acts() || held.stage != Stage::Waiting
                {
                    return None;
                }
                server.give_back(id, process.name, held.count_before);
                process.release(id);
                Some(())
            }
            End(p) => {
                let process = &mut processes[p];
                let over = process.life == Life::Stopping
                    && process.acts()
                    && process.each_held().next().is_none()
                    && process.reads == [None; 2]
                    && process.step.is_none()
                    && process.claimed.is_none();
                if !over {
                    return None;
                }
                process.life = Life::Stopped;
                process.recovery = None;
                // With something pending it stays a consumer of the group.
                if self.is(Broken::ConsumerRemoved) {
                    for id in server.ids() {
                        if server.owned(id, process.name).is_ok() {
                            server.acknowledge(id);
                        }
                    }
                }
                Some(())
            }
            Restart(p) => {
                let process = &processes[p];
                let late = process.has_late(process.name) && !self.is(Broken::NameTakenEarly);
                if process.life != Life::Crashed || (self.same_name && late) {
                    return None;
                }
                if !server.group {
                    // As a topology may ask: from the beginning.
                    server.remake(0, 0);
                }
                let name = process.name
                    + if self.same_name {
                        0
                    } else {
                        self.processes as u8
                    };
                let late = process.late;
                processes[p] = Process {
                    late,
                    ..Process::start(name, server.last_delivered)
                };
                Some(())
            }
            Thaw(p) => {
                let process = &mut processes[p];
                process.frozen.then(|| process.frozen = false)
            }
            Age(id) => {
                let pending = server.pending(id).filter(|pending| !pending.old)?;
                // Time enough for this is time enough for the keep-alive, and for a reply on its way.
                let kept = processes.iter().any(|process| {
                    process.name == pending.owner
                        && process.acts()
                        && (process.held(id).is_some_and(|held| !held.lost) || process.expects(id))
                });
                if (kept && !self.is(Broken::NoKeepAlive)) || !self.reclaims {
                    return None;
                }
                server.set(
                    id,
                    super::server::Pending {
                        old: true,
                        ..pending
                    },
                );
                Some(())
            }

            LoseReads(p) => {
                if !processes[p].acts() || processes[p].reads == [None; 2] {
                    return None;
                }
                left.losses -= 1;
                let process = &mut processes[p];
                if let [_, Some(Read::Brought(Some(id), frozen))] = process.reads
                    && self.is(Broken::RegisteredBehindUnknown)
                {
                    process.reads[1] = None;
                    process.take(id, true, 0, frozen);
                    process.registered = id;
                }
                self.forget_reads(state, p);
                self.lose_track(&mut state.processes[p]);
                Some(())
            }
            DieHandingOver(p) => {
                let process = &mut processes[p];
                let [Some(Read::Brought(Some(id), frozen)), next] = process.reads else {
                    return None;
                };
                if !process.acts() {
                    return None;
                }
                left.losses -= 1;
                process.reads = [next, None];
                process.take(id, true, 0, frozen);
                self.forget_reads(state, p);
                self.lose_track(&mut state.processes[p]);
                Some(())
            }
            LoseStep(p) => {
                let process = &processes[p];
                let steps = matches!(process.step, Some(Step::Listed(..) | Step::Taken(..)));
                if !process.acts() || !steps {
                    return None;
                }
                left.losses -= 1;
                self.forget_reads(state, p);
                self.lose_track(&mut state.processes[p]);
                Some(())
            }
            LoseReclaimed(p) => {
                let (id, ..) = processes[p].claimed.filter(|_| processes[p].acts())?;
                left.losses -= 1;
                processes[p].claimed = None;
                if history.destroyed && server.pending(id).is_none() {
                    history.gone[at(id)] = true;
                }
                Some(())
            }
            Crash(p) => {
                if !processes[p].is_alive() {
                    return None;
                }
                left.crashes -= 1;
                self.forget(state, p);
                state.processes[p].crash();
                Some(())
            }
            Freeze(p) => {
                if !processes[p].acts() {
                    return None;
                }
                left.freezes -= 1;
                processes[p].freeze();
                Some(())
            }
            Stop(p) => {
                if processes[p].life != Life::Up {
                    return None;
                }
                left.stops -= 1;
                processes[p].life = Life::Stopping;
                Some(())
            }
            Destroy => {
                if !server.group {
                    return None;
                }
                left.destructions -= 1;
                history.destroyed = true;
                for id in server.ids() {
                    let Some(pending) = server.pending(id) else {
                        continue;
                    };
                    let known = processes.iter().any(|process| {
                        let owner = process.name == pending.owner && process.is_alive();
                        owner && (process.held(id).is_some() || process.expects(id))
                    });
                    history.gone[at(id)] |= !known;
                }
                for id in server.ids() {
                    let unconfirmed = processes.iter().any(|process| {
                        process
                            .held(id)
                            .is_some_and(|held| held.stage == Stage::Retry)
                            && server.pending(id).is_none()
                    });
                    history.again[at(id)] += u8::from(unconfirmed);
                }
                server.destroy_group();
                for process in processes {
                    process.late = [None; 2];
                }
                Some(())
            }
        }
    }

    /// The replies of the reads and of the recovery under way will not come.
    fn forget_reads(&self, state: &mut State, process: usize) {
        if !state.history.destroyed {
            return;
        }
        for id in state.server.ids() {
            let process = &state.processes[process];
            if process.expects(id)
                && process.held(id).is_none()
                && state.server.pending(id).is_none()
            {
                state.history.gone[at(id)] = true;
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let process = |name: u8| Process {
            // Nothing was left behind yet.
            recovery: None,
            life: if usize::from(name) < self.processes {
                Life::Up
            } else {
                Life::Stopped
            },
            ..Process::start(name, 0)
        };
        vec![State {
            server: Server::new(self.entries),
            processes: [process(0), process(1)],
            left: self.faults,
            history: History::default(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.goes_on(state, actions);
        self.goes_wrong(state, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        self.step(&mut state, action)?;
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}
