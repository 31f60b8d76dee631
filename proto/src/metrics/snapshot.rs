//! Owns the files through which a process shows its metrics: one per incarnation, replaced as a whole.

use std::io;
use std::path::{Path, PathBuf};

use prometheus::proto::MetricFamily;
use prometheus::{Encoder, ProtobufEncoder, Registry};
use protobuf::{CodedInputStream, Message};

use crate::ids::{Incarnation, Role};

const SUFFIX: &str = ".pb";

/// Writes one process's snapshots.
pub struct SnapshotWriter {
    path: PathBuf,
    /// Where a snapshot is until it is complete.
    draft: PathBuf,
}

impl SnapshotWriter {
    /// `dir` is made with the first snapshot.
    pub fn new(dir: &Path, role: Role, incarnation: Incarnation) -> Self {
        let name = format!("{role}.{:016x}", incarnation.0);
        Self { path: dir.join(format!("{name}{SUFFIX}")), draft: dir.join(format!("{name}.tmp")) }
    }

    /// Replaces the snapshot. A reader sees the old one or the new one, never a part.
    pub fn write(&self, registry: &Registry) -> io::Result<()> {
        let mut bytes = Vec::new();
        ProtobufEncoder::new().encode(&registry.gather(), &mut bytes).map_err(io::Error::other)?;
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        std::fs::write(&self.draft, bytes)?;
        std::fs::rename(&self.draft, &self.path)
    }
}

/// One process's series at one time.
pub(super) struct Snapshot {
    /// `None` for a registry that was not read from a file.
    pub(super) role: Option<String>,
    pub(super) incarnation: u64,
    pub(super) families: Vec<MetricFamily>,
}

/// All snapshots in a directory, and the number of those that cannot be read. What is not named like one is
/// ignored; so is a directory that is not there yet.
pub(super) fn read_all(dir: &Path) -> (Vec<Snapshot>, usize) {
    let (mut snapshots, mut unreadable) = (Vec::new(), 0);
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let Some((role, incarnation)) = name.to_str().and_then(parse_name) else { continue };
        match std::fs::read(entry.path()).map(|bytes| parse(&bytes)) {
            Ok(Ok(families)) => {
                snapshots.push(Snapshot { role: Some(role.to_owned()), incarnation, families });
            }
            // Folded into another or cleared away since the directory was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => unreadable += 1,
        }
    }
    (snapshots, unreadable)
}

fn parse_name(name: &str) -> Option<(&str, u64)> {
    let (role, incarnation) = name.strip_suffix(SUFFIX)?.rsplit_once('.')?;
    Some((role, u64::from_str_radix(incarnation, 16).ok()?))
}

/// Families, each behind its length.
fn parse(bytes: &[u8]) -> protobuf::Result<Vec<MetricFamily>> {
    let mut input = CodedInputStream::from_bytes(bytes);
    let mut families = Vec::new();
    while !input.eof()? {
        // Not `read_message`, which takes the end of the file for the end of a message.
        let length = input.read_raw_varint32()?;
        families.push(MetricFamily::parse_from_bytes(&input.read_raw_bytes(length)?)?);
    }
    Ok(families)
}
