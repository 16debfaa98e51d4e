//! What a server, or the way to it, can answer instead of a result.

use std::borrow::Cow;

use fred::error::ErrorKind;

/// Why something asked of the server was not done, sorted by what can be done about it.
///
/// After [`Away`](ServerError::Away) and [`NotPrimary`](ServerError::NotPrimary) nobody knows
/// whether the server did what it was asked; after all others it did not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ServerError {
    /// It cannot be reached or cannot do it now: wait, keep everything.
    #[error("{0}")]
    Away(String),
    /// It is not the primary any more. The connection looks for the primary by itself; else as
    /// `Away`.
    #[error("{0}")]
    NotPrimary(String),
    /// The consumer group, or its stream, does not exist.
    #[error("{0}")]
    GroupGone(String),
    /// The user may not do it, or the key holds something else: somebody has to change that.
    #[error("{0}")]
    Blocked(String),
    /// Any other error reply.
    #[error("{0}")]
    Refused(String),
    /// The reply has not the form that this command's replies have.
    #[error("the server's reply is not understood: {0}")]
    Malformed(String),
}

impl ServerError {
    /// Sorts an error reply by its text.
    pub(crate) fn from_reply(text: &str) -> Self {
        let mut text = without_place(text);
        // What 6.2, 7.0 and later ones say when a script calls what its user may not.
        let said = text.strip_prefix("ERR ").unwrap_or(&text);
        if said.starts_with("The user executing the script can't")
            || said.starts_with("ACL failure in script")
        {
            text = Cow::Owned(format!("NOPERM {said}"));
        }
        let kind = match text.split(' ').next().unwrap_or_default() {
            "LOADING" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "OOM" | "MISCONF"
            | "NOREPLICAS" | "MOVED" | "ASK" => ServerError::Away,
            "READONLY" => ServerError::NotPrimary,
            "NOGROUP" => ServerError::GroupGone,
            "UNBLOCKED" if text.contains("no longer exists") => ServerError::GroupGone,
            "NOAUTH" | "WRONGPASS" | "NOPERM" | "WRONGTYPE" | "DENIED" => ServerError::Blocked,
            "ERR" if text.contains("max number of clients") => ServerError::Away,
            _ => ServerError::Refused,
        };
        kind(text.into_owned())
    }

    /// Whether memory is full: plain acknowledgements still go through.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self, ServerError::Away(text) if text.starts_with("OOM"))
    }

    /// Whether it passes by itself, so that the same thing is worth asking again.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, ServerError::Away(_) | ServerError::NotPrimary(_))
    }

    /// Whether it lasts until somebody changes something: waiting longer than usual is no loss.
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(self, ServerError::Blocked(_) | ServerError::Refused(_))
    }

    /// Whether the server said `NOPERM`.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, ServerError::Blocked(text) if text.starts_with("NOPERM"))
    }

    /// Whether this is the end of a blocked read that somebody else ended: there is nothing to
    /// read.
    pub(crate) fn is_unblocked(&self) -> bool {
        matches!(self, ServerError::Refused(text) if text.starts_with("UNBLOCKED"))
    }

    /// The same with words added to its text.
    pub(crate) fn explained(self, explain: impl FnOnce(String) -> String) -> Self {
        match self {
            ServerError::Away(text) => ServerError::Away(explain(text)),
            ServerError::NotPrimary(text) => ServerError::NotPrimary(explain(text)),
            ServerError::GroupGone(text) => ServerError::GroupGone(explain(text)),
            ServerError::Blocked(text) => ServerError::Blocked(explain(text)),
            ServerError::Refused(text) => ServerError::Refused(explain(text)),
            ServerError::Malformed(text) => ServerError::Malformed(explain(text)),
        }
    }
}

/// Errors that the client itself reports. It passes on some error replies too, those after which it
/// reconnects; the others arrive as frames.
impl From<fred::error::Error> for ServerError {
    fn from(error: fred::error::Error) -> Self {
        let text = io_text(error.details());
        match ServerError::from_reply(&text) {
            // A server's own words.
            ServerError::Refused(text) if text.starts_with("ERR ") => ServerError::Refused(text),
            // The client's.
            ServerError::Refused(text) => match error.kind() {
                ErrorKind::Config
                | ErrorKind::Url
                | ErrorKind::InvalidArgument
                | ErrorKind::InvalidCommand
                | ErrorKind::Parse => ServerError::Refused(text),
                ErrorKind::Auth => ServerError::Blocked(text),
                _ => ServerError::Away(text),
            },
            sorted => sorted,
        }
    }
}

