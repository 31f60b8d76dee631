//! Owns counts that must not lag behind what clients are told: a file beside a process's snapshot, whose first page is
//! replaced at every step by one write of a few microseconds. What is written survives SIGKILL, because it is the
//! kernel's then. Behind the counts lies a log, for the process's successor; a record of it exists as soon as counts
//! that include it are written, and not before, so that no step is counted and forgotten, or remembered and counted
//! again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};
use serde::{Deserialize, Serialize};

use crate::ids::{Incarnation, Role};

const SUFFIX: &str = "live";
/// Bytes of a slot for the counts. There are two, written in turn: one of them is always whole.
const SLOT: usize = 16 << 10;
/// Checksum, number, end of the log, length.
const SLOT_HEADER: usize = 32;
/// Where the log begins.
const LOG: u64 = 2 * SLOT as u64;
/// Checksum and length in front of a record.
const RECORD_HEADER: usize = 16;

/// The present values of one counter, by its only label beyond those of the process, or one without a label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveCounts {
    pub name: String,
    /// Empty for a counter without labels of its own.
    pub label: String,
    pub values: Vec<(String, u64)>,
}

/// Writes one process's file.
pub struct LiveFile {
    path: PathBuf,
    file: File,
    number: u64,
    log_end: u64,
}

impl LiveFile {
    /// A new file, with nothing in it.
    pub fn create(dir: &Path, role: Role, incarnation: Incarnation) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let path = dir.join(format!("{role}.{:016x}.{SUFFIX}", incarnation.0));
        Self::create_at(path)
    }

    fn create_at(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(&path)?;
        Ok(Self { path, file, number: 0, log_end: LOG })
    }

    /// Bytes of the log.
    pub fn log_len(&self) -> u64 {
        self.log_end - LOG
    }

    /// Adds a record to the log, unless it is empty, and counts that include it.
    pub fn commit(&mut self, record: &[u8], counts: &[LiveCounts]) -> io::Result<()> {
        let log_end = self.log_end + self.append(record)?;
        let counts = rmp_serde::to_vec(counts).map_err(io::Error::other)?;
        if SLOT_HEADER + counts.len() > SLOT {
            return Err(io::Error::other(format!("{} bytes of counts do not fit", counts.len())));
        }
        let number = self.number + 1;
        let mut slot = vec![0; 8];
        slot.extend(number.to_le_bytes());
        slot.extend(log_end.to_le_bytes());
        slot.extend((counts.len() as u64).to_le_bytes());
        slot.extend(counts);
        let sum = checksum(&slot[8..]);
        slot[..8].copy_from_slice(&sum.to_le_bytes());
        self.file.write_all_at(&slot, (number % 2) * SLOT as u64)?;
        (self.number, self.log_end) = (number, log_end);
        Ok(())
    }

    fn append(&self, record: &[u8]) -> io::Result<u64> {
        if record.is_empty() {
            return Ok(0);
        }
        let mut bytes = Vec::with_capacity(RECORD_HEADER + record.len());
        bytes.extend(checksum(record).to_le_bytes());
        bytes.extend((record.len() as u64).to_le_bytes());
        bytes.extend(record);
        self.file.write_all_at(&bytes, self.log_end)?;
        Ok(bytes.len() as u64)
    }

    /// Replaces the log by one record. A reader finds the old file or the new one.
    pub fn rewrite(&mut self, record: &[u8], counts: &[LiveCounts]) -> io::Result<()> {
        let mut new = Self::create_at(self.path.with_extension("live.tmp"))?;
        new.commit(record, counts)?;
        std::fs::rename(&new.path, &self.path)?;
        new.path = std::mem::take(&mut self.path);
        *self = new;
        Ok(())
    }
}

/// What a process has left behind.
pub struct Remains {
    pub incarnation: Incarnation,
    /// Records of its log, oldest first.
    pub records: Vec<Vec<u8>>,
    path: PathBuf,
}

