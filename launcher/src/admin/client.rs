//! Owns `launcher ps | restart | drain | logs`: finds the server, asks it, and shows the answer.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args as ClapArgs, Parser, Subcommand};
use proto::{Endpoints, Member};
use serde_json::json;

use super::{Question, Reply};
use crate::board::ProcessReport;
use crate::run_dir;
use crate::supervise::{EXIT_FAILED, EXIT_OK};

/// How long a server may take to answer: it answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a replaced process may take to be ready, its weights included.
const RESTART: Duration = Duration::from_secs(600);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Asks a server that runs, or tells it what to do.
#[derive(Debug, Parser)]
#[command(name = "launcher", max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the server's processes
    Ps(Common),
    /// Replace a process, or all of a role one after the other; a tokenizer process answers what it holds first
    Restart {
        /// scheduler, detokenizer or tokenizer; tokenizer-1 where there are several and one is meant
        role: Member,
        #[command(flatten)]
        common: Common,
    },
    /// Finish what runs, then end the server
    Drain(Common),
    /// Show what a process wrote last, also its lives before
    Logs {
        /// scheduler, detokenizer or tokenizer; tokenizer-1 where there are several and one is meant
        role: Member,
        /// Lines to show
        #[arg(long, short = 'n', default_value_t = 100, value_name = "N")]
        lines: usize,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, ClapArgs)]
struct Common {
    /// The server's run directory; needed where several servers run
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

/// Whether the command line is one for a running server.
pub(crate) fn is_command(argv: &[OsString]) -> bool {
    let word = argv.get(1).and_then(|word| word.to_str());
    word.is_some_and(|word| ["ps", "restart", "drain", "logs"].contains(&word))
}

pub(crate) fn main(argv: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(argv) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return (error.exit_code() as u8).into();
        }
    };
    match run(&cli.command) {
        Ok(text) => {
            // A reader that has seen enough, as `head`, is none of the server's business.
            let _ = writeln!(std::io::stdout(), "{text}");
            EXIT_OK.into()
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            EXIT_FAILED.into()
        }
    }
}

fn run(command: &Command) -> Result<String> {
    match command {
        Command::Ps(common) => {
            let reports = processes(&find(common)?)?;
            Ok(if common.json { serde_json::to_string(&reports)? } else { table(&reports) })
        }
        Command::Restart { role, common } => {
            let reports = restart(&find(common)?, *role)?;
            Ok(match reports.as_slice() {
                _ if !common.json => reports.iter().map(ready_line).collect::<Vec<_>>().join("\n"),
                [only] => serde_json::to_string(only)?,
                several => serde_json::to_string(several)?,
            })
        }
        Command::Drain(common) => {
            let run_dir = find(common)?;
            accepted(ask(&run_dir, &Question::Drain)?)?;
            Ok(if common.json { json!({"draining": true}).to_string() } else { "draining".to_owned() })
        }
        Command::Logs { role, lines, common } => {
            match ask(&find(common)?, &Question::Logs { role: *role, lines: *lines })? {
                Reply::Lines(lines) if common.json => Ok(serde_json::to_string(&lines)?),
                Reply::Lines(lines) => Ok(lines.join("\n")),
                other => unexpected(other),
            }
        }
    }
}

fn find(common: &Common) -> Result<PathBuf> {
    if let Some(dir) = &common.run_dir {
        return Ok(dir.clone());
    }
    match run_dir::running().as_slice() {
        [] => bail!("no server of this user runs; name its run directory with --run-dir"),
        [one] => Ok(one.clone()),
        many => {
            let names: Vec<_> = many.iter().map(|dir| format!("  {}", dir.display())).collect();
            bail!("several servers run; name one with --run-dir:\n{}", names.join("\n"))
        }
    }
}

fn ask(run_dir: &Path, question: &Question) -> Result<Reply> {
    let path = Endpoints::new(run_dir).admin();
    let talk = || -> Result<Reply> {
        let mut stream = UnixStream::connect(&path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut line = serde_json::to_vec(question)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply)?;
        Ok(serde_json::from_str(&reply)?)
    };
    talk().with_context(|| format!("the server behind {} does not answer", path.display()))
}

fn processes(run_dir: &Path) -> Result<Vec<ProcessReport>> {
    match ask(run_dir, &Question::Ps)? {
        Reply::Processes(reports) => Ok(reports),
        other => unexpected(other),
    }
}

