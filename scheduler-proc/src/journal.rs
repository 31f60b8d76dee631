//! Owns what a scheduler leaves to its successor: every step's new tokens and counts, written before any client is told
//! of them. A request that comes back goes on behind the last token that was counted, delivered or not, so that
//! nothing is made, or counted, twice.

use std::collections::HashMap;
use std::path::Path;

use proto::metrics::{LiveCounts, LiveFile, Remains};
use proto::{
    FinishReason, Incarnation, Lane, RequestId, Role, RowLogprobs, SpecCounters, TokenId,
    TokenizedGenerateReqInput,
};
use serde::{Deserialize, Serialize};

use crate::request::Request;

#[cfg(test)]
mod tests;

/// Bytes of the log at which it is written anew, without the requests that have ended.
const REWRITE_AT: u64 = 8 << 20;
/// Successors that keep what no client asks for any more.
const MAX_AGE: u8 = 2;

/// New tokens of one request, and how it stands with them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    rid: RequestId,
    lane: Lane,
    /// Index of the first of `ids` in the answer.
    start: usize,
    ids: Vec<TokenId>,
    spec: SpecCounters,
    finish: Option<FinishReason>,
    /// Of `ids`, and of the prompt if these are the first.
    logprobs: Option<RowLogprobs>,
    /// Lives since the one that made them.
    age: u8,
}

/// What an earlier scheduler made of a request, beyond what its client has.
#[derive(Debug, Clone, PartialEq)]
pub struct Inheritance {
    pub ids: Vec<TokenId>,
    pub spec: SpecCounters,
    pub finish: Option<FinishReason>,
    pub logprobs: Option<RowLogprobs>,
}

/// See the module.
pub struct Journal {
    file: LiveFile,
    /// Of this step, not yet written.
    entries: Vec<Entry>,
    inherited: HashMap<RequestId, Entry>,
    failing: bool,
}

impl Journal {
    /// Takes over what earlier schedulers have left in `dir`, where the metric snapshots are.
    pub fn open(dir: &Path, me: Incarnation) -> std::io::Result<Self> {
        let mut inherited = HashMap::new();
        let remains = Remains::of_others(dir, Role::Scheduler, me);
        for remains in &remains {
            let records = remains.records.iter().filter_map(|record| decode(record));
            // Whoever died later has taken over from whoever died earlier.
            records.flatten().for_each(|entry| merge(&mut inherited, entry));
        }
        inherited.retain(|_, entry| {
            entry.age += 1;
            entry.age <= MAX_AGE
        });
        let mut journal = Self {
            file: LiveFile::create(dir, Role::Scheduler, me)?,
            entries: inherited.values().cloned().collect(),
            inherited,
            failing: false,
        };
        journal.commit(&[]);
        if !journal.failing {
            remains.into_iter().for_each(Remains::discard);
        }
        Ok(journal)
    }

    /// What is known of a request that comes back, from the end of what its client has on.
    pub fn claim(&mut self, input: &TokenizedGenerateReqInput) -> Option<Inheritance> {
        let entry = self.inherited.remove(&input.rid)?;
        let have = &input.output_ids;
        let known = have.len().checked_sub(entry.start)?;
        let (told, ids) = entry.ids.split_at_checked(known)?;
        if have[entry.start..] != *told || entry.logprobs.is_some() != input.return_logprob {
            return None;
        }
        let logprobs = entry.logprobs.map(|mut all| {
            all.drop_outputs(known);
            all
        });
        Some(Inheritance { ids: ids.to_vec(), spec: entry.spec, finish: entry.finish, logprobs })
    }

    /// Takes down what a request has gained since it was noted last.
    pub fn note(&mut self, request: &mut Request) {
        let start = request.noted_len;
        if start < request.output_len() || request.finish.is_some() {
            self.entries.push(entry(request, start));
            request.noted_len = request.output_len();
        }
    }

    /// Writes what was noted, together with the counts that include it.
    pub fn commit(&mut self, counts: &[LiveCounts]) {
        let record = encode(&self.entries);
        self.entries.clear();
        let written = record.and_then(|record| self.file.commit(&record, counts));
        self.report(written);
    }

    pub fn is_long(&self) -> bool {
        self.file.log_len() >= REWRITE_AT
    }

    /// Forgets all requests but these.
    pub fn rewrite<'a>(&mut self, live: impl Iterator<Item = &'a Request>, counts: &[LiveCounts]) {
        let mut entries: Vec<Entry> = live.map(|request| entry(request, request.resumed_len())).collect();
        entries.extend(self.inherited.values().cloned());
        let written = encode(&entries).and_then(|record| self.file.rewrite(&record, counts));
        self.report(written);
    }

    /// Nobody asks for what was left to an earlier tokenizer process, at the end of these lanes.
    pub fn forget_inherited(&mut self, is_its: impl Fn(Lane) -> bool) {
        self.inherited.retain(|_, entry| !is_its(entry.lane));
    }

    /// A disk that is full costs the exactness of a restart, not the service. Said once.
    fn report(&mut self, written: std::io::Result<()>) {
        let was_failing = std::mem::replace(&mut self.failing, written.is_err());
        if let Err(error) = written
            && !was_failing
        {
            tracing::warn!(%error, "counts cannot be written; they will not survive a restart");
        }
    }
}

fn entry(request: &Request, start: usize) -> Entry {
    Entry {
        rid: request.rid.clone(),
        lane: request.lane,
        start,
        ids: request.output()[start..].to_vec(),
        spec: request.spec.clone(),
        finish: request.finish.clone(),
        logprobs: request.logprobs.as_ref().map(|all| {
            let from = start - request.resumed_len();
            all.since(from, from == 0)
        }),
        age: 0,
    }
}

fn merge(known: &mut HashMap<RequestId, Entry>, later: Entry) {
    match known.get_mut(&later.rid) {
        Some(entry) if later.start >= entry.start && later.start <= entry.start + entry.ids.len() => {
            let keep = later.start - entry.start;
            entry.ids.truncate(keep);
            entry.ids.extend(later.ids);
            match (&mut entry.logprobs, later.logprobs) {
                (Some(all), Some(mut more)) => {
                    all.truncate_outputs(keep);
                    // Those of the prompt stand already.
                    more.drop_inputs();
                    all.extend(more);
                }
                (all, more) => *all = more,
            }
            (entry.spec, entry.finish, entry.age) = (later.spec, later.finish, later.age);
        }
        _ => {
            known.insert(later.rid.clone(), later);
        }
    }
}

/// Nothing for no entries: then only the counts are written.
fn encode(entries: &[Entry]) -> std::io::Result<Vec<u8>> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    rmp_serde::to_vec(entries).map_err(std::io::Error::other)
}

fn decode(record: &[u8]) -> Option<Vec<Entry>> {
    match rmp_serde::from_slice(record) {
        Ok(entries) => Some(entries),
        Err(error) => {
            tracing::warn!(%error, "a record of an earlier scheduler cannot be read");
            None
        }
    }
}
