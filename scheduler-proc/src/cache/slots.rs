//! Owns the free list of KV pages. A page is `page_size` neighbouring slots and is handed out as a whole.

use crate::batch::KvSlot;

/// A page's number; its slots are `page * page_size ..`.
pub(super) type Page = u32;

/// Pages that nobody holds.
#[derive(Debug)]
pub(super) struct PagePool {
    page_size: usize,
    total: usize,
    free: Vec<Page>,
    is_free: Vec<bool>,
}

impl PagePool {
    /// Slots that do not fill a page are left unused.
    pub(super) fn new(slots: usize, page_size: usize) -> Self {
        assert!(page_size > 0, "a page holds at least one slot");
        let total = slots / page_size;
        // Popped from the end, so that low pages go first.
        let free = (0..total as Page).rev().collect();
        Self { page_size, total, free, is_free: vec![true; total] }
    }

    pub(super) fn page_size(&self) -> usize {
        self.page_size
    }

    pub(super) fn total(&self) -> usize {
        self.total
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn is_free(&self, page: Page) -> bool {
        self.is_free[page as usize]
    }

    pub(super) fn alloc(&mut self) -> Option<Page> {
        let page = self.free.pop()?;
        self.is_free[page as usize] = false;
        Some(page)
    }

    pub(super) fn put_back(&mut self, page: Page) {
        let was_free = std::mem::replace(&mut self.is_free[page as usize], true);
        assert!(!was_free, "page {page} was freed twice");
        self.free.push(page);
    }

    pub(super) fn slots_of(&self, page: Page) -> impl Iterator<Item = KvSlot> + use<> {
        let first = page * self.page_size as KvSlot;
        first..first + self.page_size as KvSlot
    }

    pub(super) fn page_of(&self, slot: KvSlot) -> Page {
        slot / self.page_size as KvSlot
    }
}