impl Remains {
    /// Those of all lives of a role in `dir` but one, oldest first. What is damaged is left out.
    pub fn of_others(dir: &Path, role: Role, me: Incarnation) -> Vec<Self> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let paths =
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == SUFFIX));
        let mut all: Vec<Self> = paths.filter_map(|path| Self::read(path, role)).collect();
        all.retain(|remains| remains.incarnation != me);
        all.sort_by_key(|remains| remains.incarnation);
        all
    }

    fn read(path: PathBuf, role: Role) -> Option<Self> {
        let (of, incarnation) = path.file_stem()?.to_str()?.rsplit_once('.')?;
        let incarnation = Incarnation(u64::from_str_radix(incarnation, 16).ok()?);
        if of != role.as_str() {
            return None;
        }
        let bytes = std::fs::read(&path).ok()?;
        let records = slot(&bytes).map_or(Vec::new(), |(_, log_end, _)| records(&bytes, log_end));
        Some(Self { incarnation, records, path })
    }

    /// Removes the file, once its counts are in the role's file for dead lives.
    pub fn discard(self) {
        if !self.path.with_extension("pb").exists() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The newer of the two slots that are whole: its number, the end of the log, the counts.
fn slot(bytes: &[u8]) -> Option<(u64, u64, &[u8])> {
    let read = |at: usize| -> Option<(u64, u64, &[u8])> {
        let slot = bytes.get(at..)?;
        let number = |from: usize| Some(u64::from_le_bytes(slot.get(from..from + 8)?.try_into().ok()?));
        let len = usize::try_from(number(24)?).ok().filter(|len| *len <= SLOT - SLOT_HEADER)?;
        let counts = slot.get(SLOT_HEADER..SLOT_HEADER + len)?;
        (number(0)? == checksum(&slot[8..SLOT_HEADER + len])).then_some((number(8)?, number(16)?, counts))
    };
    read(0).into_iter().chain(read(SLOT)).max_by_key(|(number, ..)| *number)
}

fn records(bytes: &[u8], log_end: u64) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let end = usize::try_from(log_end).unwrap_or(usize::MAX).min(bytes.len());
    let mut log = bytes.get(LOG as usize..end).unwrap_or_default();
    while let Some((header, rest)) = log.split_at_checked(RECORD_HEADER) {
        let number =
            |from: usize| u64::from_le_bytes(header[from..from + 8].try_into().expect("eight bytes"));
        let len = usize::try_from(number(8)).unwrap_or(usize::MAX);
        let Some((record, rest)) = rest.split_at_checked(len).filter(|(r, _)| checksum(r) == number(0))
        else {
            break;
        };
        records.push(record.to_vec());
        log = rest;
    }
    records
}

/// FNV-1a over words: guards against a write that was cut short, not against malice.
fn checksum(bytes: &[u8]) -> u64 {
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| mix(sum, u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| mix(sum, u64::from(*byte))) ^ bytes.len() as u64
}

/// Brings a snapshot's counters up to the counts that lie beside it.
pub(super) fn bring_up(families: &mut Vec<MetricFamily>, snapshot: &Path) {
    let Ok(file) = File::open(snapshot.with_extension(SUFFIX)) else { return };
    let mut bytes = vec![0; LOG as usize];
    let mut len = 0;
    while let Ok(read @ 1..) = file.read_at(&mut bytes[len..], len as u64) {
        len += read;
    }
    let Some((_, _, counts)) = slot(&bytes[..len]) else { return };
    let Ok(counts) = rmp_serde::from_slice::<Vec<LiveCounts>>(counts) else { return };
    let Some(base) = base_labels(families, &counts) else { return };
    for live in counts {
        let family = families.iter().position(|family| family.name() == live.name);
        let family = match family {
            Some(at) => &mut families[at],
            None => {
                let mut family = MetricFamily::default();
                family.set_name(live.name.clone());
                family.set_help(help(&live.name).to_owned());
                family.set_field_type(MetricType::COUNTER);
                families.push(family);
                families.last_mut().expect("it was just added")
            }
        };
        if family.type_() == MetricType::COUNTER {
            live.values.iter().for_each(|(value, count)| raise(family, &base, &live.label, value, *count));
        }
    }
}

/// The process's own labels, as on a counter that has no others.
fn base_labels(families: &[MetricFamily], counts: &[LiveCounts]) -> Option<Vec<LabelPair>> {
    let plain = counts.iter().find(|live| live.label.is_empty())?;
    let family = families.iter().find(|family| family.name() == plain.name)?;
    Some(family.get_metric().first()?.get_label().to_vec())
}

fn raise(family: &mut MetricFamily, base: &[LabelPair], label: &str, value: &str, count: u64) {
    let is_it = |metric: &Metric| {
        label.is_empty()
            || metric.get_label().iter().any(|pair| pair.name() == label && pair.value() == value)
    };
    let at = family.get_metric().iter().position(is_it).unwrap_or_else(|| {
        let mut labels = base.to_vec();
        if !label.is_empty() {
            let mut pair = LabelPair::default();
            pair.set_name(label.to_owned());
            pair.set_value(value.to_owned());
            labels.push(pair);
            labels.sort_by(|a, b| a.name().cmp(b.name()));
        }
        family.mut_metric().push(Metric::from_label(labels));
        family.get_metric().len() - 1
    });
    let metric = &mut family.mut_metric()[at];
    let raised = metric.get_counter().value().max(count as f64);
    metric.counter.mut_or_insert_default().set_value(raised);
}

fn help(name: &str) -> &'static str {
    super::names::ALL.iter().find(|info| info.name == name).map_or("", |info| info.help)
}

#[cfg(test)]
mod tests;
