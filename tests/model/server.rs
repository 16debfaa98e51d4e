//! The server's side: one stream, one group, and each script as the one step that it is there.

/// An entry, by its place in the stream; 0 is before the first one.
pub type Id = u8;

/// A consumer's name. A process that starts again may take a new one or the old one.
pub type Name = u8;

/// The most entries of a model.
pub const MOST: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pending {
    pub owner: Name,
    /// The delivery count.
    pub count: u8,
    /// It has been idle for `min_idle`: whoever reclaims may take it.
    pub old: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Server {
    /// The group exists.
    pub group: bool,
    pub last_delivered: Id,
    pub entries: Id,
    pending: [Option<Pending>; MOST],
    /// Copies that were made of each entry. They are not handled again in the model: a copy is an entry
    /// like any other.
    pub copies: [u8; MOST],
}

/// What a script says of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    NotPending,
    Anothers,
}

/// The group does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoGroup;

pub fn at(id: Id) -> usize {
    usize::from(id) - 1
}

impl Server {
    pub fn new(entries: Id) -> Self {
        assert!(usize::from(entries) <= MOST);
        Server {
            group: true,
            last_delivered: 0,
            entries,
            pending: [None; MOST],
            copies: [0; MOST],
        }
    }

    pub fn ids(&self) -> std::ops::RangeInclusive<Id> {
        1..=self.entries
    }

    pub fn pending(&self, id: Id) -> Option<Pending> {
        self.pending[at(id)]
    }

    pub fn set(&mut self, id: Id, pending: Pending) {
        self.pending[at(id)] = Some(pending);
    }

    pub fn unread(&self) -> Id {
        self.entries - self.last_delivered
    }

    /// `XREADGROUP … COUNT 1 >`
    pub fn read(&mut self, consumer: Name) -> Result<Option<Id>, NoGroup> {
        if !self.group {
            return Err(NoGroup);
        }
        if self.unread() == 0 {
            return Ok(None);
        }
        self.last_delivered += 1;
        let pending = Pending {
            owner: consumer,
            count: 1,
            old: false,
        };
        self.set(self.last_delivered, pending);
        Ok(Some(self.last_delivered))
    }

    /// What every script that checks the owner begins with.
    pub fn owned(&mut self, id: Id, consumer: Name) -> Result<&mut Pending, Outcome> {
        match &mut self.pending[at(id)] {
            None => Err(Outcome::NotPending),
            Some(pending) if pending.owner != consumer => Err(Outcome::Anothers),
            Some(pending) => Ok(pending),
        }
    }

    /// `XACK`: whoever owns it.
    pub fn acknowledge(&mut self, id: Id) {
        self.pending[at(id)] = None;
    }

    /// `copy.lua`
    pub fn copy(
        &mut self,
        id: Id,
        consumer: Name,
        owner_checked: bool,
    ) -> Result<Outcome, NoGroup> {
        if !self.group {
            return Err(NoGroup);
        }
        match self.owned(id, consumer) {
            Err(outcome) if owner_checked => Ok(outcome),
            _ => {
                self.copies[at(id)] += 1;
                self.acknowledge(id);
                Ok(Outcome::Done)
            }
        }
    }

    /// `count_starts.lua`, `take_own.lua`: the count becomes what is given, the entry is fresh again.
    pub fn set_count(&mut self, id: Id, consumer: Name, count: u8) -> Result<Outcome, NoGroup> {
        if !self.group {
            return Err(NoGroup);
        }
        match self.owned(id, consumer) {
            Err(outcome) => Ok(outcome),
            Ok(pending) => {
                pending.count = count;
                pending.old = false;
                Ok(Outcome::Done)
            }
        }
    }

    /// `give_back.lua`
    pub fn give_back(&mut self, id: Id, consumer: Name, count: u8) {
        if let Ok(pending) = self.owned(id, consumer) {
            pending.count = count;
            pending.old = true;
        }
    }

    /// `XGROUP DESTROY`: the pending list goes with the group.
    pub fn destroy_group(&mut self) {
        self.group = false;
        self.pending = [None; MOST];
    }

    /// `remake.lua`: where the group stands afterwards.
    pub fn remake(&mut self, mark: Id, highest: Id) -> Id {
        if !self.group {
            self.group = true;
            self.last_delivered = highest;
        } else if mark > self.last_delivered {
            self.last_delivered = mark;
        }
        self.last_delivered
    }

    /// `register.lua`: only what is pending for nobody.
    pub fn register(&mut self, id: Id, consumer: Name, count: u8, only_if_nobodys: bool) {
        if self.pending(id).is_none() || !only_if_nobodys {
            let pending = Pending {
                owner: consumer,
                count,
                old: false,
            };
            self.set(id, pending);
        }
    }
}