fn accepted(reply: Reply) -> Result<()> {
    match reply {
        Reply::Accepted => Ok(()),
        other => unexpected(other),
    }
}

fn unexpected<T>(reply: Reply) -> Result<T> {
    match reply {
        Reply::Error(why) => bail!(why),
        other => bail!("the server answers something else: {other:?}"),
    }
}

fn ready_line(report: &ProcessReport) -> String {
    format!("{} is ready as process {}", report.process, report.pid.unwrap_or_default())
}

/// Waits until the next life of every process of this name is ready.
fn restart(run_dir: &Path, name: Member) -> Result<Vec<ProcessReport>> {
    let named = || -> Result<Vec<ProcessReport>> {
        Ok(processes(run_dir)?.into_iter().filter(|report| name.means(report.process)).collect())
    };
    let before = named()?;
    accepted(ask(run_dir, &Question::Restart { role: name })?)?;
    let deadline = Instant::now() + RESTART;
    loop {
        let reports = named()?;
        let is_new = |(now, before): (&ProcessReport, &ProcessReport)| {
            now.restarts > before.restarts && now.state == "ready"
        };
        if reports.iter().zip(&before).all(is_new) {
            return Ok(reports);
        }
        if Instant::now() >= deadline {
            bail!("{name} is not ready after {} s", RESTART.as_secs());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn table(reports: &[ProcessReport]) -> String {
    let head = [
        "ROLE",
        "PID",
        "INCARNATION",
        "STATE",
        "UPTIME",
        "RESTARTS",
        "HEARTBEAT",
        "IN-FLIGHT",
        "QUEUED",
        "RSS",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(reports.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<_> = rows.iter().map(line).collect();
    for report in reports {
        if let Some(end) = &report.last_end {
            lines.push(format!("{} before: {end}", report.process));
        }
    }
    lines.join("\n")
}

fn row(report: &ProcessReport) -> Vec<String> {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    vec![
        report.process.to_string(),
        or_dash(report.pid.map(|pid| pid.to_string())),
        or_dash(report.incarnation.clone()),
        report.state.clone(),
        format!("{:.1} s", report.uptime_s),
        report.restarts.to_string(),
        format!("{:.1} s", report.heartbeat_age_s),
        report.in_flight.to_string(),
        report.queue_depth.to_string(),
        or_dash(report.rss_bytes.map(|bytes| format!("{} MiB", bytes >> 20))),
    ]
}

#[cfg(test)]
mod tests {
    use proto::Role;

    use super::*;

    #[test]
    fn command_lines_for_a_running_server_are_told_from_those_that_start_one() {
        let argv = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(is_command(&argv("launcher ps --json")) && is_command(&argv("launcher restart scheduler")));
        assert!(!is_command(&argv("launcher --model ps")) && !is_command(&argv("launcher")));
        assert!(Cli::try_parse_from(argv("launcher logs tokenizer -n 5 --run-dir /x")).is_ok());
        assert!(Cli::try_parse_from(argv("launcher restart tokenizer-1")).is_ok());
        assert!(Cli::try_parse_from(argv("launcher restart front")).is_err());
    }

    #[test]
    fn the_table_lines_up() {
        let report = ProcessReport {
            process: Role::Scheduler.into(),
            role: Role::Scheduler,
            pid: Some(12),
            incarnation: Some("5f".into()),
            state: "ready".into(),
            uptime_s: 3.21,
            restarts: 1,
            heartbeat_age_s: 0.04,
            in_flight: 2,
            queue_depth: 0,
            rss_bytes: Some(5 << 20),
            last_end: Some("was killed by signal 9 (SIGKILL)".into()),
        };
        let dead =
            ProcessReport { pid: None, incarnation: None, rss_bytes: None, last_end: None, ..report.clone() };
        assert_eq!(
            table(&[report, dead]),
            "ROLE       PID  INCARNATION  STATE  UPTIME  RESTARTS  HEARTBEAT  IN-FLIGHT  QUEUED  RSS\n\
             scheduler  12   5f           ready  3.2 s   1         0.0 s      2          0       5 MiB\n\
             scheduler  -    -            ready  3.2 s   1         0.0 s      2          0       -\n\
             scheduler before: was killed by signal 9 (SIGKILL)"
        );
    }
}
