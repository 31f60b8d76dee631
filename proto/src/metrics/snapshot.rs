//! Owns the files through which a process shows its metrics: one per living incarnation, replaced as a whole, and one
//! per member of the server for its lives before.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use prometheus::proto::MetricFamily;
use prometheus::{Encoder, ProtobufEncoder, Registry};
use protobuf::{CodedInputStream, Message};

use super::live;
use crate::ids::Incarnation;
use crate::topology::Member;

const SUFFIX: &str = ".pb";
/// In the name of a member's file for its dead lives.
const FOLDED: &str = ".folded";
/// Looks at a directory that changes while it is read.
const MAX_LOOKS: usize = 5;

/// Writes one process's snapshots.
pub struct SnapshotWriter {
    path: PathBuf,
    /// Where a snapshot is until it is complete.
    draft: PathBuf,
}

impl SnapshotWriter {
    /// `dir` is made with the first snapshot.
    pub fn new(dir: &Path, member: impl Into<Member>, incarnation: Incarnation) -> Self {
        let name = format!("{}.{:016x}", member.into(), incarnation.0);
        Self { path: dir.join(format!("{name}{SUFFIX}")), draft: dir.join(format!("{name}.tmp")) }
    }

    /// The counters of all lives of a process up to this one.
    pub(super) fn folded(dir: &Path, member: Member, incarnation: Incarnation) -> Self {
        let name = format!("{member}{FOLDED}.{:016x}", incarnation.0);
        Self { path: dir.join(format!("{name}{SUFFIX}")), draft: dir.join(format!("{name}.tmp")) }
    }

    /// Replaces the snapshot. A reader sees the old one or the new one, never a part.
    pub fn write(&self, registry: &Registry) -> io::Result<()> {
        self.write_families(&registry.gather())
    }

    pub(super) fn write_families(&self, families: &[MetricFamily]) -> io::Result<()> {
        let mut bytes = Vec::new();
        ProtobufEncoder::new().encode(families, &mut bytes).map_err(io::Error::other)?;
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        std::fs::write(&self.draft, bytes)?;
        std::fs::rename(&self.draft, &self.path)
    }
}

/// One process's series at one time.
pub(super) struct Snapshot {
    /// The member's name; `None` for a registry that was not read from a file.
    pub(super) of: Option<String>,
    pub(super) incarnation: u64,
    pub(super) families: Vec<MetricFamily>,
}

/// What a file's name says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    /// The member's name.
    pub(super) of: String,
    pub(super) incarnation: u64,
    pub(super) folded: bool,
    pub(super) path: PathBuf,
}

/// All snapshots in a directory, and the number of those that cannot be read. What is not named like one is
/// ignored; so is a directory that is not there yet.
pub(super) fn read_all(dir: &Path) -> (Vec<Snapshot>, usize) {
    let mut names = list(dir);
    for _ in 1..MAX_LOOKS {
        let found = read(&names);
        // Folding moves counts from one name to another: what was read in between would count them twice, or not.
        let now = list(dir);
        if now == names {
            return found;
        }
        names = now;
    }
    read(&names)
}

/// Names of the snapshots that cannot be read.
pub fn unreadable(dir: &Path) -> BTreeSet<PathBuf> {
    let bad = |name: &Name| matches!(std::fs::read(&name.path), Ok(bytes) if parse(&bytes).is_err());
    list(dir).into_iter().filter(bad).map(|name| name.path).collect()
}

/// The names in a directory, without those whose counts are in a later one.
fn list(dir: &Path) -> BTreeSet<Name> {
    let all = list_all(dir);
    let mut folded = BTreeMap::new();
    for name in all.iter().filter(|name| name.folded) {
        let latest = folded.entry(name.of.clone()).or_insert(name.incarnation);
        *latest = name.incarnation.max(*latest);
    }
    let counts = |name: &Name| match folded.get(&name.of) {
        Some(&latest) if name.folded => name.incarnation == latest,
        Some(&latest) => name.incarnation > latest,
        None => true,
    };
    all.into_iter().filter(counts).collect()
}

pub(super) fn list_all(dir: &Path) -> BTreeSet<Name> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| parse_name(entry.path())).collect()
}

pub(super) fn read<'a>(names: impl IntoIterator<Item = &'a Name>) -> (Vec<Snapshot>, usize) {
    let (mut snapshots, mut unreadable) = (Vec::new(), 0);
    for Name { of, incarnation, path, .. } in names {
        match std::fs::read(path).map(|bytes| parse(&bytes)) {
            Ok(Ok(mut families)) => {
                live::bring_up(&mut families, path);
                snapshots.push(Snapshot { of: Some(of.clone()), incarnation: *incarnation, families });
            }
            // Folded into another or cleared away since the directory was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => unreadable += 1,
        }
    }
    (snapshots, unreadable)
}

fn parse_name(path: PathBuf) -> Option<Name> {
    let (of, incarnation) = path.file_name()?.to_str()?.strip_suffix(SUFFIX)?.rsplit_once('.')?;
    let incarnation = u64::from_str_radix(incarnation, 16).ok()?;
    let (of, folded) = match of.strip_suffix(FOLDED) {
        Some(of) => (of.to_owned(), true),
        None => (of.to_owned(), false),
    };
    Some(Name { of, incarnation, folded, path })
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
