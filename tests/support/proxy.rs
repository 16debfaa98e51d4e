//! A TCP proxy between a client and a server that fails on demand, and knows requests and replies
//! well enough to lose a particular one.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::resp::{Frames, request_args};
use super::server::free_port;

/// A proxy on a loopback port of its own. Each connection to it becomes one to the server.
///
/// It passes on whole requests and whole replies. Dropping it cuts all connections.
pub struct FaultProxy {
    port: u16,
    shared: Arc<Shared>,
    /// The thread that accepts connections; `None` while they are refused.
    listener: Mutex<Option<Listener>>,
}

/// A fault that was asked for and may not have happened yet.
#[derive(Clone)]
pub struct Fault(Arc<AtomicBool>);

impl Fault {
    pub fn happened(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

struct Listener {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

struct Shared {
    target: SocketAddr,
    state: Mutex<State>,
    /// Signalled when replies that are held should look again: released, or their connection closed.
    changed: Condvar,
    accepted: AtomicU64,
}

#[derive(Default)]
struct State {
    hold_replies: bool,
    black_hole: bool,
    delay: Duration,
    /// Waiting for the next request that matches; the oldest first.
    armed: Vec<Armed>,
    connections: Vec<Arc<Connection>>,
    /// Made while nothing got through: the server has never heard of them.
    stranded: Vec<TcpStream>,
}

struct Armed {
    matcher: Matcher,
    loss: Loss,
    fault: Fault,
}

#[derive(Clone, Copy)]
enum Loss {
    Request,
    Reply,
    HalfOfReply,
}

/// A command's name, and words that its arguments must contain.
struct Matcher {
    command: Vec<u8>,
    words: Vec<Vec<u8>>,
}

struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// Set first when it is closed, so that held replies are dropped.
    closed: AtomicBool,
    /// A black hole of its own.
    half_open: AtomicBool,
    /// Bytes of it went into the black hole: its two ends no longer agree.
    lossy: AtomicBool,
    /// Replies to lose, by their number on this connection.
    doomed: Mutex<VecDeque<(u64, Loss, Fault)>>,
}

impl FaultProxy {
    /// A proxy in front of the server on this port of this machine.
    #[track_caller]
    pub fn start(target_port: u16) -> FaultProxy {
        let shared = Arc::new(Shared {
            target: SocketAddr::from((Ipv4Addr::LOCALHOST, target_port)),
            state: Mutex::default(),
            changed: Condvar::new(),
            accepted: AtomicU64::new(0),
        });
        for _ in 0..10 {
            let port = free_port();
            if let Ok(listener) = listen(port, &shared) {
                return FaultProxy {
                    port,
                    shared,
                    listener: Mutex::new(Some(listener)),
                };
            }
        }
        panic!("the proxy found no port to listen on in ten attempts");
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.shared.state().connections.len()
    }

    /// Connections ever made through it: a reconnect shows here.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Closes all connections now, on both sides. New ones are accepted.
    pub fn cut_all(&self) {
        let (connections, stranded) = {
            let mut state = self.shared.state();
            (
                std::mem::take(&mut state.connections),
                std::mem::take(&mut state.stranded),
            )
        };
        for connection in connections {
            self.shared.close(&connection);
        }
        drop(stranded);
    }

    /// Lets the next request that matches reach the server, and closes its connection when the
    /// reply arrives, without passing that on. Replies before it on the connection do pass.
    ///
    /// A matcher is a command's name and, after spaces, words that must be contained in its
    /// arguments (`"XACK"`, `"XADD orders"`, `"* orders"` for any command); upper or lower case.
    pub fn drop_next_reply(&self, matcher: &str) -> Fault {
        self.arm(matcher, Loss::Reply)
    }

    /// The same, with the first half of the reply passed on before its connection is closed.
    pub fn tear_next_reply(&self, matcher: &str) -> Fault {
        self.arm(matcher, Loss::HalfOfReply)
    }

    /// Closes the connection instead of passing the next request that matches to the server. To the
    /// client this looks exactly as a lost reply does.
    pub fn drop_next_request(&self, matcher: &str) -> Fault {
        self.arm(matcher, Loss::Request)
    }

    fn arm(&self, matcher: &str, loss: Loss) -> Fault {
        let fault = Fault(Arc::new(AtomicBool::new(false)));
        self.shared.state().armed.push(Armed {
            matcher: Matcher::new(matcher),
            loss,
            fault: fault.clone(),
        });
        fault
    }

    /// Requests still reach the server; replies are kept, in order, until `release`.
    pub fn hold_replies(&self) {
        self.shared.state().hold_replies = true;
    }

    /// From now on both directions are swallowed and nobody is told, not even of an end that closes
    /// (a half-open connection); new connections open and stay silent. `release` closes those that
    /// lost something.
    pub fn black_hole(&self) {
        self.shared.state().black_hole = true;
    }

    /// As `black_hole`, for the connections of this moment and for ever: each end believes that the
    /// other one is merely silent. New connections work.
    pub fn half_open(&self) {
        for connection in &self.shared.state().connections {
            connection.half_open.store(true, Ordering::SeqCst);
        }
    }

    /// Ends `hold_replies` and `black_hole`.
    pub fn release(&self) {
        let (lossy, stranded): (Vec<_>, Vec<_>) = {
            let mut state = self.shared.state();
            state.hold_replies = false;
            state.black_hole = false;
            let lossy = state.connections.iter().filter(|connection| {
                // The swallowed bytes are missing in the middle of the conversation.
                connection.lossy.load(Ordering::SeqCst)
            });
            (
                lossy.cloned().collect(),
                std::mem::take(&mut state.stranded),
            )
        };
        for connection in lossy {
            self.shared.close(&connection);
        }
        drop(stranded);
        self.shared.changed.notify_all();
    }

    /// Keeps every reply for this long before it is passed on; zero ends it. What arrives meanwhile
    /// is passed on with the next one.
    pub fn delay(&self, delay: Duration) {
        self.shared.state().delay = delay;
    }

    /// Refuses new connections, as a server does that is not running. Those that are open stay.
    pub fn refuse(&self) {
        let Some(listener) = self.listener().take() else {
            return;
        };
        listener.stop.store(true, Ordering::SeqCst);
        // The thread waits in accept: this wakes it.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        let _ = listener.thread.join();
    }

    /// Accepts connections again after `refuse`.
    #[track_caller]
    pub fn accept(&self) {
        let mut current = self.listener();
        if current.is_some() {
            return;
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            match listen(self.port, &self.shared) {
                Ok(listener) => {
                    *current = Some(listener);
                    return;
                }
                Err(error) => assert!(
                    Instant::now() < deadline,
                    "the proxy cannot listen on port {} again: {error}",
                    self.port
                ),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn listener(&self) -> MutexGuard<'_, Option<Listener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.refuse();
        self.cut_all();
    }
}

fn listen(port: u16, shared: &Arc<Shared>) -> std::io::Result<Listener> {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let stop = Arc::new(AtomicBool::new(false));
    let thread = {
        let stop = Arc::clone(&stop);
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            while let Ok((client, _)) = socket.accept() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                shared.open(client);
            }
        })
    };
    Ok(Listener { stop, thread })
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to pass on what a new client says. Without a server behind us it is cut off at once.
    fn open(self: &Arc<Self>, client: TcpStream) {
        self.accepted.fetch_add(1, Ordering::SeqCst);
        {
            let mut state = self.state();
            if state.black_hole {
                state.stranded.push(client);
                return;
            }
        }
        let Ok(server) = TcpStream::connect_timeout(&self.target, Duration::from_secs(5)) else {
            return;
        };
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let connection = Arc::new(Connection {
            client,
            server,
            closed: AtomicBool::new(false),
            half_open: AtomicBool::new(false),
            lossy: AtomicBool::new(false),
            doomed: Mutex::default(),
        });
        self.state().connections.push(Arc::clone(&connection));
        for pass_on in [Shared::pass_requests, Shared::pass_replies] {
            let shared = Arc::clone(self);
            let connection = Arc::clone(&connection);
            thread::spawn(move || pass_on(&shared, &connection));
        }
    }

    fn close(&self, connection: &Arc<Connection>) {
        {
            // Under the lock that held replies wait with, so that none of them misses the change.
            let mut state = self.state();
            connection.closed.store(true, Ordering::SeqCst);
            state.connections.retain(|c| !Arc::ptr_eq(c, connection));
        }
        let _ = connection.client.shutdown(Shutdown::Both);
        let _ = connection.server.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }

    /// Whether what was just received has been swallowed.
    fn swallowed(&self, connection: &Connection) -> bool {
        let state = self.state();
        if connection.half_open.load(Ordering::SeqCst) {
            return true;
        }
        if state.black_hole {
            // Under the same lock, so that `release` sees either none of it or the mark.
            connection.lossy.store(true, Ordering::SeqCst);
        }
        state.black_hole
    }

    /// Client to server, until the connection is closed.
    fn pass_requests(&self, connection: &Arc<Connection>) {
        let mut frames = Frames::default();
        let mut number = 0;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let received = read(&connection.client, &mut buffer);
            if self.swallowed(connection) {
                match received {
                    // The client has gone, and the server will not hear of it before `release`.
                    0 => return,
                    _ => continue,
                }
            }
            if received == 0 {
                return self.close(connection);
            }
            let mut passed = Vec::new();
            let mut lost = None;
            frames.feed(&buffer[..received], |frame| {
                if lost.is_some() {
                    return;
                }
                match self.take_armed(frame) {
                    Some((Loss::Request, fault)) => lost = Some(fault),
                    Some((loss, fault)) => {
                        let mut doomed = connection.doomed();
                        doomed.push_back((number, loss, fault));
                    }
                    None => {}
                }
                if lost.is_none() {
                    passed.extend_from_slice(frame);
                    number += 1;
                }
            });
            let written = (&connection.server).write_all(&passed);
            if let Some(fault) = lost {
                // First, so that who sees the connection end finds it told.
                fault.0.store(true, Ordering::SeqCst);
                return self.close(connection);
            }
            if written.is_err() {
                return self.close(connection);
            }
        }
    }

