//! Owns the noise of sampling: a counter-based generator (Philox4x32-10), so that any draw can be made without
//! a history, in any order, on any device.
//!
//! The draw for a token depends on (request seed, position, token id, stream) and on nothing else: not on the
//! batch, not on the draft, not on what was drawn before. The seed is the key; the counter is
//! `(token / 4, position low, position high, stream)`, and token `t` takes word `t % 4` of its block.

use proto::TokenId;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Tokens drawn for at once by [`Noise::group`].
pub const GROUP: usize = 64;
const LANES: usize = GROUP / 4;

/// What draws are for. Those of different streams know nothing of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// The target's choices, and those of a draft worker that chooses along.
    Choice = 0,
    /// A draft worker's own draws, where a rule weighs a draft against its law.
    Draft = 1,
    /// Whether a weighed draft is accepted.
    Coin = 2,
}

/// The draws of one request at one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    position: [u32; 2],
    stream: u32,
}

impl Noise {
    pub fn new(seed: u64, position: u64, stream: Stream) -> Self {
        Self { key: halves(seed), position: halves(position), stream: stream as u32 }
    }

    /// The words of tokens `4 * block .. 4 * block + 4`.
    pub fn block(&self, block: u32) -> [u32; 4] {
        philox4x32_10([block, self.position[0], self.position[1], self.stream], self.key)
    }

    /// The word of one token.
    pub fn word(&self, token: TokenId) -> u32 {
        self.block(token / 4)[token as usize % 4]
    }

    /// The draw of one token, in the open interval (0, 1).
    pub fn uniform(&self, token: TokenId) -> f64 {
        to_uniform(self.word(token))
    }

    /// The words of tokens `GROUP * group .. GROUP * (group + 1)`, computed side by side.
    #[inline(always)]
    pub fn group(&self, group: u32) -> [u32; GROUP] {
        let mut lanes = Lanes {
            c0: std::array::from_fn(|lane| group * LANES as u32 + lane as u32),
            c1: [self.position[0]; LANES],
            c2: [self.position[1]; LANES],
            c3: [self.stream; LANES],
        };
        let mut key = self.key;
        for _ in 0..ROUNDS {
            lanes.round(key);
            key = next_key(key);
        }
        lanes.interleave()
    }
}

/// The draw of one token's choice, in the open interval (0, 1).
pub fn uniform(seed: u64, position: u64, token: TokenId) -> f64 {
    Noise::new(seed, position, Stream::Choice).uniform(token)
}

/// Maps a word to the middle of its 2^-32 wide cell: exact in f64, never 0, never 1.
pub fn to_uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

/// Philox's bijection of `counter` under `key`.
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        counter = round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn round([c0, c1, c2, c3]: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (high0, low0) = wide_mul(MULTIPLIERS[0], c0);
    let (high1, low1) = wide_mul(MULTIPLIERS[1], c2);
    [high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0]
}

#[inline(always)]
fn wide_mul(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])]
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Counters of `LANES` consecutive blocks, word by word, in the shape vector units want.
struct Lanes {
    c0: [u32; LANES],
    c1: [u32; LANES],
    c2: [u32; LANES],
    c3: [u32; LANES],
}

impl Lanes {
    #[inline(always)]
    fn round(&mut self, key: [u32; 2]) {
        for lane in 0..LANES {
            let counter = [self.c0[lane], self.c1[lane], self.c2[lane], self.c3[lane]];
            [self.c0[lane], self.c1[lane], self.c2[lane], self.c3[lane]] = round(counter, key);
        }
    }

    #[inline(always)]
    fn interleave(&self) -> [u32; GROUP] {
        let mut words = [0; GROUP];
        for (lane, block) in words.chunks_exact_mut(4).enumerate() {
            block.copy_from_slice(&[self.c0[lane], self.c1[lane], self.c2[lane], self.c3[lane]]);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123.
    #[test]
    fn known_answers() {
        let check = |counter, key, expect| assert_eq!(philox4x32_10(counter, key), expect);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn group_block_and_word_agree() {
        for stream in [Stream::Choice, Stream::Draft, Stream::Coin] {
            let noise = Noise::new(0x0123_4567_89ab_cdef, 5_000_000_123, stream);
            for group in [0, 1, 767, 2374] {
                let words = noise.group(group);
                for (offset, &word) in words.iter().enumerate() {
                    let token = group * GROUP as u32 + offset as u32;
                    assert_eq!(word, noise.word(token));
                    assert_eq!(word, noise.block(token / 4)[offset % 4]);
                }
            }
        }
    }

    #[test]
    fn draws_stay_inside_the_open_interval() {
        assert!(to_uniform(0) > 0.0 && to_uniform(u32::MAX) < 1.0);
        assert!(1.0 - to_uniform(u32::MAX) > 0.0);
    }

    #[test]
    fn every_coordinate_changes_the_draw() {
        let base = uniform(1, 2, 3);
        for other in [uniform(2, 2, 3), uniform(1 << 32, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)] {
            assert_ne!(base, other);
        }
        assert_eq!(base, uniform(1, 2, 3));
        let [draft, coin] = [Stream::Draft, Stream::Coin].map(|stream| Noise::new(1, 2, stream).uniform(3));
        assert!(base != draft && draft != coin && coin != base);
    }

    #[test]
    fn draws_are_uniform_over_tokens_and_positions() {
        let mut cells = [0u32; 16];
        for position in 0..256 {
            for token in 0..256 {
                cells[(uniform(7, position, token) * 16.0) as usize] += 1;
            }
        }
        let expect = 65536.0 / 16.0;
        let chi: f64 = cells.iter().map(|&n| (f64::from(n) - expect).powi(2) / expect).sum();
        assert!(chi < 37.7, "chi-square {chi} of 15 degrees of freedom"); // p = 0.001
    }
}
