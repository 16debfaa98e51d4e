//! Who of the application's actors works where, so that messages find them across restarts.

use ractor::ActorCell;
use tokio::sync::watch;

/// The actors of one subscription, by worker.
pub(crate) struct Roster {
    seats: watch::Sender<Seats>,
}

#[derive(Clone, Default)]
pub(crate) struct Seats {
    occupants: Vec<Option<Occupant>>,
    /// Nobody will come any more.
    pub closed: bool,
}

/// The actor that works somewhere.
#[derive(Clone)]
pub(crate) struct Occupant {
    pub cell: ActorCell,
    /// The task that runs it.
    pub task: Option<tokio::task::Id>,
}

impl Seats {
    pub(crate) fn get(&self, worker: usize) -> Option<&Occupant> {
        self.occupants.get(worker)?.as_ref()
    }
}

impl Roster {
    pub(crate) fn new() -> Self {
        Roster {
            seats: watch::Sender::new(Seats::default()),
        }
    }

    pub(crate) fn enter(&self, worker: usize, occupant: Occupant) {
        self.seats.send_modify(|seats| {
            if seats.occupants.len() <= worker {
                seats.occupants.resize(worker + 1, None);
            }
            if let Some(seat) = seats.occupants.get_mut(worker) {
                *seat = Some(occupant);
            }
        });
    }

    /// This actor has left, if nobody has taken its place yet.
    pub(crate) fn leave(&self, worker: usize, cell: &ActorCell) {
        self.seats.send_if_modified(|seats| {
            let seat = seats.occupants.get_mut(worker);
            let Some(seat) = seat.filter(|it| {
                it.as_ref()
                    .is_some_and(|it| it.cell.get_id() == cell.get_id())
            }) else {
                return false;
            };
            *seat = None;
            true
        });
    }

    pub(crate) fn get(&self, worker: usize) -> Option<Occupant> {
        self.seats.borrow().get(worker).cloned()
    }

    /// Whether one of them runs in this task.
    pub(crate) fn is_run_by(&self, task: tokio::task::Id) -> bool {
        let seats = self.seats.borrow();
        let mut occupants = seats.occupants.iter().flatten();
        occupants.any(|occupant| occupant.task == Some(task))
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Seats> {
        self.seats.subscribe()
    }

    /// Nobody will come any more.
    pub(crate) fn close(&self) {
        self.seats.send_modify(|seats| {
            *seats = Seats {
                occupants: Vec::new(),
                closed: true,
            }
        });
    }
}
