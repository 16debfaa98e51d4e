//! The command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

pub const USAGE: &str = "\
usage: soak [options]
  --minutes N        how long faults are made (default 2; fractions too)
  --seed N           what follows from it: entries, verdicts, faults (default: from the clock)
  --server PATH      the redis-server or valkey-server to run (default: one under target/servers, else
                     redis-server on the PATH)
  --processes N      supervisor processes at a time (default 3)
  --rate N           entries a second for each of the three streams (default 100)
  --dir PATH         where the run keeps its files (default: a folder of its own under target/soak)
  --keep             keep them although nothing is wrong
  --calm             make no faults
  --break WHAT       do damage behind everybody's back, so that the verdict has to be VIOLATION:
                     lose (acknowledge an entry unhandled), double (copy one without being asked),
                     pending (leave one pending)";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    Lose,
    Double,
    Pending,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub minutes: f64,
    pub seed: u64,
    pub server: PathBuf,
    pub processes: usize,
    pub rate: u64,
    pub dir: Option<PathBuf>,
    pub keep: bool,
    pub calm: bool,
    pub damage: Option<Damage>,
}

impl Options {
    pub fn length(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    /// The command line that repeats the run.
    pub fn command(&self) -> String {
        let mut command = format!(
            "cargo run --release{} --example soak -- --minutes {} --seed {} --server {}",
            match cfg!(feature = "fail_points") {
                true => " --features fail_points",
                false => "",
            },
            self.minutes,
            self.seed,
            self.server.display(),
        );
        let standard = Options::parse([].into_iter());
        if let Ok(standard) = standard {
            if self.processes != standard.processes {
                command.push_str(&format!(" --processes {}", self.processes));
            }
            if self.rate != standard.rate {
                command.push_str(&format!(" --rate {}", self.rate));
            }
        }
        if self.calm {
            command.push_str(" --calm");
        }
        command
    }

    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            minutes: 2.0,
            seed: crate::journal::now() % 1_000_000,
            server: standard_server(),
            processes: 3,
            rate: 100,
            dir: None,
            keep: false,
            calm: false,
            damage: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--minutes" => options.minutes = number(&arg, &value()?)?,
                "--seed" => options.seed = number(&arg, &value()?)?,
                "--server" => options.server = value()?.into(),
                "--processes" => options.processes = number(&arg, &value()?)?,
                "--rate" => options.rate = number(&arg, &value()?)?,
                "--dir" => options.dir = Some(value()?.into()),
                "--keep" => options.keep = true,
                "--calm" => options.calm = true,
                "--break" => {
                    options.damage = Some(match value()?.as_str() {
                        "lose" => Damage::Lose,
                        "double" => Damage::Double,
                        "pending" => Damage::Pending,
                        other => return Err(format!("--break {other}: lose, double or pending")),
                    });
                }
                other => return Err(format!("no such option: {other}")),
            }
        }
        let positive = options.minutes > 0.0 && options.minutes.is_finite();
        if !positive || options.processes == 0 || options.rate == 0 {
            return Err("--minutes, --processes and --rate have to be more than 0".to_owned());
        }
        Ok(options)
    }
}

fn number<T: std::str::FromStr>(option: &str, text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{option} {text}: not a number"))
}

fn standard_server() -> PathBuf {
    let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/servers");
    ["redis-8", "redis-7.0"]
        .map(|version| servers.join(version).join("redis-server"))
        .into_iter()
        .find(|path| path.is_file())
        .unwrap_or_else(|| "redis-server".into())
}
