//! What stands in the application's supervision tree for a tree of ours.
//!
//! ractor kills the linked children of a parent that stops, without letting them finish. A tree that
//! was killed like that would leave everything to recovery. So what is linked to the parent is this thin
//! actor, and the tree itself is linked to nobody: when the front ends, however it ends, the tree is
//! told to drain and does so by itself.

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::supervisor::{Message, SupervisorMessage};

pub(crate) struct Front;

pub(crate) struct FrontState {
    tree: DrainsWhenDropped,
}

/// Lives in the state of the front, because that is dropped at every kind of end, a kill included.
struct DrainsWhenDropped(ActorRef<SupervisorMessage>);

impl Drop for DrainsWhenDropped {
    fn drop(&mut self) {
        // A tree that has ended needs no word.
        let _ = self.0.cast(SupervisorMessage(Message::Shutdown));
    }
}

impl Actor for Front {
    type Msg = SupervisorMessage;
    type State = FrontState;
    type Arguments = ActorRef<SupervisorMessage>;

    async fn pre_start(
        &self,
        _: ActorRef<SupervisorMessage>,
        tree: ActorRef<SupervisorMessage>,
    ) -> Result<FrontState, ActorProcessingErr> {
        Ok(FrontState {
            tree: DrainsWhenDropped(tree),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMessage>,
        SupervisorMessage(message): SupervisorMessage,
        state: &mut FrontState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            // The parent hears of a failure as of that of any child.
            Message::Ended(Some(failure)) => return Err(failure.into()),
            Message::Ended(None) => myself.stop(None),
            message => {
                // A tree that has ended will say so in a moment.
                let _ = state.tree.0.cast(SupervisorMessage(message));
            }
        }
        Ok(())
    }
}
