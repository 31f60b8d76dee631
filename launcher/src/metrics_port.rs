//! Owns the launcher's own metrics page: the same numbers as on the HTTP port, from the same files, also while the
//! tokenizer process is away.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use proto::metrics::{Format, join};

/// Scrapers answered at once; more are hung up on.
const MAX_SCRAPERS: usize = 16;
/// How long a scraper may take for its question, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);
const MAX_HEAD: u64 = 16 << 10;

/// Serves until the process ends. Gives the address.
pub(crate) fn serve(host: &str, port: u16, dir: PathBuf) -> Result<SocketAddr> {
    let listener = TcpListener::bind((host, port))
        .with_context(|| format!("cannot listen on --host {host} --metrics-port {port}"))?;
    let address = listener.local_addr()?;
    let dir: Arc<Path> = dir.into();
    let scrapers = Arc::new(AtomicUsize::new(0));
    thread::Builder::new().name("metrics-port".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let place = Place::take(&scrapers);
            if place.0.load(Ordering::Relaxed) > MAX_SCRAPERS {
                continue;
            }
            let dir = dir.clone();
            // Without a thread the scraper is hung up on, and comes again.
            let _ = thread::Builder::new().name("scrape".into()).spawn(move || {
                let _place = place;
                let _ = answer(&stream, &dir);
            });
        }
    })?;
    Ok(address)
}

/// One scraper's place, given back when it is dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(scrapers: &Arc<AtomicUsize>) -> Self {
        scrapers.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(scrapers))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(mut stream: &TcpStream, dir: &Path) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = BufReader::new(stream.take(MAX_HEAD));
    let mut request = String::new();
    head.read_line(&mut request)?;
    let (mut line, mut accepted) = (String::new(), Vec::new());
    while head.read_line(&mut line)? > 2 {
        let header = line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("accept"));
        accepted.extend(header.map(|(_, value)| value.trim().to_owned()));
        line.clear();
    }
    let format = Format::negotiate(Some(&accepted.join(",")));
    let mut words = request.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        ("GET" | "HEAD", "/metrics" | "/metrics/") => ("200 OK", format.render(&join(dir, None))),
        ("GET" | "HEAD", _) => ("404 Not Found", "only /metrics is here\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET is answered\n".to_owned()),
    };
    let (length, content_type) = (body.len(), format.content_type());
    let body = if method == "HEAD" { "" } else { body.as_str() };
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "{request}\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    #[test]
    fn metrics_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let address = serve("127.0.0.1", 0, dir.path().to_owned()).unwrap();
        for path in ["/metrics", "/metrics/", "/metrics?x=1"] {
            let reply = ask(address, &format!("GET {path} HTTP/1.1"));
            assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
            assert!(reply.ends_with("sglang:metrics_unreadable_snapshots 0\n"), "{reply}");
        }
        let reply = ask(address, "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text");
        assert!(reply.contains("content-type: application/openmetrics-text; version=1.0.0;"), "{reply}");
        assert!(reply.ends_with("# EOF\n"), "{reply}");
        assert!(ask(address, "GET / HTTP/1.1").starts_with("HTTP/1.1 404 "));
        assert!(ask(address, "POST /metrics HTTP/1.1").starts_with("HTTP/1.1 405 "));
        assert!(ask(address, "nonsense").starts_with("HTTP/1.1 405 "));
    }
}
