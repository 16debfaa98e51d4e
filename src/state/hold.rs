//! Why a subscription stands still.

/// A reason for a subscription not to read and to start nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The application asked for it, and may ask for the opposite.
    Paused,
    /// The actor that its entries are sent to is not there.
    TargetGone,
    /// It has been given up.
    Failed,
    /// It is taken out of the tree.
    Removed,
}

impl Reason {
    fn flag(self) -> u8 {
        match self {
            Reason::Paused => 1,
            Reason::Failed => 1 << 1,
            Reason::Removed => 1 << 2,
            Reason::TargetGone => 1 << 3,
        }
    }
}

/// The reasons for which a subscription stands still. It goes on when none is left.
///
/// What is asked for from outside is only ever written here, and the actors go by what stands here when
/// they look: nothing is told to one incarnation that the next would have to be told again, and of
/// several requests the last one holds, whoever crashes in between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Hold {
    reasons: u8,
    /// The workers start nothing. Set with the first reason; only the reader takes it back, when there
    /// is no reason left and nothing that waited is still on its way back to the server.
    barred: bool,
}

impl Hold {
    /// Returns whether this is news.
    pub(crate) fn add(&mut self, reason: Reason) -> bool {
        let news = !self.is_for(reason);
        self.reasons |= reason.flag();
        self.barred = true;
        news
    }

    /// Returns whether this is news.
    pub(crate) fn take_away(&mut self, reason: Reason) -> bool {
        let news = self.is_for(reason);
        self.reasons &= !reason.flag();
        news
    }

    /// Lets the workers start entries again, unless there is a reason against it. Returns whether they
    /// may.
    pub(crate) fn unbar(&mut self) -> bool {
        self.barred = self.reasons != 0;
        !self.barred
    }

    pub(crate) fn is_for(self, reason: Reason) -> bool {
        self.reasons & reason.flag() != 0
    }

    /// Whether there is a reason to stand still.
    pub(crate) fn is_on(self) -> bool {
        self.reasons != 0
    }

    /// Whether the workers start nothing.
    pub(crate) fn is_barred(self) -> bool {
        self.barred
    }

    /// Whether it will never go on.
    pub(crate) fn is_final(self) -> bool {
        self.is_for(Reason::Failed) || self.is_for(Reason::Removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_when_the_last_reason_is_gone_and_the_workers_were_let_go() {
        let mut hold = Hold::default();
        assert!(hold.add(Reason::Paused) && !hold.add(Reason::Paused));
        assert!(hold.add(Reason::Removed));
        assert!(hold.take_away(Reason::Paused) && !hold.take_away(Reason::Paused));
        assert!(hold.is_on() && hold.is_final() && !hold.unbar());
        assert!(hold.take_away(Reason::Removed));
        assert!(!hold.is_on() && hold.is_barred());
        assert!(hold.unbar());
        assert_eq!(hold, Hold::default());
    }
}
