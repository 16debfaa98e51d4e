//! A process: what it has in hand, where its reader stands, and what of its commands is on the way.

use super::server::{Id, MOST, Name, at};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    Up,
    /// It reads and starts nothing more, and gives back what waits.
    Stopping,
    /// It came to its end.
    Stopped,
    /// It was killed.
    Crashed,
}

/// An entry in hand (`InFlight`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Held {
    pub stage: Stage,
    /// It came from `>`: the server has counted its start.
    pub fresh: bool,
    /// The count before the coming start.
    pub count_before: u8,
    /// Another consumer owns it, as far as is known here.
    pub lost: bool,
    /// For the properties: a worker has asked to start it.
    pub asked: bool,
    /// For the properties: the process was frozen while it had the entry, so that others may have it too.
    pub frozen: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    Waiting,
    Running,
    /// Its verdict is in the queue: an acknowledgement.
    Ack,
    /// Its verdict is in the queue: a copy.
    Retry,
}

impl Held {
    /// The count with the coming start.
    pub fn count(&self) -> u8 {
        self.count_before + 1
    }

    /// What the server has for it, as far as is known here.
    pub fn count_now(&self) -> u8 {
        let started = self.asked && self.stage != Stage::Waiting;
        if self.fresh || started {
            self.count()
        } else {
            self.count_before
        }
    }
}

/// A read from `>` whose reply is still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Read {
    Sent,
    /// The server has run it; the process may have been frozen since.
    Brought(Option<Id>, bool),
    NoGroup,
}

/// Where a recovery stands (`state::Cursor`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    AtStart,
    First,
    Waiting,
    Second,
}

/// A step of a reader that takes more than one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// A recovery has listed these, each with its count, and there may be more.
    Listed([Option<u8>; MOST], bool),
    /// They were taken, and the reply is still to come.
    Taken([Option<u8>; MOST], bool, bool),
    /// The group was made again, and this is to be registered in it.
    Registering([Option<u8>; MOST]),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Process {
    pub life: Life,
    pub name: Name,
    pub frozen: bool,
    pub registered: Id,
    pub recovery: Option<(Id, Recovery)>,
    /// At most two, in the order in which they were sent.
    pub reads: [Option<Read>; 2],
    pub step: Option<Step>,
    /// A reclaim has taken this one, with its count; whether the process was frozen since.
    pub claimed: Option<(Id, u8, bool)>,
    /// This process has seen the group missing, and has not registered yet what it has in hand.
    pub missing: bool,
    pub held: [Option<Held>; MOST],
    /// Reads that nobody waits for any more and that may still reach the server, and for whom they read.
    pub late: [Option<Name>; 2],
}

impl Process {
    /// Starts: everything that its name has pending is recovered first.
    pub fn start(name: Name, last_delivered: Id) -> Self {
        Process {
            life: Life::Up,
            name,
            frozen: false,
            registered: last_delivered,
            recovery: Some((0, Recovery::AtStart)),
            reads: [None; 2],
            step: None,
            claimed: None,
            missing: false,
            held: [None; MOST],
            late: [None; 2],
        }
    }

    /// It is there and can do something.
    pub fn acts(&self) -> bool {
        self.is_alive() && !self.frozen
    }

    pub fn is_alive(&self) -> bool {
        matches!(self.life, Life::Up | Life::Stopping)
    }

    pub fn held(&self, id: Id) -> Option<Held> {
        self.held[at(id)]
    }

    pub fn each_held(&self) -> impl Iterator<Item = (Id, Held)> {
        (1..)
            .zip(self.held)
            .filter_map(|(id, held)| Some((id, held?)))
    }

    pub fn change(&mut self, id: Id) -> &mut Held {
        self.held[at(id)].as_mut().expect("it is in hand")
    }

    pub fn release(&mut self, id: Id) {
        self.held[at(id)] = None;
    }

    /// `InFlight::register`: what is held already is left alone.
    pub fn take(&mut self, id: Id, fresh: bool, count_before: u8, frozen: bool) {
        self.held[at(id)].get_or_insert(Held {
            stage: Stage::Waiting,
            fresh,
            count_before,
            lost: false,
            asked: false,
            frozen,
        });
    }

    /// How many entries it has in hand or has asked for.
    pub fn used(&self) -> usize {
        let held = self.held.iter().flatten().count();
        held + self.reads.iter().flatten().count() + usize::from(self.claimed.is_some())
    }

    /// A reply on its way brings this entry.
    pub fn expects(&self, id: Id) -> bool {
        let read = |read: &Read| matches!(read, Read::Brought(Some(brought), _) if *brought == id);
        let taken = matches!(self.step, Some(Step::Taken(taken, ..)) if taken[at(id)].is_some());
        self.reads.iter().flatten().any(read)
            || taken
            || self.claimed.is_some_and(|(claimed, ..)| claimed == id)
    }

    /// Whether it reads from `>` no sooner than its own pending entries were looked through.
    pub fn is_recovering(&self) -> bool {
        let stage = self.recovery.map(|(_, stage)| stage);
        stage.is_some_and(|stage| stage != Recovery::Waiting)
    }

    pub fn has_late(&self, name: Name) -> bool {
        self.late.contains(&Some(name))
    }

    /// `Cursor::lose_track`: where entries may have been delivered to nobody.
    pub fn lose_track(&mut self, floor_kept: bool) {
        self.recovery = Some(match self.recovery {
            Some((floor, Recovery::AtStart)) => (floor, Recovery::AtStart),
            Some((floor, _)) if floor_kept => (floor, Recovery::First),
            _ => (self.registered, Recovery::First),
        });
    }

    /// `Cursor::recovered`, for the last page of a run.
    pub fn recovered(&mut self, second_look: bool) {
        self.recovery = match self.recovery {
            Some((floor, Recovery::First)) if second_look => Some((floor, Recovery::Waiting)),
            _ => None,
        };
    }

    /// What it sent and nobody waits for any more may still reach the server.
    pub fn leave_reads(&mut self) {
        for read in &mut self.reads {
            if read.take() == Some(Read::Sent)
                && let Some(free) = self.late.iter_mut().find(|late| late.is_none())
            {
                *free = Some(self.name);
            }
        }
        self.late.sort_unstable();
    }

    /// It stands still, and others may take what it has meanwhile.
    pub fn freeze(&mut self) {
        self.frozen = true;
        self.held
            .iter_mut()
            .flatten()
            .for_each(|held| held.frozen = true);
        for read in self.reads.iter_mut().flatten() {
            if let Read::Brought(_, frozen) = read {
                *frozen = true;
            }
        }
        if let Some(Step::Taken(.., frozen)) = &mut self.step {
            *frozen = true;
        }
        if let Some((.., frozen)) = &mut self.claimed {
            *frozen = true;
        }
    }

    /// It is killed: all that it had in memory is gone.
    pub fn crash(&mut self) {
        self.leave_reads();
        let late = self.late;
        *self = Process {
            life: Life::Crashed,
            recovery: None,
            late,
            ..Process::start(self.name, 0)
        };
    }
}
