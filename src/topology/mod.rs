//! What to run: plain data and its validation. Nothing here speaks to a server.

mod redis;

pub use redis::{InvalidRedis, Redis};
