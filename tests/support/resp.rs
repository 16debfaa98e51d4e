//! RESP, the protocol, as far as tests need it: a blocking client for assertions, and a scanner that
//! finds where one message ends and the next begins.
//!
//! Deliberately its own: a mistake in the client library or in our decoder must not hide itself.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// How long an assertion waits for a server that does not answer (it may be frozen).
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// What these connections call themselves, so that `Server::client_list` can leave them out.
pub(super) const CLIENT_NAME: &str = "test-assertions";

/// A RESP2 reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Int(i64),
    Bytes(Vec<u8>),
    Status(String),
    Error(String),
    Array(Vec<Reply>),
}

impl Reply {
    pub fn is_nil(&self) -> bool {
        *self == Reply::Nil
    }

    /// The message of an error reply, code included (`NOGROUP No such key ...`).
    pub fn as_error(&self) -> Option<&str> {
        match self {
            Reply::Error(message) => Some(message),
            _ => None,
        }
    }

    /// An integer, or a string that holds one.
    #[track_caller]
    pub fn as_int(&self) -> i64 {
        match self {
            Reply::Int(n) => *n,
            Reply::Bytes(_) | Reply::Status(_) => {
                let text = self.as_str();
                text.parse()
                    .unwrap_or_else(|_| panic!("expected an integer, the server sent {text:?}"))
            }
            other => panic!("expected an integer, the server sent {other:?}"),
        }
    }

    #[track_caller]
    pub fn as_str(&self) -> &str {
        match self {
            Reply::Status(text) => text,
            Reply::Bytes(bytes) => std::str::from_utf8(bytes)
                .unwrap_or_else(|_| panic!("expected text, the server sent {self:?}")),
            other => panic!("expected text, the server sent {other:?}"),
        }
    }

    #[track_caller]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Reply::Bytes(bytes) => bytes,
            Reply::Status(text) => text.as_bytes(),
            other => panic!("expected a string, the server sent {other:?}"),
        }
    }

    #[track_caller]
    pub fn as_array(&self) -> &[Reply] {
        match self {
            Reply::Array(items) => items,
            other => panic!("expected an array, the server sent {other:?}"),
        }
    }
}

/// One blocking connection.
pub struct Client {
    reader: BufReader<TcpStream>,
}

impl Client {
    /// Connects to a server on this machine, and authenticates when there is a password.
    pub fn connect(port: u16, password: Option<&str>) -> io::Result<Client> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let stream = TcpStream::connect_timeout(&address, READ_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        let mut client = Client {
            reader: BufReader::new(stream),
        };
        if let Some(password) = password
            && let Reply::Error(message) = client.command(&["AUTH", password])?
        {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        // Refused where a test renamed CLIENT or gave its user no right to it: then without a name.
        client.command(&["CLIENT", "SETNAME", CLIENT_NAME])?;
        Ok(client)
    }

    /// For replies that take longer than the default of 10 s, or must come sooner.
    pub fn set_read_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.reader.get_ref().set_read_timeout(Some(timeout))
    }

    /// Sends one command and waits for its reply.
    pub fn command<A: AsRef<[u8]>>(&mut self, args: &[A]) -> io::Result<Reply> {
        self.send(args)?;
        self.receive()
    }

    /// Sends many commands before waiting for their replies.
    pub fn pipeline<A: AsRef<[u8]>>(&mut self, commands: &[Vec<A>]) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::with_capacity(commands.len());
        // In portions: while we only write, nobody takes the server's replies off its hands.
        for portion in commands.chunks(256) {
            let mut request = Vec::new();
            for args in portion {
                encode(args, &mut request);
            }
            self.reader.get_mut().write_all(&request)?;
            for _ in portion {
                replies.push(self.receive()?);
            }
        }
        Ok(replies)
    }

    /// Sends one command and does not wait; `receive` gets the reply.
    pub fn send<A: AsRef<[u8]>>(&mut self, args: &[A]) -> io::Result<()> {
        let mut request = Vec::new();
        encode(args, &mut request);
        self.reader.get_mut().write_all(&request)
    }

    /// The next reply.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        self.reader.read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\r\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8_lossy(&line[1..line.len() - 2]).into_owned();
        match line[0] {
            b'+' => Ok(Reply::Status(text)),
            b'-' => Ok(Reply::Error(text)),
            b':' => Ok(Reply::Int(number(&text)?)),
            b'$' => match usize::try_from(number(&text)?) {
                Err(_) => Ok(Reply::Nil),
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.reader.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    Ok(Reply::Bytes(bytes))
                }
            },
            b'*' => match usize::try_from(number(&text)?) {
                Err(_) => Ok(Reply::Nil),
                Ok(length) => (0..length)
                    .map(|_| self.receive())
                    .collect::<io::Result<_>>()
                    .map(Reply::Array),
            },
            other => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("not a RESP2 type: {:?}", char::from(other)),
            )),
        }
    }

    /// Whether the server has closed this connection while nobody was asking anything.
    pub(super) fn is_closed(&self) -> bool {
        let stream = self.reader.get_ref();
        let peeked = stream
            .set_nonblocking(true)
            .and_then(|()| stream.peek(&mut [0]));
        let blocking = stream.set_nonblocking(false);
        match peeked {
            Ok(0) => true,
            Ok(_) => blocking.is_err(),
            Err(error) => error.kind() != io::ErrorKind::WouldBlock || blocking.is_err(),
        }
    }
}

