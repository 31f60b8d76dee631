//! Random operations on the cache with its invariant checked after each, and examples for what they rest on.

use proptest::prelude::*;

use super::*;

fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    ids.into_iter().collect()
}

/// Runs a sequence through the cache and leaves it there.
fn remember(cache: &mut PrefixCache, namespace: &Option<String>, ids: &[TokenId]) {
    let mut lease = cache.open(namespace, ids);
    cache.reserve(&mut lease, ids.len()).expect("room");
    cache.release(lease, ids);
}

#[test]
fn a_finished_sequence_is_found_in_whole_pages() {
    let mut cache = PrefixCache::new(64, 4, true);
    remember(&mut cache, &None, &tokens(0..10));
    assert_eq!(cache.lookup(&None, &tokens(0..10)), 8);
    assert_eq!(cache.lookup(&None, &tokens(0..7)), 4);
    assert_eq!(cache.lookup(&None, &tokens(1..10)), 0);
    assert_eq!(cache.usage(), Usage { used: 0, cached: 8, free: 56, total: 64 });
}

#[test]
fn namespaces_share_nothing_and_vanish_when_empty() {
    let mut cache = PrefixCache::new(8, 1, true);
    let tenant = Some("tenant".to_owned());
    remember(&mut cache, &tenant, &tokens(0..4));
    assert_eq!(cache.lookup(&None, &tokens(0..4)), 0);
    assert_eq!(cache.lookup(&tenant, &tokens(0..4)), 4);
    cache.flush();
    assert_eq!(cache.usage().free, 8);
    assert_eq!(format!("{:?}", cache.tree).matches("tenant").count(), 0);
}

#[test]
fn the_slower_of_two_equal_prompts_moves_to_the_pages_of_the_faster() {
    let mut cache = PrefixCache::new(16, 2, true);
    let ids = tokens(0..6);
    let (mut first, mut second) = (cache.open(&None, &ids), cache.open(&None, &ids));
    cache.reserve(&mut first, 6).expect("room");
    cache.reserve(&mut second, 7).expect("room");
    cache.commit(&mut first, &ids);
    cache.commit(&mut second, &ids[..5]);
    assert_eq!(second.slots()[..4], first.slots()[..4]);
    assert_ne!(second.slots()[4..6], first.slots()[4..6]);
    assert_eq!(cache.check([&first, &second]), Ok(()));
    assert_eq!(cache.usage().used, 6 + 4);
    cache.release(first, &ids);
    cache.release(second, &ids);
    assert_eq!(cache.usage(), Usage { used: 0, cached: 6, free: 10, total: 16 });
}

#[test]
fn the_least_recently_used_leaf_goes_first_and_locked_ones_stay() {
    let mut cache = PrefixCache::new(8, 1, true);
    remember(&mut cache, &None, &tokens([1, 2, 3]));
    remember(&mut cache, &None, &tokens([1, 5, 6]));
    let held = cache.open(&None, &tokens([1, 2]));
    let mut grown = cache.open(&None, &tokens([9]));
    cache.reserve(&mut grown, 4).expect("one page comes from eviction");
    assert_eq!(cache.lookup(&None, &tokens([1, 2, 3])), 2, "the older leaf went");
    assert_eq!(cache.lookup(&None, &tokens([1, 5, 6])), 3);
    assert_eq!(cache.reserve(&mut grown, 7), Err(OutOfPages { missing: 1 }), "1 and 2 are held");
    cache.release(held, &tokens([1, 2]));
    assert_eq!(cache.reserve(&mut grown, 7), Ok(()));
    assert_eq!(cache.check([&grown]), Ok(()));
    cache.release(grown, &[]);
}

#[test]
fn check_names_a_lease_that_was_lost() {
    let mut cache = PrefixCache::new(8, 1, true);
    let mut lease = cache.open(&None, &tokens([1]));
    cache.reserve(&mut lease, 2).expect("room");
    let lost = cache.check([]);
    assert_eq!(lost, Err("2 pages are counted as leased, leases hold 0".to_owned()));
    cache.release(lease, &[]);
    assert_eq!(cache.check([]), Ok(()));
}

