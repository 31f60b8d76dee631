//! Owns how many processes of each role a server has, what they are called, and who talks to whom.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::Role;

/// One process of a server: a role, and a number where the role has several processes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Member {
    pub role: Role,
    /// `None` for the only one of its role.
    number: Option<u8>,
}

/// The number of a tokenizer process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Front(pub u8);

/// The number of a lane: the way of text from the scheduler through one detokenizer to one tokenizer process. Every
/// lane has links of its own, so that a process that is away holds up nobody else's acknowledgements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Lane(pub u8);

/// How many processes share the work of a role. Everybody has at least one lane, and there are no more lanes than
/// that takes: lane `k` joins tokenizer process `k mod N` and detokenizer `k mod M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    pub tokenizer_worker_num: u8,
    pub detokenizer_worker_num: u8,
}

impl Member {
    /// The only process of its role.
    pub const fn only(role: Role) -> Self {
        Self { role, number: None }
    }

    /// One of several.
    pub const fn nth(role: Role, number: u8) -> Self {
        Self { role, number: Some(number) }
    }

    /// Whether this name means that process: a role without a number means all of its processes.
    pub fn means(self, other: Self) -> bool {
        self == other || (self.number.is_none() && self.role == other.role)
    }

    /// Its number among those of its role; the only one has 0.
    pub fn number(self) -> u8 {
        self.number.unwrap_or(0)
    }
}

impl From<Role> for Member {
    fn from(role: Role) -> Self {
        Self::only(role)
    }
}

impl From<Member> for String {
    fn from(member: Member) -> Self {
        member.to_string()
    }
}

impl TryFrom<String> for Member {
    type Error = UnknownMember;

    fn try_from(name: String) -> Result<Self, UnknownMember> {
        name.parse()
    }
}

/// Its name in logs, file names and commands: `scheduler`, or `tokenizer-1`.
impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            None => f.pad(self.role.as_str()),
            Some(number) => f.pad(&format!("{}-{number}", self.role)),
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            None => write!(f, "{:?}", self.role),
            Some(number) => write!(f, "{:?}-{number}", self.role),
        }
    }
}

/// A name that no process can have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no process: scheduler, detokenizer or tokenizer, with -0, -1, … where there are several")]
pub struct UnknownMember(String);

impl FromStr for Member {
    type Err = UnknownMember;

    fn from_str(name: &str) -> Result<Self, UnknownMember> {
        let unknown = || UnknownMember(name.to_owned());
        let (role, number) = match name.split_once('-') {
            None => (name, None),
            Some((role, number)) => (role, Some(number.parse().map_err(|_| unknown())?)),
        };
        let role = [&[Role::Launcher], &Role::CHILDREN[..]].concat().into_iter().find(|r| r.as_str() == role);
        Ok(Self { role: role.ok_or_else(unknown)?, number })
    }
}

impl Default for Topology {
    fn default() -> Self {
        Self { tokenizer_worker_num: 1, detokenizer_worker_num: 1 }
    }
}

impl Topology {
    /// Every process the launcher starts, in start order: the scheduler first, because it takes longest.
    pub fn children(self) -> Vec<Member> {
        Role::CHILDREN.into_iter().flat_map(|role| self.members(role)).collect()
    }

    /// The processes of one role.
    pub fn members(self, role: Role) -> Vec<Member> {
        let count = match role {
            Role::Launcher | Role::Scheduler => 1,
            Role::Detokenizer => self.detokenizer_worker_num,
            Role::Tokenizer => self.tokenizer_worker_num,
        };
        match count {
            1 => vec![Member::only(role)],
            count => (0..count).map(|number| Member::nth(role, number)).collect(),
        }
    }

    pub fn fronts(self) -> impl Iterator<Item = Front> {
        (0..self.tokenizer_worker_num).map(Front)
    }

    pub fn lanes(self) -> impl Iterator<Item = Lane> {
        (0..self.tokenizer_worker_num.max(self.detokenizer_worker_num)).map(Lane)
    }

    /// Where the text of a lane ends.
    pub fn front_of(self, lane: Lane) -> Front {
        Front(lane.0 % self.tokenizer_worker_num)
    }

    pub fn lanes_of_front(self, front: Front) -> impl Iterator<Item = Lane> {
        self.lanes().filter(move |lane| self.front_of(*lane) == front)
    }

    pub fn lanes_of_detokenizer(self, number: u8) -> impl Iterator<Item = Lane> {
        self.lanes().filter(move |lane| lane.0 % self.detokenizer_worker_num == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_lane_and_nobody_has_one_for_nothing() {
        for (fronts, detokenizers) in [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (8, 3)] {
            let topology = Topology { tokenizer_worker_num: fronts, detokenizer_worker_num: detokenizers };
            assert_eq!(topology.lanes().count(), usize::from(fronts.max(detokenizers)));
            for front in topology.fronts() {
                assert!(topology.lanes_of_front(front).all(|lane| topology.front_of(lane) == front));
                assert!(topology.lanes_of_front(front).next().is_some(), "{front:?} of {topology:?}");
            }
            let of_detokenizers = (0..detokenizers).map(|n| topology.lanes_of_detokenizer(n).count());
            assert!(of_detokenizers.clone().all(|count| count > 0), "{topology:?}");
            assert_eq!(of_detokenizers.sum::<usize>(), topology.lanes().count());
        }
    }

    #[test]
    fn names_lead_back() {
        let topology = Topology { tokenizer_worker_num: 2, detokenizer_worker_num: 1 };
        let names: Vec<String> = topology.children().iter().map(Member::to_string).collect();
        assert_eq!(names, ["scheduler", "detokenizer", "tokenizer-0", "tokenizer-1"]);
        for (name, member) in names.iter().zip(topology.children()) {
            assert_eq!(name.parse(), Ok(member));
        }
        assert!(Member::only(Role::Tokenizer).means(Member::nth(Role::Tokenizer, 1)));
        assert!(!Member::nth(Role::Tokenizer, 0).means(Member::nth(Role::Tokenizer, 1)));
        assert!(!Member::only(Role::Tokenizer).means(Member::only(Role::Scheduler)));
        for name in ["", "tokenizer-", "tokenizer-x", "tokenizer-256", "front", "Scheduler"] {
            assert!(name.parse::<Member>().is_err(), "{name}");
        }
    }
}
