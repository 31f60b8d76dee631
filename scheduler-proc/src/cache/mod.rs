//! Owns all KV slots: the pages of the pool, and the prefix tree over them. The only place that moves a page
//! between free, leased and cached, so that used + cached + free = total is its own to keep.

mod radix;
mod slots;
#[cfg(test)]
mod tests;

use proto::TokenId;

use self::radix::{NodeId, RadixTree};
use self::slots::{Page, PagePool};
use crate::batch::KvSlot;

/// The slots of one running request. Made by [`PrefixCache::open`], given back by [`PrefixCache::release`].
#[derive(Debug)]
pub struct Lease {
    namespace: Option<String>,
    /// Deepest tree node whose pages the lease uses.
    node: NodeId,
    /// Positions `..shared_len` lie in pages of the tree; those behind in pages of this lease alone.
    shared_len: usize,
    slots: Vec<KvSlot>,
}

impl Lease {
    /// The slot of every position, in whole pages.
    pub fn slots(&self) -> &[KvSlot] {
        &self.slots
    }

    /// Positions found in the tree when the lease was opened, or inserted since.
    pub fn shared_len(&self) -> usize {
        self.shared_len
    }
}

/// How the slots are divided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Held by running requests, alone or shared.
    pub used: usize,
    /// In the tree, and free to go.
    pub cached: usize,
    pub free: usize,
    pub total: usize,
}

/// Not even eviction makes enough room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of KV pages: {missing} more are needed than can be had")]
pub struct OutOfPages {
    pub missing: usize,
}

/// The KV pool with the prefix cache on top.
#[derive(Debug)]
pub struct PrefixCache {
    pool: PagePool,
    tree: RadixTree,
    /// `false` is "radix off": nothing is ever inserted, so nothing is ever found.
    share: bool,
    /// Pages held by leases alone.
    leased_pages: usize,
}

impl PrefixCache {
    pub fn new(slots: usize, page_size: usize, share: bool) -> Self {
        Self {
            pool: PagePool::new(slots, page_size),
            tree: RadixTree::new(page_size),
            share,
            leased_pages: 0,
        }
    }

    pub fn page_size(&self) -> usize {
        self.pool.page_size()
    }

    /// Slots in whole pages.
    pub fn capacity(&self) -> usize {
        self.pool.total() * self.page_size()
    }

    /// Slots that new or growing requests can have, by eviction if need be.
    pub fn available(&self) -> usize {
        (self.pool.free() + self.tree.pages() - self.tree.locked_pages()) * self.page_size()
    }

    pub fn usage(&self) -> Usage {
        let slots = |pages| pages * self.page_size();
        Usage {
            used: slots(self.leased_pages + self.tree.locked_pages()),
            cached: slots(self.tree.pages() - self.tree.locked_pages()),
            free: slots(self.pool.free()),
            total: self.capacity(),
        }
    }

    /// How many tokens of this sequence are cached, without touching them.
    pub fn lookup(&self, namespace: &Option<String>, tokens: &[TokenId]) -> usize {
        self.tree.find(namespace, tokens) * self.page_size()
    }

    /// Starts a lease on what is cached of `tokens`.
    pub fn open(&mut self, namespace: &Option<String>, tokens: &[TokenId]) -> Lease {
        let (node, pages) = self.tree.lock_prefix(namespace, tokens);
        let slots: Vec<_> = pages.into_iter().flat_map(|page| self.pool.slots_of(page)).collect();
        Lease { namespace: namespace.clone(), node, shared_len: slots.len(), slots }
    }

    /// Makes the lease hold at least `len` slots, all of them or none.
    pub fn reserve(&mut self, lease: &mut Lease, len: usize) -> Result<(), OutOfPages> {
        let missing = self.missing_pages(lease, len);
        let available = self.available() / self.page_size();
        if missing > available {
            return Err(OutOfPages { missing: missing - available });
        }
        self.evict(missing.saturating_sub(self.pool.free()));
        for _ in 0..missing {
            let page = self.pool.alloc().expect("eviction made room for all of them");
            lease.slots.extend(self.pool.slots_of(page));
        }
        self.leased_pages += missing;
        Ok(())
    }

    /// Pages still to be had before the lease holds `len` slots.
    pub fn missing_pages(&self, lease: &Lease, len: usize) -> usize {
        len.saturating_sub(lease.slots.len()).div_ceil(self.page_size())
    }

    /// Makes `tokens`, whose keys and values lie in the lease's first slots, known to others; whole pages only.
    /// Where another request was faster, the lease moves over to that one's pages.
    pub fn commit(&mut self, lease: &mut Lease, tokens: &[TokenId]) {
        let page_size = self.page_size();
        let len = tokens.len() / page_size * page_size;
        if !self.share || len <= lease.shared_len {
            return;
        }
        let mine: Vec<Page> =
            lease.slots[..len].iter().step_by(page_size).map(|&slot| self.pool.page_of(slot)).collect();
        let (node, pages) = self.tree.insert_locked(&lease.namespace, &tokens[..len], &mine);
        for index in lease.shared_len / page_size..mine.len() {
            if pages[index] != mine[index] {
                self.pool.put_back(mine[index]);
                let slots = self.pool.slots_of(pages[index]);
                lease.slots.splice(index * page_size..(index + 1) * page_size, slots);
            }
        }
        self.leased_pages -= mine.len() - lease.shared_len / page_size;
        self.tree.unlock(lease.node);
        lease.node = node;
        lease.shared_len = len;
    }

    /// Ends a lease: `tokens` become cached, every other slot free.
    pub fn release(&mut self, mut lease: Lease, tokens: &[TokenId]) {
        self.commit(&mut lease, tokens);
        let page_size = self.page_size();
        for &slot in lease.slots[lease.shared_len..].iter().step_by(page_size) {
            self.pool.put_back(self.pool.page_of(slot));
            self.leased_pages -= 1;
        }
        self.tree.unlock(lease.node);
    }

    /// Forgets everything that no lease holds.
    pub fn flush(&mut self) {
        self.evict(usize::MAX);
    }

    fn evict(&mut self, pages: usize) {
        let evicted = self.tree.evict(pages);
        evicted.into_iter().for_each(|page| self.pool.put_back(page));
    }

    /// Checks that every page is in exactly one place, given all leases that are alive. The error names the leak.
    pub fn check<'a>(&self, leases: impl IntoIterator<Item = &'a Lease>) -> Result<(), String> {
        self.tree.check()?;
        let mut holder = vec![None; self.pool.total()];
        let mut claim = |page: Page, who: &'static str| match holder[page as usize].replace(who) {
            None => Ok(()),
            Some(other) => Err(format!("page {page} is held by {other} and by {who}")),
        };
        (0..self.pool.total() as Page)
            .filter(|&p| self.pool.is_free(p))
            .try_for_each(|p| claim(p, "free"))?;
        self.tree.all_pages().try_for_each(|page| claim(page, "tree"))?;
        let mut leased = 0;
        for lease in leases {
            for &slot in lease.slots[lease.shared_len..].iter().step_by(self.page_size()) {
                claim(self.pool.page_of(slot), "lease")?;
                leased += 1;
            }
        }
        if leased != self.leased_pages {
            return Err(format!("{} pages are counted as leased, leases hold {leased}", self.leased_pages));
        }
        if let Some(page) = holder.iter().position(Option::is_none) {
            return Err(format!("page {page} leaked: neither free, cached nor leased"));
        }
        let Usage { used, cached, free, total } = self.usage();
        if used + cached + free != total {
            return Err(format!("used {used} + cached {cached} + free {free} != total {total}"));
        }
        Ok(())
    }
}
