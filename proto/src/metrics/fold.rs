//! Owns what becomes of the series of dead processes: their counters and histograms go on in one file per
//! member of the server, their gauges end with them.

use std::io;
use std::path::Path;

use prometheus::proto::MetricType;

use super::join::Page;
use super::snapshot::{SnapshotWriter, list_all, read};
use crate::ids::Incarnation;
use crate::topology::Member;

/// Puts the counts of all lives of a process into one file. None of them may be running. A file that cannot be
/// read is given up: its number is returned. On an error nothing is lost, and the next call does it.
pub fn fold(dir: &Path, member: impl Into<Member>) -> io::Result<usize> {
    let member = member.into();
    let of = member.to_string();
    let names: Vec<_> = list_all(dir).into_iter().filter(|name| name.of == of).collect();
    let Some(latest) = names.iter().map(|name| name.incarnation).max() else { return Ok(0) };
    let folded = names.iter().filter(|name| name.folded).max_by_key(|name| name.incarnation);
    let up_to = folded.map_or(0, |name| name.incarnation);
    let counted = names.iter().filter(|name| Some(*name) == folded || name.incarnation > up_to);
    let (snapshots, unreadable) = read(counted);
    let mut page = Page::default();
    for mut snapshot in snapshots {
        snapshot.families.retain(|family| family.type_() != MetricType::GAUGE);
        page.add(snapshot, false);
    }
    let target = SnapshotWriter::folded(dir, member, Incarnation(latest));
    target.write_families(&page.into_families())?;
    for name in names.iter().filter(|name| !(name.folded && name.incarnation == latest)) {
        std::fs::remove_file(&name.path)?;
    }
    Ok(unreadable)
}
