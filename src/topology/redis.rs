//! Where to connect.

use std::fmt;

use fred::types::config::{Config, Server, ServerConfig};

/// The server, or the servers, that a topology consumes from.
///
/// ```
/// use streamvisor::Redis;
///
/// let redis = Redis::url("redis://:secret@localhost:6379/2")?;
/// assert_eq!(format!("{redis:?}"), r#"Redis("localhost:6379", database 2)"#);
/// assert!(Redis::url("http://localhost").is_err());
/// # Ok::<(), streamvisor::InvalidRedis>(())
/// ```
#[derive(Clone)]
pub struct Redis {
    config: Config,
}

/// Why a URL or a configuration cannot be used. The text never holds a password.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRedis {
    /// The scheme is none of those that are understood.
    #[error(
        "`{0}` is not a scheme for Redis: use redis://, redis+unix://, redis-sentinel:// or redis-cluster:// (or the same with valkey)"
    )]
    Scheme(String),
    /// The scheme asks for TLS and this build has none.
    #[error(
        "`{0}://` asks for TLS, which this version of streamvisor does not have: it would connect in plain text. Use a scheme without TLS, or a TLS proxy beside the program"
    )]
    Tls(String),
    /// The rest of the URL does not make sense.
    #[error("the URL cannot be used: {0}")]
    Malformed(String),
}

/// The same as `Display`: a `main` that returns the error shows its text.
impl std::fmt::Debug for InvalidRedis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Redis {
    /// Reads a URL such as `redis://user:password@host:6379/0`, with every scheme that fred takes:
    /// `redis`, `redis+unix`, `redis-cluster`, `redis-sentinel` and the same with `valkey`.
    ///
    /// # Errors
    ///
    /// [`InvalidRedis`] names what is wrong with the URL; it never repeats the URL, which may hold a
    /// password.
    pub fn url(url: &str) -> Result<Self, InvalidRedis> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(InvalidRedis::Malformed(
                "it has no scheme; redis://localhost:6379 has".to_owned(),
            ));
        };
        let (kind, variant) = match scheme.find(['-', '+']) {
            Some(at) => scheme.split_at(at),
            None => (scheme, ""),
        };
        match kind {
            "redis" | "valkey" => {}
            "rediss" | "valkeys" => return Err(InvalidRedis::Tls(scheme.to_owned())),
            _ => return Err(InvalidRedis::Scheme(scheme.to_owned())),
        }
        if !["", "-cluster", "-sentinel", "+unix"].contains(&variant) {
            return Err(InvalidRedis::Scheme(scheme.to_owned()));
        }
        if rest.rsplit('@').next().is_none_or(str::is_empty) {
            return Err(InvalidRedis::Malformed("it names no host".to_owned()));
        }
        // fred knows the one name only; the two mean the same.
        let config = Config::from_url(&format!("redis{variant}://{rest}"))
            .map_err(|error| InvalidRedis::Malformed(without(error.details(), rest)))?;
        Ok(Redis { config })
    }

    /// Takes a fred configuration as it is, for what a URL cannot say.
    ///
    /// The protocol version is set to RESP2 (it costs less here and nothing is lost), and what
    /// concerns blocking commands is set by this crate.
    pub fn from_config(config: Config) -> Self {
        Redis { config }
    }

    /// Whether keys live in slots.
    pub(crate) fn is_clustered(&self) -> bool {
        self.config.server.is_clustered()
    }

    /// The configuration as fred takes it, for clients of the application's own.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl From<Config> for Redis {
    fn from(config: Config) -> Self {
        Redis::from_config(config)
    }
}

/// An error text without the part of the URL that may hold a password.
fn without(details: &str, secret: &str) -> String {
    details.replace(secret, "…")
}

fn servers(hosts: &[Server]) -> String {
    hosts
        .iter()
        .map(Server::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

impl fmt::Display for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.config.server {
            ServerConfig::Centralized { server } => write!(f, "{server}"),
            ServerConfig::Clustered { hosts, .. } => write!(f, "cluster of {}", servers(hosts)),
            ServerConfig::Sentinel {
                hosts,
                service_name,
                ..
            } => {
                write!(f, "{service_name} of the sentinels {}", servers(hosts))
            }
            ServerConfig::Unix { path } => write!(f, "{}", path.display()),
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis(\"{self}\"")?;
        if let Some(database) = self.config.database {
            write!(f, ", database {database}")?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_of_the_standalone_and_the_clustered_server_is_taken() {
        for url in [
            "redis://localhost",
            "redis://localhost:6379/3",
            "valkey://user:p%40ss@localhost:6379",
            "redis-cluster://a:1?node=b:2",
            "valkey-sentinel://a:1?node=b:2&sentinelServiceName=main",
            "redis+unix:///tmp/redis.sock",
        ] {
            assert!(Redis::url(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong_and_never_the_password() {
        for (url, expected) in [
            ("localhost:6379", "no scheme"),
            ("http://:hunter2@localhost", "is not a scheme"),
            ("redis-fleet://:hunter2@localhost", "is not a scheme"),
            ("rediss://:hunter2@localhost", "plain text"),
            ("valkeys-cluster://:hunter2@localhost", "plain text"),
            ("redis://:hunter2@localhost:port", "cannot be used"),
            ("redis://", "no host"),
        ] {
            let text = Redis::url(url).expect_err(url).to_string();
            assert!(text.contains(expected), "{url}: {text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn debug_never_shows_credentials() {
        let shown = format!(
            "{:?}",
            Redis::url("redis://admin:hunter2@localhost:6379").unwrap()
        );
        assert!(
            !shown.contains("hunter2") && !shown.contains("admin"),
            "{shown}"
        );
    }
}