fn number(text: &str) -> io::Result<i64> {
    text.parse().map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("not a number: {text:?}"),
        )
    })
}

/// Appends a command as clients send it: an array of bulk strings.
fn encode<A: AsRef<[u8]>>(args: &[A], request: &mut Vec<u8>) {
    request.extend_from_slice(format!("*{}\r\n", args.len()).as_bytes());
    for arg in args {
        let arg = arg.as_ref();
        request.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        request.extend_from_slice(arg);
        request.extend_from_slice(b"\r\n");
    }
}

/// Cuts a byte stream into RESP2 or RESP3 messages, requests as well as replies, however the bytes
/// are split into reads.
///
/// Of a nested message only the number of values still to come matters, so a counter does for a
/// stack.
#[derive(Default)]
pub struct Frames {
    /// The message that is not complete yet, from its first byte.
    partial: Vec<u8>,
    /// How much of `partial` has been looked at.
    seen: usize,
    /// Values still to come before the message is complete; 0 between messages.
    values: u64,
    /// Bytes of the current bulk string still to come, its line end included.
    bulk: usize,
}

impl Frames {
    /// Takes bytes in and calls `complete` with each message that they complete.
    pub fn feed(&mut self, bytes: &[u8], mut complete: impl FnMut(&[u8])) {
        self.partial.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(end) = self.next_end(start) {
            complete(&self.partial[start..end]);
            start = end;
        }
        self.partial.drain(..start);
        self.seen -= start;
    }

    /// Where the message that starts at `start` ends, when all of it is there.
    fn next_end(&mut self, start: usize) -> Option<usize> {
        loop {
            if self.seen == self.partial.len() {
                return None;
            }
            if self.seen == start && self.bulk == 0 {
                self.values = 1;
            }
            if self.bulk > 0 {
                let taken = self.bulk.min(self.partial.len() - self.seen);
                self.bulk -= taken;
                self.seen += taken;
            } else {
                let rest = &self.partial[self.seen..];
                let line = rest.iter().position(|&byte| byte == b'\n')? + 1;
                let length = || -> i64 {
                    std::str::from_utf8(&rest[1..line])
                        .ok()
                        .and_then(|digits| digits.trim_end().parse().ok())
                        .unwrap_or(-1)
                };
                let items = || u64::try_from(length()).unwrap_or(0);
                match rest[0] {
                    b'*' | b'~' | b'>' => self.values = self.values - 1 + items(),
                    b'%' => self.values = self.values - 1 + 2 * items(),
                    // Attributes come before the value that they describe.
                    b'|' => self.values += 2 * items(),
                    b'$' | b'!' | b'=' => {
                        self.values -= 1;
                        self.bulk = usize::try_from(length()).map_or(0, |length| length + 2);
                    }
                    // A line of its own: status, error, number, null, or a command typed by hand.
                    _ => self.values -= 1,
                }
                self.seen += line;
            }
            if self.values == 0 && self.bulk == 0 {
                return Some(self.seen);
            }
        }
    }
}

/// The arguments of a request.
pub fn request_args(frame: &[u8]) -> Vec<Vec<u8>> {
    if frame.first() != Some(&b'*') {
        return frame
            .split(u8::is_ascii_whitespace)
            .filter(|word| !word.is_empty())
            .map(<[u8]>::to_vec)
            .collect();
    }
    let mut args = Vec::new();
    let mut rest = frame;
    while let Some(line_end) = rest.iter().position(|&byte| byte == b'\n') {
        let (line, after) = rest.split_at(line_end + 1);
        rest = after;
        if line[0] != b'$' {
            continue;
        }
        let length = std::str::from_utf8(&line[1..])
            .ok()
            .and_then(|digits| digits.trim_end().parse::<usize>().ok())
            .filter(|length| *length <= rest.len());
        let Some(length) = length else { break };
        args.push(rest[..length].to_vec());
        rest = rest.get(length + 2..).unwrap_or_default();
    }
    args
}