#[derive(Debug, Clone)]
enum Op {
    /// Open a lease on a sequence of small tokens, so that prefixes collide.
    Open {
        namespace: u8,
        ids: Vec<u32>,
    },
    Reserve {
        lease: usize,
        len: usize,
    },
    Commit {
        lease: usize,
        len: usize,
    },
    Release {
        lease: usize,
        len: usize,
    },
    Flush,
}

fn op(max_len: usize) -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u8..2, prop::collection::vec(0u32..2, 1..max_len))
            .prop_map(|(namespace, ids)| Op::Open { namespace, ids }),
        4 => (any::<usize>(), 0..max_len).prop_map(|(lease, len)| Op::Reserve { lease, len }),
        3 => (any::<usize>(), 0..max_len).prop_map(|(lease, len)| Op::Commit { lease, len }),
        2 => (any::<usize>(), 0..max_len).prop_map(|(lease, len)| Op::Release { lease, len }),
        1 => Just(Op::Flush),
    ]
}

/// Sequences are long relative to the page, equal ones are frequent, and the pool is small.
fn run(page_size: usize, share: bool, ops: Vec<Op>) -> Result<(), String> {
    let mut cache = PrefixCache::new(page_size * 12 + page_size / 2, page_size, share);
    let mut open: Vec<(Lease, Vec<TokenId>)> = Vec::new();
    for op in ops {
        match op {
            Op::Open { namespace, ids } => {
                let namespace = (namespace > 0).then(|| "other".to_owned());
                // One drawn bit per page makes whole pages equal or different.
                let ids: Vec<_> = ids.iter().flat_map(|&id| std::iter::repeat_n(id, page_size)).collect();
                let found = cache.lookup(&namespace, &ids);
                let lease = cache.open(&namespace, &ids);
                if lease.shared_len() != found {
                    return Err(format!("lookup said {found}, open got {}", lease.shared_len()));
                }
                open.push((lease, ids));
            }
            Op::Reserve { lease, len } if !open.is_empty() => {
                let index = lease % open.len();
                let before = (cache.usage(), open[index].0.slots().len());
                if cache.reserve(&mut open[index].0, len * page_size).is_err()
                    && before != (cache.usage(), open[index].0.slots().len())
                {
                    return Err("a reservation that failed changed something".to_owned());
                }
            }
            Op::Commit { lease, len } if !open.is_empty() => {
                let index = lease % open.len();
                let (lease, ids) = &mut open[index];
                let len = (len * page_size).min(ids.len()).min(lease.slots().len());
                cache.commit(lease, &ids[..len]);
            }
            Op::Release { lease, len } if !open.is_empty() => {
                let (lease, ids) = open.swap_remove(lease % open.len());
                let len = (len * page_size).min(ids.len()).min(lease.slots().len());
                cache.release(lease, &ids[..len]);
            }
            Op::Flush => cache.flush(),
            Op::Reserve { .. } | Op::Commit { .. } | Op::Release { .. } => {}
        }
        cache.check(open.iter().map(|(lease, _)| lease))?;
    }
    open.into_iter().for_each(|(lease, ids)| {
        let len = ids.len().min(lease.slots().len());
        cache.release(lease, &ids[..len]);
    });
    cache.check([])?;
    let usage = cache.usage();
    cache.flush();
    (usage.used == 0 && cache.usage().free == usage.total)
        .then_some(())
        .ok_or(format!("{usage:?} at the end"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_operations_keep_every_page_in_one_place(
        page_size in prop::sample::select(vec![1usize, 16, 64]),
        share in prop::bool::weighted(0.8),
        ops in prop::collection::vec(op(8), 1..80),
    ) {
        prop_assert_eq!(run(page_size, share, ops), Ok(()));
    }
}
