//! Owns a scraper that never lets a counter go down unnoticed, on both metrics pages.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use tests::{Metrics, Server};

/// Twenty scrapes a second.
const INTERVAL: Duration = Duration::from_millis(50);

/// A scraper at work; ask it for its verdict.
pub(super) struct Watch<'scope, 'a> {
    stop: &'a AtomicBool,
    scraper: ScopedJoinHandle<'scope, Vec<String>>,
}

impl<'scope, 'a: 'scope> Watch<'scope, 'a> {
    pub(super) fn start(scope: &'scope Scope<'scope, '_>, server: &'a Server, stop: &'a AtomicBool) -> Self {
        let scraper = scope.spawn(move || {
            let (mut last, mut losses, mut scrapes) = (BTreeMap::new(), Vec::new(), 0_u64);
            let mut last_http = BTreeMap::new();
            let address = launcher_address(server);
            while !stop.load(Ordering::SeqCst) {
                if let Some(page) = page(&address) {
                    losses.extend(decreases(&mut last, &page));
                    scrapes += 1;
                }
                // Away while the tokenizer process is.
                if let Some(reply) = server.try_get("/metrics").filter(|reply| reply.status == 200) {
                    losses.extend(decreases(&mut last_http, &reply.body));
                }
                std::thread::sleep(INTERVAL);
            }
            assert!(scrapes > 0, "nothing was scraped");
            losses
        });
        Self { stop, scraper }
    }

    /// Every decrease that was seen.
    pub(super) fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::SeqCst);
        self.scraper.join().unwrap()
    }
}

fn decreases(last: &mut BTreeMap<String, f64>, page: &str) -> Vec<String> {
    let now = Metrics::parse(page).counters();
    let mut losses = Vec::new();
    for (series, before) in last.iter() {
        match now.get(series) {
            Some(after) if after >= before => {}
            after => losses.push(format!("{series}: {before} then {after:?}")),
        }
    }
    last.extend(now);
    losses
}

/// The page on the launcher's own port.
pub(super) fn launcher_page(server: &Server) -> String {
    page(&launcher_address(server)).expect("the launcher answers")
}

fn launcher_address(server: &Server) -> String {
    let logs = server.logs();
    let line = logs.lines().find_map(|line| line.strip_prefix("metrics on http://"));
    line.and_then(|line| line.strip_suffix("/metrics")).expect("the launcher says where").to_owned()
}

fn page(address: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).ok()?;
    let (head, body) = reply.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    Some(body.to_owned())
}