/// The error as the command gave it, without what 6.2 puts around an error inside a script:
/// `ERR Error running script (call to f_…): @user_script:3: -NOGROUP …`.
fn without_place(text: &str) -> Cow<'_, str> {
    let inner = text
        .rsplit_once("@user_script:")
        .filter(|(before, _)| before.is_empty() || before.starts_with("ERR Error running script"));
    let text = match inner {
        Some((_, place)) => {
            let error = place
                .trim_start_matches([' ', ':', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']);
            error.strip_prefix('-').unwrap_or(error)
        }
        None => text,
    };
    let text = text.trim_end();
    if text.contains(['\r', '\n']) {
        Cow::Owned(text.replace(['\r', '\n'], " "))
    } else {
        Cow::Borrowed(text)
    }
}

/// The words in the debug text of an I/O error: `Os { code: 111, …, message: "Connection refused"
/// }`.
fn io_text(details: &str) -> Cow<'_, str> {
    let quoted = ["message: \"", "error: \""].iter().find_map(|start| {
        let (_, rest) = details.split_once(start)?;
        let (words, _) = rest.rsplit_once('"')?;
        Some(words)
    });
    match quoted {
        Some(words) if details.ends_with('}') => Cow::Owned(words.replace("\\\"", "\"")),
        _ => Cow::Borrowed(details),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_reply_is_sorted_by_what_can_be_done_about_it() {
        use ServerError::*;
        type Kind = fn(String) -> ServerError;
        let cases: [(&str, Kind); 18] = [
            ("LOADING Redis is loading the dataset in memory", Away),
            ("BUSY Redis is busy running a script.", Away),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                Away,
            ),
            ("CLUSTERDOWN The cluster is down", Away),
            ("MASTERDOWN Link with MASTER is down", Away),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Away,
            ),
            ("MISCONF Redis is configured to save RDB snapshots", Away),
            ("NOREPLICAS Not enough good replicas to write.", Away),
            ("ERR max number of clients reached", Away),
            (
                "READONLY You can't write against a read only replica.",
                NotPrimary,
            ),
            ("NOGROUP No such key 'a' or consumer group 'b'", GroupGone),
            ("UNBLOCKED the stream key no longer exists", GroupGone),
            ("UNBLOCKED client unblocked via CLIENT UNBLOCK", Refused),
            ("NOAUTH Authentication required.", Blocked),
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                Blocked,
            ),
            (
                "NOPERM User x has no permissions to run the 'xadd' command",
                Blocked,
            ),
            (
                "WRONGTYPE Operation against a key holding the wrong kind of value",
                Blocked,
            ),
            ("ERR unknown command 'XACKDEL'", Refused),
        ];
        for (text, kind) in cases {
            assert_eq!(ServerError::from_reply(text), kind(text.to_owned()));
        }
        assert!(ServerError::from_reply(cases[5].0).is_memory());
        assert!(!ServerError::from_reply(cases[6].0).is_memory());
        assert!(ServerError::from_reply(cases[12].0).is_unblocked());
    }

    #[test]
    fn errors_inside_a_script_are_told_as_the_command_gave_them() {
        for text in [
            "ERR Error running script (call to f_0123): @user_script:12: -OOM command not allowed",
            "ERR Error running script (call to f_0123): @user_script:12: @user_script: 12: -OOM command not allowed\r\n",
            "@user_script: 7: -OOM command not allowed",
        ] {
            assert_eq!(
                ServerError::from_reply(text),
                ServerError::Away("OOM command not allowed".to_owned())
            );
        }
    }

    #[test]
    fn a_right_missing_inside_a_script_is_a_right_missing() {
        for text in [
            "@user_script: 14: The user executing the script can't run this command or subcommand",
            "ERR The user executing the script can't run this command or subcommand",
            "ERR ACL failure in script: User limited has no permissions to run the 'xack' command",
        ] {
            assert!(ServerError::from_reply(text).is_denied());
        }
    }

    #[test]
    fn a_refused_connection_is_told_in_words() {
        let error = std::io::Error::from_raw_os_error(111);
        let ServerError::Away(text) = ServerError::from(fred::error::Error::from(error)) else {
            panic!("a refused connection passes");
        };
        assert_eq!(text, "Connection refused");
    }
}
