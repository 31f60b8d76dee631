//! Owns who sees what in one step: rows of tokens, grouped into tiles that share a pass over their common keys.

use crate::engine::target::ForwardRow;

/// Absolute positions per block of keys; the kernels' `kBlock`.
pub const BLOCK: usize = 32;

/// Rows per tile at most. A tile's queries and sums should stay in the first-level cache.
pub const TILE_ROWS: usize = 16;

/// Consecutive rows of one request whose keys at positions `0..shared_blocks * BLOCK` are the same.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    pub first_row: u32,
    pub rows: u32,
    /// Index into the plan's slots.
    pub shared_at: u32,
    pub shared_blocks: u32,
}

/// The keys a row does not share with its tile: up to its own position, itself included, or as far as its block sees.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rest {
    /// Index into the plan's slots.
    pub at: u32,
    pub len: u32,
}

/// The rows of one step. Built from [`ForwardRow`]s only, so that every range lies inside `slots`.
#[derive(Debug, Default)]
pub struct AttentionPlan {
    tiles: Vec<Tile>,
    rests: Vec<Rest>,
    slots: Vec<u32>,
    positions: Vec<u32>,
    new_slots: Vec<u32>,
    max_slot: u32,
    max_position: u32,
}

impl AttentionPlan {
    pub fn new(rows: &[ForwardRow<'_>]) -> Self {
        let mut plan = Self::default();
        for row in rows {
            let base = plan.add_slots(row);
            match row.parents {
                None => plan.add_chain(row, base),
                Some(parents) => plan.add_tree(row, parents, base),
            }
        }
        plan.finished()
    }

    /// Rows that are blocks: a token sees its context and the whole of its row, also what comes after it. With a
    /// window, only what is nearer than that, on both sides.
    pub fn of_blocks(rows: &[ForwardRow<'_>], window: Option<usize>) -> Self {
        let mut plan = Self::default();
        for row in rows {
            let base = plan.add_slots(row);
            plan.add_block(row, base, window);
        }
        plan.finished()
    }

    pub fn rows(&self) -> usize {
        self.rests.len()
    }

    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// One per row.
    pub fn rests(&self) -> &[Rest] {
        &self.rests
    }

    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Absolute position of every row.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Where every row's keys and values go.
    pub fn new_slots(&self) -> &[u32] {
        &self.new_slots
    }

    /// Whether every slot is below `slots` and every position below `positions`.
    pub fn fits(&self, slots: usize, positions: usize) -> bool {
        self.rests.is_empty() || (self.max_slot as usize) < slots && (self.max_position as usize) < positions
    }

    /// The slots of one tile's row, by position.
    pub fn keys_of(&self, tile: &Tile, row: usize) -> impl Iterator<Item = u32> + '_ {
        let shared = &self.slots[tile.shared_at as usize..][..tile.shared_blocks as usize * BLOCK];
        let rest = self.rests[row];
        shared.iter().chain(&self.slots[rest.at as usize..][..rest.len as usize]).copied()
    }

    /// The row's slots by position; where they begin.
    fn add_slots(&mut self, row: &ForwardRow<'_>) -> usize {
        let base = self.slots.len();
        self.slots.extend_from_slice(&row.kv_slots[..row.context_len + row.tokens.len()]);
        self.new_slots.extend_from_slice(&row.kv_slots[row.context_len..][..row.tokens.len()]);
        base
    }

    fn finished(mut self) -> Self {
        self.max_slot = self.slots.iter().copied().max().unwrap_or(0);
        self.max_position = self.positions.iter().copied().max().unwrap_or(0);
        self
    }

    fn add_block(&mut self, row: &ForwardRow<'_>, base: usize, window: Option<usize>) {
        let end = row.context_len + row.tokens.len();
        // Rows of a window begin at different keys, and share none as a tile.
        let shared = if window.is_some() { 0 } else { row.context_len / BLOCK * BLOCK };
        for position in row.context_len..end {
            if (position - row.context_len).is_multiple_of(TILE_ROWS) {
                self.push_tile((end - position).min(TILE_ROWS), base, shared);
            }
            let (from, to) = match window {
                None => (shared, end),
                Some(window) => ((position + 1).saturating_sub(window), end.min(position + window)),
            };
            self.push_row(base + from, to - from, position);
        }
    }

    /// Tiles end at multiples of `TILE_ROWS`, so that a row's own keys fit one block.
    fn add_chain(&mut self, row: &ForwardRow<'_>, base: usize) {
        let end = row.context_len + row.tokens.len();
        let mut from = row.context_len;
        while from < end {
            let to = end.min((from / TILE_ROWS + 1) * TILE_ROWS);
            let shared = from / BLOCK * BLOCK;
            self.push_tile(to - from, base, shared);
            for position in from..to {
                self.push_row(base + shared, position + 1 - shared, position);
            }
            from = to;
        }
    }

    fn add_tree(&mut self, row: &ForwardRow<'_>, parents: &[usize], base: usize) {
        let shared = row.context_len / BLOCK * BLOCK;
        let mut depths = Vec::with_capacity(parents.len());
        for node in 0..row.tokens.len() {
            if node % TILE_ROWS == 0 {
                self.push_tile((row.tokens.len() - node).min(TILE_ROWS), base, shared);
            }
            let depth = if node == 0 { 0 } else { depths[parents[node]] + 1 };
            depths.push(depth);
            let at = self.slots.len();
            self.slots.extend_from_within(base + shared..base + row.context_len);
            let path_at = self.slots.len();
            let mut ancestor = node;
            for _ in 0..depth {
                self.slots.push(row.kv_slots[row.context_len + ancestor]);
                ancestor = parents[ancestor];
            }
            self.slots.push(row.kv_slots[row.context_len]);
            self.slots[path_at..].reverse();
            self.push_row(at, self.slots.len() - at, row.context_len + depth);
        }
    }

    fn push_tile(&mut self, rows: usize, shared_at: usize, shared: usize) {
        self.tiles.push(Tile {
            first_row: self.rests.len() as u32,
            rows: rows as u32,
            shared_at: shared_at as u32,
            shared_blocks: (shared / BLOCK) as u32,
        });
    }

    fn push_row(&mut self, at: usize, len: usize, position: usize) {
        self.rests.push(Rest { at: at as u32, len: len as u32 });
        self.positions.push(position as u32);
    }
}
