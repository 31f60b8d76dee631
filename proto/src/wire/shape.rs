//! Owns a look at a message's outline before anything is built from it: lengths that point past the end, nesting,
//! and the number of containers. A byte of msgpack can become an empty list or struct of 24 to 200 bytes, so the
//! length of a message alone does not bound the memory it asks for.

/// Most lists. Top log-probabilities have one per alternative: 8 million are 20 for each of 400 000 positions.
const MAX_LISTS: usize = 8 << 20;
/// Most maps. Ours have a few per row.
const MAX_MAPS: usize = 256 << 10;

/// Why an outline is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("it ends early")]
    Truncated,
    #[error("it nests deeper than {0} levels")]
    TooDeep(usize),
    #[error("it has too many lists or maps")]
    TooManyContainers,
    #[error("byte {0:#04x} starts no value")]
    Reserved(u8),
}

/// Walks one value and returns how many bytes it takes. Allocates nothing but one counter per level.
pub(super) fn measure(bytes: &[u8], max_depth: usize) -> Result<usize, ShapeError> {
    let mut walk = Walk { rest: bytes, lists: 0, maps: 0 };
    let mut open: Vec<u64> = Vec::new();
    loop {
        match walk.value()? {
            0 => {}
            _ if open.len() == max_depth => return Err(ShapeError::TooDeep(max_depth)),
            children => {
                open.push(children);
                continue;
            }
        }
        // A value is complete; so is every container whose last child it was.
        loop {
            match open.last_mut() {
                None => return Ok(bytes.len() - walk.rest.len()),
                Some(1) => {
                    open.pop();
                }
                Some(left) => {
                    *left -= 1;
                    break;
                }
            }
        }
    }
}

struct Walk<'a> {
    rest: &'a [u8],
    lists: usize,
    maps: usize,
}

impl Walk<'_> {
    /// Steps over one value's head, and over its bytes if it is no container; returns how many values are inside.
    fn value(&mut self) -> Result<u64, ShapeError> {
        let marker = self.number(1)? as u8;
        match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => Ok(0),
            0x80..=0x8f => self.map(u64::from(marker & 0x0f)),
            0x90..=0x9f => self.list(u64::from(marker & 0x0f)),
            0xa0..=0xbf => self.skip(u64::from(marker & 0x1f)),
            0xc4 | 0xd9 => self.sized(1, 0),
            0xc5 | 0xda => self.sized(2, 0),
            0xc6 | 0xdb => self.sized(4, 0),
            0xc7 => self.sized(1, 1),
            0xc8 => self.sized(2, 1),
            0xc9 => self.sized(4, 1),
            0xcc | 0xd0 => self.skip(1),
            0xcd | 0xd1 => self.skip(2),
            0xca | 0xce | 0xd2 => self.skip(4),
            0xcb | 0xcf | 0xd3 => self.skip(8),
            0xd4..=0xd8 => self.skip((1 << (marker - 0xd4)) + 1),
            0xdc => self.number(2).and_then(|count| self.list(count)),
            0xdd => self.number(4).and_then(|count| self.list(count)),
            0xde => self.number(2).and_then(|count| self.map(count)),
            0xdf => self.number(4).and_then(|count| self.map(count)),
            0xc1 => Err(ShapeError::Reserved(marker)),
        }
    }

    fn list(&mut self, count: u64) -> Result<u64, ShapeError> {
        self.lists += 1;
        self.container(count)
    }

    fn map(&mut self, pairs: u64) -> Result<u64, ShapeError> {
        self.maps += 1;
        self.container(2 * pairs)
    }

    fn container(&self, children: u64) -> Result<u64, ShapeError> {
        if self.lists > MAX_LISTS || self.maps > MAX_MAPS {
            return Err(ShapeError::TooManyContainers);
        }
        // Every child takes at least one byte.
        if children > self.rest.len() as u64 { Err(ShapeError::Truncated) } else { Ok(children) }
    }

    /// A length of `width` bytes, then that many bytes and `extra`.
    fn sized(&mut self, width: usize, extra: u64) -> Result<u64, ShapeError> {
        let length = self.number(width)?;
        self.skip(length + extra)
    }

    fn skip(&mut self, count: u64) -> Result<u64, ShapeError> {
        self.rest = usize::try_from(count)
            .ok()
            .and_then(|count| self.rest.get(count..))
            .ok_or(ShapeError::Truncated)?;
        Ok(0)
    }

    fn number(&mut self, width: usize) -> Result<u64, ShapeError> {
        let (head, rest) = self.rest.split_at_checked(width).ok_or(ShapeError::Truncated)?;
        self.rest = rest;
        Ok(head.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
}