    /// The oldest fault that this request sets off.
    fn take_armed(&self, request: &[u8]) -> Option<(Loss, Fault)> {
        let mut state = self.state();
        if state.armed.is_empty() {
            return None;
        }
        let args = request_args(request);
        let index = state
            .armed
            .iter()
            .position(|armed| armed.matcher.matches(&args))?;
        let armed = state.armed.remove(index);
        Some((armed.loss, armed.fault))
    }

    /// Server to client, until the connection is closed.
    fn pass_replies(&self, connection: &Arc<Connection>) {
        let mut frames = Frames::default();
        let mut number = 0;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let received = read(&connection.server, &mut buffer);
            if self.swallowed(connection) {
                match received {
                    0 => return,
                    _ => continue,
                }
            }
            if received == 0 {
                return self.close(connection);
            }
            let delay = self.state().delay;
            if !delay.is_zero() {
                thread::sleep(delay);
            }
            if !self.wait_while_held(connection) {
                return;
            }
            if self.swallowed(connection) {
                continue;
            }
            let mut passed = Vec::new();
            let mut lost = None;
            frames.feed(&buffer[..received], |frame| {
                if lost.is_some() {
                    return;
                }
                // A push of RESP3 answers no request.
                if frame.first() == Some(&b'>') {
                    passed.extend_from_slice(frame);
                    return;
                }
                let mut doomed = connection.doomed();
                if doomed.front().is_some_and(|(doomed, ..)| *doomed == number) {
                    if let Some((_, Loss::HalfOfReply, _)) = doomed.front() {
                        passed.extend_from_slice(&frame[..frame.len() / 2]);
                    }
                    lost = doomed.pop_front().map(|(.., fault)| fault);
                } else {
                    passed.extend_from_slice(frame);
                }
                number += 1;
            });
            let written = (&connection.client).write_all(&passed);
            if let Some(fault) = lost {
                // First, so that who sees the connection end finds it told.
                fault.0.store(true, Ordering::SeqCst);
                return self.close(connection);
            }
            if written.is_err() {
                return self.close(connection);
            }
        }
    }

    /// Waits until replies may pass; false when the connection was closed instead.
    fn wait_while_held(&self, connection: &Connection) -> bool {
        let closed = || connection.closed.load(Ordering::SeqCst);
        let state = self.state();
        let _state = self
            .changed
            .wait_while(state, |state| state.hold_replies && !closed())
            .unwrap_or_else(PoisonError::into_inner);
        !closed()
    }
}

impl Connection {
    fn doomed(&self) -> MutexGuard<'_, VecDeque<(u64, Loss, Fault)>> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As many bytes as there are; 0 at the end or after an error, which is the same to a proxy.
fn read(mut stream: &TcpStream, buffer: &mut [u8]) -> usize {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result.unwrap_or(0),
        }
    }
}

impl Matcher {
    #[track_caller]
    fn new(text: &str) -> Matcher {
        let mut words = text
            .split_whitespace()
            .map(|word| word.to_lowercase().into_bytes());
        Matcher {
            command: words
                .next()
                .expect("a matcher should begin with a command's name, or *"),
            words: words.collect(),
        }
    }

    fn matches(&self, args: &[Vec<u8>]) -> bool {
        let args: Vec<_> = args.iter().map(|arg| arg.to_ascii_lowercase()).collect();
        let Some((command, rest)) = args.split_first() else {
            return false;
        };
        (self.command == b"*" || self.command == *command)
            && self
                .words
                .iter()
                .all(|word| rest.iter().any(|arg| contains(arg, word)))
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
